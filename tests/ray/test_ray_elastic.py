"""Elastic jobs whose processes are actors, on a real cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polyhvd.numpy as hvd
import pytest
import ray
import ray.cloudpickle
from ranks_alive import is_running, wait_until
from ray._raylet import GcsClient
from ray.autoscaler.v2.sdk import get_cluster_resource_state
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from polyhvd.data import ArrayLoader
from polyhvd.installed import is_installed
from polyhvd.launch.providers.elastic import visible_gpus
from polyhvd.ray import (
    BaseHorovodWorker,
    ElasticParams,
    ElasticRayExecutor,
    RayExecutor,
    RayHostDiscovery,
    ray_logger,
)
from polyhvd.ray import room as room_module
from polyhvd.ray.elastic_job import ElasticJob
from polyhvd.ray.room import Held, NodeRoom
from polyhvd.ray.worker import gpus_of_node

sys.path.insert(0, str(Path(__file__).parents[1] / "elastic"))

import dying

for module in (sys.modules[__name__], sys.modules[wait_until.__module__], dying):
    ray.cloudpickle.register_pickle_by_value(module)

#: Those of the suite, which tools/matrix.py names; only ranks see them.
PACKAGES = os.environ.get("SUITE_PACKAGES", "")
ROWS, EPOCHS, BATCH = 48, 2, 4
END_S = 5.0
BUSY_S = 60.0  # for what takes a second on an idle machine


class Found(NamedTuple):
    """What a rank returns."""

    process: int
    rank: int
    size: int
    seen: list[float]  # how often each row has been in a step
    weights: list[float]
    momentum: list[float] = []  # noqa: RUF012 - no rank has changed it


def executor(least: int, most: int | None = None, **options: Any) -> ElasticRayExecutor:
    settings = ElasticRayExecutor.create_settings(least, most, timeout_s=BUSY_S, **options)
    made = ElasticRayExecutor(settings)
    made.start()
    return made


def once(path: Path) -> bool:
    """Whether no process has called this before."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def note(folder: Path) -> None:
    """Have started() list this process."""
    (folder / f"{time.time():.6f}-{os.getpid()}").touch()


def started(folder: Path) -> list[int]:
    """The processes that have noted themselves, in their order."""
    return [int(path.name.partition("-")[2]) for path in sorted(folder.glob("[0-9]*-*"))]


class NumPyModel:
    """Counts rows in ``seen`` and sums them up in ``weights``, exactly; ``momentum`` depends on the steps."""

    def __init__(self) -> None:
        hvd.init()
        self.hvd: Any = hvd
        self.state: Any = hvd.elastic.ArrayState(
            seen=np.zeros(ROWS), weights=np.zeros(3), momentum=np.zeros(3), steps=0
        )

    def step(self, rows: Any) -> None:
        """Add a batch."""
        state, seen = self.state, np.zeros(ROWS)
        seen[rows.astype(int)] = 1.0
        state.seen += hvd.allreduce(seen, op=hvd.Sum, name="seen")
        total = hvd.allreduce(np.full(3, float(rows.sum())), op=hvd.Sum, name="weights")
        state.weights += total
        state.momentum = 0.9 * state.momentum + total

    def found(self) -> list[list[float]]:
        """The three arrays."""
        return [array.tolist() for array in (self.state.seen, self.state.weights, self.state.momentum)]


class TorchModel:
    """Does the same by the gradients of two weights, of which the last has a momentum, too."""

    def __init__(self) -> None:
        sys.path.append(PACKAGES)
        import polyhvd.torch as hvd
        import torch

        hvd.init()
        self.hvd: Any = hvd
        self.names = names = ("seen", "weights", "moving")
        self.model = torch.nn.ParameterDict(
            {name: torch.zeros(ROWS if name == "seen" else 3, dtype=torch.float64) for name in names}
        )
        groups = [
            {"params": [self.model[name]], "momentum": 0.9 * (name == "moving"), "lr": 1.0} for name in names
        ]
        named = self.model.named_parameters()
        self.optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups), named_parameters=named, op=hvd.Sum)
        self.state: Any = hvd.elastic.TorchState(model=self.model, optimizer=self.optimizer, steps=0)

    def step(self, rows: Any) -> None:
        """Take a step of which each gradient is what is to be added."""
        self.optimizer.zero_grad()
        total = float(rows.sum()) * (self.model["weights"].sum() + self.model["moving"].sum())
        (-(self.model["seen"][rows.astype(int)].sum() + total)).backward()
        self.optimizer.step()

    def found(self) -> list[list[float]]:
        """The three weights."""
        return [self.model[name].tolist() for name in self.names]


