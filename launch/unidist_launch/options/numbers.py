"""The types of options that are numbers: whole or not, in a range, never nan or infinite."""

from __future__ import annotations

from typing import Any

import click
from typing_extensions import override

from unidist.options import number_fault

_MOST_SECONDS = 1e9


class Whole(click.IntRange):
    """A whole number, in a range if one is given."""

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if fault := number_fault(value, int, negative=True):
            self.fail(f"{value!r} {fault}{_wanted(self)}", param, ctx)
        return super().convert(value, param, ctx)


class Real(click.FloatRange):
    """A finite number, in a range if one is given."""

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if fault := number_fault(value, float, negative=True):
            self.fail(f"{value!r} {fault}{_wanted(self)}", param, ctx)
        return super().convert(value, param, ctx)


class Seconds(Real):
    """A duration, 0 or more."""

    def __init__(self, *, zero: bool = False) -> None:
        super().__init__(min=0, min_open=not zero)

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if found > _MOST_SECONDS:
            self.fail(f"{value!r}: give at most {_MOST_SECONDS:.0f} seconds", param, ctx)
        return found


def _wanted(given: click.IntRange | click.FloatRange) -> str:
    """Say what is in the range, for the end of a sentence."""
    if given.min is None:
        return ""
    if given.max is not None:
        return f"; give {'more than ' if given.min_open else ''}{given.min}, up to {given.max}"
    return f"; give more than {given.min}" if given.min_open else f"; give {given.min} or more"
