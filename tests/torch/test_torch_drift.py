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
    assert "'2.weight'" in report
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


@pytest.mark.parametrize("op", ["Average", "Adasum"])
@pytest.mark.parametrize("case", ["equal", "on one rank", "broadcast", "other"])
def test_a_state_of_the_optimizer_that_only_some_ranks_have_loaded_is_reported(op: str, case: str) -> None:
    torch.manual_seed(1)
    module = model()
    optimizer: Any = torch.optim.AdamW(module.parameters(), 0.1)
    saved = torch.optim.AdamW(module.parameters(), 0.1)
    train(module, saved, steps=1)
    state = saved.state_dict()
    if case == "other" and hvd.rank() == 2:
        state["state"][1]["exp_avg"] = state["state"][1]["exp_avg"] + 1
    if hvd.rank() == 0 or case in ("equal", "other"):
        optimizer.load_state_dict(state)
    if case == "broadcast":
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, module.named_parameters(), op=getattr(hvd, op))
    reports = everyones_reports(module, optimizer)
    if case in ("equal", "broadcast"):
        assert reports == []
        return
    (report,) = reports
    counted, sides = "4 weights", "'0.weight': rank 0 has one, ranks 1, 2 have none"
    if case == "other":
        counted, sides = "1 weight", "'0.bias': rank 2 has other values than rank 0"
    assert f"the optimizer's states of {counted} differ between ranks, the first is that of " in report
    assert f"{sides}; load the state of the optimizer on every rank, or call hvd.broadcast_op" in report


def test_weights_are_compared_in_the_first_step_only() -> None:
    module = model()
    optimizer = sgd(module)
    counts = []
    for _ in range(3):
        before = hvd.counters()["operations"]
        train(module, optimizer, steps=1)
        counts.append(hvd.counters()["operations"] - before)
    assert counts == [6, 5, 5]  # a round and four gradients


def reports_of_schedule(rate_of: Any, steps: int = 6, *, between: bool = False, **options: Any) -> list[str]:
    """Those of all ranks, if ``rate_of`` a step is set before it, or between backward() and step()."""
    torch.manual_seed(1)
    module = model()
    optimizer = sgd(module, **options)
    with drift_reports() as reports:
        for step in range(steps):
            optimizer.zero_grad()
            if not between:
                optimizer.param_groups[0]["lr"] = rate_of(step)
            if not between or hvd.rank() != step % 3:
                module(torch.ones(4, 5)).sum().backward()
            if between:
                optimizer.param_groups[0]["lr"] = rate_of(step)
            optimizer.step()
    return [report for some in hvd.allgather_object(reports) for report in some]


@pytest.mark.parametrize("first", [0, 2])
def test_learning_rates_that_differ_are_reported_once_with_their_values(first: int) -> None:
    (report,) = reports_of_schedule(lambda step: 0.1 if step < first or hvd.rank() == 0 else 0.025)
    assert "DistributedOptimizer: the learning rate of '0.weight' differs" in report
    assert "between ranks: 0.1 on rank 0, 0.025 on ranks 1, 2; set the same value on every rank" in report


def test_a_rate_that_is_set_between_backward_and_step_is_not_reported() -> None:
    assert reports_of_schedule(lambda step: 0.1 / (1 + step), between=True) == []


def test_rates_that_hosts_round_differently_are_not_reported() -> None:
    assert reports_of_schedule(lambda step: (0.1 / (1 + step)) * (1 + 1e-15 * hvd.rank())) == []


