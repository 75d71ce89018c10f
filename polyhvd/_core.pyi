"""What the extension module offers to polyhvd's Python code. Adapters use it, users do not."""

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from polyhvd.config import Settings
from polyhvd.runtime.connections import Connections
from polyhvd.runtime.placement import Placement

_Result = TypeVar("_Result", covariant=True)

DTYPES: Final[dict[str, int]]  # "float32" -> number, as in csrc/control/types.h
INSTRUCTION_SET: Final[str]
#: As csrc/control/error.h has them: code, class in polyhvd/errors.py, whether the engine has ended, and
#: whether it is a consequence of what happened elsewhere.
ERRORS: Final[tuple[tuple[int, str, bool, bool], ...]]

def begin_end_of_program() -> None:
    """Only this thread goes on from now: others that wait in failing operations are held up for 10 s."""

def watch_system_exits(watch: Callable[[object], None]) -> None:
    """Call `watch` with the code of each SystemExit that is made from now on; only the first call counts."""

def crc32c(bytes: Any) -> int:
    """The CRC-32C of a dense buffer."""

def segment_bytes(local_size: int) -> int:
    """Size of the memory that `local_size` ranks of one host share."""

def register_dlpack_exchange(tensor_type: type, capsule: object) -> None:
    """Read objects of this type (or a subclass) through DLPack's C exchange API."""

class _InPlace(Protocol[_Result]):
    def __call__(
        self,
        engine: Engine,
        kind: int,
        name: str | None,
        tensor: Any,
        op: int,
        root: int,
        prescale: float,
        postscale: float,
        process_set: int,
        priority: int,
        /,
    ) -> _Result:
        """Submit a collective on one dense tensor in place; BufferError when it is not dense."""

#: Waits for it: the shortest way.
run: _InPlace[Literal[True]]
#: The handle's result is the tensor.
start: _InPlace[Handle]

#: Of a row of sketch(): the norm, how many elements are not finite, and 64 sums.
SKETCH_NUMBERS: Final[int]

def sketch(
    tensors: Sequence[Any],
    rows: npt.NDArray[np.float64],
    places: Sequence[int],
    *,
    begins: Sequence[int] | None = None,
    factors: Sequence[float] | None = None,
    less: Sequence[Any] | None = None,
    copies: Sequence[Any] | None = None,
) -> list[tuple[str, tuple[int, ...]] | None]:
    """Write a sketch of each tensor into its row; see host/sketch.h.

    Args:
        tensors: dense ones on a CPU; of others nothing is written.
        rows: [number, SKETCH_NUMBERS], in the order of C.
        places: of each tensor, the number of its row.
        begins: the number of its first element in the whole of which it is a part; None: 0.
        factors: by which the elements are multiplied, after all; None: 1.
        less: what is subtracted from the elements, of as many bytes and taken for the same type; each may be
            None.
        copies: where the elements are copied, of as many bytes; each may be None.

    Returns:
        dtype and shape of each; None: it cannot be read where it lies, or what is to be beside it is not as
        long.

    Raises:
        ValueError: `rows` or another list has another length.
        IndexError: there is no such row.
    """

def copy(targets: Sequence[Any], sources: Sequence[Any]) -> list[int]:
    """Overwrite tensors with others; see host/copies.h.

    Args:
        targets: where each source is copied.
        sources: as many.

    Returns:
        The numbers of those that are left for the caller to copy: a tensor is not dense or not on a CPU, a
        target is read-only, dtypes or shapes differ, or the two have memory in common.

    Raises:
        ValueError: the sequences have different lengths; nothing was copied.
    """

def different(tensors: Sequence[Any], others: Sequence[Any]) -> list[int]:
    """The numbers of tensors that are not the same bit for bit as the others in their places.

    Args:
        tensors: of which each is compared. What is not dense or not on a CPU is taken for different.
        others: as many.

    Raises:
        ValueError: the sequences have different lengths.
    """

