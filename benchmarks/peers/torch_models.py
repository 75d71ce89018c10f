"""Two models for whole training steps in PyTorch: a ResNet-18 and a small Transformer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (He et al. 2015, arXiv:1512.03385)."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet18() -> tuple[Any, Any, Any]:
    """11.7 million parameters in 62 tensors; eight images of 64 by 64."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = 64
    for out, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [BasicBlock(channels, out, stride), BasicBlock(out, out, 1)]
        channels = out
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)]
    return nn.Sequential(*layers), torch.randn(8, 3, 64, 64), torch.randint(0, 1000, (8,))


class Encoder(nn.Module):
    """Four layers of width 256 over 32 tokens, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8000, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(256, 1000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


def transformer() -> tuple[Any, Any, Any]:
    """5.5 million parameters in 51 tensors; eight sequences of 32 tokens."""
    return Encoder(), torch.randint(0, 8000, (8, 32)), torch.randint(0, 1000, (8,))


MODELS: dict[str, Callable[[], tuple[Any, Any, Any]]] = {"ResNet-18": resnet18, "Transformer": transformer}
