"""RayExecutor on a real cluster."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polyhvd.numpy as hvd
import pytest
import ray
import ray.cloudpickle
from ranks_alive import is_running, wait_until
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import polyhvd.ray
from polyhvd.ray import BaseHorovodWorker, ElasticRayExecutor, RayExecutor

for module in (__name__, wait_until.__module__):
    ray.cloudpickle.register_pickle_by_value(sys.modules[module])

END_S = 5.0
BUSY_S = 60.0  # for what takes a second on an idle machine


class MineError(Exception):
    pass


@contextlib.contextmanager
def started(size: int = 2, **options: Any) -> Iterator[RayExecutor]:
    executor = RayExecutor(num_workers=size, **options)
    executor.start()
    try:
        yield executor
    finally:
        executor.shutdown()


@pytest.fixture(scope="module")
def pair() -> Iterator[RayExecutor]:
    """An executor of two ranks, for tests after which it still runs; each uses a world of its own."""
    with started(2) as executor:
        yield executor


def in_world(function: Callable[..., Any], *args: Any) -> Any:
    hvd.init()
    result = function(*args)
    hvd.shutdown()
    return result


def place() -> tuple[int, ...]:
    return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()


def total(value: float) -> list[float]:
    values: list[float] = hvd.allreduce(np.full(2, value + hvd.rank()), op=hvd.Sum).tolist()
    return values


def test_ranks_on_two_nodes_are_consecutive_on_each_and_add_up() -> None:
    executor = RayExecutor(num_hosts=2, num_workers_per_host=2)
    executor.start()
    try:
        found = executor.run(in_world, [lambda: (place(), total(1.0))])
        nodes = executor.run(lambda: ray.get_runtime_context().get_node_id())
    finally:
        executor.shutdown()
    assert [where for where, _ in found] == [
        (0, 4, 0, 2, 0, 2),
        (1, 4, 1, 2, 0, 2),
        (2, 4, 0, 2, 1, 2),
        (3, 4, 1, 2, 1, 2),
    ]
    assert [values for _, values in found] == [[10.0, 10.0]] * 4
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]


def test_results_are_in_rank_order_in_each_of_several_worlds(pair: RayExecutor) -> None:
    for value in (1.0, 2.0):
        assert pair.run(in_world, [lambda value: (hvd.rank(), total(value)), value]) == [
            (0, [2 * value + 1] * 2),
            (1, [2 * value + 1] * 2),
        ]


def test_run_remote_returns_a_reference_for_each_rank(pair: RayExecutor) -> None:
    assert ray.get(pair.run_remote(lambda x, y: x + y, [1], {"y": 2})) == [3, 3]


def test_a_function_that_cannot_be_pickled_is_an_error_and_the_workers_go_on(pair: RayExecutor) -> None:
    lock = threading.Lock()
    with pytest.raises(
        TypeError, match=r"RayExecutor\.run\(\): .*cannot be sent.*cannot pickle '_thread.lock'"
    ):
        pair.run(lambda: lock)
    assert pair.run(lambda: 1) == [1, 1]


def test_two_executors_run_at_once_as_jobs_of_their_own(pair: RayExecutor) -> None:
    with started(3) as other:
        mine = pair.run_remote(in_world, [lambda: (hvd.size(), total(1.0))])
        assert other.run(in_world, [lambda: (hvd.size(), total(5.0))]) == [(3, [18.0, 18.0])] * 3
        assert ray.get(mine) == [(2, [3.0, 3.0])] * 2


def test_calls_of_several_threads_reach_all_ranks_in_the_same_order(pair: RayExecutor) -> None:
    def note(call: tuple[int, int]) -> None:
        vars(sys).setdefault("notes", []).append(call)

    def submit(thread: int) -> None:
        for number in range(50):
            pair.run_remote(note, [(thread, number)])

    threads = [threading.Thread(target=submit, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = pair.run(lambda: vars(sys)["notes"])
    assert first == second
    assert len(first) == 200


def test_the_secret_is_in_no_environment_argument_or_log(pair: RayExecutor, cluster: str) -> None:
    def look() -> tuple[str, bytes]:
        from polyhvd.launch.providers.precedence import RAY

        process, given = Path("/proc/self"), RAY._given or RAY.elastic_launched
        assert given is not None
        known = process.joinpath("environ").read_bytes() + process.joinpath("cmdline").read_bytes()
        return given.secret, known + repr(given).encode() + str(dict(os.environ)).encode()

    elastic = ElasticRayExecutor(ElasticRayExecutor.create_settings(1, 1, timeout_s=BUSY_S))
    elastic.start()
    pair.run(in_world, [place])
    found = pair.run(look) + elastic.run(lambda: in_world(look))
    secrets = {secret.encode() for secret, _ in found}
    assert [len(secret) for secret in secrets] == [64, 64]
    logs = Path(ray._private.worker.global_worker.node.get_logs_dir_path())
    texts = [known for _, known in found] + [path.read_bytes() for path in logs.rglob("*") if path.is_file()]
    assert len(texts) > 10
    assert not any(secret in text for text in texts for secret in secrets)


class Counter:
    def __init__(self, start: int, *, step: int) -> None:
        self.value, self.step = start, step

    def count(self) -> int:
        self.value += self.step
        return self.value


def test_the_object_of_each_rank_keeps_its_state_and_sees_the_variables() -> None:
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=77), num_workers=2, use_gpu=True)
    executor.start(Counter, [10], {"step": 2}, extra_env_vars={"MINE": 7})
    try:
        assert executor.execute(lambda counter: counter.count()) == [12, 12]
        assert executor.execute_single(lambda counter: counter.count()) == 14
        assert executor.execute(lambda counter: counter.value) == [14, 12]
        names = ("MINE", "POLYHVD_START_TIMEOUT", "CUDA_VISIBLE_DEVICES")
        first, second = executor.run(lambda: [os.environ[name] for name in names])
    finally:
        executor.shutdown()
    assert first == second
    assert first[:2] == ["7", "77"]
    assert sorted(first[2].split(",")) == ["0", "1"], "each rank sees the GPUs of both"


def test_workers_start_in_the_placement_group_around_the_caller() -> None:
    @ray.remote(num_cpus=1)
    def trial() -> tuple[list[str], str, list[Any]]:
        executor = RayExecutor(num_workers=2)
        executor.start()
        mine = ray.util.get_current_placement_group()
        groups = executor.run(lambda: ray.get_runtime_context().get_placement_group_id())
        sums = executor.run(in_world, [total, 1.0])
        executor.shutdown()
        return groups, mine.id.hex(), sums

    group = placement_group([{"CPU": 1}] * 3)
    strategy = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
    try:
        groups, mine, sums = ray.get(trial.options(scheduling_strategy=strategy).remote())
    finally:
        remove_placement_group(group)
    assert groups == [mine, mine]
    assert sums == [[3.0, 3.0]] * 2


def test_nics_apply_to_the_store_of_rank_0_too() -> None:
    def endpoint() -> str:
        from polyhvd.launch.providers.precedence import RAY

        assert RAY._given is not None
        return RAY._given.endpoint

    with started(1, settings=RayExecutor.create_settings(nics=["lo"])) as executor:
        assert executor.run(endpoint)[0].startswith("127.0.0.1:")


def test_a_second_start_and_a_run_while_the_workers_start_are_refused(tmp_path: Path) -> None:
    executor = RayExecutor(num_workers=2)
    go = tmp_path / "go"
    thread = threading.Thread(target=executor.start, args=(wait_until, [go.exists, "the file", BUSY_S]))
    thread.start()
    try:
        wait_until(lambda: len(executor._workers) == 2, "two workers", BUSY_S)
        with pytest.raises(RuntimeError, match="another thread is starting it"):
            executor.start()
        with pytest.raises(RuntimeError, match=r"no workers are running: start\(\) has not returned"):
            executor.run(lambda: 1)
        go.touch()
        thread.join()
        assert executor.run(lambda: 1) == [1, 1]
    finally:
        go.touch()
        thread.join()
        executor.shutdown()


def test_too_few_resources_are_an_error_with_what_was_asked_for_and_what_there_is() -> None:
    settings = RayExecutor.create_settings(placement_group_timeout_s=2)
    executor = RayExecutor(settings, num_hosts=2, num_workers_per_host=7)
    with pytest.raises(TimeoutError) as caught:
        executor.start()
    words = str(caught.value)
    assert "14 workers with 1 CPUs each, 7 on each of 2 nodes, within 2 s" in words
    assert "6 CPUs and 2 GPUs" in words
    with pytest.raises(RuntimeError, match=r"run\(\): no workers are running: start\(\) has failed"):
        executor.run(lambda: 1)


def test_too_small_a_placement_group_is_an_error_with_its_bundles() -> None:
    @ray.remote(num_cpus=1)  # which Ray gives to another process while the task waits
    def trial() -> None:
        RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=2), num_workers=3).start()

    group = placement_group([{"CPU": 1}, {"CPU": 1}])
    strategy = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
    words = r"3 workers with 1 CPUs each in the current placement group, within 2 s\. Its bundles: \[\{'CPU'"
    try:
        with pytest.raises(TimeoutError, match=words):
            ray.get(trial.options(scheduling_strategy=strategy).remote())
    finally:
        remove_placement_group(group)


def groups_left() -> int:
    return sum(group["state"] != "REMOVED" for group in placement_group_table().values())


def test_an_executor_that_is_dropped_gives_its_resources_back() -> None:
    before = groups_left()
    executor = RayExecutor(num_workers=2)
    executor.start()
    assert groups_left() == before + 1
    del executor
    gc.collect()
    wait_until(lambda: groups_left() == before, "placement groups are removed", END_S)


@pytest.mark.parametrize("size", [2, 100])
def test_shutdown_ends_a_start_that_waits_for_resources_or_has_just_received_them(size: int) -> None:
    executor = RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=60), num_workers=size)
    place, before = executor._place, groups_left()

    def place_and_shut_down(deadline: float) -> Any:
        placed = place(deadline)
        executor.shutdown()
        return placed

    executor._place = place_and_shut_down  # type: ignore[method-assign]
    shutdown = threading.Timer(0.5, executor.shutdown)
    begun = time.monotonic()
    if size == 100:  # more than there are
        shutdown.start()
    with pytest.raises(
        RuntimeError, match=r"^RayExecutor.start\(\): shutdown\(\) has been called meanwhile$"
    ):
        executor.start()
    assert time.monotonic() - begun < 20.0
    assert groups_left() == before
    assert not executor._workers


@pytest.mark.parametrize("moment", ["while it waits", "when Ray has just made the group"])
def test_ctrl_c_ends_a_start_that_waits_for_resources(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=60), num_workers=100)
    before, main = groups_left(), threading.main_thread()

    def interrupt() -> None:
        wait_until(lambda: groups_left() > before, "start() waits", BUSY_S)
        signal.pthread_kill(main.ident, signal.SIGINT)  # type: ignore[arg-type]

    def make_group(*args: Any, **kwargs: Any) -> Any:
        group = placement_group(*args, **kwargs)
        interrupt()
        return group

    thread = threading.Thread(target=interrupt)
    if moment == "while it waits":
        thread.start()
    else:
        monkeypatch.setattr("polyhvd.ray.executor.placement_group", make_group)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        executor.start()
    assert time.monotonic() - begun < 20.0
    if thread.ident is not None:
        thread.join()
    assert groups_left() == before


class Interrupting:
    """A worker whose calls Ctrl-C interrupts."""

    def __getattr__(self, name: str) -> Any:
        raise KeyboardInterrupt


@pytest.mark.parametrize("method", [lambda executor: executor.run(place), RayExecutor.shutdown])
def test_ctrl_c_while_a_call_is_sent_to_the_ranks_ends_all_of_them(
    method: Callable[[RayExecutor], Any],
) -> None:
    with started(2) as executor:
        processes = executor.run(os.getpid)
        executor._workers[1] = Interrupting()
        with pytest.raises(KeyboardInterrupt):
            method(executor)
        wait_until(lambda: not any(map(is_running, processes)), "the processes end", END_S)
        with pytest.raises(RuntimeError, match=r"run\(\): no workers are running: "):
            executor.run(place)


ORPHANED = """
import sys, ray
from polyhvd.ray import RayExecutor

