"""Weights that differ between the ranks of a DistributedOptimizer are reported in its first step."""

from __future__ import annotations

from typing import Any

import polyhvd.torch as hvd
import pytest
import torch
from drift_reports import drift_reports
from torch_common import model, raises

from polyhvd import RankMismatchError

WARN = {"POLYHVD_CHECK_DRIFT": "warn"}
pytestmark = pytest.mark.ranks(3, framework="torch", env=WARN)


def with_other_weights(*ranks: int) -> torch.nn.Module:
    module = model()
    if hvd.rank() in ranks:
        with torch.no_grad():
            module[2].weight[0, 3] += 1
    return module


def train(module: torch.nn.Module, optimizer: Any, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.ones(4, 5)).sum().backward()
        optimizer.step()


def sgd(module: torch.nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    return hvd.DistributedOptimizer(optimizer, module.named_parameters(), **options)


def everyones_reports(module: torch.nn.Module, optimizer: Any) -> list[str]:
    with drift_reports() as reports:
        train(module, optimizer)
    return [report for some in hvd.allgather_object(reports) for report in some]


@pytest.mark.parametrize("op", ["Average", "Sum", "Adasum"])
@pytest.mark.parametrize("passes", [1, 2])
def test_one_report_names_the_first_weight_and_the_ranks(op: str, passes: int) -> None:
    module = with_other_weights(1, 2)
    optimizer = sgd(module, op=getattr(hvd, op), backward_passes_per_step=passes)
    (report,) = everyones_reports(module, optimizer)
    assert "DistributedOptimizer: 1 of 4 weights differ between ranks" in report
    assert ("'2.weight'" if op != "Adasum" else "'2'") in report
    assert "ranks 1, 2 have other values than rank 0; call hvd.broadcast_parameters(" in report


def test_equal_weights_are_not_reported() -> None:
    module = with_other_weights(1)
    hvd.broadcast_parameters(module.state_dict(), root_rank=0)
    assert everyones_reports(module, sgd(module)) == []


def test_what_ranks_keep_for_themselves_is_not_reported() -> None:
    module = with_other_weights(1)
    frozen, shared = torch.nn.Linear(5, 5), torch.nn.BatchNorm1d(5)
    frozen.requires_grad_(False).weight.fill_(hvd.rank())
    shared.running_mean.fill_(hvd.rank())
    whole = torch.nn.Sequential(frozen, shared, *module)
    optimizer = sgd(whole)
    optimizer.register_local_var(module[2].weight)
    assert everyones_reports(whole, optimizer) == []


def test_a_process_set_compares_its_own_ranks() -> None:
    pair = hvd.add_process_set([0, 2])
    module = with_other_weights(1)
    assert everyones_reports(module, sgd(module, process_set=pair)) == []
    module = with_other_weights(2)
    (report,) = everyones_reports(module, sgd(module, process_set=pair))
    assert "rank 2 has other values than rank 0" in report


@pytest.mark.ranks(3, framework="torch", env=WARN, fresh=True)  # ranks that have joined compare nothing
def test_a_rank_that_joins_before_its_first_step_holds_nobody_up() -> None:
    module = with_other_weights(2)
    optimizer = sgd(module)
    with drift_reports() as reports:
        if hvd.rank() != 1:
            train(module, optimizer)
        hvd.join()
        train(module, optimizer)
    assert [len(each) for each in hvd.allgather_object(reports)] == [1, 0, 0]
    assert "rank 2 has other values than rank 0" in "".join(reports) or hvd.rank() > 0


def test_weights_are_compared_in_the_first_step_only() -> None:
    module = model()
    optimizer = sgd(module)
    counts = []
    for _ in range(3):
        before = hvd.counters()["operations"]
        train(module, optimizer, steps=1)
        counts.append(hvd.counters()["operations"] - before)
    assert counts == [6, 5, 5]  # a round and four gradients


@pytest.mark.ranks(3, framework="torch", env={"POLYHVD_CHECK_DRIFT": "error"})
@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_an_error_is_raised_on_every_rank_before_the_step(op: str) -> None:
    module = with_other_weights(1)
    optimizer = sgd(module, op=getattr(hvd, op))
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with raises(RankMismatchError, "rank 1 has other values than rank 0"):
        train(module, optimizer)
    assert all(map(torch.equal, before, module.parameters()))


def test_an_error_of_backward_names_the_line_of_the_program() -> None:
    width = 4 + hvd.rank()
    weight = torch.nn.Parameter(torch.ones(width))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 0.1), [("wide", weight)])
    with raises(RankMismatchError, "'wide'", "rank 0 sent float32 [4] (test_torch_drift.py:", "rank 1 sent"):
        (weight * torch.ones(width)).sum().backward()
        optimizer.step()
