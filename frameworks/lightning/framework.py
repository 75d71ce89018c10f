"""Facts about Lightning that are read without importing it."""

from __future__ import annotations

from polyhvd.installed import Framework

__all__ = ["FRAMEWORK"]

FRAMEWORK = Framework(
    title="Lightning",
    packages=("lightning", "pytorch_lightning"),
    versions="2",
    install="pip install lightning",
    distributions=("lightning", "pytorch-lightning"),
    companions=("torchmetrics",),
    stands_on=("torch",),
    place=5,
)
