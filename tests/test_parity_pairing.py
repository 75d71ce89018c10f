"""polyhvd.parity.load with rules of a user's own: what is split, joined or left out on the way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polyhvd import parity
from polyhvd.errors import InvalidArgumentError

Arrays = dict[str, np.ndarray[Any, Any]]


def _numbers(*shape: int) -> np.ndarray[Any, Any]:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1


def test_a_fused_projection_is_split_by_a_function() -> None:
    fused = {"qkv": _numbers(6, 4), "out": _numbers(4, 2)}
    model = {"q": np.zeros((2, 4)), "k": np.zeros((2, 4)), "v": np.zeros((2, 4)), "out": np.zeros((4, 2))}

    def split(weights: Arrays) -> Arrays:
        q, k, v = np.split(weights["qkv"], 3)
        return {"q": q, "k": k, "v": v, "out": weights["out"]}

    loaded = parity.load(model, from_=fused, convert=split)
    assert [(each.name, each.source) for each in loaded] == [(name, name) for name in ("q", "k", "v", "out")]
    for part, name in enumerate("qkv"):
        np.testing.assert_array_equal(model[name], fused["qkv"][2 * part : 2 * part + 2])


def test_projections_are_joined_and_then_renamed() -> None:
    parts = {name: _numbers(2, 4) * number for number, name in enumerate("qkv", 1)}
    model = {"attention.in_proj": np.zeros((6, 4))}
    parity.load(
        model,
        from_=parts,
        convert=lambda weights: {"all": np.concatenate([weights[name] for name in "qkv"])},
        names={"all": "attention.in_proj"},
    )
    np.testing.assert_array_equal(model["attention.in_proj"], np.concatenate(list(parts.values())))


def test_a_new_last_layer_keeps_its_weights() -> None:
    model = {"body": np.zeros((3, 2)), "head": np.full((5, 3), 7.0)}
    loaded = parity.load(
        model,
        from_={"body": _numbers(3, 2), "old_head": _numbers(9, 3)},
        names=lambda name: None if name == "old_head" else name,
        partial=True,
    )
    assert [each.name for each in loaded] == ["body"]
    np.testing.assert_array_equal(model["body"], _numbers(3, 2))
    assert (model["head"] == 7).all()


def test_partial_refuses_what_has_no_place_and_what_loads_nothing() -> None:
    model = {"body": np.zeros((3, 2)), "head": np.zeros((5, 3))}
    with pytest.raises(InvalidArgumentError, match="'boddy', which the model does not have"):
        parity.load(model, from_={"boddy": _numbers(3, 2)}, partial=True)
    with pytest.raises(InvalidArgumentError, match="nothing is called 'body'"):
        parity.load(model, from_={"body": _numbers(3, 2)}, names=lambda name: None, partial=True)
    with pytest.raises(InvalidArgumentError, match=r"nothing is called 'head'.*partial=True"):
        parity.load(model, from_={"body": _numbers(3, 2)}, names={})
    assert not model["body"].any()


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (None, "expected a dict of arrays by name, found NoneType"),
        ([_numbers(2)], "expected a dict of arrays by name, found list"),
        ({"w": "text"}, "'w': expected an array of numbers by its name, found str"),
        ({"w": _numbers(3)}, "at weight 0.*nothing was loaded"),
        ({}, "at weight 0.*has no more"),
    ],
)
def test_what_a_function_returns_is_checked(made: Any, message: str) -> None:
    model = {"w": np.zeros(2)}
    with pytest.raises(InvalidArgumentError, match=message):
        parity.load(model, from_={"w": _numbers(2)}, convert=lambda weights: made)
    assert not model["w"].any()
