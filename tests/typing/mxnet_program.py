"""What a user writes with polyhvd.mxnet, as a type checker sees it: MXNet itself has no types."""

from __future__ import annotations

import mxnet as mx
import polyhvd.mxnet as hvd
from typing_extensions import assert_type


def main(net: mx.gluon.Block) -> None:
    hvd.init()
    weights = mx.nd.ones((3,))
    hvd.allreduce_(weights, op=hvd.Sum, name="weights", priority=-1)
    hvd.synchronize(hvd.allgather_async(weights, priority=2))
    both = hvd.grouped_allreduce([weights, weights])
    assert len(both) == 2
    assert_type(hvd.poll(hvd.broadcast_async(weights, 0)), bool)
    assert_type(hvd.join(), int)
    hvd.allreduce(weights, opp=hvd.Sum)  # type: ignore[call-arg]
    hvd.broadcast(weights)  # type: ignore[call-arg]
    hvd.allreduce(weights, name=3)  # type: ignore[arg-type]
