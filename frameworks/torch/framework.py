"""Facts about PyTorch that are read without importing it."""

from __future__ import annotations

from polyhvd.installed import Framework, Parity

__all__ = ["FRAMEWORK"]

FRAMEWORK = Framework(
    title="PyTorch",
    packages=("torch",),
    versions="2.1 to 2.13",
    install="pip install torch",
    distributions=("torch",),
    companions=("torchvision",),
    place=2,
    count_gpus=lambda torch: torch.cuda.device_count() if torch.cuda.is_available() else 0,
    ones=lambda torch, count, dtype: torch.ones(count, dtype=getattr(torch, dtype)),
    parity=Parity(
        models="PyTorch",
        packages=("torch",),
        session="TorchSession",
        cannot_compute=lambda precision, kinds: (
            "PyTorch has no LSTM in float16 on processors"
            if precision == "float16" and "lstm" in kinds
            else ""
        ),
        migrates_as="torch",
        endings=(".pt", ".pth"),
    ),
)
