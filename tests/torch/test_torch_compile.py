"""Collectives inside of torch.compile, and optimizers outside of it."""

from __future__ import annotations

import pytest
from on_ranks import Functions
from pool import Pool

cases = Functions("torch_compile_cases")
_COMPILE_S = 400.0  # a first graph of inductor compiles headers of C++

OPERATIONS = [
    "allreduce",
    "allreduce sum",
    "grouped_allreduce",
    "compressed",
    "allgather",
    "grouped_allgather",
    "broadcast",
    "reducescatter",
    "grouped_reducescatter",
    "alltoall",
    "alltoall with splits",
    "in place",
    "process set",
]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_compiled_operation_is_the_eager_one(ranks: Pool, operation: str) -> None:
    ranks.run(cases.is_the_eager_operation, operation, "aot_eager", deadline_s=_COMPILE_S)


@pytest.mark.sizes(2)
def test_inductor_compiles_all_operations_into_one_graph(ranks: Pool) -> None:
    ranks.run(cases.all_in_one_graph, "inductor", deadline_s=_COMPILE_S)


@pytest.mark.sizes(2)
def test_operations_stay_in_the_order_of_the_program(ranks: Pool) -> None:
    ranks.run(cases.order_is_that_of_the_program, deadline_s=_COMPILE_S)


def test_one_rank_may_compile_again_and_another_not_at_all(ranks: Pool) -> None:
    ranks.run(cases.ranks_compile_as_they_like, deadline_s=_COMPILE_S)


@pytest.mark.sizes(2)
def test_sizes_may_be_dynamic(ranks: Pool) -> None:
    ranks.run(cases.sizes_may_be_dynamic, deadline_s=_COMPILE_S)


@pytest.mark.sizes(2)
def test_names_that_are_given_reach_the_wire(ranks: Pool) -> None:
    ranks.run(cases.names_reach_the_wire, deadline_s=_COMPILE_S)


@pytest.mark.sizes(2)
def test_errors_come_out_of_a_graph_as_they_are(ranks: Pool) -> None:
    ranks.run(cases.errors_come_out_as_they_are, deadline_s=_COMPILE_S)


@pytest.mark.sizes(2)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model_trains_with_a_distributed_optimizer(ranks: Pool, backend: str) -> None:
    ranks.run(cases.compiled_models_train, backend, deadline_s=_COMPILE_S)


def test_sync_batch_norm_compiles_without_a_break(ranks: Pool) -> None:
    ranks.run(cases.sync_batch_norm_compiles, deadline_s=_COMPILE_S)


@pytest.mark.sizes(2)
def test_operators_are_what_torch_expects_of_operators(ranks: Pool) -> None:
    ranks.run(cases.operators_are_sound, deadline_s=_COMPILE_S)