class GluonModel:
    """Does the same in MXNet, whose optimizers have one momentum for all weights."""

    def __init__(self) -> None:
        import polyhvd.mxnet as hvd
        from mxnet import gluon

        hvd.init()
        self.hvd: Any = hvd
        self.block = gluon.nn.Dense(3, use_bias=False, in_units=1)
        self.block.initialize("zeros")
        options = {"learning_rate": 1.0, "momentum": 0.9}
        self.trainer = hvd.DistributedTrainer(self.block.collect_params(), "sgd", options, op=hvd.Sum)
        arrays = {"seen": np.zeros(ROWS), "weights": np.zeros(3)}
        self.state: Any = hvd.elastic.GluonState(self.block, self.trainer, steps=0, **arrays)

    def step(self, rows: Any) -> None:
        """Add up by calls, and take a step."""
        from mxnet import autograd, nd

        seen, total = np.zeros(ROWS), float(rows.sum())
        seen[rows.astype(int)] = 1.0
        with autograd.record():
            loss = -self.block(nd.full((1, 1), total)).sum()
        loss.backward()
        self.trainer.step(1)
        hvd = self.hvd
        self.state.seen = self.state.seen + hvd.allreduce(nd.array(seen), op=hvd.Sum, name="seen").asnumpy()
        added = hvd.allreduce(nd.full(3, total), op=hvd.Sum, name="total").asnumpy()
        self.state.weights = self.state.weights + added

    def found(self) -> list[list[float]]:
        """The two arrays, and the weight."""
        weight = self.block.weight.data().asnumpy()
        return [array.tolist() for array in (self.state.seen, self.state.weights, weight[:, 0])]


MODELS = {"numpy": NumPyModel, "torch": TorchModel, "mxnet": GluonModel}


def train(
    folder: Path, lost: Sequence[int] = (), at: int = 3, dies_early: bool = False, framework: str = "numpy"
) -> Found:
    """Count rows; ranks of the first world are killed within a step, while the others wait for them."""
    note(folder)
    if dies_early and (folder / "lost-1").exists() and once(folder / "died-early"):
        os.kill(os.getpid(), signal.SIGKILL)
    model = MODELS[framework]()
    state, hvd = model.state, model.hvd

    def step(batch: Any) -> None:
        if state.steps == at and hvd.rank() in lost and once(folder / f"lost-{hvd.rank()}"):
            os.kill(os.getpid(), signal.SIGKILL)
        model.step(batch.arrays[0])
        state.steps += 1

    rows = np.arange(ROWS, dtype=np.float64)
    hvd.elastic.train(step, state, ArrayLoader([rows], batch_size=BATCH, seed=7), epochs=EPOCHS)
    return Found(os.getpid(), hvd.rank(), hvd.size(), *model.found())


def in_frameworks(cases: Sequence[Any], torch: Sequence[str]) -> list[Any]:
    """Cases, in NumPy and other frameworks; without ``make nightly`` only these are in PyTorch.

    Args:
        cases: parameters with ids.
        torch: ids of those.
    """
    absent = {
        "numpy": "",
        "torch": "" if Path(PACKAGES, "torch").is_dir() else "SUITE_PACKAGES names no folder with PyTorch",
        "mxnet": "" if is_installed("mxnet") else "MXNet is not installed; make nightly's ray-mxnet has it",
    }
    found = []
    for framework, reason in absent.items():
        for case in cases:
            marks = [*case.marks, *([pytest.mark.skip(reason=reason)] if reason else ())]
            if framework == "mxnet" or (framework == "torch" and case.id not in torch):
                marks.append(pytest.mark.nightly)
            found.append(pytest.param(framework, *case.values, id=f"{framework}: {case.id}", marks=marks))
    return found


LOSSES = [
    pytest.param([1], id="single"),
    pytest.param([0], id="rank 0"),
    pytest.param([0, 2], id="all but one"),
]


@pytest.mark.parametrize(("framework", "lost"), in_frameworks(LOSSES, ["single"]))
def test_the_others_keep_their_processes_and_each_row_counts_once(
    framework: str, lost: list[int], tmp_path: Path
) -> None:
    found = executor(1, 3).run(lambda: train(tmp_path, lost, framework=framework))
    check_training(found)
    survivors = 3 - len(lost)
    assert len(found) >= survivors
    assert {item.process for item in found[:survivors]} <= set(started(tmp_path)[:3])


def test_a_job_waits_for_a_new_process_when_the_first_one_dies_at_once(tmp_path: Path) -> None:
    found = executor(3, 3).run(lambda: train(tmp_path, [1], dies_early=True))
    check_training(found)
    processes = started(tmp_path)
    assert len(processes) == 5  # of which one was lost in a step, and one before init()
    assert [item.process in processes[:3] for item in found] == [True, True, False]


def train_killed(folder: Path, kills: Sequence[str], framework: str) -> Found:
    """Count rows; processes are killed in commits, and while the ranks of a world meet or get the state."""
    from polyhvd.elastic import train as module

    places = dying.Kills(folder, kills)
    dying.die_in_meetings(places)

    class Killed(module.Training):
        def save(self) -> None:
            self._inner.save()
            places.die_at("commit", hvd.rank(), self.steps)
            super().save()

        def _sync_from(self, root: int, *, among: Any) -> None:
            if places.is_done("commit", 1, 4):
                places.die_at("sync", hvd.rank())
            super()._sync_from(root, among=among)

    module.Training = Killed  # type: ignore[misc]
    return train(folder, framework=framework)


