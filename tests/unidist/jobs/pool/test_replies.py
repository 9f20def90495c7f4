"""What tells the reply of a function that raised from that of one that returned."""

from __future__ import annotations

from typing import Any

import pytest

from unidist.jobs.pool import answer_of, is_error


@pytest.mark.parametrize(
    "result", ["error", "an error", ("error", 1, 2, 3), {"error": "error"}, b"error", None, "x" * 70_000]
)
def test_a_result_that_speaks_of_errors_is_none(result: Any) -> None:
    assert not is_error(answer_of(lambda: result))


@pytest.mark.parametrize("text", ["", "value", "x" * 70_000])
def test_an_exception_is_one(text: str) -> None:
    def fail() -> None:
        raise ValueError(text)

    assert is_error(answer_of(fail))
