"""SyncBatchNorm, against torch's BatchNorm on the joined batch."""

from __future__ import annotations

import pytest
from on_ranks import Functions
from pool import Pool

cases = Functions("torch_sync_batch_norm_cases")


@pytest.mark.parametrize("rows", ["uneven", "an empty rank", "one row in all but one", "equal"])
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 2)], ids=["2D", "3D", "4D", "5D"])
def test_it_is_batch_norm_on_the_joined_batch(ranks: Pool, shape: tuple[int, ...], rows: str) -> None:
    ranks.run(cases.is_batch_norm_on_the_joined_batch, shape, rows)


@pytest.mark.parametrize(
    "option", ["momentum", "cumulative", "without affine", "untracked", "channels last", "frozen input"]
)
def test_each_option_means_what_it_does_in_torch(ranks: Pool, option: str) -> None:
    ranks.run(cases.options_are_those_of_torch, option)


def test_evaluation_uses_running_statistics_and_communicates_nothing(ranks: Pool) -> None:
    ranks.run(cases.evaluation_is_local)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("parameters", ["float32", "half"])
def test_half_precision_has_statistics_in_float32(ranks: Pool, dtype: str, parameters: str) -> None:
    ranks.run(cases.half_precision_has_wide_statistics, dtype, parameters)


def test_a_large_mean_does_not_cancel_the_variance(ranks: Pool) -> None:
    ranks.run(cases.large_means_do_not_cancel)


def test_statistics_have_the_same_bits_on_every_rank(ranks: Pool) -> None:
    ranks.run(cases.statistics_have_the_same_bits)


def test_one_collective_forward_and_one_backward(ranks: Pool) -> None:
    ranks.run(cases.one_collective_each_way)


def test_all_ranks_empty_gives_nothing_and_changes_nothing(ranks: Pool) -> None:
    ranks.run(cases.nothing_in_nothing_out)


def test_one_value_in_all_is_an_error_on_every_rank(ranks: Pool) -> None:
    ranks.run(cases.one_value_in_all_is_an_error)


def test_other_dtypes_are_an_error_on_every_rank(ranks: Pool) -> None:
    ranks.run(cases.other_dtypes_are_an_error_on_every_rank)


def test_layers_of_different_width_stay_in_the_response_cache(ranks: Pool) -> None:
    ranks.run(cases.layers_of_other_widths_stay_in_the_cache)


def test_bad_inputs_are_refused_where_they_are_passed(ranks: Pool) -> None:
    ranks.run(cases.bad_inputs_are_refused)


def test_ranks_outside_the_process_set_normalize_alone(ranks: Pool) -> None:
    ranks.run(cases.process_sets)


def test_a_rank_that_has_joined_counts_as_empty(ranks: Pool) -> None:
    ranks.run(cases.joined_ranks_count_as_empty)


def test_convert_keeps_parameters_statistics_and_mode(ranks: Pool) -> None:
    ranks.run(cases.convert_keeps_what_there_is)


def test_copies_and_checkpoints_work(ranks: Pool) -> None:
    ranks.run(cases.copies_and_checkpoints_work)


@pytest.mark.parametrize("converted", [True, False])
def test_training_a_network_is_that_of_one_process(ranks: Pool, converted: bool) -> None:
    ranks.run(cases.trains_like_one_process, converted)
