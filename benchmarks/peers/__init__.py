"""The libraries that are measured: a module a framework, a class a peer.

Nothing here imports a framework; `make` does, in the rank that needs it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.base import Peer

_TF = ("tensorflow", "tf_keras")
#: Where MPICH's wheel puts its library, beside which it has its own launcher.
MPICH_LIBRARY = Path(sys.prefix) / "lib" / "libmpi.so.12"


@dataclass(frozen=True)
class Entry:
    """How a peer is found and its ranks are started."""

    label: str
    module: str  # of this package, with the class behind a colon
    needs: tuple[str, ...]  # modules, in this Python
    start: str  # see launchers.py
    restless: bool = False  # its ranks use CPU while they have nothing to do: they are stopped between orders

    def missing(self) -> str:
        """The packages that are not installed; empty when the peer can run."""
        return next((name for name in self.needs if importlib.util.find_spec(name) is None), "")


ENTRIES = {
    "numpy": Entry("polyhvd.numpy", "numpy_peers:PolyhvdNumpy", ("numpy",), "polyhvdrun"),
    "torch": Entry("polyhvd.torch", "torch_peers:PolyhvdTorch", ("torch",), "polyhvdrun"),
    "mxnet": Entry("polyhvd.mxnet", "mxnet_peers:PolyhvdMxnet", ("mxnet",), "polyhvdrun"),
    "tensorflow": Entry("polyhvd.tensorflow", "tensorflow_peers:PolyhvdTensorflow", _TF, "polyhvdrun"),
    "horovod": Entry("Horovod on gloo", "torch_peers:Horovod", (), "horovod-gloo", restless=True),
    "horovod-mpi": Entry("Horovod on Open MPI", "torch_peers:Horovod", (), "horovod-mpi", restless=True),
    "gloo": Entry("torch.distributed gloo", "torch_peers:Gloo", ("torch",), "plain"),
    "openmpi": Entry("Open MPI (mpi4py)", "mpi_peers:Mpi", ("mpi4py",), "openmpi"),
    "mpich": Entry("MPICH (mpi4py)", "mpi_peers:Mpi", ("mpi4py",), "mpich"),
    "kvstore": Entry("MXNet kvstore dist_sync", "mxnet_peers:Kvstore", ("mxnet",), "kvstore"),
    "mwms": Entry("MultiWorkerMirroredStrategy", "tensorflow_peers:Mirrored", _TF, "plain"),
    "floor": Entry("floor: vectors in shared memory", "numpy_peers:Floor", ("numpy",), "plain"),
    "torch-alone": Entry("torch, no communication", "torch_peers:TorchAlone", ("torch",), "plain"),
    "torch-met": Entry("torch, no communication, met", "torch_peers:TorchMeeting", ("torch",), "plain"),
    "mxnet-alone": Entry("MXNet, no communication", "mxnet_peers:MxnetAlone", ("mxnet",), "plain"),
    "mxnet-met": Entry("MXNet, no communication, met", "mxnet_peers:MxnetMeeting", ("mxnet",), "plain"),
    "tensorflow-alone": Entry(
        "TensorFlow, no communication", "tensorflow_peers:TensorflowAlone", _TF, "plain"
    ),
    "tensorflow-met": Entry(
        "TensorFlow, no communication, met", "tensorflow_peers:TensorflowMeeting", _TF, "plain"
    ),
    "keras-alone": Entry("Keras, no communication", "tensorflow_peers:KerasAlone", _TF, "plain"),
    "keras-met": Entry("Keras, no communication, met", "tensorflow_peers:KerasMeeting", _TF, "plain"),
}


def make(name: str) -> Peer:
    """The peer, connected to its other ranks; in a rank's process."""
    module, _, kind = ENTRIES[name].module.partition(":")
    peer: Peer = getattr(importlib.import_module(f"benchmarks.peers.{module}"), kind)()
    return peer