ray.init(address=sys.argv[1], log_to_driver=False)
executors = [RayExecutor(num_workers=1) for _ in range(3)]
for executor in executors:
    executor.start()
ray.shutdown()
executors[0].shutdown()
assert not ray.is_initialized()
ray.init(address=sys.argv[1], log_to_driver=False)
executors[1].shutdown()
try:
    executors[2].run(lambda: 1)
except RuntimeError as error:
    print(error)
executors[2].start()
print(executors[2].run(lambda: 1))
"""


def test_workers_end_with_the_connection_to_ray_in_which_they_were_started(cluster: str) -> None:
    words = [sys.executable, "-c", ORPHANED, cluster]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, timeout=2 * BUSY_S)
    reason = "RayExecutor.run(): no workers are running: ray.shutdown() has been called. Call start() first"
    assert done.stdout.splitlines()[-2:] == [reason, "[1]"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "num_workers=None, num_hosts=None"),
        ({"num_workers": 2, "num_hosts": 2}, "expected exactly one of them"),
        ({"num_workers": 2, "gpus_per_worker": 1}, "needs use_gpu=True"),
        ({"num_workers": 0}, "expected positive numbers"),
        ({"num_workers": 1, "cpus_per_worker": 0}, "expected positive numbers"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RayExecutor(**arguments)


def test_a_call_that_shutdown_has_ended_leaves_workers_alone_that_were_started_since() -> None:
    with started(1) as executor:
        former = executor._workers
        calls = executor.run_remote(time.sleep, [600])
        executor._end("shutdown() has been called")  # without the time in which ranks can leave
        executor.start()
        with pytest.raises(RuntimeError, match=r"^rank 0 has ended"):
            executor._collect(calls, former)  # what the thread of run_remote() does, maybe later than this
        assert executor.run(lambda: 1) == [1]


def test_a_call_that_shutdown_ends_in_another_thread_has_that_as_its_reason() -> None:
    with started(1) as executor:
        calls, workers = executor.run_remote(time.sleep, [600]), executor._workers
        executor._end("shutdown() has been called")  # without the time in which ranks can leave
        words = r"^the workers have ended during the call: shutdown\(\) has been called$"
        with pytest.raises(RuntimeError, match=words):
            executor._collect(calls, workers)  # what run() does


def kill(rank: int) -> None:
    if hvd.rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def raise_on(rank: int) -> None:
    if hvd.rank() == rank:
        raise MineError("a bad row")


def leave_on(rank: int) -> None:
    if hvd.rank() == rank:
        sys.exit(4)


def fail(how: Callable[[int], None]) -> None:
    """Rank 1 fails, rank 0 waits for it in a collective, and rank 2 in something else."""
    hvd.init()
    how(1)
    if hvd.rank() == 2:
        time.sleep(600)
    total(1.0)


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        (raise_on, MineError, "^a bad row$"),
        (leave_on, RuntimeError, r"^rank 1 has called sys\.exit\(4\)$"),
        (kill, RuntimeError, "^rank 1 has ended: The actor died"),
    ],
)
def test_the_failure_of_a_rank_is_raised_and_ends_the_others(
    how: Callable[[int], None], kind: type[Exception], words: str
) -> None:
    with started(3) as executor:
        processes = executor.run(os.getpid)
        with pytest.raises(kind, match=words) as caught:
            executor.run(fail, [how])
        wait_until(lambda: not any(map(is_running, processes)), "the processes end", END_S)
        if kind is MineError:
            assert str(caught.value.__cause__).startswith("rank 1 has failed:")
            assert "in raise_on" in str(caught.value.__cause__)
        with pytest.raises(RuntimeError, match=r"no workers are running: rank 1 has failed\. Call start\(\)"):
            executor.run(place)


def test_a_rank_killed_before_it_calls_init_ends_those_that_wait_there() -> None:
    def die_or_init(died: int) -> None:
        if os.getpid() == died:
            os.kill(died, signal.SIGKILL)
        hvd.init()

    with started(2) as executor:
        processes = executor.run(os.getpid)
        with pytest.raises(RuntimeError, match=r"^rank 0 has ended"):
            executor.run(die_or_init, [processes[0]])
        wait_until(lambda: not any(map(is_running, processes)), "the processes end", END_S)


DRIVER = """
import os, sys, time, ray
from polyhvd.ray import RayExecutor

