"""The table of configuration: every variable under both prefixes, and what unknown ones cause."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import polyhvd.numpy as hvd
import pytest
from pool import Pool, PoolSpec

from polyhvd.config import ConfigError, Launched, Settings, ineffective, table, unknown
from polyhvd.runtime import current

#: What scripts for Horovod set, with a value that Horovod takes.
HOROVODS = {
    "ADASUM_MPI_CHUNK_SIZE": "1",
    "AUTOTUNE": "1",
    "AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "20",
    "AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.8",
    "AUTOTUNE_LOG": "tune.csv",
    "AUTOTUNE_STEPS_PER_SAMPLE": "10",
    "AUTOTUNE_WARMUP_SAMPLES": "3",
    "BATCH_D2D_MEMCOPIES": "1",
    "CACHE_CAPACITY": "7",
    "CCL_CACHE": "1",
    "CONTROLLER": "MPI",
    "CPU_OPERATIONS": "MPI",
    "CYCLE_TIME": "2.5",
    "DISABLE_GROUP_FUSION": "1",
    "DISABLE_NVTX_RANGES": "1",
    "DYNAMIC_PROCESS_SETS": "1",
    "ELASTIC": "1",
    "ELASTIC_TIMEOUT": "600",
    "ENABLE_ASYNC_COMPLETION": "1",
    "ENABLE_XLA_OPS": "1",
    "FUSION_THRESHOLD": "1024",
    "GLOO_IFACE": "lo",
    "GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "GLOO_RENDEZVOUS_PORT": "9000",
    "GLOO_TIMEOUT_SECONDS": "31",
    "HIERARCHICAL_ALLGATHER": "1",
    "HIERARCHICAL_ALLREDUCE": "1",
    "HOSTNAME": "algo-1",
    "LOG_HIDE_TIME": "1",
    "LOG_LEVEL": "DEBUG",
    "MPI_THREADS_DISABLE": "1",
    "NUM_NCCL_STREAMS": "2",
    "STALL_CHECK_DISABLE": "1",
    "STALL_CHECK_TIME_SECONDS": "61",
    "STALL_SHUTDOWN_TIME_SECONDS": "62",
    "START_TIMEOUT": "63",
    "THREAD_AFFINITY": "3,5",
    "TORUS_ALLREDUCE": "1",
    "WITH_PYTORCH": "1",
}
READ = {
    "backends": ("nccl?", "mpi", "host"),
    "cache_capacity": 7,
    "controller": "mpi",
    "cycle_time_ms": 2.5,
    "data_timeout_s": 31.0,
    "fusion_bytes_max": 1024,
    "groups_apart": True,
    "hierarchical_allreduce": True,
    "interface": "lo",
    "log_hide_time": True,
    "log_level": "debug",
    "mpi_threads_disable": True,
    "stall_check_disable": True,
    "stall_shutdown_s": 62.0,
    "stall_warn_s": 61.0,
    "start_timeout_s": 63.0,
    "thread_affinity": (3, 5),
}


@pytest.mark.parametrize("prefix", ["POLYHVD_", "HOROVOD_"])
def test_every_variable_is_accepted_under_both_prefixes(prefix: str) -> None:
    environ = {prefix + name: value for name, value in HOROVODS.items()}
    settings = Settings.from_environment(environ)
    assert {name: getattr(settings, name) for name in READ} == READ
    assert unknown(environ) == {}


def test_no_variable_is_in_the_table_twice() -> None:
    names = [row.name for row in (*table(), *ineffective())] + [row.other_name for row in table()]
    names = [name for name in names if name]
    assert sorted(names) == sorted(set(names))


def test_a_variable_without_effect_has_a_reason() -> None:
    assert [row.name for row in ineffective() if not row.reason.endswith(".")] == []


@pytest.mark.parametrize(
    ("value", "backends", "may_use_nccl"),
    [
        ("", ("nccl?", "host"), True),
        ("gloo", ("nccl?", "host"), True),
        ("mpi:allreduce", ("nccl?", "mpi:allreduce", "host"), True),
        ("host", ("host",), False),
        ("mpi,host", ("mpi", "host"), False),
        ("nccl:allreduce mpi", ("nccl:allreduce", "mpi", "host"), True),
        ("host,nccl?", ("host", "nccl?"), True),
    ],
)
def test_who_says_how_cpus_are_served_says_nothing_about_gpus(
    value: str, backends: tuple[str, ...], may_use_nccl: bool
) -> None:
    config = Settings.from_environment({"POLYHVD_BACKENDS": value})
    assert (config.backends, config.may_use_nccl) == (backends, may_use_nccl)


def test_our_prefix_wins_and_so_does_our_name() -> None:
    both = {"HOROVOD_CYCLE_TIME": "1", "POLYHVD_CYCLE_TIME": "2"}
    assert Settings.from_environment(both).cycle_time_ms == 2
    both = {"POLYHVD_GLOO_TIMEOUT_SECONDS": "1", "HOROVOD_DATA_TIMEOUT_SECONDS": "2"}
    assert Settings.from_environment(both).data_timeout_s == 2


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("HOROVOD_LOG_LEVEL", "loud", "must be one of trace, debug"),
        ("HOROVOD_CPU_OPERATIONS", "rccl", "'rccl' is not a backend; expected one of nccl, mpi, host"),
        ("POLYHVD_BACKENDS", "mpi:barrier", "'barrier' is not an operation; expected one of allreduce"),
        ("HOROVOD_CONTROLLER", "ring", "must be mpi or gloo"),
        ("POLYHVD_THREAD_AFFINITY", "1,-2", "must be a whole number that is not negative"),
        ("POLYHVD_THREAD_AFFINITY", "one", "must be a whole number that is not negative"),
        ("POLYHVD_CACHE_CAPACITY", str(1 << 64), "must be a whole number that is not negative, below 2"),
        ("POLYHVD_CYCLE_TIME", "fast", "must be a finite number that is not negative"),
        ("HOROVOD_DISABLE_GROUP_FUSION", "maybe", "must be 0 or 1"),
        ("HOROVOD_GLOO_TIMEOUT_SECONDS", "-1", "must be a finite number"),
    ],
)
def test_a_bad_value_is_told_with_its_variable(variable: str, value: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable}={value!r}: {reason}"):
        Settings.from_environment({variable: value})


@pytest.mark.parametrize(("on", "off"), [("1", "0"), ("true", "false"), ("YES", "no"), ("on", "Off")])
def test_a_switch_takes_both_words_of_a_pair(on: str, off: str) -> None:
    for word, value in ((on, True), (off, False)):
        assert Settings.from_environment({"POLYHVD_STALL_CHECK_DISABLE": word}).stall_check_disable is value


def test_a_time_beyond_what_the_kernel_can_wait_for_is_a_very_long_one() -> None:
    settings = Settings.from_environment(
        {"HOROVOD_START_TIMEOUT": "1e12", "POLYHVD_DATA_TIMEOUT_SECONDS": "9e9"}
    )
    assert settings.start_timeout_s == settings.data_timeout_s == 1e6


def test_a_local_rank_without_a_core_is_told() -> None:
    ours = {"POLYHVD_LOCAL_RANK": "2", "POLYHVD_LOCAL_SIZE": "4", "HOROVOD_THREAD_AFFINITY": "0,1"}
    settings = Settings.from_environment(ours)
    with pytest.raises(ConfigError, match="cores for 2 local ranks, and none for local rank 2; list 4"):
        settings.engine_core(2, 4)
    done = subprocess.run(
        [sys.executable, "-c", "import polyhvd; polyhvd.init()"],
        env={**os.environ, **ours},
        capture_output=True,
        text=True,
    )
    assert "ConfigError: POLYHVD_THREAD_AFFINITY has cores for 2 local ranks" in done.stderr


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("HOROVOD_FUSION_TRESHOLD", "HOROVOD_FUSION_THRESHOLD"),
        ("POLYHVD_STALL_CHECK_TIME", "POLYHVD_STALL_CHECK_TIME_SECONDS"),
        ("HOROVOD_GLOO_TIMEOUT_SECOND", "HOROVOD_GLOO_TIMEOUT_SECONDS"),
        ("POLYHVD_cycle_time", "POLYHVD_CYCLE_TIME"),
        ("HOROVOD_ZZZ", ""),
    ],
)
def test_an_unknown_variable_is_found_with_the_nearest_name(variable: str, nearest: str) -> None:
    assert unknown({variable: "1", "OTHER_CYCLE_TIMES": "1"}) == {variable: nearest}


def run(source: str, **environment: str) -> str:
    """Standard error of a program that is a world of one rank."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("POLYHVD_", "HOROVOD_"))}
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stderr


