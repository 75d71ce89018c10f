"""The measured workloads: the columns of the tables, without how and by which library."""

from __future__ import annotations

from dataclasses import dataclass

KB, MB = 1 << 10, 1 << 20
SIZES = (KB, 64 * KB, MB, 16 * MB, 64 * MB, 256 * MB)
ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1}


@dataclass(frozen=True)
class Workload:
    """One thing to do again and again.

    `path` is how it is asked for: "blocking" is ``allreduce_``, "async" a handle and ``synchronize``,
    "separate" a handle for each tensor before the first is waited for, "grouped" one operation, "computed"
    separately in the function that computes the tensors, "copy" a copy within memory, "noop" the
    framework's own asynchronous operation that does nothing, "met" that and a wait for the other ranks,
    "step" a training step of `model`.
    """

    label: str
    path: str
    elements: tuple[int, ...] = ()
    dtype: str = "float32"
    model: str = ""

    @property
    def bytes(self) -> int:
        """The size of one rank's tensors."""
        return sum(self.elements) * ITEM_SIZES[self.dtype]


def size_label(size: int) -> str:
    return f"{size // MB} MB" if size >= MB else f"{size // KB} KB"


def resnet50_elements() -> tuple[int, ...]:
    """Elements of the 161 parameters of ResNet-50 (He et al. 2015, arXiv:1512.03385)."""
    sizes = [9408, 64, 64]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            out = width * 4
            sizes += [width * channels, width, width, width * width * 9, width, width, out * width, out, out]
            if block == 0:
                sizes += [out * channels, out, out]
            channels = out
    return (*sizes, 2048 * 1000, 1000)


def single(size: int, path: str) -> Workload:
    return Workload(size_label(size), path, (size // ITEM_SIZES["float32"],))


def blocking(sizes: tuple[int, ...] = SIZES) -> list[Workload]:
    return [single(size, "blocking") for size in sizes]


def asynchronous() -> list[Workload]:
    nothing = [Workload("no operation", "noop", (256,)), Workload("no operation, met", "met", (256,))]
    return [single(size, "async") for size in SIZES] + nothing


def gradients() -> list[Workload]:
    sizes = resnet50_elements()
    return [Workload(path, path, sizes) for path in ("separate", "grouped", "computed")]


def dtypes() -> list[Workload]:
    """The same number of elements of each dtype: rates are then ratios of times."""
    listed = []
    for count in (MB // 4, 16 * MB, 64 * MB):
        for dtype in ("float32", "float16", "bfloat16", "int8", "uint8"):
            listed.append(Workload(f"{count / 1e6:.3g} M {dtype}", "blocking", (count,), dtype))
        listed.append(Workload(f"{count / 1e6:.3g} M bytes copied", "copy", (count,), "uint8"))
    return listed


def steps() -> list[Workload]:
    return [Workload(model, "step", model=model) for model in ("ResNet-18", "Transformer", "Gluon", "Keras")]
