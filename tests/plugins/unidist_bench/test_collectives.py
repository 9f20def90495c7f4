from __future__ import annotations

import pytest

from unidist.errors import ConfigurationError
from unidist_bench.collectives import Collective, parse


def test_names_are_taken_in_any_usual_spelling_and_once() -> None:
    assert parse(()) == (Collective.ALLREDUCE,)
    assert parse(("All-Reduce", "all_gather", "allreduce", "ping-pong")) == (
        Collective.ALLREDUCE,
        Collective.ALLGATHER,
        Collective.SENDRECV,
    )
    assert parse(("all",)) == tuple(Collective)


def test_an_unknown_name_is_an_error_with_the_choices() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown collective 'allreduc'. Did you mean 'allreduce'"):
        parse(("allreduc",))
