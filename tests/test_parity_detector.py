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

from polyhvd.parity import layers, running, session
from polyhvd.parity.case import Case
from polyhvd.parity.catalogue import CASES
from polyhvd.parity.judging import ADVICE, Finding, described, judge
from polyhvd.parity.limits import Bounds, differences, grown, suspicious
from polyhvd.parity.runs import Run
from polyhvd.parity.traces import KINDS, Facts, reported_kind, trace_of

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


class Small:
    """A model with weights and activations as users have them: of 0.02 and 0.1."""

    def __init__(self, optimizer: str, epsilon: float = 1e-6) -> None:
        self.case = optimized(optimizer, rate=1e-3)
        made = [
            layers.layer_normalization(32, epsilon=epsilon),
            layers.dense(32, 64),
            layers.activation("gelu"),
            layers.dense(64, 5),
        ]
        self.case = replace(self.case, build=lambda _: made, batch=self.batch)

    def batch(self, framework: str, step: int) -> Any:
        inputs = np.random.default_rng(step).standard_normal((24, 32), np.float32) * np.float32(0.1)
        return inputs, inputs[:, :5].argmax(axis=1)

    def trained(self, monkeypatch: pytest.MonkeyPatch, name: str = "numpy") -> Run:
        def small(weights: Any, seed: int = 0) -> list[Any]:
            made = session.first_values(weights, seed)
            sizes = [0.02 / values.std() if values.ndim > 1 else 1.0 for values in made]
            return [np.float32(size) * values for size, values in zip(sizes, made, strict=True)]

        def begin(weights: Any, seed: int = 0) -> None:
            for weight, values in zip(weights, small(weights, seed), strict=True):
                weight.write(np.array(weight.layout.array_from_common(values), np.float32))

        monkeypatch.setattr(running, "begin", begin)
        return trained(self.case, name=name)


