"""A step may cost no more messages, bytes, copies and allocations than its limits say."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from tools.walks.step_counts import BUCKETS, GRADIENT_BYTES, GRADIENTS, LIMITS, StepCounts, more_than, step_table


def test_the_limits_leave_no_room_for_another_bucket_or_a_second_copy() -> None:
    assert LIMITS.messages < BUCKETS + 3
    assert LIMITS.message_bytes < GRADIENTS * GRADIENT_BYTES + 2 * GRADIENT_BYTES
    assert LIMITS.copies < 2 * GRADIENTS
    assert more_than(LIMITS, LIMITS) == []


@pytest.mark.parametrize("name", [field.name for field in fields(StepCounts)])
def test_each_count_that_grows_is_named(name: str) -> None:
    grown = replace(LIMITS, **{name: getattr(LIMITS, name) + 1})
    [line] = more_than(grown, LIMITS)
    assert line.startswith(
        f"step: {getattr(grown, name)} {name.replace('_', ' ')}, but at most {getattr(LIMITS, name)}"
    )
    assert any(name.replace("_", " ") in row for row in step_table(grown))
