"""parity.watch in programs that do more than train, or in odd ways: no false alarm, and no blindness."""

from __future__ import annotations

import pytest
import watch_attacks
from worlds import Ranks

#: Three ranks of three frameworks, and two of each of two.
_WORLDS = ("torch+mxnet+tensorflow", "torch+torch+mxnet+mxnet")

pytestmark = [pytest.mark.drivers(*_WORLDS), pytest.mark.not_by_mpi]


def test_an_evaluation_between_steps_is_no_divergence(ranks: Ranks) -> None:
    assert ranks.run(watch_attacks.evaluates) == [(3, None)] * ranks.size


def test_a_step_that_fails_and_is_taken_again_is_no_divergence(ranks: Ranks) -> None:
    assert ranks.run(watch_attacks.fails_once) == [(3, None)] * ranks.size


def test_a_frozen_layer_is_watched(ranks: Ranks) -> None:
    for steps, first in ranks.run(watch_attacks.freezes):
        assert (steps, first[:4]) == (4, (2, "weights", 0, 1))


def test_watches_end_in_any_order(ranks: Ranks) -> None:
    ranks.run(watch_attacks.ends_in_any_order)


def test_a_watch_outlives_its_world_and_one_that_begins_then_says_the_same(ranks: Ranks) -> None:
    each = ranks.run(watch_attacks.begins_late)
    assert [places[0] for places in each] == [(4, None)] * ranks.size
    ended = {places[1] for places in each}
    assert len(ended) == 1, ended
    ((steps, first),) = ended
    assert (steps, first[:4]) == (5, (4, "input", 0, ranks.size - 1))


def test_a_layer_that_runs_twice_in_a_pass_is_watched(ranks: Ranks) -> None:
    for steps, first in ranks.run(watch_attacks.shares):
        assert steps == 4
        assert first[:2] == (3, "input"), first


@pytest.mark.drivers("torch+torch+mxnet+mxnet", "torch+torch+tensorflow+tensorflow")
@pytest.mark.parametrize("is_split", [False, True], ids=["step", "allreduce_grads"])
def test_gradients_of_two_data_parallel_jobs_are_compared_before_they_are_averaged(
    ranks: Ranks, is_split: bool
) -> None:
    assert ranks.run(watch_attacks.data_parallel, (1.0, 1.0), is_split) == [None] * 4
    slower = ranks.run(watch_attacks.data_parallel, (2.0, 1.0), is_split)
    assert slower == [(0, "learning rate")] * 4


@pytest.mark.drivers("tensorflow+torch", "torch+torch+tensorflow+tensorflow")
@pytest.mark.parametrize(
    ("change", "first"),
    [
        ("", None),
        ("rate", (0, "learning rate", 0)),
        ("activation", (0, "activation", 2)),
        ("loss", (0, "gradient", 3)),
        ("batch", (1, "input", 0)),
    ],
)
def test_mixed_precision_is_judged_by_the_lowest_precision_on_the_way(
    ranks: Ranks, change: str, first: tuple[int, str, int] | None
) -> None:
    assert ranks.run(watch_attacks.mixed_precision, change) == [first] * ranks.size


def test_a_model_that_is_compiled_for_a_graph_is_refused_at_once(ranks: Ranks) -> None:
    ranks.run(watch_attacks.compiled_for_a_graph)


def test_bad_calls_say_who_what_and_what_was_found(ranks: Ranks) -> None:
    for said in ranks.run(watch_attacks.misuses):
        for text in said:
            assert text.startswith(("parity.watch: ", "parity.compare")), text
            assert "expected" in text or "has none of the model's weights; pass" in text, text
            assert len(text.splitlines()) == 1, text
