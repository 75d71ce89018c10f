"""Intercepts methods of single objects for a time, for several observers at once."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["Stepping", "intercept"]

#: What a step of an optimizer is to be within, by what returns the gradient of a source: a tensor, or one and
#: by what it is multiplied; None: it has none.
Stepping = Callable[[Callable[[Any], Any]], AbstractContextManager[None]]


def intercept(owner: Any, name: str, replacement: Callable[..., Any]) -> Callable[[], None]:
    """Have calls of a method go through a function; whoever else does so may end that before or after.

    Args:
        owner: the object; others of its class are not changed.
        name: of the method.
        replacement: is called with the method as it was, and its arguments.

    Returns:
        a function that ends it. The object is then as before, if the method was not replaced since; else its
        calls go on to what was there before.
    """
    original = getattr(owner, name)
    before = vars(owner).get(name)
    is_on = True

    # A method, since PyTorch's schedulers of learning rates look for its __func__.
    @functools.wraps(getattr(original, "__func__", original))
    def through(_: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs) if is_on else original(*args, **kwargs)

    method = types.MethodType(through, owner)
    object.__setattr__(owner, name, method)  # frameworks track attributes in their own __setattr__

    def end() -> None:
        nonlocal is_on
        is_on = False
        if vars(owner).get(name) is not method:
            return
        if before is None:
            object.__delattr__(owner, name)
        else:
            object.__setattr__(owner, name, before)

    return end
