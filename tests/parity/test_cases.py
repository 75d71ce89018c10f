"""The catalogue of ``polyhvd parity``: every framework trains every case, and is held against NumPy."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import cases
import pytest
from worlds import Ranks

from polyhvd.parity.catalogue import CASES
from polyhvd.parity.judging import judge

pytestmark = [
    pytest.mark.drivers("torch", "mxnet", "tensorflow"),
    pytest.mark.sizes(2),
    pytest.mark.not_by_mpi,
]

_STEPS = 4
#: Numbers that are none of any framework's own.
_NUMBERS = {"rate": 0.02, "weight_decay": 0.03, "epsilon": 1e-3, "schedule": "warmup"}
_OPTIMIZERS: tuple[dict[str, Any], ...] = (
    {"name": "sgd", **_NUMBERS, "clip_norm": 0.3},
    {"name": "momentum", **_NUMBERS, "momentum": 0.8, "accumulate": 2},
    {"name": "nesterov", **_NUMBERS, "momentum": 0.8},
    {"name": "adam", **_NUMBERS, "betas": (0.8, 0.95)},
    {"name": "adamw", **_NUMBERS, "betas": (0.8, 0.95), "clip_norm": 0.3, "accumulate": 3},
    {"name": "rmsprop", **_NUMBERS, "rho": 0.7},
    {"name": "adagrad", **_NUMBERS},
)


def _assert_agreement(ranks: Ranks, case: str, options: dict[str, Any]) -> None:
    if case == "resnet18" and ranks.driver == "tensorflow":
        pytest.skip("takes half a minute; make slow runs it")
    if ranks.driver == "tensorflow" and metadata.version("keras").startswith("2."):
        pytest.skip("the catalogue needs Keras 3")
    seen = ranks.run(cases.runs_of, case, options, _STEPS)
    reference = cases.run("numpy", cases.case_of(case, options), _STEPS)
    verdict = judge([reference, *(run for runs in seen for run in runs)])
    assert not verdict.problem, verdict.message
    assert {(pair.frameworks, pair.modes) for pair in verdict.pairs} == {
        ((seen[0][0].framework,) * 2, ("plain", "all")),
        (("numpy", seen[0][0].framework), ("plain", "plain")),
    }
    for pair in verdict.pairs:
        assert pair.agree, f"{pair.title(ranks.size)}: {pair.first}"
        assert pair.loss < 1e-4
        compared = {kind for kind, worst in pair.worst.items() if worst}
        assert {"activation", "gradient", "update"} <= compared or pair.question == "distribution"


@pytest.mark.parametrize("case", CASES)
def test_a_case_trains_alike_in_each_framework_and_on_several_ranks(ranks: Ranks, case: str) -> None:
    _assert_agreement(ranks, case, {})


def test_an_embedding_has_dense_gradients_where_the_optimizer_needs_them(ranks: Ranks) -> None:
    _assert_agreement(ranks, "embedding", {"name": "adam", "rate": 0.01, "epsilon": 1e-3})


def test_passes_of_a_step_are_normalized_over_the_same_rows_on_any_number_of_ranks(ranks: Ranks) -> None:
    _assert_agreement(ranks, "cnn", {"accumulate": 2})


@pytest.mark.parametrize("options", _OPTIMIZERS, ids=lambda options: str(options["name"]))
def test_an_optimizer_runs_the_same_algorithm_everywhere(ranks: Ranks, options: dict[str, Any]) -> None:
    _assert_agreement(ranks, "mlp", options)
