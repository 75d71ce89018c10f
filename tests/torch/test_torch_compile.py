"""Collectives inside of torch.compile, and optimizers outside of it."""

from __future__ import annotations

import pytest
import torch_compile_cases as cases

# A first graph of inductor compiles headers of C++.
pytestmark = pytest.mark.ranks(2, 3, framework="torch", timeout_s=400)

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
def test_a_compiled_operation_is_the_eager_one(operation: str) -> None:
    cases.is_the_eager_operation(operation, "aot_eager")


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_inductor_compiles_operations_of_all_kinds_into_one_graph() -> None:
    cases.several_in_one_graph("inductor")


@pytest.mark.ranks(2)
def test_operations_stay_in_the_order_of_the_program() -> None:
    cases.order_is_that_of_the_program()


def test_one_rank_may_compile_again_and_another_not_at_all() -> None:
    cases.ranks_compile_as_they_like()


@pytest.mark.ranks(2)
def test_sizes_may_be_dynamic() -> None:
    cases.sizes_may_be_dynamic()


@pytest.mark.ranks(2)
def test_names_that_are_given_reach_the_wire() -> None:
    cases.names_reach_the_wire()


@pytest.mark.ranks(2)
def test_errors_come_out_of_a_graph_as_they_are() -> None:
    cases.errors_come_out_as_they_are()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model_trains_with_a_distributed_optimizer(backend: str) -> None:
    cases.compiled_models_train(backend)


def test_sync_batch_norm_compiles_without_a_break() -> None:
    cases.sync_batch_norm_compiles()


@pytest.mark.ranks(2)
def test_operators_are_what_torch_expects_of_operators() -> None:
    cases.operators_are_sound()
