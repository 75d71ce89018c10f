"""polyhvd.keras with Keras 3 on PyTorch; with Keras on TensorFlow see tests/tensorflow."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch_keras_cases as cases

pytestmark = [
    pytest.mark.ranks(2, framework="torch"),
    pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="Keras is not installed"),
]


def test_fit_trains_as_one_process_on_the_joined_batch() -> None:
    cases.fit_equals_one_process()


def test_other_optimizers_clip_after_averaging() -> None:
    cases.other_optimizers_clip_after_averaging()


def test_several_passes_make_a_step() -> None:
    cases.several_passes_make_a_step()


def test_callbacks_do_what_they_do_on_tensorflow(tmp_path: Path) -> None:
    cases.callbacks_do_what_they_do_elsewhere(str(tmp_path))


@pytest.mark.ranks(2, framework="torch", env={"POLYHVD_CHECK_DRIFT": "warn"})
def test_weights_that_differ_between_ranks_are_reported() -> None:
    cases.other_weights_are_reported()


def test_metrics_of_several_threads_are_averaged() -> None:
    cases.metrics_of_several_threads_are_averaged()


def test_metrics_are_paired_by_name() -> None:
    cases.metrics_are_paired_by_name()


def test_a_saved_model_keeps_the_state_of_the_optimizer(tmp_path: Path) -> None:
    cases.a_saved_model_keeps_the_optimizers_state(str(tmp_path))


def test_an_overflow_on_one_rank_is_everybodys() -> None:
    cases.overflow_on_one_rank_is_everybodys()


def test_gradients_of_a_custom_loop_are_reduced() -> None:
    cases.gradients_of_a_custom_loop()


def test_gradients_of_other_variables_are_an_error_with_their_names() -> None:
    cases.gradients_of_other_variables_are_an_error()


def test_gradients_of_local_layers_stay_on_their_rank() -> None:
    cases.local_layers_stay_on_their_rank()


def test_batch_normalization_is_that_of_the_joined_batch() -> None:
    cases.batch_normalization_is_that_of_the_joined_batch()


def test_values_are_exchanged_and_bad_calls_refused() -> None:
    cases.values_and_refusals()


def test_ranks_outside_of_the_process_set_keep_their_gradients() -> None:
    cases.ranks_outside_of_the_process_set_keep_their_gradients()
