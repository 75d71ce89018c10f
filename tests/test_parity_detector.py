"""Where ``polyhvd parity`` says that two runs part: by the first kind that differs, with step and layer.

Runs of NumPy, in this process, of which the second one makes a mistake.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from polyhvd.numpy import layers as blocks
from polyhvd.numpy.cases import NumpySession

from polyhvd.parity import running
from polyhvd.parity.case import Case
from polyhvd.parity.catalogue import CASES
from polyhvd.parity.judging import ADVICE, Finding, judge
from polyhvd.parity.runs import Run
from polyhvd.parity.traces import KINDS, Bounds, differences, grown, told, trace_of

ROOT = Path(__file__).resolve().parents[1]
STEPS = 4


def trained(
    case: Case,
    session: type[NumpySession] = NumpySession,
    *,
    mode: str = "plain",
    name: str = "numpy",
    part: tuple[int, int] = (0, 1),
    seed: int = 0,
) -> Run:
    made = Run(name, mode)
    running.train(session(case, None, synchronized=False), made, STEPS, part, lambda: None, seed)
    return made


def first_of(runs: list[Run]) -> Finding:
    verdict = judge(runs)
    assert not verdict.problem, verdict.message
    (pair,) = verdict.pairs
    assert pair.first is not None, "nothing was found"
    return pair.first


def place_of(case: Case, session: type[NumpySession]) -> tuple[int, str, int | None, str]:
    found = first_of([trained(case), trained(case, session, name="other")])
    return found.step, found.kind, found.layer, found.detail


def optimized(name: str, case: str = "mlp", **numbers: Any) -> Case:
    return replace(CASES[case], optimizer=replace(CASES[case].optimizer, name=name, **numbers))


# Mistakes of a session --------------------------------------------------------------


class ReducesInHalf(NumpySession):
    def reduce(self) -> None:
        for block, role in self._trained:
            block.gradients[role][...] = block.gradients[role].astype(np.float16)


class SumsInsteadOfAveraging(NumpySession):
    def reduce(self) -> None:
        for block, role in self._trained:
            block.gradients[role] *= 2


class SendsTheGradientOfTheLastStep(NumpySession):
    kept: list[Any] | None = None

    def reduce(self) -> None:
        fresh = [block.gradients[role].copy() for block, role in self._trained]
        for (block, role), old in zip(self._trained, self.kept or fresh, strict=True):
            block.gradients[role][...] = old
        self.kept = fresh


class ScalesTheLoss(NumpySession):
    def compute(self, *arguments: Any, **options: Any) -> float:
        return super().compute(*arguments, **options) * 24


class ScalesBackward(NumpySession):
    def compute(self, *arguments: Any, **options: Any) -> float:
        loss = super().compute(*arguments, **options)
        for block, role in self._trained:
            block.gradients[role] *= 24
        return loss


class ForgetsTheCorrection(NumpySession):
    def _change(self, place: int, g: Any, rate: float) -> Any:
        beta_1, beta_2 = self.case.optimizer.betas
        made = super()._change(place, g, rate)
        return made * (1 - beta_1**self._steps) / np.sqrt(1 - beta_2**self._steps)


class DecaysTheMomentum(NumpySession):
    def _change(self, place: int, g: Any, rate: float) -> Any:
        if self._steps == 3:
            self._first[place] *= 0.5
        return super()._change(place, g, rate)


class IsALittleFaster(NumpySession):
    def update(self, rate: float) -> None:
        super().update(rate * 1.01 if self._steps == 1 else rate)


@pytest.mark.parametrize(
    ("session", "case", "place"),
    [
        (ReducesInHalf, optimized("sgd"), (0, "average", 2, "")),
        (ReducesInHalf, CASES["cnn"], (0, "average", 4, "")),
        (SumsInsteadOfAveraging, optimized("adam"), (0, "average", 2, "")),
        (SendsTheGradientOfTheLastStep, optimized("sgd"), (1, "average", 2, "")),
        (ScalesTheLoss, optimized("sgd"), (0, "loss", None, "")),
        (ScalesBackward, optimized("adam"), (0, "gradient", 2, "")),
        (ForgetsTheCorrection, optimized("adam"), (0, "update", 0, "")),
        (DecaysTheMomentum, optimized("momentum"), (2, "update", 0, "momentum")),
        (DecaysTheMomentum, optimized("adamw", rate=0.01), (2, "update", 0, "momentum")),
        (IsALittleFaster, optimized("momentum"), (1, "learning rate", None, "")),
    ],
)
def test_a_mistake_is_found_by_step_kind_and_layer(
    session: type[NumpySession], case: Case, place: tuple[int, str, int | None, str]
) -> None:
    assert place_of(case, session) == place


def test_a_sum_in_float16_is_found_in_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["mlp"]
    right = trained(case)
    original = blocks.Dense.forward

    def forward(self: blocks.Dense, x: Any) -> Any:
        made = original(self, x)
        return made.astype(np.float16).astype(np.float32) if made.shape[1] == 5 else made

    monkeypatch.setattr(blocks.Dense, "forward", forward)
    found = first_of([right, trained(case, name="other")])
    assert (found.step, found.kind, found.layer) == (0, "activation", 2)


def test_another_momentum_of_batch_normalization_is_found_in_its_statistics() -> None:
    case = CASES["cnn"]

    def build(framework: str) -> Any:
        made = case.of(framework)
        made[4] = replace(made[4], options={**made[4].options, "keep": 0.1})
        return made

    found = first_of([trained(case), trained(replace(case, build=build), name="other")])
    assert (found.step, found.kind, found.layer, found.detail) == (0, "statistics", 3, "mean")


def test_an_unbiased_running_variance_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch keeps it: by n - 1, where others divide by n."""
    case = CASES["cnn"]
    right = trained(case)
    original = blocks.BatchNorm.forward

    def forward(self: blocks.BatchNorm, x: Any) -> Any:
        before, made = self.weights["variance"].copy(), original(self, x)
        count = x.size // x.shape[1]
        new = (self.weights["variance"] - self.keep * before) * count / (count - 1)
        self.weights["variance"][...] = self.keep * before + new
        return made

    class Unbiased(NumpySession):
        def batch_norm_of(self, layer: Any) -> tuple[float, bool] | None:
            known = super().batch_norm_of(layer)
            return None if known is None else (known[0], True)

    monkeypatch.setattr(blocks.BatchNorm, "forward", forward)
    assert judge([right, trained(case, Unbiased, name="other")]).agree
    found = first_of([right, trained(case, name="other")])
    assert (found.kind, found.detail) == ("statistics", "variance")