#: Places at which processes are killed, and how many are lost.
KILLS = [
    pytest.param(["commit:1:4"], 1, id="in a commit"),
    pytest.param(["commit:0:4"], 1, id="rank 0 in a commit", marks=pytest.mark.nightly),
    pytest.param(["commit:1:4", "meet:0:2:hello"], 2, id="in a recovery"),
    pytest.param(
        ["commit:1:4", "meet:1:2:done"], 2, id="at the end of a recovery", marks=pytest.mark.nightly
    ),
    pytest.param(["commit:1:4", "join:hello"], 2, id="a new rank when it joins", marks=pytest.mark.nightly),
    pytest.param(["commit:1:4", "sync:2"], 2, id="a new rank when it gets the state"),
]


@pytest.mark.parametrize(("framework", "kills", "lost"), in_frameworks(KILLS, ["in a recovery"]))
def test_kills_at_bad_moments_lose_and_repeat_no_row(
    framework: str, kills: list[str], lost: int, tmp_path: Path
) -> None:
    made = executor(3 if len(kills) > 1 else 1, 3)
    found = made.run(lambda: train_killed(tmp_path, kills, framework))
    check_training(found)
    for kill in kills:
        assert (tmp_path / f"killed {kill}").exists(), "the process was not killed"
    kept = {item.process for item in found} & set(started(tmp_path)[:3])
    assert len(kept) == 3 - sum("join" not in kill and "sync" not in kill for kill in kills)
    assert len(started(tmp_path)) == 3 + lost or len(kills) == 1


def check_training(found: list[Found]) -> None:
    assert [(item.rank, item.size) for item in found] == [(i, len(found)) for i in range(len(found))]
    assert all(item.seen == [EPOCHS] * ROWS for item in found)
    assert all(item.weights == [EPOCHS * sum(range(ROWS))] * 3 for item in found)
    assert len({tuple(item.momentum) for item in found}) == 1, "the same bits on all ranks"


class Hosts:
    """A discovery that lists one node, until it is asked for both."""

    def __init__(self) -> None:
        self.first, self.second = (node["NodeID"] for node in alive())
        self.grows = False

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return {self.first: 2, **({self.second: 1} if self.grows else {})}


def grow(folder: Path) -> Found:
    """Make steps until there are three ranks."""
    note(folder)
    hvd.init()
    state = hvd.elastic.ArrayState(total=np.zeros(2), steps=0)
    deadline = time.monotonic() + BUSY_S

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while state.steps < 5 or hvd.size() < 3:
            assert time.monotonic() < deadline
            ray_logger.log({"step": state.steps, "size": hvd.size()})
            state.total += hvd.allreduce(np.ones(2), op=hvd.Average, name="ones")
            state.steps += 1
            time.sleep(0.02)
            state.commit()

    loop(state)
    return Found(os.getpid(), hvd.rank(), hvd.size(), [float(state.steps)] * 2, state.total.tolist())


def test_a_process_joins_on_a_new_node_and_gets_the_state(tmp_path: Path) -> None:
    hosts, logged = Hosts(), []

    def take(values: dict[str, int]) -> None:
        logged.append(values)
        hosts.grows = values["step"] >= 2

    settings = ElasticRayExecutor.create_settings(2, 3, timeout_s=BUSY_S, discovery=hosts)
    made = ElasticRayExecutor(settings, override_discovery=False)
    made.start()
    found = made.run(lambda: grow(tmp_path), callbacks=[take])
    assert [item.size for item in found] == [3, 3, 3]
    assert [item.process in started(tmp_path)[:2] for item in found] == [True, True, False]
    assert len({tuple(item.seen) for item in found}) == 1
    assert all(item.weights == item.seen for item in found), "a step for each that was counted"
    sizes = [values["size"] for values in logged]
    assert sizes == sorted(sizes)
    assert {2} <= set(sizes) <= {2, 3}
    assert [values["step"] for values in logged] == list(range(len(logged)))


def train_with_a_spare(folder: Path) -> Found:
    """Train; rank 1 of the first world is killed when the spare waits in ``init()``."""
    begun = folder / "begun"
    note(begun)
    if len(started(begun)) > 3:
        time.sleep(600)  # what takes the place of the spare has no part in this
    hvd.init()
    if hvd.rank() == 1 and not (folder / "lost-1").exists():
        wait_until(lambda: len(started(begun)) == 3, "the spare starts", BUSY_S)
    return train(folder, [1])


def test_a_spare_takes_the_place_of_a_lost_rank(tmp_path: Path) -> None:
    (tmp_path / "begun").mkdir()
    found = executor(2, 2, spares=1).run(lambda: train_with_a_spare(tmp_path))
    check_training(found)
    assert len(found) == 2
    assert {item.process for item in found} < set(started(tmp_path / "begun")[:3])


def test_spares_count_in_the_room_of_a_job_without_a_limit() -> None:
    params = ElasticParams(min_workers=2, spares=2)
    assert [params.limits(slots).size for slots in (2, 3, 4, 5, 12)] == [2, 2, 2, 3, 10]
    with pytest.raises(ValueError, match=r"spares=-1: expected a number from 0 on"):
        ElasticParams(spares=-1)


