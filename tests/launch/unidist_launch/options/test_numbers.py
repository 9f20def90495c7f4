"""Options that are numbers."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.types import FloatParamType, IntParamType

from unidist_launch.cli import cli
from unidist_launch.options import Real, Seconds, Whole


def every_option(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Parameter]]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in (*command.list_commands(context), *(() if path else ("horovodrun",))):
            found = command.get_command(context, name)
            assert found is not None
            yield from every_option(found, (*path, name))
    for parameter in command.params:
        yield " ".join((*path, *parameter.opts)), parameter


def test_no_number_of_any_command_is_nan_infinite_or_of_clicks_own_wording() -> None:
    checked = 0
    for name, parameter in every_option(cli):
        if not isinstance(parameter.type, IntParamType | FloatParamType):
            continue
        checked += 1
        for text in ("nan", "inf", "-inf", "two"):
            with pytest.raises(click.BadParameter, match=r"is not (an integer|a number|finite)"):
                parameter.type.convert(text, parameter, None)
        assert isinstance(parameter.type, Whole | Real), name
    assert checked > 60


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (Whole(min=1), "two", "'two' is not an integer; give 1 or more"),
        (Whole(1, 9), "2.5", "'2.5' is not an integer; give 1, up to 9"),
        (Whole(), "", "'' is not an integer"),
        (Real(min=0, min_open=True), "nan", "'nan' is not a number; give more than 0"),
        (Real(0, 1, min_open=True), "inf", "'inf' is not finite; give more than 0, up to 1"),
        (Seconds(), "0", "0.0 is not in the range"),
        (Seconds(zero=True), "1e300", "give at most 1000000000 seconds"),
    ],
)
def test_what_is_no_number_is_refused_with_what_is(kind: click.ParamType, text: str, message: str) -> None:
    with pytest.raises(click.BadParameter) as caught:
        kind.convert(text, None, None)
    assert message in caught.value.message


def test_numbers_in_range_are_taken() -> None:
    assert Whole(min=1).convert("3", None, None) == 3
    assert Real(0, 1).convert("0.25", None, None) == 0.25
    assert Seconds(zero=True).convert("0", None, None) == 0
