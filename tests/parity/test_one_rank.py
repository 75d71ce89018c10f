"""A program that runs without a launcher is a job of one rank: each verb of each framework works there."""

from __future__ import annotations

import collectives
import exchange
import pytest
import test_objects
from worlds import Ranks

from polyhvd.collectives.adapter import Capability

pytestmark = [
    pytest.mark.sizes(1),
    pytest.mark.drivers("torch", "mxnet", "tensorflow", "tensorflow-function"),
]


def test_reductions_of_one_rank_are_its_tensors(ranks: Ranks) -> None:
    ranks.run_alike(collectives.allreduce, "Average", 0.5, 0.75)
    ranks.run_alike(collectives.numbers)


def test_rows_of_one_rank_stay_with_it(ranks: Ranks) -> None:
    ranks.run_alike(collectives.allgather, "growing")
    ranks.run_alike(collectives.broadcast)
    ranks.run(exchange.alltoall, "uneven", True)
    ranks.run(exchange.reducescatter, "Sum")
    ranks.run(exchange.grouped)
    ranks.run(exchange.adasum)
    ranks.run(exchange.join)
    ranks.run(exchange.process_sets)


def test_one_rank_may_have_much_in_flight(ranks: Ranks) -> None:
    ranks.needs(Capability.ASYNC)
    ranks.run_alike(collectives.allreduce_async, "Sum", False)
    ranks.run(exchange.everything_in_flight)


def test_objects_and_parameters_of_one_rank_are_its_own(ranks: Ranks) -> None:
    ranks.run(test_objects.broadcast_objects)
    ranks.run(test_objects.gather_objects)
    ranks.run(test_objects.refuse_objects)
    ranks.run_alike(test_objects.broadcast_model, 0)
    ranks.run(test_objects.start_again)
