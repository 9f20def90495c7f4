"""A `fit` that ends early on one rank of Keras on JAX: the others say so, in few lines."""

from __future__ import annotations

import pytest
from ended_fits import check, error_of
from part_pools import PartOfPool

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize("kind", ["fewer batches", "exception", "stop"])
def test_the_others_say_that_it_has_ended(two: PartOfPool, kind: str) -> None:
    check(kind, two.run(error_of, (kind,)))
