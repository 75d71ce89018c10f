"""SyncBatchNorm, against torch's BatchNorm on the joined batch."""

from __future__ import annotations

import pytest
import torch_sync_batch_norm_cases as cases

pytestmark = pytest.mark.ranks(2, 3, framework="torch")


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param("uneven", marks=pytest.mark.every_size),
        "an empty rank",
        "one row in all but one",
        "equal",
    ],
)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 2)], ids=["2D", "3D", "4D", "5D"])
def test_it_is_batch_norm_on_the_joined_batch(shape: tuple[int, ...], rows: str) -> None:
    cases.is_batch_norm_on_the_joined_batch(shape, rows)


@pytest.mark.parametrize(
    "option", ["momentum", "cumulative", "without affine", "untracked", "channels last", "frozen input"]
)
def test_each_option_means_what_it_does_in_torch(option: str) -> None:
    cases.options_are_those_of_torch(option)


def test_evaluation_uses_running_statistics_and_communicates_nothing() -> None:
    cases.evaluation_is_local()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("parameters", ["float32", "half"])
def test_half_precision_has_statistics_in_float32(dtype: str, parameters: str) -> None:
    cases.half_precision_has_wide_statistics(dtype, parameters)


def test_a_large_mean_does_not_cancel_the_variance() -> None:
    cases.large_means_do_not_cancel()


def test_statistics_have_the_same_bits_on_every_rank() -> None:
    cases.statistics_have_the_same_bits()


def test_one_collective_forward_and_one_backward() -> None:
    cases.one_collective_each_way()


def test_all_ranks_empty_gives_nothing_and_changes_nothing() -> None:
    cases.nothing_in_nothing_out()


def test_one_value_in_all_is_an_error_on_every_rank() -> None:
    cases.one_value_in_all_is_an_error()


def test_other_dtypes_are_an_error_on_every_rank() -> None:
    cases.other_dtypes_are_an_error_on_every_rank()


def test_layers_of_different_width_stay_in_the_response_cache() -> None:
    cases.layers_of_other_widths_stay_in_the_cache()


def test_bad_inputs_are_refused_where_they_are_passed() -> None:
    cases.bad_inputs_are_refused()


def test_ranks_outside_the_process_set_normalize_alone() -> None:
    cases.process_sets()


def test_a_rank_that_has_joined_counts_as_empty() -> None:
    cases.joined_ranks_count_as_empty()


def test_convert_keeps_parameters_statistics_and_mode() -> None:
    cases.convert_keeps_what_there_is()


def test_copies_and_checkpoints_work() -> None:
    cases.copies_and_checkpoints_work()


@pytest.mark.parametrize("converted", [True, False])
def test_training_a_network_is_that_of_one_process(converted: bool) -> None:
    cases.trains_like_one_process(converted)
