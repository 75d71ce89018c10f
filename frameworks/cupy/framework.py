"""Facts about CuPy that are read without importing it."""

from __future__ import annotations

from polyhvd.installed import Framework

__all__ = ["FRAMEWORK"]

FRAMEWORK = Framework(
    title="CuPy",
    packages=("cupy",),
    versions="13",
    install="pip install cupy-cuda12x",
    remark="or cupy-cuda13x, for arrays on GPUs",
    distributions=("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy"),
    place=8,
    count_gpus=lambda cupy: cupy.cuda.runtime.getDeviceCount(),
)
