"""Layouts, rules and errors that go over the wire come out as they went in."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from unidist.buffer import DType
from unidist.control.codec import decode, encode
from unidist.errors import ConfigurationError, PeerLostError, StalledError
from unidist_parameter_server.optimizers import Adam, FlatStep, Momentum, Rule
from unidist_parameter_server.store.shards import FlatMemory, ParameterSlot, cut
from unidist_parameter_server.wire import SegmentLayout, failure, rules_of, told_error, told_rules
from unidist_parameter_server.wire.messages import CopyChange, Replicate


def test_a_layout() -> None:
    shards = cut([FlatMemory(DType.FLOAT64, 1000, (ParameterSlot(0, 0, 600), ParameterSlot(1, 600, 400)))], 2000)
    layout = SegmentLayout("name", 1, shards, 2, 3, 2, 3, 10, 0)
    assert decode(encode(Replicate(layout))) == Replicate(layout)
    assert layout.nbytes >= 1000 * 8 * (1 + 2 + 3)


def test_rules_are_written_once_and_equal_ones_are_one_object_again() -> None:
    first, second = Adam(0.1, decoupled=True, weight_decay=0.5), Momentum(0.2, nesterov=True, momentum=0.9)
    message = decode(encode(CopyChange(0, 1, ((2, 3),), 0.5, told_rules([first, second, first]), (True,) * 3)))
    assert isinstance(message, CopyChange)
    assert message.rules is not None
    assert len(message.rules.different) == 2
    found = rules_of(message.rules)
    assert found == [first, second, first]
    assert found[0] is found[2]


@dataclass(frozen=True)
class _Own(Rule):
    def apply(self, step: FlatStep) -> None:
        raise NotImplementedError


def test_a_rule_that_servers_do_not_know_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"servers step by AddDifference, .*, and not by _Own"):
        told_rules([_Own()])


@pytest.mark.parametrize("error", [StalledError("it waits", ranks=[2]), PeerLostError("it is gone", ranks=(0, 1))])
def test_an_error(error: PeerLostError) -> None:
    found = told_error(failure(error))
    assert type(found) is type(error)
    assert isinstance(found, PeerLostError)
    assert (str(found), found.ranks) == (str(error), error.ranks)
