"""Gradients are reduced while backward still computes others."""

from __future__ import annotations

import threading

import pytest

pytestmark = pytest.mark.ranks(framework="mxnet", timeout_s=180)


class Gate:
    """Holds the backward of a layer until the test lets it pass, as a slow layer would."""

    def __init__(self, mx):
        self.open = threading.Event()
        self.reached = threading.Event()
        gate = self

        class Held(mx.operator.CustomOp):
            def forward(self, is_train, req, in_data, out_data, aux):
                self.assign(out_data[0], req[0], in_data[0])

            def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
                gate.reached.set()
                gate.open.wait()
                self.assign(in_grad[0], req[0], out_grad[0])

        @mx.operator.register("held_in_backward")
        class Properties(mx.operator.CustomOpProp):
            def create_operator(self, ctx, shapes, dtypes):
                return Held()


def network(mx, hybrid):
    net = mx.gluon.nn.HybridSequential()
    net.add(
        mx.gluon.nn.Dense(6, in_units=4),
        mx.gluon.nn.HybridLambda(lambda F, x: F.Custom(x, op_type="held_in_backward")),
        mx.gluon.nn.Dense(5, in_units=6),
        mx.gluon.nn.Dense(1, in_units=5),
    )
    net.initialize(mx.init.Normal(0.5))
    if hybrid is not None:
        net.hybridize(**hybrid)
    return net


@pytest.mark.ranks(2)
def test_last_layers_are_reduced_before_the_first_layers_gradient_is_there(hvd, mx, np):
    hvd.init()
    gate = Gate(mx)
    for hybrid in (None, {}, {"static_alloc": True}, {"static_alloc": True, "static_shape": True}):
        for options in ({}, {"num_groups": 3}, {"compression": hvd.Compression.fp16}):
            net = network(mx, hybrid)
            hvd.broadcast_parameters(net.collect_params())
            trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", **options)
            gate.open.clear()
            gate.reached.clear()
            with mx.autograd.record():
                loss = net(mx.nd.ones((2, 4)) * (hvd.rank() + 1)).sum()
            loss.backward()
            trainer.allreduce_grads()
            assert gate.reached.wait(60)
            first, *_, last = net.collect_params().values()
            # If these were reduced only after the first layer's, the test would hang here.
            mean = last.grad().asnumpy()
            before_last = net[2].weight.grad().asnumpy()
            handle = hvd.allreduce_async(first.grad(), name="after the first layer's")
            assert not hvd.poll(handle)  # the first layer's gradient is not there yet
            gate.open.set()
            assert hvd.synchronize(handle).shape == first.shape
            np.testing.assert_allclose(mean, [2.0], rtol=1e-3)
            others = hvd.allgather_object((before_last, first.grad().asnumpy()))
            for one, other in zip(*others, strict=True):
                np.testing.assert_array_equal(one, other)
            trainer.update(1)
            mx.nd.waitall()
