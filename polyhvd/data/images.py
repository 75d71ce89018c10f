"""Images in columns of bytes. Pillow decodes them; it is imported only when it is used."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["MODES", "ImageError", "decoder"]

#: What images can be converted to: grey, colours, colours with transparency.
MODES = ("L", "RGB", "RGBA")
_FORMATS = ("JPEG", "PNG")
#: Of images that are in none of these: grey of two colours and with transparency, and palettes.
_NEAREST = {"1": "L", "LA": "RGBA", "PA": "RGBA", "La": "RGBA", "RGBa": "RGBA"}
_SIXTEEN_BITS = ("I;16", "I")  # grey; "I" in older versions of Pillow
_UNCHANGED = (*MODES, *_SIXTEEN_BITS)


class ImageError(ValueError):
    """Bytes are not an image that can be decoded."""


def decoder(mode: str | None) -> Callable[[bytes], npt.NDArray[Any]]:
    """A function that decodes a JPEG or PNG image to an array [height, width] or [height, width, channels].

    Args:
        mode: one of :data:`MODES`, to which images are converted; None: as they are stored.

    Raises:
        ModuleNotFoundError: Pillow is not installed.
    """
    try:
        import PIL.Image  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"decode= needs Pillow, which cannot be imported ({error}); install it with: "
            "pip install 'polyhvd[data]', or pass a function that decodes bytes",
            name="PIL",
        ) from error
    return partial(_decoded, mode=mode)


def _decoded(data: bytes, mode: str | None) -> npt.NDArray[Any]:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            wanted = mode or _suitable(image)
            if image.mode != wanted and image.mode in _SIXTEEN_BITS:  # Pillow would clip values at 255
                high_bytes = (np.asarray(image) >> 8).astype(np.uint8)
                return np.asarray(Image.fromarray(high_bytes).convert(wanted))
            return np.asarray(image if image.mode == wanted else image.convert(wanted))
    except UnidentifiedImageError:
        raise ImageError(f"{len(data)} bytes are neither JPEG nor PNG") from None
    # Pillow raises SyntaxError for damaged PNG files.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ImageError(str(error)) from error


def _suitable(image: Any) -> str:
    mode: str = image.mode
    if mode in _UNCHANGED:
        return mode
    return "RGBA" if "transparency" in image.info else _NEAREST.get(mode, "RGB")
