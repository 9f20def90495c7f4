"""A case that can only raise an error of its own is refused, as it would agree with itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("horovod", reason="Horovod is not installed (`unidist build horovod`)")
from beside import CaseError, Raised, attempt


def of_a_table(body: str) -> Callable[[], object]:
    """Return a function that is defined in a table of cases."""
    names: dict[str, Callable[[], object]] = {}
    exec(compile(f"def case():\n    {body}\n", "some_cases.py", "exec"), {"attempt": attempt}, names)
    return names["case"]


@pytest.mark.parametrize("body", ["no_such_name", "raise NotImplementedError", "assert 1 == 2"])
def test_errors_of_the_case_itself_are_refused(body: str) -> None:
    with pytest.raises(CaseError, match=r"case, line 2, raised (NameError|NotImplementedError|AssertionError)"):
        attempt(of_a_table(body))
    with pytest.raises(CaseError):  # inside of another attempt, too
        attempt(lambda: attempt(of_a_table(body)))


@pytest.mark.parametrize("body", ["return int('x')", "return [][0]"])
def test_errors_that_a_call_may_raise_are_outcomes(body: str) -> None:
    assert isinstance(attempt(of_a_table(body)), Raised)


def test_an_error_of_what_is_called_is_an_outcome() -> None:
    def called() -> None:
        raise NotImplementedError("of the library")

    assert attempt(called).kinds[0] == "NotImplementedError"