TWICE = "import polyhvd.numpy as hvd\nfor _ in range(2): hvd.init(); hvd.shutdown()\n"
LINE = (
    "polyhvd rank 0 WARNING: HOROVOD_CYCLE_TIMES is set, but is not a variable of polyhvd or Horovod; "
    "did you mean HOROVOD_CYCLE_TIME?\n"
)


def test_an_unknown_variable_is_reported_once() -> None:
    assert run(TWICE, HOROVOD_CYCLE_TIMES="1", POLYHVD_LOG_HIDE_TIME="1") == LINE


def test_a_log_line_begins_with_the_time() -> None:
    time, rest = run(TWICE, HOROVOD_CYCLE_TIMES="1").split(" polyhvd ", 1)
    assert len(time) == len("2000-01-01 00:00:00,000")
    assert f"polyhvd {rest}" == LINE


@pytest.mark.parametrize(
    ("level", "shown"), [("warning", 1), ("TRACE", 1), ("Error", 0), ("FATAL", 0), ("info", 1)]
)
def test_the_log_level_decides_what_is_shown(level: str, shown: int) -> None:
    text = run(TWICE, HOROVOD_CYCLE_TIMES="1", HOROVOD_LOG_LEVEL=level)
    assert text.count("HOROVOD_CYCLE_TIMES") == shown


