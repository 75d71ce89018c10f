"""The configuration: one table of the variables that a launcher sets for its ranks, and of the settings.

No other module reads the environment, except for the launcher, which creates that of the ranks.

Every variable is accepted as ``POLYHVD_<NAME>`` and as ``HOROVOD_<NAME>``; the former wins. Those
of Horovod that have nothing to set here stand in the table as well, with the reason.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

__all__ = [
    "MPI_LAUNCHERS",
    "ConfigError",
    "Ineffective",
    "Launched",
    "MpiLaunch",
    "Settings",
    "Variable",
    "ineffective",
    "mpi_launch",
    "notify_mpi4py",
    "table",
    "unknown",
]

_PREFIXES = ("POLYHVD_", "HOROVOD_")
_BACKENDS = ("nccl", "mpi", "host")
#: NCCL where it is found, and else the way through memory of the host.
_NCCL_IF_FOUND = "nccl?"
#: Of Horovod's CPU_OPERATIONS; the host backend does without MPI what they do.
_HOST_NAMES = {"gloo": "host", "ccl": "host"}
_KINDS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
_CONTROLLERS = ("", "mpi", "gloo")
#: Set for each rank by launchers that speak PMI, with its rank; and the number of ranks, if there is one.
MPI_LAUNCHERS = (
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPICH", "PMI_RANK", "PMI_SIZE"),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMIx", "PMIX_RANK", ""),
)
_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
#: By the number of the core's host::Attaching.
_ATTACHING = ("0", "auto", "1")
_DRIFT = ("warn", "error", "off")
_LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")


class ConfigError(ValueError):
    """An environment variable holds a value that cannot be used."""


@dataclass(frozen=True)
class Variable:
    """A row of the table: environment name, how to read it, default, meaning."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    meaning: str
    other_name: str = ""  # of Horovod, for the same; the first name wins


@dataclass(frozen=True)
class Ineffective:
    """A row of the table for a variable that is accepted and sets nothing."""

    name: str  # with a final "*" for all that begin so
    reason: str


def _number(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) < float("inf"):
            return min(value, 1e6)  # as seconds eleven days; longer waits overflow timers
    raise ValueError("must be a finite number that is not negative")


def _count(text: str) -> int:
    with contextlib.suppress(ValueError):
        if 0 <= (value := int(text)) < 1 << 62:  # the core takes no more
            return value
    raise ValueError("must be a whole number that is not negative, below 2**62")


def _positive(text: str) -> int:
    value = _count(text)
    if value == 0:
        raise ValueError("must be 1 or more")
    return value


def _switch(text: str) -> bool:
    word = text.strip().lower() or "0"
    if word not in _ON + _OFF:
        raise ValueError("must be 0 or 1")
    return word in _ON