def test_a_job_begins_without_actors_whose_resources_another_job_has_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = ray.remote(BaseHorovodWorker).options(num_cpus=6).remote()
    taken = ray.get(other.node_id.remote())
    find = NodeRoom.available

    def find_late(room: NodeRoom, held: Held) -> dict[str, int]:
        if once(tmp_path / "found"):  # before the other one has come
            return {node["NodeID"]: 1 for node in alive()}
        return find(room, held)

    settings = ElasticRayExecutor.create_settings(1, 2, timeout_s=15.0)
    made = ElasticRayExecutor(settings, cpus_per_slot=6)
    made.start()
    monkeypatch.setattr(NodeRoom, "available", find_late)
    shutdown = threading.Timer(BUSY_S, made.shutdown)
    shutdown.start()
    try:
        (found,) = made.run(lambda: (train(tmp_path), ray.get_runtime_context().get_node_id()))
    finally:
        shutdown.cancel()
        ray.kill(other)
    check_training([found[0]])
    assert found[1] != taken
    assert "Ray has not started actors of the job within 15 s: their resources" in capsys.readouterr().err


def step_until(folder: Path, done: Callable[[], bool]) -> Found:
    """Make steps until something is the case on rank 0."""
    note(folder)
    hvd.init()
    state = hvd.elastic.ArrayState(total=np.zeros(2), steps=0)
    deadline = time.monotonic() + BUSY_S

    @hvd.elastic.on_leave
    def note_leave(leave: Any) -> None:
        (folder / f"left-{os.getpid()}").touch()

    @hvd.elastic.run
    def loop(state: Any) -> None:
        is_done = False
        while not is_done:
            assert time.monotonic() < deadline
            is_done = hvd.broadcast_object(done(), root_rank=0)
            state.total += hvd.allreduce(np.ones(2), op=hvd.Average, name="ones")
            state.steps += 1
            (folder / f"step-{hvd.size()}").touch()
            time.sleep(0.02)
            state.commit()

    loop(state)
    return Found(os.getpid(), hvd.rank(), hvd.size(), [float(state.steps)] * 2, state.total.tolist())


def test_an_actor_that_gets_sigterm_leaves_with_notice(tmp_path: Path) -> None:
    def send() -> None:
        wait_until((tmp_path / "step-2").exists, "a step of two ranks", BUSY_S)
        os.kill(started(tmp_path)[1], signal.SIGTERM)

    thread = threading.Thread(target=send)
    thread.start()
    (found,) = executor(1, 2).run(lambda: step_until(tmp_path, (tmp_path / "step-1").exists))
    thread.join()
    left = started(tmp_path)[1]
    assert found.process == started(tmp_path)[0]
    assert found.seen == found.weights, "no step was lost"
    assert (tmp_path / f"left-{left}").exists()
    wait_until(lambda: not is_running(left), "the process ends", END_S)


def alive() -> list[dict[str, Any]]:
    """Those nodes that Ray does not list as dead."""
    return [node for node in ray.nodes() if node["Alive"]]


def drain(node_id: str) -> None:
    """Have Ray drain a node, as an autoscaler does when the node is about to be lost."""
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    accepted, why = client.drain_node(node_id, reason, "test", int((time.time() + 600) * 1000))
    assert accepted, why


def demands() -> list[dict[str, float]]:
    """The bundles that Ray's autoscaler is shown, as it reads them."""
    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    gangs = get_cluster_resource_state(client).pending_gang_resource_requests
    return [dict(request.resources_bundle) for gang in gangs for request in gang.requests]


def test_a_job_shows_the_autoscaler_what_it_lacks_and_leaves_drained_nodes_with_notice(
    tmp_path: Path, ray_cluster: Cluster
) -> None:
    def back() -> bool:
        return hvd.size() == 2 and (tmp_path / "step-3").exists()

    made = ElasticRayExecutor(ElasticRayExecutor.create_settings(1, 3, timeout_s=BUSY_S), cpus_per_slot=6)
    made.start()
    found: list[Found] = []
    thread = threading.Thread(target=lambda: found.extend(made.run(lambda: step_until(tmp_path, back))))
    thread.start()
    wait_until((tmp_path / "step-2").exists, "a step of two ranks", BUSY_S)
    wait_until(demands, "the autoscaler is asked", BUSY_S)
    assert demands() == [{"CPU": 6.0}]
    node = ray_cluster.add_node(num_cpus=6, num_gpus=0)
    try:
        wait_until((tmp_path / "step-3").exists, "a step of three ranks", BUSY_S)
        drain(node.node_id)
        thread.join()
    finally:
        ray_cluster.remove_node(node)
        wait_until(lambda: len(alive()) == 2, "the node is dead for Ray", BUSY_S)
    assert [item.size for item in found] == [2, 2]
    assert all(item.seen == item.weights for item in found), "no step was lost"
    (left,) = {*started(tmp_path)} - {item.process for item in found}
    assert (tmp_path / f"left-{left}").exists()
    wait_until(lambda: not demands(), "nothing waits", END_S)


