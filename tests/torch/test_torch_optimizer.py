"""DistributedOptimizer: what it computes, against torch on the joined batch, and how it fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch_optimizer_cases as cases

pytestmark = pytest.mark.ranks(2, 3, framework="torch")


@pytest.mark.parametrize("clip", [None, 0.05], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
@pytest.mark.parametrize("kind", ["momentum", "adam", "adamw"])
def test_training_is_that_of_one_process_on_the_joined_batch(
    kind: str, set_to_none: bool, clip: float | None
) -> None:
    cases.trains_like_one_process(kind, set_to_none, clip)


@pytest.mark.parametrize(
    ("passes", "tied", "op"),
    [*((passes, tied, "Average") for passes in (1, 2) for tied in (False, True)), (1, False, "Sum")],
)
def test_checkpoints_that_call_backward_within_backward(passes: int, tied: bool, op: str) -> None:
    cases.backward_within_backward(passes, tied, op)


def test_a_sum_of_a_parameter_in_two_reentrant_checkpoints_is_an_error() -> None:
    cases.sums_of_a_parameter_of_two_segments()


def test_backward_within_no_sync_may_come_before_or_after_another_collective() -> None:
    cases.backward_and_another_collective_in_other_orders()


@pytest.mark.parametrize("kind", ["none", "fp16", "bf16"])
def test_compressed_gradients_are_near_and_alike(kind: str) -> None:
    cases.compression_and_predivision(kind)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_parameters_of_half_precision_stay_alike(dtype: str) -> None:
    cases.half_precision_parameters(dtype)


@pytest.mark.parametrize("passes", [2, 3])
def test_gradients_of_several_passes_are_added_up_locally(passes: int) -> None:
    cases.accumulates_locally(passes)


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_layers_of_different_losses_are_reduced_once_each(op: str) -> None:
    cases.two_losses_of_different_layers(op)


@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
def test_gradients_may_be_cleared_through_the_model(set_to_none: bool) -> None:
    cases.model_zero_grad_serves_as_well(set_to_none)


@pytest.mark.parametrize("before", [True, False], ids=["scheduler first", "optimizer first"])
def test_schedulers_work_without_warnings(before: bool) -> None:
    cases.schedulers_work(before)


def test_backward_returns_with_averages_and_step_has_nothing_to_wait_for() -> None:
    cases.has_averages_when_backward_returns()


def test_the_optimizer_stays_the_users_object_and_of_its_class() -> None:
    cases.is_of_the_users_class()


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    cases.skips_a_step_when_one_rank_overflows()


def test_a_step_within_an_accumulation_reduces_what_there_is() -> None:
    cases.steps_early_within_an_accumulation()


def test_a_layer_used_in_one_pass_of_several_is_complete_when_the_last_returns() -> None:
    cases.layers_of_one_pass_are_reduced_with_the_others()


def test_passes_within_no_sync_only_add_up() -> None:
    cases.no_sync_adds_up_without_exchanges()


def test_the_number_of_passes_can_be_changed() -> None:
    cases.changes_the_number_of_passes()


@pytest.mark.parametrize("num_groups", [0, 2])
def test_a_parameter_unused_on_some_ranks_has_zero_gradients_there_before_clipping(num_groups: int) -> None:
    cases.parameters_unused_on_some_ranks(num_groups)


def test_a_rank_may_skip_backward() -> None:
    cases.a_rank_without_backward()


def test_a_rank_may_have_one_more_loss() -> None:
    cases.an_auxiliary_loss_on_some_ranks()


def test_backward_twice_before_a_step_adds_up() -> None:
    cases.backward_twice_before_a_step()


def test_backward_twice_before_a_step_is_an_error_for_sums() -> None:
    cases.backward_twice_is_an_error_for_sums()


def test_an_extra_backward_on_one_rank_is_an_error_on_every_rank() -> None:
    cases.an_extra_backward_on_one_rank_is_seen()


def test_a_closure_returns_to_averaged_gradients() -> None:
    cases.closure_sees_averages()


def test_a_rank_may_skip_backward_in_its_closure() -> None:
    cases.closure_without_backward_on_a_rank()


def test_lbfgs_may_evaluate_its_closure_often() -> None:
    cases.lbfgs_evaluates_its_closure_often()


def test_two_optimizers_in_one_backward_do_not_wait_for_each_other() -> None:
    cases.two_optimizers_in_one_backward()


@pytest.mark.parametrize("seed", range(8))
def test_ranks_may_compute_what_they_like_as_often_as_they_like(seed: int) -> None:
    cases.any_program(seed, 3 * (seed % 2))


def test_two_optimizers_may_take_turns() -> None:
    cases.optimizers_that_take_turns()


def test_frozen_parameters_are_left_alone_and_may_be_thawed() -> None:
    cases.frozen_parameters_are_left_alone_and_may_be_thawed()


def test_parameter_groups_added_later_are_reduced() -> None:
    cases.groups_added_later_are_reduced()


def test_replaced_parameters_are_an_error() -> None:
    cases.replaced_parameters_are_an_error()


def test_a_shared_parameter_is_reduced_once() -> None:
    cases.shared_parameters_are_reduced_once()


def test_gradients_set_by_hand_are_reduced_in_step() -> None:
    cases.gradients_set_by_hand_are_reduced_in_step()


def test_synchronize_and_skip_synchronize_work_as_in_horovod() -> None:
    cases.synchronize_then_skip()


def test_memory_layouts_may_differ_between_ranks() -> None:
    cases.layouts_other_than_row_major()


def test_step_hooks_run_once() -> None:
    cases.step_hooks_run_once()


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("clear", ["none", "zero", "keep"])
@pytest.mark.parametrize("op", ["Average", "Sum"])
@pytest.mark.parametrize("before", [True, False], ids=["hook first", "optimizer first"])
def test_a_hook_of_a_parameter_may_step(before: bool, op: str, clear: str, layers: int) -> None:
    cases.hooks_that_step_within_backward(before, op, clear, layers)


@pytest.mark.parametrize("before", [True, False], ids=["hook first", "optimizer first"])
def test_a_hook_of_a_parameter_may_step_every_second_time(before: bool) -> None:
    cases.hooks_that_step_every_second_time(before)


def test_a_hook_that_steps_after_a_second_backward_is_an_error_for_sums() -> None:
    cases.a_hook_that_steps_too_late_for_a_sum()


@pytest.mark.parametrize(
    ("kind", "op", "options"),
    [
        *((kind, "Average", {}) for kind in cases.SHARING),
        ("twice each", "Average", {"backward_passes_per_step": 2}),
        ("twice crossed", "Average", {"backward_passes_per_step": 2}),
        ("together", "Average", {"num_groups": 1}),
        *((kind, "Sum", {}) for kind in ("in turns", "older twice", "without zeroing", "no_sync")),
        ("twice each", "Sum", {"backward_passes_per_step": 2}),
        ("one backward", "Sum", {"num_groups": 2}),
    ],
)
def test_optimizers_may_share_parameters(kind: str, op: str, options: dict[str, Any]) -> None:
    cases.optimizers_share_parameters(kind, op, **options)


def test_ranks_may_skip_a_loss_of_a_shared_encoder() -> None:
    cases.ranks_may_skip_a_loss_of_a_shared_encoder()


@pytest.mark.parametrize(("kind", "expected"), [("in turns", 11), ("one backward", 9), ("together", 12)])
def test_a_shared_gradient_is_sent_once_in_a_backward(kind: str, expected: int) -> None:
    cases.a_shared_gradient_is_sent_once(kind, expected)


def test_three_optimizers_may_share_parameters_and_the_newest_be_deleted() -> None:
    cases.three_optimizers_share_parameters()


def test_shared_parameters_may_be_local() -> None:
    cases.shared_parameters_may_be_local()


@pytest.mark.parametrize("before", [True, False], ids=["hook first", "optimizer first"])
def test_hooks_may_step_with_shared_parameters(before: bool) -> None:
    cases.hooks_that_step_with_shared_parameters(before)


def test_a_newer_optimizer_of_another_op_takes_over() -> None:
    cases.a_newer_optimizer_of_another_op_takes_over()


def test_a_deleted_optimizer_leaves_no_trace() -> None:
    cases.deleted_optimizers_leave_no_trace()


def test_a_copy_does_not_train_silently_alone() -> None:
    cases.copies_are_refused()


def test_bad_arguments_are_refused_and_leave_the_optimizer_as_it_was() -> None:
    cases.bad_arguments_are_named()


@pytest.mark.parametrize(
    "kind", ["number", "number as groups", "more than parameters", "lists", "compressed"]
)
def test_a_group_is_reduced_by_one_operation(kind: str) -> None:
    cases.groups_are_one_operation_each(kind)


def test_frozen_parameters_do_not_hold_their_group_up() -> None:
    cases.frozen_parameters_are_in_no_group()


def test_other_shapes_in_a_group_are_an_error_on_every_rank() -> None:
    cases.other_shapes_in_a_group_are_an_error_on_every_rank()


@pytest.mark.parametrize(
    "kind", ["sparse", "sum", "grouped", "compressed", "as dense", "as dense in a group", "two passes"]
)
def test_sparse_gradients_train_like_dense_ones(kind: str) -> None:
    cases.sparse_gradients_train_like_dense_ones(kind)


def test_zeros_take_the_layout_of_what_another_rank_has_computed() -> None:
    cases.layouts_of_gradients_follow_what_some_rank_computed()


def test_sparse_here_and_dense_there_is_an_error_on_every_rank() -> None:
    cases.sparse_here_and_dense_there_is_an_error_on_every_rank()


def test_sparse_gradients_are_refused_where_their_zeros_count() -> None:
    cases.sparse_gradients_need_a_sum()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("kind", "num_groups"), [("momentum", 0), ("adam", 1)])
def test_adasum_combines_what_optimizers_make_of_gradients(kind: str, num_groups: int) -> None:
    cases.adasum_combines_the_steps_of_the_ranks(kind, num_groups)


@pytest.mark.ranks(2)
def test_adasum_works_with_closures_scalers_and_schedulers() -> None:
    cases.adasum_takes_closures_scalers_and_schedulers()


def test_adasum_holds_passes_until_the_step() -> None:
    cases.adasum_holds_passes_until_the_step()


@pytest.mark.parametrize("num_groups", [0, 1])
def test_ranks_may_join_before_others(num_groups: int) -> None:
    cases.ranks_may_join_before_others(num_groups)


@pytest.mark.parametrize("kind", ["scaled", "unscaled", "sum", "two passes", "sparse", "grouped"])
def test_local_gradients_stay_on_their_rank(kind: str) -> None:
    cases.local_gradients_stay(kind)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_what_is_local_on_one_rank_is_reduced_by_the_others(sparse: bool) -> None:
    cases.local_on_one_rank_alone(sparse)


def test_local_parameters_are_declared_before_backward() -> None:
    cases.local_parameters_are_declared_in_time()


def test_gradients_with_a_graph_are_refused() -> None:
    cases.gradients_with_a_graph_are_refused()


def test_a_backward_that_fails_can_be_recovered_from() -> None:
    cases.a_backward_that_fails_can_be_recovered_from()


def test_gradients_of_other_shapes_are_an_error_on_every_rank() -> None:
    cases.other_shapes_are_an_error_on_every_rank()


def test_other_numbers_of_parameters_are_an_error_on_every_rank() -> None:
    cases.other_numbers_of_parameters_are_an_error_on_every_rank()


def test_ranks_outside_the_process_set_train_alone() -> None:
    cases.ranks_outside_the_process_set_train_alone()


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_model_may_be_cast_after_its_optimizer_was_made(dtype: str) -> None:
    cases.models_may_be_cast_later(dtype)


def test_state_goes_through_a_file_into_a_plain_optimizer_and_back() -> None:
    cases.state_goes_through_a_file()


def test_two_networks_that_play_against_each_other() -> None:
    cases.generator_and_discriminator()


def test_channels_last_trains_like_row_major() -> None:
    cases.channels_last_trains()


def test_before_init_it_says_so() -> None:
    cases.not_initialized_is_an_error()


def test_ranks_with_another_past_meet_after_init() -> None:
    cases.ranks_with_another_past_meet_after_init()
