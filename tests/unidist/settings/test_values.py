"""Single values out of the environment."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from unidist.errors import ConfigurationError
from unidist.settings.values import first_set, integer, non_negative, real, required, seconds


@pytest.mark.parametrize(
    ("env", "name"), [({}, "A"), ({"A": "", "B": "1"}, "B"), ({"A": "0", "B": "1"}, "A"), ({"C": "1"}, "A")]
)
def test_the_first_variable_that_says_something_is_taken(env: dict[str, str], name: str) -> None:
    assert first_set(env, "A", "B") == name


@pytest.mark.parametrize("text", [None, ""])
def test_what_is_not_set_or_empty_is_the_default(text: str | None) -> None:
    env = {} if text is None else {"A": text}
    assert (integer(env, "A", -3), non_negative(env, "A", 3), real(env, "A", 0.5)) == (-3, 3, 0.5)
    assert seconds(env, "A", timedelta(minutes=1)) == timedelta(minutes=1)


def test_a_variable_without_a_name_is_the_default() -> None:
    assert integer({"": "7"}, "", 2) == 2


def test_values_are_read() -> None:
    env = {"A": "-7", "B": "7", "C": "0.25", "D": "0"}
    assert (integer(env, "A", 0), required(env, "B", "set"), non_negative(env, "B", 0)) == (-7, 7, 7)
    assert (real(env, "C", 1.0), seconds(env, "C", timedelta(1))) == (0.25, timedelta(milliseconds=250))
    assert seconds(env, "D", timedelta(1), zero_allowed=True) == timedelta(0)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (lambda env: integer(env, "A", 0), "1.5"),
        (lambda env: required(env, "A", "set by x"), "x"),
        (lambda env: non_negative(env, "A", 0), "-1"),
        (lambda env: real(env, "A", 0.0), "nan"),
        (lambda env: seconds(env, "A", timedelta(1)), "0"),
    ],
)
def test_what_cannot_be_meant_is_an_error_that_names_the_variable(
    read: Callable[[dict[str, str]], Any], text: str
) -> None:
    with pytest.raises(ConfigurationError, match=r"^A="):
        read({"A": text})


def test_what_is_missing_is_named_with_who_has_set_the_others() -> None:
    with pytest.raises(ConfigurationError, match="B is not set, though other variables are set by x"):
        required({"A": "1"}, "B", "set by x")
