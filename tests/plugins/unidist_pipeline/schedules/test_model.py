"""The data model: notation, sizes, placements."""

from __future__ import annotations

import pytest

from unidist.errors import ConfigurationError
from unidist_pipeline.schedules.model import (
    WHOLE_STAGE,
    Action,
    ActionKind,
    PipelineSize,
    ScheduleError,
    parse_action,
    round_robin,
    v_shaped,
)


@pytest.mark.parametrize("kind", ActionKind)
def test_an_action_is_read_as_it_is_written(kind: ActionKind) -> None:
    action = Action(kind, 12, None if kind in WHOLE_STAGE else 345)
    assert parse_action(str(action)) == action


def test_the_notation_is_the_one_of_the_text() -> None:
    assert str(Action(ActionKind.FORWARD, 2, 0)) == "2F0"
    assert str(Action(ActionKind.SEND_GRADIENT, 1, 10, peer=0)) == "1SEND_B10"
    assert str(Action(ActionKind.REDUCE, 3)) == "3REDUCE_GRAD"


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2F-1", "2REDUCE_GRAD0", "2F0 ", "2SEND_F", "F"])
def test_what_is_no_action_is_refused_with_what_was_read(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action") as caught:
        parse_action(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("size", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-2, 1, 1)])
def test_a_size_below_one_is_refused(size: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigurationError, match="must be 1 or more"):
        PipelineSize(*size)


def test_stages_lie_around_the_ranks_or_there_and_back() -> None:
    size = PipelineSize(num_ranks=3, num_microbatches=1, stages_per_rank=3)
    assert round_robin(size) == (0, 1, 2, 0, 1, 2, 0, 1, 2)
    assert v_shaped(size) == (0, 1, 2, 2, 1, 0, 0, 1, 2)
