"""Mixed precision: GradScaler and autocast, as scripts for Horovod use them and without their ritual."""

from __future__ import annotations

import pytest
import torch_amp_cases as cases

pytestmark = pytest.mark.ranks(2, 3, framework="torch")


@pytest.mark.parametrize(
    "overflow", [None, 0, 1], ids=["no overflow", "rank 0 overflows", "rank 1 overflows"]
)
@pytest.mark.parametrize("ritual", [True, False], ids=["ritual", "no ritual"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ritual: bool, overflow: int | None) -> None:
    cases.scaled_training(ritual, overflow)


@pytest.mark.parametrize("ritual", [True, False], ids=["ritual", "no ritual"])
def test_an_overflow_skips_the_step_on_all_ranks_of_a_mapping(ritual: bool) -> None:
    cases.scaled_training(ritual, 1, mapped=True)


def test_gradients_of_a_mapping_are_all_reduced() -> None:
    cases.gradients_of_a_mapping_are_all_reduced()


@pytest.mark.parametrize("ritual", [True, False], ids=["ritual", "no ritual"])
def test_an_overflow_of_a_local_parameter_skips_the_step_on_all(ritual: bool) -> None:
    cases.scaled_training_with_a_local_parameter(ritual)


def test_bfloat16_autocast_trains_near_the_joined_batch() -> None:
    cases.autocast_to_bfloat16()


def test_accumulated_scaled_gradients_are_unscaled_once() -> None:
    cases.scaled_accumulation()


@pytest.mark.parametrize("kind", ["on hold", "fewer passes"])
def test_gradients_that_the_step_reduces_are_reduced_before_they_are_unscaled(kind: str) -> None:
    cases.scaled_gradients_that_the_step_reduces(kind)


def test_a_rank_without_a_batch_steps_after_a_step_that_all_ranks_skipped() -> None:
    cases.scaled_training_without_a_batch()