def work(folder):
    import polyhvd.numpy as hvd
    hvd.init()
    open(os.path.join(folder, str(os.getpid())), "w").close()
    if hvd.rank() == 0:
        time.sleep(600)
    hvd.barrier()

ray.init(address=sys.argv[1], log_to_driver=False)
executor = RayExecutor(num_workers=2)
executor.start()
try:
    executor.run(work, [sys.argv[2]])
except KeyboardInterrupt:
    try:
        executor.run(work, [sys.argv[2]])
    except RuntimeError as error:
        print(error, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_ranks_end_when_their_driver_is_killed_or_interrupted(
    number: signal.Signals, cluster: str, tmp_path: Path
) -> None:
    words = [sys.executable, "-c", DRIVER, cluster, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as driver:
        try:
            wait_until(lambda: len(list(tmp_path.iterdir())) == 2, "two processes start", BUSY_S)
            driver.send_signal(number)
            processes = [int(path.name) for path in tmp_path.iterdir()]
            wait_until(lambda: not any(map(is_running, processes)), "the processes end", END_S)
            if number == signal.SIGINT:
                assert driver.stdout is not None
                assert "the last call was interrupted" in driver.stdout.readline()
        finally:
            driver.kill()


@pytest.mark.nightly  # Ray takes long to mark the node as dead
def test_a_busy_rank_ends_with_its_raylet_even_if_that_stays_a_zombie(ray_cluster: Any) -> None:
    node = ray_cluster.add_node(num_cpus=1, resources={"lost": 1})
    actor = ray.remote(BaseHorovodWorker).options(resources={"lost": 1}).remote()
    try:
        (actor,) = polyhvd.ray.rendezvous([actor], timeout_s=BUSY_S)
        process = ray.get(actor.execute.remote(lambda _: os.getpid()))
        actor.execute.remote(lambda _: time.sleep(600))
        (raylet,) = [info.process.pid for info in node.all_processes["raylet"]]
        os.kill(raylet, signal.SIGKILL)
        wait_until(lambda: not is_running(process), "the rank ends", END_S)
        assert Path(f"/proc/{raylet}").exists(), "nothing has waited for it"
    finally:
        ray_cluster.remove_node(node, allow_graceful=False)
        wait_until(lambda: sum(item["Alive"] for item in ray.nodes()) == 2, "the node is dead", BUSY_S)


OTHER_VERSIONS = """
import platform, polyhvd
polyhvd.__version__ = "0.0.9"
platform.python_version_tuple = lambda: ("3", "9", "1")
"""

ELSEWHERE = """
import sys, ray
from polyhvd.ray import ElasticRayExecutor, RayExecutor

ray.init(address=sys.argv[1], log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": sys.argv[2]}})
for executor in (
    RayExecutor(num_workers=1),
    ElasticRayExecutor(ElasticRayExecutor.create_settings(1, 1, timeout_s=60)),
):
    try:
        executor.start()
        executor.run(lambda: 1)
    except Exception as error:
        print(type(error).__name__, *str(error).split(), flush=True)
"""


@pytest.mark.parametrize(
    ("name", "source", "reason"),
    [
        ("sitecustomize.py", OTHER_VERSIONS, "has polyhvd 0.0.9 on Python 3.9, and this process polyhvd"),
        ("polyhvd/__init__.py", "raise ImportError('not this one')", "not this one"),
    ],
    ids=["other versions", "none"],
)
def test_a_node_with_other_versions_or_without_polyhvd_is_an_error(
    name: str, source: str, reason: str, cluster: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(source)
    words = [sys.executable, "-c", ELSEWHERE, cluster, str(tmp_path)]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=2 * BUSY_S)
    fixed, elastic = done.stdout.splitlines()
    assert reason in fixed
    assert elastic.startswith("RuntimeError process 0 on ")
    assert "was not started: " in elastic
    assert reason in elastic


@pytest.mark.nightly
def test_actors_that_die_before_their_first_call_end_an_elastic_job(cluster: str, tmp_path: Path) -> None:
    (tmp_path / "polyhvd").mkdir()
    (tmp_path / "polyhvd" / "__init__.py").write_text("import os\nos._exit(1)")
    words = [sys.executable, "-c", ELSEWHERE, cluster, str(tmp_path)]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=4 * BUSY_S)
    assert re.search("^ActorDiedError ", done.stdout, re.MULTILINE)  # Ray prints other lines
    assert re.search("^RuntimeError process .* was not started: ", done.stdout, re.MULTILINE), done.stdout
