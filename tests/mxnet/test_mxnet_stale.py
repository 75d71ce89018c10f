"""Parameters that only some ranks use in a step: as one process with the joined batch would train them."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.ranks(framework="mxnet", timeout_s=180)


STEPS = 5

#: Whether a rank uses the second parameter in a step; the first one is used by all, always.
PATTERNS = {
    "by all, once": lambda rank, step: step == 0,
    "by one rank": lambda rank, step: rank == 0,
    "by one rank, once": lambda rank, step: (rank, step) == (1, 1),
    "by each in turn": lambda rank, step: rank == step % 3,
    "by two, every other step": lambda rank, step: rank < 2 and step % 2 == 1,
    "by none": lambda rank, step: False,
}


def parameters(mx, grad_req):
    made = [mx.gluon.Parameter(f"p{i}", shape=(3,), init=mx.init.One()) for i in range(2)]
    for parameter in made:
        parameter.initialize()
        parameter.grad_req = grad_req
    return made


def slope(rank, step, position):
    return 1.0 + rank + 10 * step + 100 * position


def backward(mx, made, ranks, step, used, divisor=1.0):
    """The gradient of what these ranks make of the parameters."""
    with mx.autograd.record():
        terms = [
            (made[position].data() * (slope(rank, step, position) / divisor)).sum()
            for rank in ranks
            for position in (0, 1)
            if position == 0 or used(rank, step)
        ]
        loss = sum(terms)
    loss.backward()


def cases(hvd):
    for op in (hvd.Sum, hvd.Average):
        for options in ({}, {"num_groups": 1}):
            yield op, "write", False, options
            yield op, "add", True, options
            if op == hvd.Average:  # what is left in a gradient is equal on all ranks, and so its average
                yield op, "add", False, options


@pytest.mark.ranks(3)
def test_stale_gradients_count_as_in_one_process(hvd, mx, np):
    hvd.init()
    plain = ("sgd", {"learning_rate": 0.01, "momentum": 0.5})
    for number, (op, grad_req, zeroes, options) in enumerate(cases(hvd)):
        for name, used in PATTERNS.items():
            mine, alone = parameters(mx, grad_req), parameters(mx, grad_req)
            trainer = hvd.DistributedTrainer(mine, *plain, op=op, prefix=f"{number} {name}", **options)
            reference = mx.gluon.Trainer(alone, *plain, kvstore=None)
            divisor = hvd.size() if op == hvd.Average else 1.0
            for step in range(STEPS):
                backward(mx, mine, [hvd.rank()], step, used)
                backward(mx, alone, range(hvd.size()), step, used, divisor)
                for each in (trainer, reference):
                    each.step(1, ignore_stale_grad=True)
                if zeroes:
                    for parameter in (*mine, *alone):
                        parameter.zero_grad()
            for got, expected in zip(mine, alone, strict=True):
                np.testing.assert_allclose(
                    got.data().asnumpy(),
                    expected.data().asnumpy(),
                    rtol=1e-5,
                    err_msg=f"{name} {op} {grad_req}",
                )
            if name == "by none":
                np.testing.assert_array_equal(mine[1].data().asnumpy(), np.ones(3))
