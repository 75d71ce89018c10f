"""TorchState on ranks: models, optimizers, schedulers and handlers of the user's own."""

from __future__ import annotations

from typing import Any

import polyhvd.torch as hvd
import pytest
import torch
from polyhvd.torch.elastic import blank

from polyhvd.elastic.checkpoint import pack, unpack

pytestmark = pytest.mark.ranks(2, framework="torch")


def make(optimizer: str = "Adam", **kwargs: Any) -> Any:
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    model.register_buffer("seen", torch.zeros(1, dtype=torch.int64))
    options = {"momentum": 0.9} if optimizer == "SGD" else {}
    inner = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1, **options)
    wrapped = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    return hvd.elastic.TorchState(model, wrapped, step=0, **kwargs)


def step(state: Any) -> None:
    state.optimizer.zero_grad()
    torch.manual_seed(100 * state.step + hvd.rank())
    state.model(torch.randn(6, 3)).square().sum().backward()
    state.optimizer.step()
    state.model.seen += 1
    state.step += 1


def values(state: Any) -> list[Any]:
    moments = [
        value.tolist() if torch.is_tensor(value) else value
        for item in state.optimizer.state_dict()["state"].values()
        for _, value in sorted(item.items())
    ]
    return [
        state.step,
        [tensor.tolist() for tensor in state.model.state_dict().values()],
        moments,
        [group["lr"] for group in state.optimizer.param_groups],
    ]


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW"])
def test_training_from_a_restored_commit_takes_the_same_course(optimizer: str) -> None:
    state = make(optimizer)
    state.sync()
    step(state)
    state.commit()
    parameters = [parameter.data_ptr() for parameter in state.model.parameters()]
    courses = []
    for _ in range(3):
        step(state)
        step(state)
        courses.append(values(state))
        state.restore()
    assert courses == 3 * courses[:1]
    assert [parameter.data_ptr() for parameter in state.model.parameters()] == parameters
    assert hvd.allgather_object(values(state)) == hvd.size() * [values(state)]


@pytest.mark.ranks(2, 3, framework="torch")
def test_newcomer_gets_model_optimizer_and_scheduler_of_the_newest_commit() -> None:
    state = make()
    scheduler = torch.optim.lr_scheduler.StepLR(state.optimizer, 1, gamma=0.5)
    state = hvd.elastic.TorchState(state.model, state.optimizer, scheduler=scheduler, step=0)
    state.sync()
    for _ in range(3):
        step(state)
        scheduler.step()
    state.commit()
    fresh = make()
    scheduler = torch.optim.lr_scheduler.StepLR(fresh.optimizer, 1, gamma=0.5)
    newcomer = hvd.elastic.TorchState(fresh.model, fresh.optimizer, scheduler=scheduler, step=0)
    if hvd.rank() > 0:
        fresh.model.load_state_dict(state.model.state_dict())
        fresh.optimizer.load_state_dict(state.optimizer.state_dict())
        scheduler.load_state_dict(state.scheduler.state_dict())
        newcomer.step = state.step
        newcomer.commit()
        newcomer.restore()
    state = newcomer
    seen = hvd.rank() * fresh.model.seen  # what differs between ranks tells that it was not sent
    fresh.model.seen.copy_(seen)
    state.sync()
    assert fresh.model.seen.item() == 3 * max(1, hvd.rank())
    fresh.model.seen.fill_(3)
    found = hvd.allgather_object([values(state), scheduler.last_epoch])
    assert found == hvd.size() * found[1:2]
    assert found[0][0][0] == 3
    assert found[0][0][3] == [0.1 / 8]
    step(state)


def test_learning_rates_that_were_adapted_to_the_new_world_are_part_of_what_sync_keeps() -> None:
    state = make()

    def adapt() -> None:
        state.optimizer.param_groups[0]["lr"] /= 2

    state.register_reset_callbacks([adapt])
    state.commit()
    for rate in (0.05, 0.025):
        state.restore()
        state.on_reset()
        state.sync()
        assert values(state)[3] == [rate]


def test_state_without_model_or_optimizer_keeps_the_rest() -> None:
    state = hvd.elastic.TorchState(step=1)
    assert (state.model, state.optimizer) == (None, None)
    state.sync()
    state.step = 2
    state.restore()
    assert state.step == 1


def test_model_that_is_replaced_is_kept_from_then_on() -> None:
    state = make()
    state.model = torch.nn.Linear(2, 1)
    state.save()
    weight = state.model.weight.detach().clone()
    torch.nn.init.zeros_(state.model.weight)
    state.restore()
    assert torch.equal(state.model.weight, weight)