def gelu_by_tanh(x: Any) -> tuple[Any, Any]:
    factor = np.sqrt(2 / np.pi)
    curve = np.tanh(factor * (x + 0.044715 * x**3))
    slope = 0.5 * x * (1 - curve**2) * factor * (1 + 3 * 0.044715 * x**2)
    return (0.5 * x * (1 + curve)).astype(x.dtype), (0.5 * (1 + curve) + slope).astype(x.dtype)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_gelu_by_tanh_is_found_in_its_layer_where_values_are_small(
    monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    right = Small(optimizer).trained(monkeypatch)
    monkeypatch.setitem(blocks.FUNCTIONS, "gelu", gelu_by_tanh)
    found = first_of([right, Small(optimizer).trained(monkeypatch, "other")])
    assert (found.step, found.kind, found.layer) == (0, "activation", 1)
    assert "erf or tanh" in found.advice


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_another_epsilon_is_found_in_its_layer_where_values_are_small(
    monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    right = Small(optimizer).trained(monkeypatch)
    found = first_of([right, Small(optimizer, 1e-5).trained(monkeypatch, "other")])
    assert (found.step, found.kind, found.layer) == (0, "activation", 0)


def limits_of(*facts: Facts) -> list[float]:
    return [limit.own for limit in Bounds().limits(facts).values()]


def test_a_limit_follows_from_the_type_and_the_terms_of_its_own_layer() -> None:
    def of(inputs: int, dtype: str = "float32") -> float:
        weights = Facts("weights", 0, 0, "w", (7, inputs), dtype)
        return limits_of(weights, Facts("activation", 1, 0, "w", (8, 7), dtype))[1]

    assert of(1024) == pytest.approx(4 * 32 * 2.0**-24)
    assert of(4096) == pytest.approx(4 * 64 * 2.0**-24)
    assert of(4) == of(64) == pytest.approx(4 * 8 * 2.0**-24)
    assert of(1024, "float64") == pytest.approx(4 * 32 * 2.0**-53)


def test_a_gradient_has_the_rows_and_positions_of_its_batch_for_terms() -> None:
    given = Facts("input", 0, 0, "w", (32, 3, 8, 16), "float32")
    gradient = Facts("gradient", 0, 0, "w", (4, 3, 3, 3), "float32")
    assert limits_of(given, gradient)[1] == pytest.approx(8 * 4 * 64 * 2.0**-24)


def test_what_optimizers_make_and_weights_have_a_flat_limit() -> None:
    flat = pytest.approx(64 * 4 * 64 * 2.0**-24)
    for kind in ("weights", "learning rate", "momentum", "second moment", "update"):
        assert limits_of(Facts(kind, 0, 0, "w", (4,), "float32")) == [flat]


def activations(*apart: float, more: Any = ()) -> tuple[Any, Any]:
    """Of layers, two sides that differ by these fractions of the norm; and by kind what else does."""
    array = np.linspace(0.5, 1, 8, dtype=np.float64)
    sides = []
    for factor in (1.0, 0.0):
        made = [
            trace_of("activation", 1 + n, n, f"l{n}", array * (1 + factor * each))
            for n, each in enumerate(apart)
        ]
        made += [trace_of(kind, 0, 0, "l0", array * (1 + factor * each)) for kind, each in more]
        sides.append({trace.key: replace(trace, dtype="float32") for trace in made})
    return sides[0], sides[1]


def beyond(traces: Any, references: Any) -> list[Any]:
    return [key for key, relative, limit in differences(traces, references, Bounds()) if relative > limit]


def test_what_follows_from_a_difference_below_its_limit_is_not_told() -> None:
    """Neither as a gradient nor as another layer: the cause is where it began."""
    assert beyond(*activations(1.5e-6, 1.5e-5, more=[("gradient", 1e-4)])) == []
    assert beyond(*activations(0.0, 1.5e-5)) == [("activation", 2)]
    assert beyond(*activations(1e-7, 1e-7, more=[("gradient", 1e-4)])) == [("gradient", 0)]


@pytest.mark.parametrize(
    ("apart", "place"),
    [
        ((1e-7, 2e-6, 2e-6), 1),
        ((1e-6,), 0),
        ((1e-7, 1e-7, 1e-7), None),
        ((0.0, 0.0), None),
        ((1e-7, 1e-4, 1e-7), None),  # beyond its limit: it is the first difference itself
    ],
)
def test_a_layer_that_stands_out_below_its_limit_is_suspicious(
    apart: tuple[float, ...], place: int | None
) -> None:
    sides = activations(*apart)
    found = suspicious(differences(*sides, Bounds()), *sides, Bounds())
    assert (None if found is None else found.layer) == place


def test_layers_that_differ_alike_are_not_suspicious() -> None:
    sides = activations(1e-6, 1e-6, 1e-6)
    assert suspicious([(key, 1e-6, 2e-6) for key in sides[0]], *sides, Bounds()) is None


def test_half_types_have_no_suspicious_layers() -> None:
    sides, bounds = activations(1e-7, 1e-6), Bounds(precision="bfloat16")
    assert suspicious([(("activation", 2), 0.5, 1.0)], *sides, bounds) is None


def test_a_suspicious_layer_is_told_with_its_figures_and_agrees() -> None:
    """A layer normalization whose epsilon differs by a hair."""
    right, other = (trained(Small("sgd", epsilon).case, name=f"n{epsilon}") for epsilon in (1e-6, 1.02e-6))
    (pair,) = judge([right, other]).pairs
    assert pair.agree
    assert pair.suspicious is not None
    assert (pair.suspicious.step, pair.suspicious.layer) == (0, 0)
    assert re.match(
        r"suspicious: step 0, layer 0, activation: .* differs by \S+ of its norm, "
        r"\d+% of its limit; other layers reach at most \d+% of theirs$",
        str(pair.suspicious),
    )
    assert "epsilon" in described(pair.suspicious)["advice"]


def test_the_gradient_of_a_bias_whose_terms_cancel_has_the_limit_of_its_layer() -> None:
    def traces(bias: float, kernel: float) -> Any:
        arrays = np.full((4, 4), kernel, np.float32), np.full(4, bias, np.float32)
        made = [trace_of("gradient", place, 0, "w", array) for place, array in enumerate(arrays)]
        return {trace.key: trace for trace in made}

    assert beyond(traces(1.0001e-2, 1.0), traces(1e-2, 1.0)) == []
    assert beyond(traces(1.0001e-2, 1e-3), traces(1e-2, 1e-3)) == [("gradient", 1)]


def test_where_rounding_may_decide_at_a_kink_gradients_have_a_flat_limit() -> None:
    def sides(units: int) -> Any:
        made = activations(1e-7, more=[("gradient", 1e-4)])
        return tuple({key: replace(t, shape=(units,)) for key, t in side.items()} for side in made)

    assert beyond(*sides(1000)) == [("gradient", 0)]
    assert beyond(*sides(1_000_000)) == []


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

    bounds = Bounds(0, 3)
    assert all(relative <= limit for _, relative, limit in differences(traces(2e-7), traces(-2e-7), bounds))
    found = [
        key for key, relative, limit in differences(traces(2e-7), traces(1e-4), bounds) if relative > limit
    ]
    assert found == [("gradient", 1), ("average", 1)]


def test_the_documentation_has_every_kind_in_the_order_of_causes() -> None:
    document = (ROOT / "docs" / "parity.md").read_text()
    section = document.split("### Kinds")[1].split("###")[0]
    listed = re.findall(r"^\| `([a-z ]+)` \|", section, re.MULTILINE)
    assert listed == list(dict.fromkeys(map(reported_kind, KINDS)))
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
