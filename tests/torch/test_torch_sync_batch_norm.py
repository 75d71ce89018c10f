"""SyncBatchNorm, against torch's BatchNorm on the joined batch."""

from __future__ import annotations

import copy
import io
from typing import Any

import polyhvd.torch as hvd
import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch_common import Tensor, assert_same_bits, assert_usable, batches, loss_of, own, raises

pytestmark = pytest.mark.ranks(2, 3, framework="torch")

CHANNELS = 3
KINDS = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d, 5: torch.nn.BatchNorm3d}


def _rows(kind: str) -> list[int]:
    """Rows of each rank."""
    last = hvd.size() - 1
    return {
        "equal": [2] * hvd.size(),
        "uneven": [2 + 3 * rank for rank in range(hvd.size())],
        "an empty rank": [0 if rank == last else 3 + rank for rank in range(hvd.size())],
        "one row in all but one": [3 if rank == last else 1 for rank in range(hvd.size())],
    }[kind]


def _data(rows: int, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(17 + seed)
    values = torch.randn(rows, CHANNELS, *shape, generator=generator, dtype=torch.float64)
    return values * torch.arange(1.0, CHANNELS + 1).view(1, -1, *[1] * len(shape)) + 5


def _mine(joined: Tensor, rows: list[int]) -> Tensor:
    begin = sum(rows[: hvd.rank()])
    return joined[begin : begin + rows[hvd.rank()]]


def _oracle(dimensions: int, **options: Any) -> _BatchNorm:
    layer = KINDS[dimensions](CHANNELS, dtype=torch.float64, **options)
    if layer.affine:
        with torch.no_grad():
            layer.weight.copy_(torch.arange(1.0, CHANNELS + 1) / 2)
            layer.bias.copy_(torch.arange(CHANNELS) - 1.0)
    return layer


def _distributed(oracle: _BatchNorm) -> hvd.SyncBatchNorm:
    layer = hvd.SyncBatchNorm(
        CHANNELS,
        oracle.eps,
        oracle.momentum,
        oracle.affine,
        oracle.track_running_stats,
        dtype=torch.float64,
    )
    layer.load_state_dict(oracle.state_dict())
    return layer


def _close(found: Tensor | None, expected: Tensor | None) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def _step(layer: _BatchNorm, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor | None]:
    """Output, and the gradient of the input; a loss in which every element counts differently."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    layer.zero_grad()
    y = layer(x)
    (y * weights).sum().backward()
    return y.detach(), x.grad


def _compare(layer: hvd.SyncBatchNorm, oracle: _BatchNorm, shape: tuple[int, ...], rows: list[int]) -> None:
    for seed in range(3):
        joined, weights = _data(sum(rows), shape, seed), _data(sum(rows), shape, 10 + seed)
        expected, gradient = _step(oracle, joined, weights)
        found, own_gradient = _step(layer, _mine(joined, rows), _mine(weights, rows))
        _close(found, _mine(expected, rows))
        _close(own_gradient, _mine(gradient, rows))
        for (name, p), q in zip(layer.named_parameters(), oracle.parameters(), strict=True):
            _close(hvd.allreduce(p.grad, op=hvd.Sum, name=name), q.grad)
        assert layer.state_dict().keys() == oracle.state_dict().keys()
        for key, value in oracle.state_dict().items():
            _close(layer.state_dict()[key], value)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param("uneven", marks=pytest.mark.every_size),
        "an empty rank",
        "one row in all but one",
        "equal",
    ],
)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 2)], ids=["2D", "3D", "4D", "5D"])
def test_it_is_batch_norm_on_the_joined_batch(shape: tuple[int, ...], rows: str) -> None:
    oracle = _oracle(2 + len(shape))
    _compare(_distributed(oracle), oracle, shape, _rows(rows))


@pytest.mark.parametrize(
    "option", ["momentum", "cumulative", "without affine", "untracked", "channels last", "frozen input"]
)
def test_each_option_means_what_it_does_in_torch(option: str) -> None:
    options: dict[str, dict[str, Any]] = {
        "momentum": {"momentum": 0.3, "eps": 0.1},
        "cumulative": {"momentum": None},
        "without affine": {"affine": False},
        "untracked": {"track_running_stats": False},
    }
    oracle = _oracle(4, **options.get(option, {}))
    layer = _distributed(oracle)
    rows = _rows("uneven")
    _compare(layer, oracle, (3, 4), rows)
    if option == "untracked":
        layer.eval()
        oracle.eval()
        _compare(layer, oracle, (3, 4), rows)
    elif option == "channels last":
        x = _data(sum(rows), (3, 4)).to(memory_format=torch.channels_last)
        found = layer(_mine(x, rows))
        assert found.is_contiguous(memory_format=torch.channels_last)
        _close(found, _mine(oracle(x), rows))
    elif option == "frozen input":
        x = _data(sum(rows), (3, 4))
        before = hvd.counters()["operations"]
        layer.zero_grad()
        layer(_mine(x, rows)).sum().backward()
        assert hvd.counters()["operations"] == before + 1, "nobody needs what backward would exchange"
        assert layer.bias.grad is not None
        _close(layer.bias.grad, torch.full((CHANNELS,), 12.0 * rows[hvd.rank()], dtype=torch.float64))


def test_evaluation_uses_running_statistics_and_communicates_nothing() -> None:
    oracle = _oracle(4)
    oracle(_data(5, (2, 2)))
    layer = _distributed(oracle).eval()
    oracle.eval()
    before = hvd.counters()["operations"]
    x = _data(2 + hvd.rank(), (2, 2))
    for found, expected in zip(_step(layer, x, x), _step(oracle, x, x), strict=True):
        _close(found, expected)
    assert hvd.counters()["operations"] == before
    assert_usable()


def half_precision_has_wide_statistics(dtype_name: str, parameters: str) -> None:
    dtype = getattr(torch, dtype_name)
    rows = _rows("uneven")
    joined, weights = _data(sum(rows), (8, 8)).to(dtype), _data(sum(rows), (8, 8), 10).to(dtype)
    layer = hvd.SyncBatchNorm(CHANNELS, dtype=dtype if parameters == "half" else torch.float32)
    oracle = torch.nn.BatchNorm2d(CHANNELS)
    expected, gradient = _step(oracle, joined.float(), weights.float())
    found, own_gradient = _step(layer, _mine(joined, rows), _mine(weights, rows))
    assert found.dtype == dtype
    tolerance = {"rtol": 0.01, "atol": 0.02} if dtype == torch.bfloat16 else {"rtol": 2e-3, "atol": 3e-3}
    torch.testing.assert_close(found.float(), _mine(expected, rows), **tolerance)
    assert own_gradient is not None
    torch.testing.assert_close(own_gradient.float(), _mine(gradient, rows), **tolerance)
    for name in ("running_mean", "running_var"):
        statistic = getattr(layer, name)
        if parameters == "half":
            assert statistic.dtype == dtype
            torch.testing.assert_close(statistic.float(), getattr(oracle, name), **tolerance)
        else:  # as from the same numbers in float32, which half precision would miss by far
            torch.testing.assert_close(statistic, getattr(oracle, name), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("parameters", ["float32", "half"])
def test_half_precision_has_statistics_in_float32(dtype: str, parameters: str) -> None:
    half_precision_has_wide_statistics(dtype, parameters)


def test_a_large_mean_does_not_cancel_the_variance() -> None:
    """The squares of these values have no digits left for the variance in float32."""
    rows = _rows("uneven")
    joined = _data(sum(rows), (16,)) + 3e4
    layer = hvd.SyncBatchNorm(CHANNELS)
    layer(_mine(joined.float(), rows))
    expected = joined.float().double().transpose(0, 1).reshape(CHANNELS, -1).var(1)
    torch.testing.assert_close(layer.running_var.double(), 0.9 + 0.1 * expected, rtol=1e-3, atol=0)


def test_statistics_have_the_same_bits_on_every_rank() -> None:
    layer = hvd.SyncBatchNorm(CHANNELS)
    for seed in range(3):
        layer(_mine(_data(sum(_rows("uneven")), (3,), seed).float(), _rows("uneven")))
    assert_same_bits([layer.running_mean, layer.running_var])


def test_one_collective_forward_and_one_backward() -> None:
    layer = hvd.SyncBatchNorm(CHANNELS)
    x = _data(2, (3,)).float().requires_grad_()
    before = hvd.counters()["operations"]
    y = layer(x)
    assert hvd.counters()["operations"] == before + 1
    y.square().sum().backward()
    assert hvd.counters()["operations"] == before + 2


def test_all_ranks_empty_gives_nothing_and_changes_nothing() -> None:
    layer = hvd.SyncBatchNorm(CHANNELS)
    before = copy.deepcopy(layer.state_dict())
    x = torch.ones(0, CHANNELS, 4, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.shape
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [0.0] * CHANNELS
    for key, value in layer.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_one_value_in_all_is_an_error_on_every_rank() -> None:
    layer = hvd.SyncBatchNorm(CHANNELS)
    with raises(ValueError, "one value per channel"):
        layer(torch.ones(int(hvd.rank() == 1), CHANNELS))
    assert_usable()


def test_other_dtypes_are_an_error_on_every_rank() -> None:
    dtype = torch.float64 if hvd.rank() == 1 else torch.float32
    with raises(hvd.RankMismatchError, "SyncBatchNorm.3", "rank 1"):
        hvd.SyncBatchNorm(3, dtype=dtype)(torch.randn(2, 3, dtype=dtype))
    assert_usable()


def test_layers_of_different_width_stay_in_the_response_cache() -> None:
    net = torch.nn.Sequential(hvd.SyncBatchNorm(3), torch.nn.Linear(3, 5), hvd.SyncBatchNorm(5))
    for _ in range(3):
        before = hvd.counters()
        net(torch.randn(4, 3)).sum().backward()
        after = hvd.counters()
    operations = after["operations"] - before["operations"]
    # The input needs no gradient, so the first layer has nothing to exchange in backward.
    assert operations == 3
    assert after["cache_hits"] - before["cache_hits"] == operations


def test_bad_inputs_are_refused_where_they_are_passed() -> None:
    layer = hvd.SyncBatchNorm(CHANNELS)
    for bad in (torch.ones(CHANNELS), torch.ones(2, CHANNELS + 1)):
        with raises(ValueError, "SyncBatchNorm(3)", str(tuple(bad.shape))):
            layer(bad)
    with raises(ValueError, "int64"):
        layer(torch.ones(2, CHANNELS, dtype=torch.int64))
    with raises(ValueError, "run the model once"):
        hvd.convert_sync_batchnorm(torch.nn.LazyBatchNorm1d())
    assert_usable()


def test_ranks_outside_the_process_set_normalize_alone() -> None:
    even = hvd.add_process_set(range(0, hvd.size(), 2))
    layer, oracle = hvd.SyncBatchNorm(CHANNELS, process_set=even), torch.nn.BatchNorm1d(CHANNELS)
    parts = [_data(2 + rank, (), rank).float() for rank in range(hvd.size())]
    oracle(torch.cat(parts[::2]) if even.included() else parts[hvd.rank()])
    layer(parts[hvd.rank()])
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(layer, name), getattr(oracle, name))
    assert copy.deepcopy(layer).process_set is even
    hvd.remove_process_set(even)


def test_a_rank_that_has_joined_counts_as_empty() -> None:
    layer, oracle = hvd.SyncBatchNorm(CHANNELS), torch.nn.BatchNorm1d(CHANNELS)
    if hvd.rank() > 0:
        parts = [_data(2 + rank, (), rank).float() for rank in range(1, hvd.size())]
        x = parts[hvd.rank() - 1].requires_grad_()
        layer(x).square().sum().backward()
        oracle(torch.cat(parts))
        torch.testing.assert_close(layer.running_var, oracle.running_var)
    hvd.join()


def test_convert_keeps_parameters_statistics_and_mode() -> None:
    shared = torch.nn.BatchNorm1d(4, affine=False)
    net = torch.nn.Sequential(
        torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4, eps=0.5, momentum=None)),
        torch.nn.SyncBatchNorm(4),
        torch.nn.BatchNorm3d(4, track_running_stats=False).eval(),
        shared,
        torch.nn.ModuleDict({"again": shared}),
    )
    net[1].weight.requires_grad_(False)
    before = {name: id(t) for name, t in net.state_dict(keep_vars=True).items()}
    converted = hvd.convert_sync_batchnorm(net)
    assert converted is net
    assert {name: id(t) for name, t in net.state_dict(keep_vars=True).items()} == before
    layers = [module for module in net.modules() if isinstance(module, _BatchNorm)]
    assert len(layers) == 4
    assert all(type(layer) is hvd.SyncBatchNorm for layer in layers)
    assert net[3] is net[4]["again"]
    assert (net[0][1].eps, net[0][1].momentum, net[3].affine) == (0.5, None, False)
    assert [layer.training for layer in layers] == [True, True, False, True]
    assert not net[1].weight.requires_grad
    alone = hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm1d(2))
    assert type(alone) is hvd.SyncBatchNorm


def test_copies_and_checkpoints_work() -> None:
    layer = hvd.SyncBatchNorm(CHANNELS)
    x = _data(2 + hvd.rank(), ()).float()
    layer(x)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.process_set is hvd.global_process_set
    expected = layer(x)
    for other in (loaded, copy.deepcopy(layer)):
        torch.testing.assert_close(other(x), expected)
    plain = torch.nn.BatchNorm1d(CHANNELS)
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(plain.running_var, layer.running_var)


@pytest.mark.parametrize("converted", [True, False])
def test_training_a_network_is_that_of_one_process(converted: bool) -> None:
    def network(kind: Any) -> torch.nn.Sequential:
        torch.manual_seed(3)
        return torch.nn.Sequential(
            torch.nn.Linear(5, 6), kind(6), torch.nn.ReLU(), torch.nn.Linear(6, 2)
        ).double()

    oracle = network(torch.nn.BatchNorm1d)
    module = network(torch.nn.BatchNorm1d if converted else hvd.SyncBatchNorm)
    if converted:
        module = hvd.convert_sync_batchnorm(module)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    oracle_optimizer = torch.optim.SGD(oracle.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches(5):
        x, y = x.double(), y.double()
        optimizer.zero_grad()
        loss_of(module, own(x), own(y)).backward()
        optimizer.step()
        oracle_optimizer.zero_grad()
        loss_of(oracle, x, y).backward()
        oracle_optimizer.step()
    for key, value in oracle.state_dict().items():
        _close(module.state_dict()[key], value)
    assert_same_bits([*module.state_dict().values()])
