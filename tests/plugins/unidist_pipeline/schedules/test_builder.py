"""What is put between the computing actions: messages in one order for all ranks, exchanges, gathers."""

from __future__ import annotations

import pytest

from tests.plugins.unidist_pipeline.sizes import all_schedules
from unidist_pipeline.schedules.builder import complete, with_gathers
from unidist_pipeline.schedules.classic import one_forward_one_backward
from unidist_pipeline.schedules.model import Action, ActionKind, PipelineSize, ScheduleError, parse_action
from unidist_pipeline.schedules.validation import validate


def actions(text: str) -> list[Action]:
    return [parse_action(word) for word in text.split()]


def test_messages_stand_after_what_makes_them_and_before_what_needs_them() -> None:
    schedule = one_forward_one_backward(PipelineSize(2, 2))
    assert [" ".join(map(str, listed)) for listed in schedule.ranks] == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD",
    ]
    assert schedule.ranks[0][1].peer == 1
    assert schedule.ranks[1][0].peer == 0


def test_stages_on_one_rank_exchange_no_messages() -> None:
    schedule = complete("one rank", PipelineSize(1, 1, 2), (0, 0), [actions("0F0 1F0 1B0 0B0")])
    assert " ".join(map(str, schedule.ranks[0])) == "0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD"
    validate(schedule)


def test_every_schedule_keeps_its_computing_order_and_is_valid() -> None:
    for schedule in all_schedules(ranks=(1, 2, 3, 4, 6), microbatches=(1, 2, 4, 5, 11)):
        validate(schedule)
        again = complete(
            schedule.name,
            PipelineSize(schedule.num_ranks, schedule.num_microbatches),
            schedule.placement,
            schedule.compute(),
        )
        assert again == schedule


def test_gathers_come_once_for_each_stage_before_its_first_forward() -> None:
    for schedule in all_schedules(ranks=(3,), microbatches=(4,)):
        gathering = with_gathers(schedule)
        validate(gathering)
        for rank, listed in enumerate(gathering.ranks):
            kinds = [action.kind for action in listed]
            assert kinds.count(ActionKind.GATHER) == len(schedule.stages[rank])
            assert tuple(action for action in listed if action.kind is not ActionKind.GATHER) == schedule.ranks[rank]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (["0F0 0B0", "1B0 1F0"], "rank 0 waits at 0B0 .* for the gradient of stage 1, micro-batch 0"),
        (["0F0 0SEND_F0 0B0", "1F0 1B0"], "rank 0, action 1: 0SEND_F0 does not compute"),
        (["0F0 1F0 0B0", "1F0 1B0"], "rank 0, action 1: 1F0 is not for this rank, which has stages 0"),
        (["0F0 0F1 0B0", "1F0 1B0"], "0F1 is not for this rank, .* micro-batches 0 to 0"),
        (["0F0 0B0"], "lists for 1 ranks"),
    ],
)
def test_lists_that_cannot_be_run_are_refused(ranks: list[str], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        complete("bad", PipelineSize(2, 1), (0, 1), [actions(text) for text in ranks])