@pytest.mark.nightly
def test_a_node_whose_raylet_is_killed_takes_its_ranks_along_and_the_others_go_on(
    tmp_path: Path, ray_cluster: Cluster
) -> None:
    def back() -> bool:
        return hvd.size() == 2 and (tmp_path / "step-3").exists()

    node = ray_cluster.add_node(num_cpus=6, num_gpus=0)
    made = ElasticRayExecutor(ElasticRayExecutor.create_settings(1, 3, timeout_s=BUSY_S), cpus_per_slot=6)
    made.start()
    found: list[Found] = []
    thread = threading.Thread(target=lambda: found.extend(made.run(lambda: step_until(tmp_path, back))))
    thread.start()
    wait_until((tmp_path / "step-3").exists, "a step of three ranks", BUSY_S)
    begun = time.monotonic()
    ray_cluster.remove_node(node, allow_graceful=False)
    processes = started(tmp_path)
    wait_until(lambda: sum(map(is_running, processes)) == 2, "the ranks of the node end", END_S)
    thread.join()
    assert [item.size for item in found] == [2, 2]
    assert all(item.seen == item.weights for item in found), "no step counts twice"
    assert {item.process for item in found} < set(processes)
    assert not list(tmp_path.glob("left-*")), "it was a loss"
    assert time.monotonic() - begun < 30.0, "before Ray lists the node as dead"
    wait_until(lambda: len(alive()) == 2, "the node is dead for Ray", BUSY_S)


@pytest.mark.nightly  # Ray takes long to mark the node as dead
def test_a_job_begins_without_a_node_that_was_lost_before_it(ray_cluster: Cluster) -> None:
    node = ray_cluster.add_node(num_cpus=24, num_gpus=0)  # room for four actors
    made = ElasticRayExecutor(ElasticRayExecutor.create_settings(1, 6, timeout_s=BUSY_S), cpus_per_slot=6)
    made.start()
    ray_cluster.remove_node(node, allow_graceful=False)

    def work() -> int:
        hvd.init()
        return hvd.size()

    assert len(alive()) == 3, "Ray does not know it yet"
    assert made.run(work) == [2, 2]
    wait_until(lambda: len(alive()) == 2, "the node is dead for Ray", BUSY_S)


def test_an_elastic_job_stays_in_the_placement_group_around_its_driver(tmp_path: Path) -> None:
    @ray.remote(num_cpus=1)
    def trial() -> tuple[list[Found], list[tuple[str, str]]]:
        made = RayExecutor(RayExecutor.create_settings(timeout_s=BUSY_S), min_workers=1, max_workers=4)
        made.start()

        def work() -> tuple[Found, str]:
            found = train(tmp_path, [1])
            return found, ray.get_runtime_context().get_placement_group_id()

        results = made.run(work)
        return [found for found, _ in results], [group for _, group in results]

    group = placement_group([{"CPU": 1}, {"CPU": 2}, {"CPU": 1}], strategy="SPREAD")
    strategy = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
    try:
        found, groups = ray.get(trial.options(scheduling_strategy=strategy).remote())
    finally:
        remove_placement_group(group)
    check_training(found)
    assert 2 <= len(found) <= 3, "the group has room for no more"
    assert set(groups) == {group.id.hex()}


def test_too_small_a_placement_group_is_an_error() -> None:
    @ray.remote(num_cpus=1)
    def trial() -> None:
        settings = RayExecutor.create_settings(timeout_s=BUSY_S)
        RayExecutor(settings, min_workers=3, elastic_timeout=1).start()

    group = placement_group([{"CPU": 1}, {"CPU": 2}])
    strategy = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
    words = r"current placement group has room for 2 ranks with .*Its bundles: \[\{'CPU': 1.0\}"
    try:
        with pytest.raises(TimeoutError, match=words):
            ray.get(trial.options(scheduling_strategy=strategy).remote())
    finally:
        remove_placement_group(group)


class Model:
    def __init__(self, start: int, factor: int) -> None:
        self.value = start * factor


def sees_its_gpu() -> bool:
    """Return whether the GPU at the place of the local rank is the one that Ray has assigned."""
    visible = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    return [visible[hvd.local_rank()]] == ray.get_runtime_context().get_accelerator_ids()["GPU"]


def test_an_elastic_ray_executor_makes_objects_and_each_local_rank_is_its_own_gpu() -> None:
    settings = RayExecutor.create_settings(timeout_s=BUSY_S)
    made = RayExecutor(settings, min_workers=2, max_workers=2, use_gpu=True)
    with pytest.raises(RuntimeError, match=r"RayExecutor\.run\(\): call start\(\) first"):
        made.run(lambda: 1)
    made.start(Model, [6], {"factor": 7}, extra_env_vars={"MINE": 7})

    def look(model: Model) -> tuple[Any, ...]:
        hvd.init()
        own = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        visible = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        total = hvd.allreduce(np.full(1, float(own[0])), op=hvd.Sum).tolist()
        return model.value, os.environ["MINE"], sorted(visible), sees_its_gpu(), total

    assert made.execute(look) == [(42, "7", ["0", "1"], True, [1.0])] * 2
    for name in ("run_remote", "execute_single"):
        with pytest.raises(NotImplementedError, match=rf"RayExecutor\.{name}\(\): not with min_workers"):
            getattr(made, name)(look)
    assert made.run(lambda value: value, [3]) == [3, 3], "a second job"


