"""Real models on several ranks, against one process with the joined batch."""

from __future__ import annotations

import pytest
import torch_models_cases as cases

pytestmark = pytest.mark.ranks(2, 3, framework="torch")


@pytest.mark.ranks(2, timeout_s=240)
@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        pytest.param("resnet18", marks=pytest.mark.slow),
        "lstm",
        pytest.param("transformer", marks=pytest.mark.slow),
    ],
)
def test_a_model_trains_as_in_one_process_on_the_joined_batch(name: str) -> None:
    cases.trains_like_one_process(name)
