"""Mixed precision: GradScaler and autocast, as scripts for Horovod use them and without their ritual."""

from __future__ import annotations

import pytest
from on_ranks import Functions
from pool import Pool

cases = Functions("torch_amp_cases")


@pytest.mark.parametrize(
    "overflow", [None, 0, 1], ids=["no overflow", "rank 0 overflows", "rank 1 overflows"]
)
@pytest.mark.parametrize("ritual", [True, False], ids=["ritual", "no ritual"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    ranks: Pool, ritual: bool, overflow: int | None
) -> None:
    ranks.run(cases.scaled_training, ritual, overflow)


def test_bfloat16_autocast_trains_near_the_joined_batch(ranks: Pool) -> None:
    ranks.run(cases.autocast_to_bfloat16)


def test_accumulated_scaled_gradients_are_unscaled_once(ranks: Pool) -> None:
    ranks.run(cases.scaled_accumulation)