def test_ranks_that_begin_with_other_weights_are_found() -> None:
    case = CASES["mlp"]
    parts = [trained(case, mode="all", part=(rank, 2), seed=rank) for rank in range(2)]
    found = first_of([trained(case), *parts])
    assert (found.step, found.kind, found.layer) == (0, "weights", 0)


def test_a_rank_whose_shard_is_shuffled_is_found_by_its_data() -> None:
    case = CASES["mlp"]

    def batch(framework: str, step: int) -> Any:
        inputs, targets = case.batch(framework, step)
        rows = np.r_[0:12, np.random.default_rng(step).permutation(12) + 12] if step == 2 else np.r_[0:24]
        return inputs[rows], targets[rows]

    parts = [
        trained(case, mode="all", part=(0, 2)),
        trained(replace(case, batch=batch), mode="all", part=(1, 2)),
    ]
    whole = trained(case)
    for run in (whole, *parts):  # nobody has averaged their gradients
        for step in run.steps:
            step.loss = 0.0
            step.traces = {key: trace for key, trace in step.traces.items() if key[0] == "data"}
    found = first_of([whole, *parts])
    assert (found.step, found.kind, found.layer, found.detail) == (2, "data", None, "inputs")


def test_runs_of_different_lengths_are_a_problem_of_their_own() -> None:
    shorter = trained(CASES["mlp"], name="other")
    shorter.steps.pop()
    verdict = judge([trained(CASES["mlp"]), shorter])
    assert verdict.problem == "batches"
    assert "numpy (plain) has trained 4 steps, other (plain) 3" in verdict.message


def test_the_first_step_has_limits_by_layers_and_terms_and_later_ones_a_flat_one() -> None:
    trace = trace_of("gradient", 0, 0, "w", np.ones(4, np.float32))
    flat = Bounds().limit(trace)
    assert flat == pytest.approx(64 * 4 * 64 * 2.0**-24)
    assert Bounds(0, 3, 1024).limit(trace) == pytest.approx((8 + 6) * 4 * 32 * 2.0**-24)
    assert Bounds(1, 3, 1024).limit(trace) == flat
    assert Bounds(0, 1000, 4096).limit(trace) == flat


def test_a_gradient_of_rounding_alone_is_no_difference() -> None:
    """As that of a bias before batch normalization, which adds up what cancels."""

    def traces(bias: float) -> Any:
        arrays = np.linspace(0.5, 1, 8, dtype=np.float32), np.full(4, bias, np.float32)
        made = [
            trace_of(kind, place, 0, "w", array)
            for kind in ("gradient", "average")
            for place, array in enumerate(arrays)
        ]
        return {trace.key: trace for trace in made}

    bounds = Bounds(0, 3, 1024)
    assert all(relative <= limit for _, relative, limit in differences(traces(2e-7), traces(-2e-7), bounds))
    found = [
        key for key, relative, limit in differences(traces(2e-7), traces(1e-4), bounds) if relative > limit
    ]
    assert found == [("gradient", 1), ("average", 1)]


def test_the_documentation_has_every_kind_in_the_order_of_causes() -> None:
    document = (ROOT / "docs" / "parity.md").read_text()
    section = document.split("### Kinds")[1].split("###")[0]
    listed = re.findall(r"^\| `([a-z ]+)` \|", section, re.MULTILINE)
    assert listed == list(dict.fromkeys(map(told, KINDS)))
    assert set(listed) == set(ADVICE)


def test_what_has_faded_is_measured_by_what_it_was() -> None:
    """A loss near 0 has gradients that are the rounding errors of what made them."""

    def traces(size: float) -> dict[Any, Any]:
        kinds = ("gradient", "update", "weights")
        made = [trace_of(kind, 0, 0, "w", np.full(8, size, np.float32)) for kind in kinds]
        return {trace.key: trace for trace in made}

    def found(one: float, two: float, largest: Any) -> set[str]:
        bounds = Bounds(300, 3, largest=largest)
        parts = differences(traces(one), traces(two), bounds)
        return {key[0] for key, relative, limit in parts if relative > limit}

    largest = grown(grown({}, traces(1.0)), traces(1e-6))
    assert found(1e-6, 1.01e-6, {}) == {"gradient", "update", "weights"}
    assert found(1e-6, 1.01e-6, largest) == {"weights"}
    assert found(1e-3, 1.01e-3, largest) == {"gradient", "update", "weights"}  # not faded as far as that