class Address:
    """A discovery that lists the first node, which has the GPUs, by its address."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return {alive()[0]["NodeManagerAddress"]: 2}


def test_each_local_rank_is_its_own_gpu_on_a_host_that_is_listed_by_its_address() -> None:
    settings = ElasticRayExecutor.create_settings(2, 2, timeout_s=BUSY_S, discovery=Address())
    made = ElasticRayExecutor(settings, use_gpu=True, override_discovery=False)
    made.start()

    def look() -> bool:
        hvd.init()
        return sees_its_gpu()

    assert made.run(look) == [True, True]


def test_an_elastic_ray_executor_gives_actors_the_time_of_its_settings_to_start() -> None:
    settings = RayExecutor.create_settings(timeout_s=0.01, placement_group_timeout_s=BUSY_S)
    made = RayExecutor(settings, min_workers=1, max_workers=1, elastic_timeout=5)
    made.start()
    assert made.run(lambda: 3) == [3]


@pytest.mark.parametrize("own", [("2",), ("GPU-b",)])
@pytest.mark.parametrize("local_rank", [0, 1, 3])
def test_own_gpus_are_at_the_place_of_the_local_rank(own: tuple[str, ...], local_rank: int) -> None:
    visible = visible_gpus(own, gpus_of_node(own, 4), local_rank)
    if own == ("2",):
        assert visible[local_rank] == "2"
        assert sorted(visible) == ["0", "1", "2", "3"]
    else:
        assert visible == ["GPU-b"]


class MineError(Exception):
    pass


def fail(folder: Path, error: BaseException) -> None:
    note(folder)
    hvd.init()
    state = hvd.elastic.ArrayState(total=np.zeros(2))

    @hvd.elastic.run
    def loop(state: Any) -> None:
        if hvd.rank() == 1:
            raise error
        hvd.allreduce(state.total)

    loop(state)


def test_an_exception_of_a_rank_ends_the_job(tmp_path: Path) -> None:
    with pytest.raises(MineError, match=r"^a bad row$") as caught:
        executor(2, 2).run(lambda: fail(tmp_path, MineError("a bad row")))
    assert "in fail" in str(caught.value.__cause__)
    assert "process 1 (rank 1) on " in str(caught.value.__cause__)
    wait_until(lambda: not any(map(is_running, started(tmp_path))), "the processes end", END_S)


def loaded_elsewhere(process: int) -> int:
    if os.getpid() == process:
        raise LookupError("not here")
    return process


class Unloadable(Exception):
    """What a process cannot unpickle."""

    def __init__(self, process: int) -> None:
        super().__init__("on a rank")
        self.process = process

    def __reduce__(self) -> Any:
        return loaded_elsewhere, (self.process,)


def test_a_result_that_the_driver_cannot_load_ends_the_job(tmp_path: Path) -> None:
    driver = os.getpid()

    def made() -> Any:
        note(tmp_path)
        return Unloadable(driver)

    with pytest.raises(RuntimeError, match=r"its result cannot be loaded in the driver: .*not here"):
        executor(1, 1, reset_limit=3).run(made)
    assert len(started(tmp_path)) == 1, "another process would have the same result"


@pytest.mark.nightly
def test_an_exception_that_the_driver_cannot_load_has_its_traceback(tmp_path: Path) -> None:
    driver = os.getpid()
    with pytest.raises(RuntimeError, match=r"(?s)in fail.*Unloadable: on a rank.*\(its exception cannot be"):
        executor(2, 2).run(lambda: fail(tmp_path, Unloadable(driver)))


@pytest.mark.nightly
def test_a_rank_that_calls_exit_ends_the_job(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^process 1 \(rank 1\) on \w+ has failed:\nsys\.exit\(4\)$"):
        executor(2, 2).run(lambda: fail(tmp_path, SystemExit(4)))


def test_a_job_that_changes_too_often_ends(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the world has changed 1 times, and reset_limit is 0"):
        executor(1, 2, reset_limit=0).run(lambda: train(tmp_path, [1]))
    wait_until(lambda: not any(map(is_running, started(tmp_path))), "the processes end", END_S)


def test_shutdown_in_another_thread_ends_the_job(tmp_path: Path) -> None:
    made = executor(2, 2)

    def hang() -> None:
        note(tmp_path)
        hvd.init()
        time.sleep(600)

    def shut_down() -> None:
        wait_until(lambda: len(started(tmp_path)) == 2, "two processes start", BUSY_S)
        made.shutdown()

    thread = threading.Thread(target=shut_down)
    thread.start()
    with pytest.raises(RuntimeError, match=r"shutdown\(\) has been called"):
        made.run(hang)
    thread.join()
    wait_until(lambda: not any(map(is_running, started(tmp_path))), "the processes end", END_S)


DRIVER = """
import os, sys, time, ray
from polyhvd.ray import ElasticRayExecutor
from ray.job_config import JobConfig

def work(folder):
    import polyhvd.numpy as hvd
    hvd.init()
    open(os.path.join(folder, f"0-{os.getpid()}"), "w").close()
    if hvd.rank() == 0:
        time.sleep(600)
    hvd.barrier()

