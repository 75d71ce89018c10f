"""broadcast_parameters and broadcast_optimizer_state."""

from __future__ import annotations

import pytest
import torch_state_cases as cases

pytestmark = pytest.mark.ranks(2, 3, framework="torch")


@pytest.mark.parametrize("form", ["state_dict", "pairs", "iterator", "tensors", "module"])
def test_parameters_and_buffers_become_the_roots(form: str) -> None:
    cases.parameters_in_every_form(form)


def test_tensors_that_share_memory_become_the_roots() -> None:
    cases.tied_and_overlapping_tensors()


def test_empty_and_strided_parameters_become_the_roots() -> None:
    cases.empty_and_strided_parameters()


def test_what_is_no_tensor_is_refused() -> None:
    cases.other_things_are_refused()


def test_mismatched_parameters_are_an_error_on_every_rank() -> None:
    cases.mismatched_parameters_are_an_error_on_every_rank()


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "distributed"])
@pytest.mark.parametrize("steps", ["root only", "all", "others"])
@pytest.mark.parametrize(
    "kind",
    ["momentum", "plain", "adam", "adagrad", "lbfgs", "adamw foreach", "adam fused", "rmsprop"],
)
def test_optimizer_state_becomes_the_roots_without_a_step(kind: str, steps: str, wrapped: bool) -> None:
    cases.optimizer_state(kind, steps, wrapped)


def test_training_goes_on_alike_after_both_broadcasts() -> None:
    cases.training_goes_on_alike_after_both_broadcasts()


def test_state_keeps_its_own_dtype() -> None:
    cases.state_keeps_its_own_dtype()


def test_the_root_keeps_its_state_untouched() -> None:
    cases.the_root_keeps_its_state_untouched()


def test_other_parameters_are_an_error_on_every_rank() -> None:
    cases.other_parameters_are_an_error_on_every_rank()


def test_groups_of_parameters_keep_their_own_rates() -> None:
    cases.groups_keep_their_own_rates()


def test_four_threads_may_broadcast_states_at_once() -> None:
    cases.four_threads_broadcast_states()


@pytest.mark.ranks(3, framework="torch")
def test_optimizer_state_is_broadcast_in_a_process_set() -> None:
    cases.ranks_of_a_process_set_get_the_root_s_state()
