"""What `tensor=N` refuses before any process starts."""

from __future__ import annotations

import pytest

from unidist.errors import ConfigurationError
from unidist.runtime.plugin_manager import PluginManager
from unidist.strategy.plan import build, make_plan


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tensor=0", "tensor=0: the size of a mesh axis is at least 1"),
        ("tensor=2,zero=3", "both take parameters out of their layers"),
        ("tensor=2:sequence=true,pipeline=2", "every rank of its axis, and they are divided by pipeline"),
        ("tensor=2:plan=blocks.*=sequence,pipeline=2", "sequence=true needs all blocks"),
        ("tensor=2:sequence=true,context=2", "sequence=true and context both divide the tokens of a sample"),
        ("context=2,tensor=2:plan=blocks.*=sequence", "sequence=true and context both divide the tokens"),
    ],
)
def test_what_cannot_be(line: str, message: str) -> None:
    registry = PluginManager().load().strategies
    with pytest.raises(ConfigurationError, match=message):
        make_plan(build(line, registry), 4, registry)


def test_one_rank_for_context_divides_nothing() -> None:
    registry = PluginManager().load().strategies
    make_plan(build("tensor=2:sequence=true,context=1", registry), 2, registry)