def test_a_program_that_configures_logging_gets_each_record_once() -> None:
    source = "import logging\nlogging.basicConfig(format='mine: %(name)s %(message).19s')\n" + TWICE
    assert run(source, HOROVOD_CYCLE_TIMES="1") == "mine: polyhvd HOROVOD_CYCLE_TIMES\n"


CORES = """
import os, time
from pathlib import Path
import polyhvd.numpy as hvd

hvd.init()
deadline = time.monotonic() + 30
while True:
    found = [path.read_text() for path in Path("/proc/self/task").glob("*/status")]
    cores = [text.partition("Cpus_allowed_list:")[2].split()[0] for text in found]
    if cores.count(os.environ["EXPECTED"]) == 1:
        break
    assert time.monotonic() < deadline, cores
hvd.shutdown()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: every thread is bound to it")
def test_the_engines_thread_is_bound_to_the_core_of_its_local_rank() -> None:
    core = str(max(os.sched_getaffinity(0)))
    assert run(CORES, HOROVOD_THREAD_AFFINITY=f"{core},0", EXPECTED=core) == ""


def test_a_core_that_does_not_exist_is_logged() -> None:
    text = run(TWICE, HOROVOD_THREAD_AFFINITY="1000", POLYHVD_LOG_HIDE_TIME="1")
    assert text.count("polyhvd rank 0 WARNING: the engine's thread cannot be bound to core 1000: ") == 2


def reduce_a_group_beside_others() -> int:
    single = [np.ones(4, np.float32) for _ in range(2)]
    group = [np.ones(4, np.float32) for _ in range(3)]
    fewest = 3
    for _ in range(50):  # whether all of it is ready at once is a matter of timing
        before = hvd.counters()["batches"]
        handles = [hvd.allreduce_async(t, name=f"single{i}", op=hvd.Sum) for i, t in enumerate(single)]
        current.world().engine.submit(0, "group", group, group, blocking=True).wait()
        for handle in handles:
            hvd.synchronize(handle)
        after = hvd.counters()["batches"]
        hvd.barrier()
        fewest = min(fewest, after - before)
    return fewest


@pytest.mark.parametrize("apart", ["0", "1"])
def test_groups_are_fused_with_others_unless_that_is_disabled(apart: str) -> None:
    spec = PoolSpec("numpy", (2,), (("HOROVOD_DISABLE_GROUP_FUSION", apart), ("HOROVOD_CYCLE_TIME", "50")))
    with Pool(spec) as pool:
        batches = pool.run(reduce_a_group_beside_others)
    assert set(batches) == {2 if apart == "1" else 1}


def test_the_secret_of_a_job_is_not_printed_with_its_settings() -> None:
    assert "5ec3e7" not in repr(Launched(secret="5ec3e7"))