def test_handlers_of_the_user_s_own_are_asked() -> None:
    class Counter:
        count = 0

    class CounterHandler(hvd.elastic.StateHandler):
        def save(self) -> None:
            self.saved = self.value.count

        def restore(self) -> None:
            self.value.count = self.saved

        def sync(self) -> None:
            self.value.count = hvd.broadcast_object(self.value.count)

    before = hvd.elastic.get_handler_registry()
    hvd.elastic.set_handler_registry([(Counter, CounterHandler), *before])
    try:
        state = hvd.elastic.TorchState(counter=Counter(), step=0)
    finally:
        hvd.elastic.set_handler_registry(before)
    state.counter.count = 7 + hvd.rank()
    state.commit()
    state.counter.count = 0
    state.restore()
    assert state.counter.count == 7 + hvd.rank()
    state.sync()
    assert state.counter.count == 7


def test_commit_keeps_tensors_of_every_kind_and_layout() -> None:
    model = torch.nn.Module()
    kinds = {
        "large": torch.rand(1 << 20),
        "strided": torch.rand(4, 6)[:, ::2],
        "transposed": torch.rand(4, 6).t(),
        "channels_last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.rand(3, 1).expand(3, 4),
        "negated": torch._neg_view(torch.rand(3)),
        "conjugated": torch.rand(3, dtype=torch.complex64).conj(),
        "sixteen_bits": torch.rand(5).to(torch.bfloat16),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 3),
    }
    for name, tensor in kinds.items():
        model.register_buffer(name, tensor)
    model.register_buffer("tied", model.large)
    model.weight = torch.nn.Parameter(torch.rand(3))
    state = hvd.elastic.TorchState(model, step=0)
    for step in range(3):
        with torch.no_grad():
            model.weight += 1
            model.large += 1
            model.transposed += 1
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        state.commit()
        for name in ("weight", "large", "strided", "transposed", "channels_last", "sixteen_bits", "scalar"):
            model.state_dict()[name].zero_()
        state.step = step + 1
        # These tensors cannot be written by load_state_dict(), whoever has kept them.
        kept = state._handlers["model"]._saved(state._handlers["model"]._tensors)
        assert list(kept) == list(expected)
        for name, tensor in expected.items():
            assert torch.equal(kept[name], tensor), name


def test_copies_have_the_forms_of_empty_like_and_lie_side_by_side() -> None:
    names = ("float64", "bfloat16", "bool", "complex64", "float8_e4m3fn")
    dtypes = [getattr(torch, name) for name in names if hasattr(torch, name)]
    tensors = [torch.ones(2, 3).to(dtype) for dtype in dtypes]
    tensors += [torch.ones(()), torch.empty(0, 4), torch.ones(4, 5).t(), torch.ones(4, 6)[:, ::2]]
    tensors += [
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.nn.Parameter(torch.ones(3)),
    ]
    made = blank(tensors)
    for copied, tensor in zip(made, tensors, strict=True):
        like = torch.empty_like(tensor)
        assert (copied.shape, copied.dtype, copied.stride()) == (like.shape, like.dtype, like.stride())
        assert not copied.requires_grad
        with torch.no_grad():
            copied.copy_(tensor)
    for copied, tensor in zip(made, tensors, strict=True):
        assert torch.equal(copied, tensor), "copies lie apart"
    (sparse,) = blank([torch.eye(3).to_sparse()])  # which has no memory of its own form
    assert sparse.is_sparse
    assert blank([]) == []


@pytest.mark.ranks(2, 3, framework="torch")
@pytest.mark.parametrize("how", ["sent", "restored", "imported"])
def test_moments_lie_as_their_parameters_do_for_fused_kernels(how: str) -> None:
    def make() -> Any:
        torch.manual_seed(1)
        model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters(), 0.1, fused=True)

    def step(model: Any, optimizer: Any, number: int) -> None:
        optimizer.zero_grad()
        values = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(number))
        (model(values) ** 2).mean().backward()
        optimizer.step()

    model, optimizer = make()
    state = hvd.elastic.TorchState(model, optimizer)
    for number in range(3):
        step(model, optimizer, number)
    state.commit()
    if how == "imported" or (how == "sent" and hvd.rank() > 0):
        model, optimizer = make()
        other = hvd.elastic.TorchState(model, optimizer)
        if how == "imported":
            tree, arrays = pack(state.exported())
            other.imported(unpack(tree, arrays.__getitem__))
        state = other
    if how == "restored":
        state.restore()
    state.sync()
    for parameter in model.parameters():
        assert {t.stride() for t in optimizer.state[parameter].values() if t.ndim} == {parameter.stride()}
    step(model, optimizer, 3)
    expected, first = make()
    for number in range(4):
        step(expected, first, number)
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, other)


def test_gradients_of_what_is_undone_or_used_up_are_dropped() -> None:
    state = make()
    state.sync()
    for drop in (state.restore, state.on_reset):
        step(state)
        assert all(parameter.grad is not None for parameter in state.model.parameters())
        drop()
        assert all(parameter.grad is None for parameter in state.model.parameters())


def test_scaler_is_restored_out_of_the_middle_of_a_step() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    state = hvd.elastic.TorchState(optimizer=optimizer, scaler=scaler, parameter=parameter)
    state.commit()
    for _ in range(2):
        scaler.scale(parameter.sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        state.restore()
    assert scaler.get_scale() == 4.0