config = JobConfig(default_actor_lifetime="detached")  # ranks end with their driver all the same
ray.init(address=sys.argv[1], log_to_driver=False, job_config=config)
executor = ElasticRayExecutor(ElasticRayExecutor.create_settings(2, 2, timeout_s=60))
executor.start()
executor.run(lambda folder=sys.argv[2]: work(folder))
"""


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)], ids=["kill", "int"]
)
def test_processes_end_when_their_driver_is_killed_or_interrupted(
    number: signal.Signals, cluster: str, tmp_path: Path
) -> None:
    with subprocess.Popen([sys.executable, "-c", DRIVER, cluster, str(tmp_path)]) as driver:
        try:
            wait_until(lambda: len(started(tmp_path)) == 2, "two processes start", BUSY_S)
            driver.send_signal(number)
            wait_until(lambda: not any(map(is_running, started(tmp_path))), "the processes end", END_S)
        finally:
            driver.kill()


def test_a_second_ctrl_c_does_not_keep_a_job_from_ending_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = ElasticJob.kill_members

    def interrupt_and_kill(job: ElasticJob, members: Sequence[int]) -> None:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]
        kill(job, members)

    def interrupt(value: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ElasticJob, "kill_members", interrupt_and_kill)
    with pytest.raises(KeyboardInterrupt):
        executor(2, 2).run(lambda: grow(tmp_path), callbacks=[interrupt])
    assert len(started(tmp_path)) == 2
    wait_until(lambda: not any(map(is_running, started(tmp_path))), "the processes end", END_S)


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_a_job_whose_gcs_is_gone_waits_once_for_the_end_of_all_its_processes(
    is_interrupted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()

    def late(call: Callable[[Any], None]) -> Callable[[Any], None]:
        def wait_and_call(subject: Any) -> None:
            is_over.wait(BUSY_S)
            call(subject)

        return wait_and_call

    monkeypatch.setattr(ray, "kill", late(ray.kill))
    monkeypatch.setattr(room_module, "remove_placement_group", late(remove_placement_group))
    ended_at: list[float] = []
    go = tmp_path / "go"

    def work() -> None:
        note(tmp_path)
        hvd.init()
        hvd.barrier()
        wait_until(go.exists, "the autoscaler is asked", BUSY_S)
        ray_logger.log({"time": time.time()})
        if is_interrupted:
            time.sleep(BUSY_S)

    def receive(value: dict[str, float]) -> None:
        ended_at.append(value["time"])
        if is_interrupted:
            raise KeyboardInterrupt

    def watch() -> None:
        wait_until(lambda: demands() == [{"CPU": 3.0}], "the autoscaler is asked", BUSY_S)
        go.touch()

    settings = ElasticRayExecutor.create_settings(4, 5, timeout_s=BUSY_S)
    made = ElasticRayExecutor(settings, cpus_per_slot=3)
    made.start()
    threading.Thread(target=watch).start()
    try:
        with pytest.raises(KeyboardInterrupt) if is_interrupted else contextlib.nullcontext():
            made.run(work, callbacks=[receive])
        assert time.time() - max(ended_at) < 3 * END_S
    finally:
        is_over.set()
    wait_until(lambda: not any(map(is_running, started(tmp_path))), "the processes end", END_S)


def test_shutdown_ends_a_start_that_waits_for_room() -> None:
    made = ElasticRayExecutor(ElasticRayExecutor.create_settings(100))
    shutdown = threading.Timer(0.5, made.shutdown)
    shutdown.start()
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=r"^ElasticRayExecutor\.start\(\): shutdown\(\) has been"):
        made.start()
    assert time.monotonic() - begun < END_S
    with pytest.raises(RuntimeError, match=r"call start\(\) first"):
        made.run(lambda: 1)


def test_too_little_room_is_an_error_with_what_there_is() -> None:
    settings = ElasticRayExecutor.create_settings(13, elastic_timeout=1)
    with pytest.raises(TimeoutError, match=r"room for 12 ranks with .* each, fewer than min_workers=13"):
        ElasticRayExecutor(settings).start()
    with pytest.raises(RuntimeError, match=r"call start\(\) first"):
        ElasticRayExecutor(settings).run(lambda: 1)


def test_a_run_waits_for_room_as_a_start_does() -> None:
    patient, stopped, impatient = (executor(2, 2, elastic_timeout=limit) for limit in (BUSY_S, BUSY_S, 2))
    asked = [{"CPU": 1.0}] * 2
    taken = placement_group([{"CPU": 6}, {"CPU": 5}])

    def shut_down() -> None:
        wait_until(lambda: demands() == asked, "run() asks for room", BUSY_S)
        stopped.shutdown()

    found: list[int] = []
    threads = [
        threading.Thread(target=shut_down),
        threading.Thread(target=lambda: found.extend(patient.run(lambda: 3))),
    ]
    try:
        assert taken.wait(BUSY_S)
        wait_until(lambda: ray.available_resources().get("CPU") == 1.0, "one CPU is left", BUSY_S)
        with pytest.raises(TimeoutError, match=r"^ElasticRayExecutor\.run\(\): the cluster has room for 1 "):
            impatient.run(lambda: 1)
        wait_until(lambda: not demands(), "nothing waits", END_S)
        threads[0].start()
        with pytest.raises(RuntimeError, match=r"^ElasticRayExecutor\.run\(\): shutdown\(\) has been called"):
            stopped.run(lambda: 1)
        wait_until(lambda: not demands(), "nothing waits", END_S)
        threads[1].start()
        wait_until(lambda: demands() == asked, "run() asks for room", BUSY_S)
    finally:
        remove_placement_group(taken)
    for thread in threads:
        thread.join()
    assert found == [3, 3]


def test_a_job_right_after_another_one_has_as_many_processes() -> None:
    wait_until(lambda: ray.available_resources().get("CPU") == 12.0, "all CPUs are free", BUSY_S)
    sizes = []
    for _ in range(2):
        made = ElasticRayExecutor(ElasticRayExecutor.create_settings(timeout_s=BUSY_S), cpus_per_slot=6)
        made.start()
        sizes.append(len(made.run(lambda: 1)))
    assert sizes == [2, 2]


@pytest.mark.parametrize("least", [2, 3])
def test_the_loss_of_a_process_that_has_not_called_init_leaves_the_results_of_the_others(
    least: int, tmp_path: Path
) -> None:
    def work() -> int:
        from polyhvd.launch.providers.precedence import RAY

        assert RAY.elastic_launched is not None
        if RAY.elastic_launched.member == 0:
            wait_until(lambda: len(started(tmp_path)) == 2, "the others return", BUSY_S)
            os.kill(os.getpid(), signal.SIGKILL)
        note(tmp_path)
        return RAY.elastic_launched.member or 0

    made = executor(least, 3)
    if least == 2:
        assert made.run(work) == [1, 2]
    else:
        words = r"returned on 2 processes without calling hvd\.init\(\), fewer than min_workers=3: the others"
        with pytest.raises(RuntimeError, match=words):
            made.run(work)


def test_actors_that_start_while_a_callback_takes_long_are_not_late(tmp_path: Path) -> None:
    made = executor(2, 2)

    def take(value: None) -> None:
        job = made._jobs._job
        assert job is not None
        wait_until(lambda: len(started(tmp_path)) == 2, "both actors start", BUSY_S)
        unseen = [process for process in job._processes.values() if process.start_by < float("inf")]
        wait_until(lambda: len(job._events) >= len(unseen), "Ray has reported both", BUSY_S)
        for process in unseen:
            process.start_by = 0.0  # as after timeout_s

    def work() -> int:
        note(tmp_path)
        ray_logger.log(None, chief_only=False)
        return os.getpid()

    assert sorted(made.run(work, callbacks=[take])) == sorted(started(tmp_path))
    assert len(started(tmp_path)) == 2


def test_hosts_that_ray_does_not_have_and_other_results_of_a_discovery_are_errors() -> None:
    class Listing:
        found: Any

        def find_available_hosts_and_slots(self) -> Any:
            return self.found

    settings = ElasticRayExecutor.create_settings(2, elastic_timeout=0, discovery=Listing())
    made = ElasticRayExecutor(settings, override_discovery=False)
    Listing.found = {"192.0.2.77": 2}
    with pytest.raises(TimeoutError, match=r"No node of Ray has the id or address \['192\.0\.2\.77'\]"):
        made.start()
    for Listing.found in (["192.0.2.77"], {alive()[0]["NodeID"]: "2"}):
        with pytest.raises(TypeError, match=r"_hosts_and_slots\(\) has returned .*expected a dict"):
            made.start()


def test_discovery_counts_ranks_by_node() -> None:
    found = RayHostDiscovery(cpus_per_worker=2).find_available_hosts_and_slots()
    assert found == {node["NodeID"]: 3 for node in alive()}
    assert list(RayHostDiscovery(cpus_per_worker=0.1).find_available_hosts_and_slots().values()) == [60, 60]
    assert list(RayHostDiscovery(use_gpu=True).find_available_hosts_and_slots().values()) == [2]
    assert RayHostDiscovery(cpus_per_slot=2).find_available_hosts_and_slots() == found
    of_two = RayHostDiscovery(use_gpu=True, gpus_per_slot=2)
    assert list(of_two.find_available_hosts_and_slots().values()) == [1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"min_workers": 2, "num_workers": 2}, "give one of them"),
        ({"num_workers": 2, "max_workers": 3}, "needs min_workers"),
        ({"num_workers": 2, "spares": 1}, "needs min_workers"),
        ({"min_workers": 3, "max_workers": 2}, "expected 1 <= min_workers <= max_workers"),
        ({"min_workers": 1, "gpus_per_worker": 1}, "needs use_gpu=True"),
        ({"min_workers": 1, "cooldown_range": (1,)}, "expected two numbers"),
        ({"min_workers": 1, "cooldown_range": ("a", "b")}, "expected two numbers"),
        ({"min_workers": 1, "cooldown_range": (5, 2)}, "^cooldown_range 5 2: expected 0 <= MIN <= MAX$"),
        ({"min_workers": 1, "reset_limit": -1}, "^spares and reset_limit must not be negative$"),
        ({"min_workers": 1, "elastic_timeout": -1}, "^elastic_timeout -1: expected seconds"),
        ({"min_workers": 1, "override_discovery": False}, "settings.discovery is None"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RayExecutor(**arguments)
