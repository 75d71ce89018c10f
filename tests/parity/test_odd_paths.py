"""Programs whose file names are no UTF-8: on Linux a name is bytes, and Python has surrogates for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import drivers
import numpy as np
import oracle
import pytest
from worlds import Ranks

pytestmark = pytest.mark.sizes(2)

_SOURCE = """
def call(hvd, x, name):
    return hvd.allreduce(x, name=name, op=hvd.Sum)
"""


def _call_in_odd_file() -> Callable[..., Any]:
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(_SOURCE, "tr\udcffain.py", "exec"), scope)
    return scope["call"]  # type: ignore[no-any-return]


def reduce_from_odd_file(name: str) -> None:
    driver = drivers.get(name)
    call = _call_in_odd_file()
    for _ in range(2):  # new, and remembered by number
        result = driver.call(lambda x: call(driver.hvd, x, "odd"), driver.from_numpy(np.ones(3, np.float32)))
        oracle.check("odd", driver.to_numpy(result), np.full(3, driver.hvd.size(), np.float32))


def test_operations_of_a_file_with_any_name_work(ranks: Ranks) -> None:
    ranks.run(reduce_from_odd_file)


def disagree_from_odd_file(name: str) -> None:
    driver = drivers.get(name)
    call = _call_in_odd_file()
    tensor = driver.from_numpy(np.ones(3 + driver.hvd.rank(), np.float32))
    with pytest.raises(Exception, match=r"tr\\udcffain\.py:3"):
        driver.to_numpy(driver.call(lambda x: call(driver.hvd, x, "odd shapes"), tensor))


def test_messages_show_such_a_name_escaped(ranks: Ranks) -> None:
    ranks.run(disagree_from_odd_file)
