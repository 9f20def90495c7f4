"""Micro-batches are as equal as possible, and none is empty."""

from __future__ import annotations

import pytest

from unidist.errors import UsageError
from unidist_pipeline.execution.microbatches import bounds, sizes


@pytest.mark.parametrize(("samples", "count"), [(10, 4), (12, 4), (3, 8), (1, 1), (5, 4)])
def test_sizes_differ_by_one_at_most(samples: int, count: int) -> None:
    found = sizes(samples, count)
    assert sum(found) == samples
    assert len(found) == min(samples, count)
    assert found == sorted(found, reverse=True)
    assert found[0] - found[-1] <= 1
    assert [stop - start for start, stop in bounds(found)] == found


def test_a_batch_without_samples_is_refused() -> None:
    with pytest.raises(UsageError, match="without samples"):
        sizes(0, 4)
