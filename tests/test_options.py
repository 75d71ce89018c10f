"""The options of the distributed optimizers by themselves: which values pass, and what is said of others."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from polyhvd.collectives.adapter import ReduceOp
from polyhvd.errors import InvalidArgumentError
from polyhvd.training.compression import NO_COMPRESSION
from polyhvd.training.options import Options, passes_per_step


class OneWay:
    """No compressor: what it has made cannot be undone."""

    def __repr__(self) -> str:
        return "OneWay()"

    def compress(self, tensor: Any) -> Any:
        return tensor, None


PASSES = "backward_passes_per_step"
FACTOR = "gradient_predivide_factor"
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(
        ({PASSES: value}, f"{PASSES}={value!r}: expected an integer of 1 or more, found {kind}")
        for value, kind in ((True, "bool"), (2.5, "float"), (2.0, "float"), ("2", "str"), (None, "NoneType"))
    ),
    ({PASSES: 0}, f"{PASSES}=0: expected an integer of 1 or more"),
    ({PASSES: np.int32(-3)}, f"{PASSES}=-3: expected an integer of 1 or more"),
    ({PASSES: np.ones(2, int)}, f"{PASSES}=array([1, 1]): expected an integer of 1 or more, found ndarray"),
    ({FACTOR: 0.0}, f"{FACTOR}=0.0: expected a positive number, finite"),
    ({FACTOR: -2}, f"{FACTOR}=-2.0: expected a positive number, finite"),
    ({FACTOR: float("inf")}, f"{FACTOR}=inf: expected a positive number, finite"),
    ({FACTOR: float("nan")}, f"{FACTOR}=nan: expected a positive number, finite"),
    ({FACTOR: True}, f"{FACTOR}=True: expected a positive number, found bool"),
    ({FACTOR: "2"}, f"{FACTOR}='2': expected a positive number, found str"),
    ({FACTOR: 2.0, "op": ReduceOp.Sum}, f"{FACTOR}=2.0 needs op=Average, and op is Sum"),
    ({FACTOR: 2.0, "op": ReduceOp.Adasum}, f"{FACTOR}=2.0 needs op=Average, and op is Adasum"),
    ({"op": ReduceOp.Max}, "op=Max: gradients are reduced with Average, Sum or Adasum"),
    *(
        ({"op": op}, f"op={op!r}: expected Average, Sum, Adasum, Min, Max or Product")
        for op in (7, -1, True, 1.0, "sum", [])
    ),
    ({"num_groups": -1}, "num_groups=-1: expected an integer of 0 or more"),
    ({"num_groups": True}, "num_groups=True: expected an integer of 0 or more, found bool"),
    ({"num_groups": None}, "num_groups=None: expected an integer of 0 or more, found NoneType"),
    (
        {"groups": "all"},
        "groups='all': expected an integer of 0 or more, or a list of lists of parameters, found str",
    ),
    ({"groups": -1}, "groups=-1: expected an integer of 0 or more, or a list of lists of parameters"),
    ({"groups": [["a"], "b"]}, "groups[1]: expected a list of parameters, found str"),
    ({"num_groups": 2, "groups": 2}, "num_groups=2 and groups exclude each other; pass only groups"),
    ({"num_groups": 2, "groups": []}, "num_groups=2 and groups exclude each other; pass only groups"),
    (
        {"compression": OneWay()},
        "compression=OneWay(): expected an object with compress() and decompress(), such as "
        "Compression.fp16; it has no decompress()",
    ),
    (
        {"compression": "fp16"},
        "compression='fp16': expected an object with compress() and decompress(), such as "
        "Compression.fp16; it has no compress()",
    ),
    (
        {"process_set": [0, 1]},
        "process_set=[0, 1]: expected a ProcessSet, found list; make one with add_process_set(ranks)",
    ),
]


@pytest.mark.parametrize(("arguments", "text"), REFUSED, ids=lambda case: str(case)[:60])
def test_a_value_that_cannot_be_used_is_named_with_what_was_expected(
    arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Options(**arguments)
    assert str(caught.value) == text


def test_numbers_of_numpy_become_numbers_of_python() -> None:
    options = Options(
        backward_passes_per_step=np.int64(3),
        num_groups=np.uint8(2),
        gradient_predivide_factor=np.float32(0.5),
        op=np.int32(0),
    )
    found = (options.backward_passes_per_step, options.num_groups, options.gradient_predivide_factor)
    assert found == (3, 2, 0.5)
    assert [type(value) for value in found] == [int, int, float]
    assert options.op is ReduceOp.Average
    assert Options(gradient_predivide_factor=Fraction(1, 4)).prescale_factor == 4.0
    assert passes_per_step(np.int16(7)) == 7


def test_none_and_zero_mean_what_they_mean_to_horovod() -> None:
    options = Options(op=None, compression=None, groups=0, num_groups=2)  # type: ignore[arg-type]
    assert options.op is ReduceOp.Average
    assert options.compression is NO_COMPRESSION
    assert options.grouping == 2


def test_an_optimizer_says_which_reductions_it_has() -> None:
    assert Options(op=ReduceOp.Max, ops=tuple(ReduceOp)).op is ReduceOp.Max
    with pytest.raises(InvalidArgumentError, match="op=Adasum: gradients are reduced with Average or Sum"):
        Options(op=ReduceOp.Adasum, ops=(ReduceOp.Average, ReduceOp.Sum))


def test_an_average_is_divided_in_two_parts() -> None:
    options = Options(gradient_predivide_factor=4)
    assert (options.prescale_factor, options.postscale_factor) == (0.25, 4.0)
    assert (Options().prescale_factor, Options().postscale_factor) == (1.0, 1.0)


def test_what_differs_from_the_defaults_makes_the_same_options_again() -> None:
    assert Options(gradient_predivide_factor=float("1"), op=0).changed() == {}
    groups = [["a", "b"]]
    arguments = {"op": ReduceOp.Sum, "backward_passes_per_step": 2, "groups": groups, "sparse_as_dense": True}
    options = Options(**arguments)
    assert options.changed() == arguments
    assert options.grouping is groups
    assert Options(**options.changed()).changed() == arguments


def test_nobody_changes_options_afterwards() -> None:
    with pytest.raises(FrozenInstanceError):
        Options().num_groups = 2  # type: ignore[misc]