def test_rates_of_other_process_sets_and_of_local_parameters_are_not_reported() -> None:
    pair = hvd.add_process_set([0, 2])
    assert reports_of_schedule(lambda _: 0.1 * (1 + hvd.rank() % 2), process_set=pair) == []
    module = model()
    plain = torch.optim.SGD(module[0].parameters(), 0.1)
    plain.add_param_group({"params": list(module[2].parameters()), "lr": 0.1 * (1 + hvd.rank())})
    optimizer = hvd.DistributedOptimizer(plain, module.named_parameters())
    for parameter in module[2].parameters():
        optimizer.register_local_var(parameter)
    hvd.broadcast_parameters(module.state_dict(), root_rank=0)
    with drift_reports() as reports:
        train(module, optimizer, steps=4)
    assert hvd.allgather_object(reports) == [[], [], []]
    optimizer.param_groups[0]["weight_decay"] = 0.01 * hvd.rank()
    with drift_reports() as reports:
        train(module, optimizer, steps=4)
    (report,) = [report for some in hvd.allgather_object(reports) for report in some]
    assert "the weight decay of '0.weight'" in report
    assert "0 on rank 0, 0.01 on rank 1, 0.02 on rank 2" in report


@pytest.mark.ranks(3, framework="torch", env={"POLYHVD_CHECK_DRIFT": "error"})
def test_learning_rates_that_differ_are_an_error_on_every_rank() -> None:
    with raises(RankMismatchError, "the learning rate of '0.weight'", "0.1 on ranks 0, 1, 0.2 on rank 2"):
        reports_of_schedule(lambda _: 0.2 if hvd.rank() == 2 else 0.1)


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


def test_a_layer_that_one_rank_freezes_is_reported_by_name() -> None:
    module = model()
    if hvd.rank() == 1:
        module[2].requires_grad_(False)
    (report,) = everyones_reports(module, sgd(module))
    names = "the ranks train different weights: '2.weight', '2.bias'"
    assert f"{names} are trained on ranks 0, 2 and not on rank 1; freeze the same weights on every" in report


def test_optimizers_of_other_layers_are_reported_by_name() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Linear(5, 5), torch.nn.Linear(5, 1))
    hvd.broadcast_parameters(module.state_dict(), root_rank=0)
    module[1 if hvd.rank() == 2 else 0].requires_grad_(False)
    named = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([each for _, each in named], 0.1), named)
    with drift_reports() as reports, pytest.raises(RankMismatchError, match="other names on other ranks"):
        train(module, optimizer)
    (report,) = [report for some in hvd.allgather_object(reports) for report in some]
    assert "'1.weight', '1.bias' are trained on ranks 0, 1 and not on rank 2" in report
    assert "'0.weight', '0.bias' are trained on rank 2 and not on ranks 0, 1" in report


@pytest.mark.parametrize("op", ["Average", "Adasum"])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("case", ["same", "other order", "not broadcast"])
def test_parameters_that_are_added_later_are_compared(op: str, named: bool, case: str) -> None:
    torch.manual_seed(1 if case != "not broadcast" else hvd.rank())
    module = torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(3)))
    hvd.broadcast_parameters(module[0].state_dict(), root_rank=0)
    names = module.named_parameters() if named else None
    optimizer: Any = torch.optim.SGD(module[0].parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, names, op=getattr(hvd, op))
    assert everyones_reports(module, optimizer) == []
    for layer in (2, 1) if case == "other order" and hvd.rank() == 1 else (1, 2):
        optimizer.add_param_group({"params": module[layer].parameters()})
    if case == "other order" and named and op != "Adasum":
        with raises(RankMismatchError, "other names on other ranks", "add groups of parameters"):
            train(module, optimizer)
        return
    reports = everyones_reports(module, optimizer)
    assert len(reports) == (case != "same")
    if reports and op == "Adasum" and named and case == "other order":
        assert "different orders: weight 2 is '1.weight' on ranks 0, 2 and '2.weight' on rank 1" in reports[0]
    elif reports:
        assert "4 of 6 weights differ between ranks" in reports[0]


@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_another_number_of_weights_is_an_error_with_their_names(op: str) -> None:
    module, other = model(), model()
    hvd.broadcast_parameters(module.state_dict(), root_rank=0)
    named = [(name, each) for name, each in module.named_parameters() if hvd.rank() != 1 or "2." not in name]
    optimizer = torch.optim.SGD([each for _, each in named], 0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named, op=getattr(hvd, op))
    with raises(RankMismatchError, "'2.weight', '2.bias' are", "on ranks 0, 2 and not on rank 1"):
        train(module, optimizer)
    train(other, sgd(other))
