"""DistributedOptimizer where wrong numbers would go unnoticed: closures, hooks, leftover gradients."""

from __future__ import annotations

import pytest
from on_ranks import Functions
from pool import Pool

cases = Functions("torch_optimizer_numbers_cases")


@pytest.mark.parametrize("kind", ["average", "sum", "grouped", "double"])
def test_line_searches_take_the_same_steps_on_every_rank(ranks: Pool, kind: str) -> None:
    ranks.run(cases.line_searches_branch_alike, kind)


@pytest.mark.parametrize("kind", ["tensor", "sum", "number", "none on one rank", "none", "no loss", "half"])
def test_a_closure_returns_the_joint_loss(ranks: Pool, kind: str) -> None:
    ranks.run(cases.closures_return_the_joint_loss, kind)


def test_a_closure_outside_of_the_process_set_keeps_its_loss(ranks: Pool) -> None:
    ranks.run(cases.closures_outside_of_the_process_set_keep_their_loss)
