"""A `fit` that ends early on one rank of Keras on TensorFlow: the others say so, in few lines."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ended_fits import check, error_of

from unidist.jobs.pool.pool import RankPool

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize("kind", ["fewer batches", "exception", "stop"])
def test_the_others_say_that_it_has_ended(pool: Callable[..., RankPool], kind: str) -> None:
    check(kind, pool(2, "shm").run(error_of, (kind,)))