class TensorRef:
    """A dense tensor given by address; the fallback for objects that cannot be read directly.

    Args:
        gpu: number of the GPU that holds it; None: it is in memory of the CPU.
        stream: address of the CUDA stream that makes it; 0 is the default stream.
    """

    def __init__(
        self,
        address: int,
        shape: Sequence[int],
        dtype: str,
        owner: object,
        gpu: int | None = None,
        stream: int = 0,
    ) -> None: ...

class Buffer:  # supports the buffer protocol
    """Memory that the core has allocated for an output: DLPack, and on a CPU the buffer protocol (bytes)."""

    shape: tuple[int, ...]
    dtype: str
    address: int
    gpu: int | None  # the number of the GPU that has it; None: a CPU
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __dlpack__(self, *, stream: Any = None, **_: Any) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class Handle:
    """A submitted operation. `result` and `finish` belong to Python code (see adapter.py)."""

    name: str
    number: int  # of a join the last rank, of a new process set its id; after wait()
    result: Any
    finish: Any
    slot: Any
    def done(self) -> bool: ...
    def wait(self, stream: int | None = None) -> None:
        """Return when it is done, driving progress meanwhile; raise what it failed with.

        On a GPU the CUDA stream of this address, by default the one that was current at submit,
        goes on after it; the caller does not wait.
        """
    def buffers(self) -> list[Buffer]:
        """Outputs that the core has allocated, in order; after wait()."""

class Mailbox:
    """What the engine's threads, which never call Python, leave for a thread of Python to do."""

    def __init__(self, signal: int = 0, descriptor: int = -1) -> None:
        """`signal` makes the process write its stacks to `descriptor` without the lock; 0: cannot."""
    def wait(self) -> bool:
        """Block until there is something to take; False once closed and empty."""
    def take_line(self) -> tuple[str, bool] | None:
        """A line to be logged, and whether it is for debugging (else a warning), if one is left."""
    def take_sample(self) -> StepSample | None:
        """The latest sample of the speed that was not taken."""
    def take_question(self) -> bool:
        """Whether the stacks are asked for."""
    def answer(self, stacks: str) -> None:
        """A line that says in short where the program is, then the stacks of its threads."""
    def remark(self, text: str) -> None:
        """What stall reports are to say at their end; empty: nothing."""
    def close(self) -> None:
        """End the wait."""

class StepSample:
    """How fast a job moved bytes over whole steps."""

    bytes: int
    seconds: float
    steps: int
    fingerprint: int  # of the names and sizes of a step's operations

class Tuning:
    """What may change while a job runs; no result depends on it."""

    def __init__(
        self, *, fusion_bytes_max: int, cycle_us: int, chunk_bytes: int, direct_bytes_max: int
    ) -> None: ...
    fusion_bytes_max: int
    cycle_us: int
    chunk_bytes: int
    direct_bytes_max: int

