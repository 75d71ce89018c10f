"""The collectives on torch tensors: what parity with the other frameworks does not show."""

from __future__ import annotations

import pytest
import torch_ops_cases as cases

pytestmark = pytest.mark.ranks(2, 3, framework="torch")


def test_every_dtype_survives_every_form() -> None:
    cases.dtypes_survive_every_form()


def test_gathered_tensors_own_their_memory() -> None:
    cases.gathered_tensors_own_their_memory()


def test_in_place_forms_return_their_argument() -> None:
    cases.in_place_forms_return_their_argument()


def test_other_forms_leave_their_argument_alone() -> None:
    cases.other_forms_leave_their_argument_alone()


def test_parameters_may_be_overwritten() -> None:
    cases.parameters_may_be_overwritten()


def test_views_are_written_through() -> None:
    cases.views_are_written_through()


def test_negative_views_have_their_values_not_those_of_their_memory() -> None:
    cases.negative_views_have_their_values()


def test_groups_may_mix_dtypes() -> None:
    cases.groups_of_mixed_dtypes()


def test_groups_may_be_generators() -> None:
    cases.groups_may_be_generators()


def test_a_group_is_one_operation() -> None:
    cases.groups_through_the_async_form_are_one_operation()


def test_compression_restores_the_dtype() -> None:
    cases.compression_restores_the_dtype()


def test_exchanges_work_in_every_form() -> None:
    cases.exchanges_in_every_form()


def test_compression_of_reducescatter_restores_the_dtype() -> None:
    cases.compression_of_reducescatter()


def test_sparse_tensors_are_summed_and_merged() -> None:
    cases.sparse_tensors_are_summed()


def test_sparse_sums_cost_what_their_nonzeros_do() -> None:
    cases.sparse_sums_cost_what_their_nonzeros_do()


def test_names_of_gradients_recur() -> None:
    cases.names_of_gradients_recur()


def test_average_can_be_asked_for_in_the_old_ways() -> None:
    cases.old_ways_to_ask_for_an_average()


def test_tensors_can_be_read_without_the_exchange_api() -> None:
    cases.tensors_without_the_exchange_api()


def test_handles_keep_their_tensors_and_no_longer() -> None:
    cases.handles_keep_their_tensors()


def test_a_name_or_memory_in_flight_cannot_be_used_again() -> None:
    cases.names_in_flight_are_an_error()


def test_what_cannot_be_communicated_is_a_type_error() -> None:
    cases.what_is_no_tensor_is_named()


def test_bad_arguments_are_errors_at_once() -> None:
    cases.bad_arguments_are_errors_at_once()


def test_disagreements_are_errors_on_every_rank_and_the_job_goes_on() -> None:
    cases.disagreements_are_errors_on_every_rank()


def test_overwriting_what_backward_needs_is_an_error() -> None:
    cases.overwriting_what_backward_needs_is_an_error()


@pytest.mark.parametrize(
    "case",
    [
        "gradient_of_allreduce",
        "gradient_through_compression",
        "gradient_of_grouped_allreduce",
        "gradient_of_allgather",
        "gradient_of_broadcast",
        "gradient_of_reducescatter",
        "gradient_of_grouped_reducescatter",
        "gradient_of_grouped_allgather",
        "gradient_of_alltoall",
        "gradient_of_allgather_while_a_rank_has_joined",
        "second_derivatives",
    ],
)
def test_derivatives_are_those_of_the_sum_of_all_ranks_losses(case: str) -> None:
    getattr(cases, case)()


@pytest.mark.parametrize(
    "kind",
    [
        "allreduce",
        "grouped_allreduce",
        "allgather",
        "broadcast",
        "alltoall",
        "alltoall with splits",
        "reducescatter",
    ],
)
def test_torch_func_has_the_gradients_of_autograd(kind: str) -> None:
    cases.gradients_of_torch_func(kind)


def test_there_is_no_gradient_where_none_is_defined() -> None:
    cases.no_gradient_where_there_is_none()


@pytest.mark.ranks(2)
def test_signatures_are_those_of_horovod() -> None:
    cases.signatures_are_those_of_horovod()


@pytest.mark.ranks(2)
def test_exported_names_exist_and_are_sorted() -> None:
    cases.exported_names_exist_and_are_sorted()
