"""Real models on several ranks, against one process with the joined batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polyhvd.torch as hvd
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_common import Tensor, assert_same_bits

pytestmark = pytest.mark.ranks(2, 3, framework="torch")

STEPS = 10


class Block(nn.Module):
    """He, Zhang, Ren and Sun, "Deep residual learning for image recognition" (2016): the basic block."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(y)) + self.shortcut(x))


def resnet18(width: int) -> nn.Sequential:
    """Eighteen layers with weights; as for small images, without the first pooling."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for stage in range(4):
        for number in range(2):
            outputs = width * 2**stage
            layers.append(Block(inputs, outputs, 2 if stage > 0 and number == 0 else 1))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


class Tagger(nn.Module):
    """Words to classes through a large embedding with sparse gradients, and an LSTM or a transformer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.words = nn.Embedding(5000, 16, sparse=True)
        self.body: nn.Module
        if kind == "lstm":
            self.body = nn.LSTM(16, 16, batch_first=True)
        else:
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 10)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.body(self.words(words))
        return self.head((hidden[0] if isinstance(hidden, tuple) else hidden).mean(1))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 32), nn.Tanh(), nn.Linear(32, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": _mlp,
    "resnet18": lambda: hvd.convert_sync_batchnorm(resnet18(8)) if _ranks() > 1 else resnet18(8),
    "lstm": lambda: Tagger("lstm"),
    "transformer": lambda: Tagger("transformer"),
}
_alone = [False]


def _ranks() -> int:
    return 1 if _alone[0] else hvd.size()


def _batch(name: str, rows: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    target = torch.randint(10, (rows,), generator=generator)
    if name in ("lstm", "transformer"):
        return torch.randint(5000, (rows, 6), generator=generator), target
    side = 8 if name == "mlp" else 32
    return torch.randn(rows, 3, side, side, generator=generator, dtype=torch.float64), target


def _optimizers(name: str, module: nn.Module) -> list[Any]:
    if not isinstance(module, Tagger):
        return [torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)]
    dense = [p for name, p in module.named_parameters() if not name.startswith("words")]
    return [torch.optim.SGD([module.words.weight], lr=0.1), torch.optim.AdamW(dense, lr=0.01)]


def _train(name: str, alone: bool) -> nn.Module:
    torch.manual_seed(7)
    _alone[0] = alone
    module = MODELS[name]().double()
    before = next(module.parameters()).detach().clone()
    optimizers = _optimizers(name, module)
    if not alone:
        optimizers = [hvd.DistributedOptimizer(optimizer) for optimizer in optimizers]
    rows = 4 * hvd.size()
    mine = slice(None) if alone else slice(4 * hvd.rank(), 4 * hvd.rank() + 4)
    for step in range(STEPS):
        x, y = _batch(name, rows, step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(module(x[mine]), y[mine]).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert not torch.equal(next(module.parameters()), before), "nothing was learnt"
    return module


@pytest.mark.ranks(2, timeout_s=240)
@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        pytest.param("resnet18", marks=pytest.mark.slow),
        "lstm",
        pytest.param("transformer", marks=pytest.mark.slow),
    ],
)
def test_a_model_trains_as_in_one_process_on_the_joined_batch(name: str) -> None:
    module = _train(name, alone=False)
    oracle = _train(name, alone=True)
    expected = oracle.state_dict()
    for key, value in module.state_dict().items():
        torch.testing.assert_close(
            value, expected[key], rtol=1e-7, atol=1e-8, msg=lambda m, key=key: f"{key}: {m}"
        )
    assert_same_bits(list(module.state_dict().values()))