class Engine:
    """The operation queue of one rank."""

    def __init__(
        self,
        connections: Connections,  # whose descriptors are taken over
        settings: Settings,
        placement: Placement,
        mailbox: Mailbox,
        *,
        job: str,  # names it on this host, for flight dumps
        nccl_libraries: Sequence[str] = (),  # paths and file names at which NCCL may be
        mpi: MpiJobCommunicator | None = None,  # all ranks in their order, as MPI knows them
    ) -> None: ...
    def submit(
        self,
        kind: int,  # adapter.OpKind
        name: str | None,  # None: counted now, among those of its kind on the process set
        inputs: Sequence[Any],  # numpy arrays, tensors of registered types, or TensorRef
        outputs: Sequence[Any] | None,  # None: the core allocates, see Handle.buffers()
        op: int = 1,
        root: int = -1,
        prescale: float = 1.0,
        postscale: float = 1.0,
        process_set: int = 0,
        priority: int = 0,
        blocking: bool = False,  # wait() follows at once: wake nobody
        numbers: Sequence[int] = (),  # see Submission in csrc/control/operation.h
        generation: int = 0,  # of the engine that it was made for; 0: this one
    ) -> Handle:
        """Raise InvalidArgumentError for a bad call; BufferError when a tensor is not dense.

        PeerLostError: it was made for another generation.
        """
    def take_turn(self, kind: int, process_set: int, /) -> int:
        """Count a call without a name that a native adapter submits later; from 1."""
    def process_sets(self) -> dict[int, list[int]]:
        """World ranks of every process set by its number, as of this rank's last operation."""
    def counters(self) -> dict[str, int]: ...
    def native_api(self, version: int) -> int:
        """Address of the polyhvd_engine_api (csrc/api/c_api.h), for a library built with this version.

        Raises:
            HorovodVersionMismatchError: the core was built with another version.
        """
    def set_header(self, json: str) -> None:
        """A JSON object that says who this rank is, for the files of the next two."""
    def start_timeline(self, path: str, mark_cycles: bool, bytes_max: int) -> None:
        """Raise InvalidArgumentError when one runs already, or the file cannot be made."""
    def stop_timeline(self) -> bool:
        """Return when the file is whole; False when there was none."""
    def add_data_wait(self, begin_ns: int, end_ns: int) -> None:
        """Show in the timeline, if one runs, that the program has waited for data; of ``monotonic_ns()``."""
    def hand_over_timeline(self) -> TimelineFile | None:
        """Stop the timeline, whose file stays open for the next engine; None: there was none."""
    def take_over_timeline(self, file: TimelineFile) -> None:
        """Go on with the file that another engine has handed over.

        Raises:
            InvalidArgumentError: a timeline runs already.
        """
    def tune(self, tuning: Tuning) -> None:
        """On rank 0: what all ranks work with from their next operations on."""
    tuning: Tuning  # what this rank works with
    def notify(self, notice: int) -> None:
        """On rank 0: a number for the program of every rank, in the total order; they count up."""
    #: For how many seconds this rank has waited for others, and how many operations were agreed on.
    waits: tuple[float, int]
    #: The median of the last steps in this world, in seconds; 0: there were none.
    step_s: float
    #: Other ranks of this host whose processes have died while it was connected to them, without leaving.
    dead_here: list[int]
    notice: int  # the last that precedes an operation of all ranks for which the program has waited
    behind: bool  # the other ranks are past what this rank submits, see csrc/engine/engine.h
    #: An operation has raised that ranks were lost or have left, or has no values although it has returned.
    has_lost_results: bool
    #: Devices have done all that operations have begun. Raises when a device has failed.
    are_devices_done: bool
    def shutdown(self, words: str = "") -> None:
        """Leave in good order. `words`: how this rank's program ends, for the others."""
    def abort(self, reason: str) -> None: ...
    def abandon(self) -> None:
        """In a forked child: close the descriptors and say nothing to anybody."""
    generation: int

class TimelineFile:
    """The file of a timeline, between two engines. Unless one takes it over it is to be closed."""

    def close(self) -> None:
        """Make the file whole; idempotent."""

class MpiRuntime:
    """MPI in this process: one, for as long as the process lives."""

    def __init__(self, names: Sequence[str], several_threads: bool) -> None:
        """Open the first library that is there; raises InvalidArgumentError when none can be used."""
    def initialize(self, timeout_s: float) -> bool:
        """Initialise MPI, unless that was done; False when it has not begun in time and may be asked again.

        Raises InvalidArgumentError when MPI serves only one thread.
        """
    def meet(self, communicator: int | None, ranks: Sequence[int], timeout_s: float) -> MpiJobCommunicator:
        """Meet all ranks of a communicator (None: MPI's world), or those of its ranks that are given."""
    def finish(self) -> None:
        """Finalise MPI, if it was initialised here and no job has failed; Ctrl-C ends the wait for others."""
    def give_up(self) -> None:
        """Never finalise MPI, and free nothing of it."""
    path: str
    version: str
    family: str
    threads_supported: bool  # other threads may call MPI, too

class MpiJobCommunicator:
    """A communicator of all ranks of a job, in their order."""

    rank: int
    size: int
    def hosts(self) -> list[int]:
        """For each rank the first one that shares memory with it; on all ranks together."""
    def gather(self, mine: bytes) -> list[bytes]:
        """The bytes of each rank, in order; on all ranks together."""

def probe_mpi(names: Sequence[str]) -> tuple[str, str]:
    """Path and version of the first library that is there; raises InvalidArgumentError when none is."""
