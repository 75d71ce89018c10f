"""polyhvd.parity.load: weights go from a model of one framework into the same one of another."""

from __future__ import annotations

import mixed_layers
import mixed_loading
import mixed_training
import pytest
from worlds import Ranks

pytestmark = [pytest.mark.drivers("+".join(mixed_training.TRAINED)), pytest.mark.not_by_mpi]


def test_recurrent_cells_compute_the_same_with_the_weights_of_any_framework(ranks: Ranks) -> None:
    ranks.run(mixed_loading.recurrent)


def test_convolutions_compute_the_same_with_the_weights_of_another_framework(ranks: Ranks) -> None:
    ranks.run(mixed_loading.convolutions)


@pytest.mark.parametrize("case", list(mixed_layers.CASES))
def test_a_layer_computes_the_same_with_the_weights_of_another_frameworks_layer(
    ranks: Ranks, case: str
) -> None:
    ranks.run(mixed_layers.computes_the_same, case)


def test_gradients_of_rows_in_other_orders_are_averaged_in_common_form(ranks: Ranks) -> None:
    ranks.run(mixed_layers.averages_gradients)


def test_a_layer_that_moves_axes_in_an_unknown_way_is_refused_by_name_on_every_rank(ranks: Ranks) -> None:
    ranks.run(mixed_loading.moved)


def test_a_wrong_mapping_is_found_by_the_outputs_and_the_weights_are_restored(ranks: Ranks) -> None:
    ranks.run(mixed_loading.proven)


def test_weights_of_a_file_are_found_by_rules_for_names(ranks: Ranks) -> None:
    ranks.run(mixed_loading.by_name)


def test_what_does_not_match_is_refused_and_nothing_is_written(ranks: Ranks) -> None:
    ranks.run(mixed_loading.refused)
