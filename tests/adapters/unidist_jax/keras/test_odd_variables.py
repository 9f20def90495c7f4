"""Unusual variables and learning rates in Keras on JAX: as in one process, or an error of Keras or unidist."""

from __future__ import annotations

from datetime import timedelta

import pytest
from odd_variables_keras import differing, outcomes
from part_pools import PartOfPool

pytestmark = pytest.mark.parallel

LONG = timedelta(minutes=8)  # each case is compiled
REFUSED = {
    "layer thawed": "4 gradients for 2 variables",
    "layer frozen": "2 gradients for 4 variables",
    "integer, trained": "grad requires real- or complex-valued inputs",
}
"""Text of the error by case: Keras or JAX says so in one process, too."""


@pytest.mark.parametrize("strategy", ["data", "zero=1"])
def test_training_is_as_in_one_process_or_refused(two: PartOfPool, strategy: str) -> None:
    for found in two.run(outcomes, (strategy,), timeout=LONG):
        assert differing(found, REFUSED) == {}