def _one_of(*values: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if (value := text.strip().lower()) not in values:
            raise ValueError(f"must be one of {', '.join(values)}")
        return value

    return parse


def _cores(text: str) -> tuple[int, ...]:
    return tuple(_count(core) for core in text.split(",")) if text.strip() else ()


def _backends(text: str) -> tuple[str, ...]:
    chosen = []
    items = text.lower().replace(",", " ").split()
    for item in items:
        name, colon, kinds = item.partition(":")
        name = _HOST_NAMES.get(name, name)
        if name.removesuffix("?" * name.startswith("nccl")) not in _BACKENDS or (name == "host" and colon):
            raise ValueError(f"{name!r} is not a backend; expected one of {', '.join(_BACKENDS)}")
        for kind in kinds.split("+") if colon else ():
            if kind not in _KINDS:
                raise ValueError(f"{kind!r} is not an operation; expected one of {', '.join(_KINDS)}")
        chosen.append(name + colon + kinds)
    # Whoever says how CPUs are served says nothing about GPUs, but for the plain word `host`.
    if "host" not in items and not any(item.startswith("nccl") for item in chosen):
        chosen.insert(0, _NCCL_IF_FOUND)
    # The host backend takes what the others do not: it comes last unless it has a place.
    return tuple(dict.fromkeys(chosen if "host" in chosen else [*chosen, "host"]))


def _controller(text: str) -> str:
    if text.strip().lower() not in _CONTROLLERS:
        raise ValueError("must be mpi or gloo")
    return text.strip().lower()


def _row(
    name: str,
    parse: Callable[[str], Any],
    default: Any,
    meaning: str,
    other_name: str = "",
    *,
    is_secret: bool = False,
) -> Any:
    variable = Variable(name, parse, default, meaning, other_name)
    return field(default=default, metadata={"variable": variable}, repr=not is_secret)


_T = TypeVar("_T", bound="_Table")


class _Table:
    """Reads rows from the environment."""

    @classmethod
    def from_environment(cls: type[_T], environ: Mapping[str, str] | None = None) -> _T:
        """Read the table's variables; raises :class:`ConfigError` naming the variable and the value."""
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for item in fields(cls):  # type: ignore[arg-type]
            variable: Variable = item.metadata["variable"]
            names = filter(None, (variable.name, variable.other_name))
            found = [prefix + name for name in names for prefix in _PREFIXES if prefix + name in environ]
            if not found:
                continue
            try:
                values[item.name] = variable.parse(environ[found[0]])
            except ValueError as error:
                raise ConfigError(f"{found[0]}={environ[found[0]]!r}: {error}") from None
        return cls(**values)


def _pipe(name: str) -> int:
    """The descriptor of a pipe, or -1. A wrapper may have closed it, and opened another file.

    Args:
        name: of the variable, a row of :class:`Launched`, without its prefix.
    """
    descriptor, _, inode = os.environ.get(_PREFIXES[0] + name, "").partition(":")
    with contextlib.suppress(OSError, ValueError):
        found = os.fstat(int(descriptor))
        if stat.S_ISFIFO(found.st_mode) and found.st_ino == int(inode):
            return int(descriptor)
    return -1


@dataclass(frozen=True)
class Launched(_Table):
    """Variables that polyhvdrun sets for each rank. Under other launchers these have their defaults."""

    rank: int = _row("RANK", _count, 0, "World rank of this process; set by the launcher.")
    size: int = _row("SIZE", _count, 1, "Number of ranks; set by the launcher.")
    local_rank: int = _row("LOCAL_RANK", _count, 0, "Rank of this process among the ranks on this host.")
    local_size: int = _row("LOCAL_SIZE", _count, 1, "Number of ranks on this host.")
    cross_rank: int = _row(
        "CROSS_RANK", _count, 0, "Position of this host among the hosts that have this local rank."
    )
    cross_size: int = _row("CROSS_SIZE", _count, 1, "Number of hosts that have this local rank.")
    host_id: str = _row(
        "HOST_ID",
        str,
        "0",
        "Number of this host, set by the launcher. Ranks with the same value share memory.",
    )
    rendezvous: str = _row("RENDEZVOUS", str, "", "host:port of the launcher's rendezvous; empty: one rank.")
    secret: str = _row(
        "SECRET", str, "", "The job's secret in hexadecimal, created by polyhvdrun.", is_secret=True
    )
    secret_file: str = _row("SECRET_FILE", str, "", "File that contains the secret instead.")
    restart_count: int = _row("RESTART_COUNT", _count, 0, "Number of restarts by polyhvdrun --max-restarts.")
    member: int | None = _row(
        "MEMBER", _count, None, "Number of this process in an elastic job; set by the launcher."
    )
    launcher_timeout_s: float = _row(
        "LAUNCHER_TIMEOUT_S",
        _number,
        0.0,
        "Seconds without a heartbeat after which the launcher is lost; set by it.",
    )
    metrics_interval_s: float = _row(
        "METRICS_INTERVAL_S",
        _number,
        0.0,
        "Seconds between two reports of a rank's metrics to polyhvdrun, for `polyhvd top` and "
        "`--metrics-port`; 0: none. polyhvdrun sets it to 2, and to more in jobs of more than 400 ranks, "
        "unless it is set.",
    )
    parent: str = _row(
        "PARENT", str, "", "Process and job of the rank that has started this process; set by init()."
    )
    devices: str = _row(
        "DEVICES", str, "", "Ids of the GPUs that Spark has assigned to this rank; set by polyhvd.spark.run."
    )
    host_devices: str = _row(
        "HOST_DEVICES",
        str,
        "",
        "Ids of the GPUs of all tasks on this host; set by polyhvd.spark.run_elastic.",
    )
    report: str = _row(
        "REPORT",
        str,
        "",
        "Descriptor and inode of a pipe on which a rank reports failures that other ranks have caused.",
    )
    signals: str = _row(
        "SIGNALS", str, "", "Descriptor and inode of a pipe for the numbers of signals that a rank handles."
    )

    @property
    def by_polyhvdrun(self) -> bool:
        """Whether it has started this process."""
        return self.size > 1 or bool(self.rendezvous)


@dataclass(frozen=True)
class Settings(_Table):
    """Settings of this process that do not depend on its rank. They are read in ``init()``."""

    interface: str = _row(
        "GLOO_IFACE", str, "", "Network interface or address to listen on; empty: chosen automatically."
    )
    alone: bool = _row(
        "ALONE",
        _switch,
        False,
        "1: init() makes a world of one rank, in a process that another launcher (torchrun, srun, ...) or a "
        "rank has started. Otherwise init() connects to the other processes of that launcher, or raises. "
        "polyhvdrun does not pass it to ranks.",
    )
    trust_network: bool = _row(
        "TRUST_NETWORK",
        _switch,
        False,
        "1: ranks that another launcher has started on several hosts connect without a secret. Anyone who "
        "can reach their ports can then join the job and run code in it.",
    )
    shared_dir: str = _row(
        "SHARED_DIR",
        str,
        "",
        "Folder on a file system that all hosts share, in which ranks that srun has started find each other "
        "and the job's secret; empty: ~/.polyhvd.",
    )
    start_timeout_s: float = _row("START_TIMEOUT", _number, 30.0, "Seconds to wait for all ranks at init().")
    heartbeat_timeout_s: float = _row(
        "HEARTBEAT_TIMEOUT_S",
        _number,
        30.0,
        "Seconds without a heartbeat after which polyhvdrun and its agents on the hosts consider each other "
        "lost and end the ranks; 0: never. The default in elastic jobs is 4.",
    )
    shared_memory: bool = _row("SHARED_MEMORY", _switch, True, "0: ranks on the same host use TCP, too.")
    backends: tuple[str, ...] = _row(
        "BACKENDS",
        _backends,
        (_NCCL_IF_FOUND, "host"),
        "Backends in order of preference: `mpi`, `host` on CPUs, `nccl` on GPUs; the same on every rank. "
        "`mpi:allreduce+broadcast` uses MPI only for these operations. Operations that MPI does not support "
        "run on `host`. `nccl?`, the default unless `nccl` or `host` is listed, uses NCCL if it is found, "
        "and otherwise copies tensors through host memory; with `nccl`, a missing NCCL is an error. GLOO and "
        "CCL mean `host` on CPUs.",
        other_name="CPU_OPERATIONS",
    )
    controller: str = _row(
        "CONTROLLER",
        _controller,
        "",
        "How ranks connect: `mpi`: through MPI; `gloo`: never through MPI; empty: through MPI if its "
        "launcher has started them.",
    )
    mpi_library: str = _row(
        "MPI_LIBRARY",
        str,
        "",
        "Path or file name of MPI's library; empty: found automatically, see `polyhvd docs mpi`.",
    )
    nccl_library: str = _row(
        "NCCL_LIBRARY",
        str,
        "",
        "Path or file name of NCCL's library; empty: found automatically, see `polyhvd docs gpu`.",
    )
    mpi_threads_disable: bool = _row(
        "MPI_THREADS_DISABLE",
        _switch,
        False,
        "1: initialize MPI for one thread at a time. Other threads must not call it at the same time.",
    )
    fusion_bytes_max: int = _row(
        "FUSION_THRESHOLD", _count, 128 << 20, "Maximum size of fused operations in bytes."
    )
    groups_apart: bool = _row(
        "DISABLE_GROUP_FUSION", _switch, False, "1: never fuse a grouped operation with others."
    )
    cycle_time_ms: float = _row(
        "CYCLE_TIME",
        _number,
        1.0,
        "Maximum time in milliseconds for which the engine collects asynchronous operations before it starts "
        "them.",
    )
    reproducible: bool = _row(
        "REPRODUCIBLE",
        _switch,
        False,
        "1: make sums independent of the placement of ranks on hosts, too; the same on every rank.",
    )
    cma: str = _row(
        "CMA",
        _one_of(*_ATTACHING),
        "auto",
        "Whether ranks on the same host access each other's memory (cross memory attach). auto: if it is "
        "allowed and measured to be at least a quarter faster; 0: never, ranks exchange tensors in shared "
        "memory; 1: if it is allowed.",
    )
    exact_gradients: bool = _row(
        "EXACT_GRADIENTS",
        _switch,
        False,
        "1: gradients of allgather, broadcast and reducescatter are those of the sum of all ranks' losses; "
        "0: they are scaled as in Horovod, see `polyhvd docs migrating-from-horovod`. "
        "The same on every rank.",
    )
    hierarchical_allreduce: bool = _row(
        "HIERARCHICAL_ALLREDUCE",
        _switch,
        False,
        "1: reduce tensors on GPUs with NCCL within hosts and on CPUs between them; the same on every rank. "
        "On CPUs, the ranks of a host always reduce first.",
    )
    check_drift: str = _row(
        "CHECK_DRIFT",
        _one_of(*_DRIFT),
        "warn",
        "Whether optimizers and tapes compare the weights and hyperparameters of their ranks in one of the "
        "first two steps, and handlers and callbacks that average metrics at the end of each epoch: `warn`: "
        "one rank logs what differs; `error`: every rank raises; `off`: no comparison. The same on every "
        "rank.",
    )
    cache_capacity: int = _row(
        "CACHE_CAPACITY", _count, 1024, "Maximum number of operations in the response cache."
    )
    data_timeout_s: float = _row(
        "DATA_TIMEOUT_SECONDS",
        _number,
        300.0,
        "Maximum time in seconds of a transfer that ranks have agreed on.",
        other_name="GLOO_TIMEOUT_SECONDS",
    )
    data_checksums: bool = _row(
        "DATA_CHECKSUMS",
        _switch,
        False,
        "1: add checksums to tensors that are sent by TCP, to detect corrupted data; the same on every rank.",
    )
    stall_check_disable: bool = _row("STALL_CHECK_DISABLE", _switch, False, "1: turn off stall reports.")
    stall_warn_s: float = _row(
        "STALL_CHECK_TIME_SECONDS", _number, 60.0, "Seconds after which a waiting operation is reported."
    )
    stall_shutdown_s: float = _row(
        "STALL_SHUTDOWN_TIME_SECONDS", _number, 0.0, "Seconds after which a stall ends the job; 0: never."
    )
    shutdown_drain_s: float = _row(
        "SHUTDOWN_DRAIN_SECONDS",
        _number,
        10.0,
        "Seconds for which shutdown() and the end of the program wait for collectives in MXNet's queue. The "
        "remaining ones fail.",
    )
    thread_affinity: tuple[int, ...] = _row(
        "THREAD_AFFINITY",
        _cores,
        (),
        "CPU core of the engine's thread, for each local rank, separated by commas; empty: any core.",
    )
    log_level: str = _row(
        "LOG_LEVEL",
        _one_of(*_LOG_LEVELS),
        "warning",
        f"Minimum log level: {', '.join(_LOG_LEVELS)}; in upper or lower case.",
    )
    log_hide_time: bool = _row("LOG_HIDE_TIME", _switch, False, "1: omit the time from log lines.")
    timeline: str = _row(
        "TIMELINE",
        str,
        "",
        "Timeline file of rank 0, written from init() on; the other ranks write theirs to the same folder. "
        "DYNAMIC or empty: start with start_timeline().",
    )
    timeline_mark_cycles: bool = _row(
        "TIMELINE_MARK_CYCLES", _switch, False, "1: mark in the timeline when the engine begins new work."
    )
    timeline_bytes_max: int = _row(
        "TIMELINE_MAX_BYTES",
        _count,
        256 << 20,
        "Maximum size of a rank's timeline in bytes; the oldest entries are dropped.",
    )
    parity_log: str = _row(
        "PARITY_LOG", str, "", "File to which each parity.compare and parity.watch appends a line of JSON."
    )
    autotune: bool = _row(
        "AUTOTUNE", _switch, False, "1: tune fusion, batching and chunk sizes while the job runs."
    )
    autotune_log: str = _row(
        "AUTOTUNE_LOG", str, "", "CSV file for the samples, written by rank 0; see `polyhvd autotune`."
    )
    autotune_cache: str = _row(
        "AUTOTUNE_CACHE",
        str,
        "",
        "JSON file to which rank 0 writes the best values, for later jobs with the same steps and ranks.",
    )
    autotune_warmup_samples: int = _row(
        "AUTOTUNE_WARMUP_SAMPLES", _count, 3, "Number of first samples to ignore."
    )
    autotune_steps_per_sample: int = _row("AUTOTUNE_STEPS_PER_SAMPLE", _positive, 10, "Steps in each sample.")
    autotune_samples_max: int = _row(
        "AUTOTUNE_BAYES_OPT_MAX_SAMPLES", _positive, 20, "Maximum number of samples."
    )
    autotune_noise: float = _row(
        "AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        _number,
        0.8,
        "Assumed noise of a sample: its variance as a fraction of the variance of all samples.",
    )
    flight_recorder: bool = _row(
        "FLIGHT_RECORDER", _switch, True, "0: do not write the last operations to a file when a job fails."
    )
    flight_dir: str = _row(
        "FLIGHT_DIR",
        str,
        "",
        "Folder for these files; empty: a private folder in the system's folder for temporary files.",
    )

    @property
    def moves_by_mpi(self) -> bool:
        """Whether MPI is one of the backends."""
        return any(item.partition(":")[0] == "mpi" for item in self.backends)

    @property
    def may_use_nccl(self) -> bool:
        """Whether NCCL is one of the backends."""
        return any(item.startswith("nccl") for item in self.backends)

    def engine_core(self, local_rank: int, local_size: int) -> int:
        """Core that the engine's own thread is bound to; -1: none. Raises ConfigError where none is named."""
        if not self.thread_affinity:
            return -1
        if len(self.thread_affinity) <= local_rank:
            raise ConfigError(
                f"POLYHVD_THREAD_AFFINITY has cores for {len(self.thread_affinity)} local ranks, and "
                f"none for local rank {local_rank}; list {local_size}"
            )
        return self.thread_affinity[local_rank]

    @property
    def shares_gpus(self) -> bool:
        """Whether NCCL's own variable allows several ranks on one GPU."""
        return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0").strip() not in ("", "0")

    @property
    def report_descriptor(self) -> int:
        """The pipe to the launcher for reports, or -1."""
        return _pipe("REPORT")

    @property
    def signals_descriptor(self) -> int:
        """The pipe to the agent for signals, or -1."""
        return _pipe("SIGNALS")

    @property
    def attaching(self) -> int:
        """The setting of CMA by the core's number."""
        return _ATTACHING.index(self.cma)

    def steps_per_sample(self, rank: int, size: int) -> int:
        """How many steps rank 0 measures at a time for the autotuner; 0 on others, and without it."""
        measures = self.autotune and rank == 0 and size > 1
        return self.autotune_steps_per_sample if measures else 0

    @property
    def flight_folder(self) -> str:
        """The folder of flight dumps; empty if they are turned off or the machine has no suitable folder."""
        if not self.flight_recorder or self.flight_dir:
            return self.flight_dir if self.flight_recorder else ""
        try:
            return tempfile.gettempdir()
        except OSError:
            return ""

    def flight_job(self, job: str) -> str:
        """Name of a job's folder in the private one; empty where FLIGHT_DIR names the folder itself."""
        return "" if self.flight_dir else job


_ELASTIC = "polyhvdrun's options say whether a job is elastic, and how."
_BUILD = "It concerned how Horovod was built; nothing is chosen when polyhvd is."
_LAUNCHER = "For Horovod's launchers; polyhvdrun does not use them."

_INEFFECTIVE = (
    Ineffective(
        "ADASUM_MPI_CHUNK_SIZE",
        "Adasum runs on the CPU backend, which chooses the size of its chunks itself, and not on MPI.",
    ),
    Ineffective(
        "BATCH_D2D_MEMCOPIES",
        "Large tensors are reduced in place. Small tensors on a GPU are packed with one copy each.",
    ),
    Ineffective("CCL_*", "oneCCL is not used."),
    Ineffective("DISABLE_NVTX_RANGES", "polyhvd makes no NVTX ranges."),
    Ineffective("DYNAMIC_PROCESS_SETS", "Process sets can always be added and removed while the job runs."),
    Ineffective("ELASTIC", _ELASTIC),
    Ineffective("ELASTIC_TIMEOUT", "For polyhvdrun: the default of --elastic-timeout."),
    Ineffective(
        "ENABLE_ASYNC_COMPLETION",
        "Always on: an operation on a GPU counts as completed when it has been put on a stream.",
    ),
    Ineffective(
        "ENABLE_XLA_OPS",
        "polyhvd has no operations for XLA, and XLA refuses polyhvd's operations of TensorFlow.",
    ),
    Ineffective("GLOO_RENDEZVOUS_*", _LAUNCHER),
    Ineffective(
        "HIERARCHICAL_ALLGATHER",
        "Allgather is always hierarchical: the ranks of a host gather first, then hosts exchange blocks.",
    ),
    Ineffective("HOSTNAME", "Launchers set it for scripts. polyhvd distinguishes hosts by HOST_ID."),
    Ineffective(
        "NUM_NCCL_STREAMS", "NCCL operations run on one stream, in the order that all ranks have agreed on."
    ),
    Ineffective("SPARK_*", _LAUNCHER),
    Ineffective(
        "TORUS_ALLREDUCE",
        "NCCL chooses its algorithms itself. On CPUs each rank of a host always reduces one slice, and "
        "exchanges it with the ranks that have the same slice on other hosts.",
    ),
    *(
        Ineffective(name, _BUILD)
        for name in ("BUILD_*", "CMAKE", "CUDA_HOME", "GPU_*", "NCCL_*", "ROCM_HOME")
    ),
    *(Ineffective(name, _BUILD) for name in ("WITHOUT_*", "WITH_*")),
    Ineffective("TEST_*", "Variables of test programs."),
)


@dataclass(frozen=True)
class MpiLaunch:
    """Environment variables of an MPI launcher that has started this process. Only MPI knows its rank."""

    launcher: str
    size: int  # 0: unknown
    rank: int = 0
    seen: str = ""  # the variables with their values


def mpi_launch(environ: Mapping[str, str] | None = None) -> MpiLaunch | None:
    """Return how a launcher of MPI has started this process, or None."""
    environ = os.environ if environ is None else environ
    for launcher, rank, size in MPI_LAUNCHERS:
        if environ.get(rank, "").isdecimal():
            text = environ.get(size, "")
            seen = ", ".join(f"{name}={environ[name]}" for name in (rank, size) if name in environ)
            return MpiLaunch(launcher, int(text) if text.isdecimal() else 0, int(environ[rank]), seen)
    return None


def notify_mpi4py(path: str) -> None:
    """Have mpi4py, if it is imported later, use the library that is in the process already."""
    os.environ.setdefault("MPI4PY_LIBMPI", path)


def ineffective() -> tuple[Ineffective, ...]:
    """The rows of the table for variables that are accepted and set nothing."""
    return _INEFFECTIVE


def unknown(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables with our prefixes that are not in the table: the nearest name that is, or ""."""
    environ = os.environ if environ is None else environ
    names = [name for row in table() for name in (row.name, row.other_name) if name]
    names += [row.name for row in ineffective() if not row.name.endswith("*")]
    families = tuple(row.name[:-1] for row in ineffective() if row.name.endswith("*"))
    found = {}
    for variable in sorted(environ):
        prefix = next((p for p in _PREFIXES if variable.startswith(p)), None)
        if prefix is None:
            continue
        name = variable.removeprefix(prefix)
        if name not in names and not name.startswith(families):
            nearest = difflib.get_close_matches(name.upper(), names, n=1)
            found[variable] = prefix + nearest[0] if nearest else ""
    return found


def table() -> list[Variable]:
    """The rows of the table that have an effect, in their order."""
    return [item.metadata["variable"] for group in (Launched, Settings) for item in fields(group)]


def _as_markdown() -> str:
    def shown(value: Any) -> str:
        number = int(value) if isinstance(value, bool) else value
        text = f"{number:g}" if isinstance(number, float) else str("" if value is None else number)
        if isinstance(value, tuple):
            text = ",".join(map(str, value))
        return f"`{text}`" if text else "empty"

    def meaning(row: Variable) -> str:
        return f"{row.meaning} Also `HOROVOD_{row.other_name}`." if row.other_name else row.meaning

    lines = [
        "# Configuration",
        "",
        "Environment variables, read once by `init()`. Each is also accepted with Horovod's prefix,",
        "`HOROVOD_`; with both, `POLYHVD_` wins. A variable with one of these prefixes that is not in the",
        "tables is reported once by rank 0, with the nearest name that is. A switch is on with",
        "`1`, `true`, `yes` or `on`, and off with `0`, `false`, `no` or `off`.",
        "",
        "This page is made by `python -m polyhvd.config > docs/configuration.md`.",
        "",
        "| variable | default | meaning |",
        "|---|---|---|",
        *(f"| `POLYHVD_{row.name}` | {shown(row.default)} | {meaning(row)} |" for row in table()),
        "",
        "## Accepted without effect",
        "",
        "Variables of Horovod that have nothing to set here. A name that ends in `*` stands for all that",
        "begin so.",
        "",
        "| variable | why |",
        "|---|---|",
        *(f"| `HOROVOD_{row.name}` | {row.reason} |" for row in ineffective()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(_as_markdown(), end="")
