"""Lightning's Trainer on two ranks: against the plain Trainer on the joined batch."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch_lightning_cases as cases

pytestmark = [
    pytest.mark.ranks(2, framework="torch"),
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="Lightning is not installed"),
]


@pytest.mark.parametrize(
    "arguments",
    [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.3}, {"precision": "bf16-mixed"}],
    ids=["plain", "accumulate", "clip", "bf16"],
)
def test_training_is_that_of_one_process_on_the_joined_batch(arguments: dict[str, Any]) -> None:
    cases.trains_like_one_process(arguments)


def test_batches_that_make_no_step_exchange_nothing() -> None:
    cases.accumulates_without_exchanges()


def test_sync_batchnorm_of_the_trainer_normalizes_over_all_ranks() -> None:
    cases.batch_norm_is_that_of_the_joined_batch()


def test_two_optimizers_are_stepped_by_hand() -> None:
    cases.manual_optimization_of_two_optimizers()


@pytest.mark.parametrize("accumulate", [False, True])
def test_two_optimizers_may_share_parameters(accumulate: bool) -> None:
    cases.manual_optimization_of_shared_parameters(accumulate)


def test_a_module_may_compile_its_step() -> None:
    cases.a_compiled_step_trains()


def test_logged_metrics_are_those_of_all_ranks() -> None:
    cases.metrics_are_those_of_all_ranks()


def test_numbers_of_hvd_metrics_go_to_the_loggers(tmp_path: Path) -> None:
    cases.metrics_of_ranks_are_logged(str(tmp_path))


def test_metrics_of_other_names_are_refused() -> None:
    cases.metrics_of_other_names_are_refused()


def test_the_strategy_exchanges_and_refuses_with_advice() -> None:
    cases.exchanges_of_the_strategy()


def test_rank_0_writes_checkpoints_and_all_resume_from_its_state(tmp_path: Path) -> None:
    cases.resumes_from_a_checkpoint(str(tmp_path))


def test_an_elastic_state_commits_after_the_hooks_of_an_epoch() -> None:
    cases.elastic_commits_come_after_the_hooks_of_an_epoch()


def test_a_loop_on_fabric_is_that_of_one_process_on_the_joined_batch(tmp_path: Path) -> None:
    cases.fabric_trains_like_one_process(str(tmp_path))
