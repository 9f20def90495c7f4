"""Whatever breaks a rule is found, and the error says where."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plugins.unidist_pipeline.sizes import all_schedules
from unidist_pipeline.schedules.builder import with_gathers
from unidist_pipeline.schedules.model import Schedule, ScheduleError, parse_action
from unidist_pipeline.schedules.validation import validate

VALID = list(all_schedules(ranks=(1, 2, 3), microbatches=(1, 3)))


def schedule(*ranks: str, placement: tuple[int, ...] = (0, 1), num_microbatches: int = 1) -> Schedule:
    """Return a schedule from text, with the right peers."""
    lists = []
    for text in ranks:
        listed = []
        for action in map(parse_action, text.split()):
            to = {"SEND_F": 1, "RECV_B": 1, "RECV_F": -1, "SEND_B": -1}.get(action.kind.value)
            known = to is not None and 0 <= action.stage + to < len(placement)
            listed.append(action._replace(peer=placement[action.stage + (to or 0)]) if known else action)
        lists.append(tuple(listed))
    return Schedule("mine", num_microbatches, placement, tuple(lists))


RANK_0 = "0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD"
RANK_1 = "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD"


def test_the_schedule_that_the_cases_below_spoil_is_valid() -> None:
    validate(schedule(RANK_0, RANK_1))


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (("0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD", RANK_1), "rank 0, stage 0, micro-batch 0: 0F0 is missing"),
        ((RANK_0, "1RECV_F0 1F0 1SEND_B0 1REDUCE_GRAD"), "rank 1, stage 1, micro-batch 0: 1I0 is missing"),
        ((RANK_0, "1RECV_F0 1F0 1I0 1SEND_B0 1REDUCE_GRAD"), "1W0 is missing: without it the weights get no gradient"),
        ((RANK_0, "1RECV_F0 1F0 1B0 1W0 1SEND_B0 1REDUCE_GRAD"), "1W0 comes besides a full backward"),
        ((RANK_0, "1RECV_F0 1F0 1W0 1I0 1SEND_B0 1REDUCE_GRAD"), r"1W0 \(action 2\) comes before 1I0 \(action 3\)"),
        ((RANK_0, "1RECV_F0 1B0 1F0 1SEND_B0 1REDUCE_GRAD"), r"1B0 \(action 1\) comes before 1F0 \(action 2\)"),
        ((RANK_0, "1F0 1RECV_F0 1B0 1SEND_B0 1REDUCE_GRAD"), r"1F0 \(action 0\) comes before 1RECV_F0 \(action 1\)"),
        ((RANK_0, "1RECV_F0 1F0 1SEND_B0 1B0 1REDUCE_GRAD"), r"1SEND_B0 \(action 2\) comes before 1B0"),
        ((RANK_0, "1RECV_F0 1F0 1B0 1SEND_B0"), "stage 1: 1REDUCE_GRAD is missing"),
        ((RANK_0, "1RECV_F0 1F0 1REDUCE_GRAD 1B0 1SEND_B0"), "before the stage's last weight gradient"),
        ((RANK_0, RANK_1 + " 1B0"), "1B0 stands there twice, as actions 2 and 5"),
        ((RANK_0, RANK_1 + " 0F0"), r"0F0 \(action 5\) is of a stage that this rank does not have; it has 1"),
        ((RANK_0, RANK_1 + " 1F1"), r"1F1 \(action 5\) is of a micro-batch that does not exist; there are 0 to 0"),
        (("0F0 0RECV_B0 0B0 0REDUCE_GRAD", RANK_1), "0SEND_F0 is missing: stage 1 is on another rank"),
        ((RANK_0 + " 0SEND_B0", RANK_1), "0SEND_B0 has no other rank at its other end"),
        ((RANK_0 + " 0UNSHARD", RANK_1), "0UNSHARD comes after the stage's first forward"),
    ],
)
def test_the_first_broken_rule_is_named_with_its_place(ranks: tuple[str, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message) as caught:
        validate(schedule(*ranks))
    assert (caught.value.rank, caught.value.stage) != (None, None)


def test_messages_that_pass_each_other_are_found() -> None:
    spoilt = schedule(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD",
        "1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD",
        num_microbatches=2,
    )
    with pytest.raises(ScheduleError, match="1RECV_F1 is not the message that rank 0 sends at this place") as caught:
        validate(spoilt)
    assert (caught.value.rank, caught.value.stage, caught.value.microbatch) == (1, 1, 1)


def test_a_deadlock_that_only_rendezvous_has_is_told_apart() -> None:
    # Both send before they receive what the other sends.
    crossing = schedule(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD",
        num_microbatches=2,
    )
    with pytest.raises(ScheduleError, match="where a send waits for its receive: rank 0 at 0SEND_F1") as caught:
        validate(crossing)
    assert caught.value.rank == 0
    circle = schedule(
        "0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1 0REDUCE_GRAD",
        "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1 1REDUCE_GRAD",
        num_microbatches=2,
    )
    with pytest.raises(ScheduleError, match="even if sends do not wait: rank 0 at 0RECV_B0"):
        validate(circle)


def test_a_wrong_peer_is_found() -> None:
    good = schedule(RANK_0, RANK_1)
    first = good.ranks[0]
    spoilt = replace(good, ranks=((first[0], first[1]._replace(peer=0), *first[2:]), good.ranks[1]))
    with pytest.raises(ScheduleError, match="0SEND_F0 names rank 0 as its other end; it is 1"):
        validate(spoilt)
    spoilt = replace(good, ranks=((first[0]._replace(peer=1), *first[1:]), good.ranks[1]))
    with pytest.raises(ScheduleError, match="0F0 names rank 1 as its other end, but is no message"):
        validate(spoilt)


@pytest.mark.parametrize(("placement", "message"), [((0, 2), "places stage 1 on rank 2"), ((0, 0), "rank 1, but no")])
def test_a_placement_that_does_not_fit_is_found(placement: tuple[int, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        validate(replace(schedule(RANK_0, RANK_1), placement=placement))


@given(st.sampled_from(VALID), st.data())
@settings(max_examples=150, deadline=None)
def test_a_schedule_that_lacks_or_repeats_any_action_is_invalid(valid: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, valid.num_ranks - 1))
    index = data.draw(st.integers(0, len(valid.ranks[rank]) - 1))
    listed = valid.ranks[rank]
    changed = (*listed, listed[index]) if data.draw(st.booleans()) else (*listed[:index], *listed[index + 1 :])
    with pytest.raises(ScheduleError):
        validate(replace(valid, ranks=(*valid.ranks[:rank], changed, *valid.ranks[rank + 1 :])))


@given(st.sampled_from([with_gathers(each) for each in VALID]), st.data())
@settings(max_examples=150, deadline=None)
def test_a_schedule_in_another_order_is_refused_or_runs_to_its_end(valid: Schedule, data: st.DataObject) -> None:
    """No order makes validation or simulation hang or fail in another way than they should."""
    from unidist_pipeline.schedules.execution_model import MessageMode
    from unidist_pipeline.simulation.simulator import simulate

    rank = data.draw(st.integers(0, valid.num_ranks - 1))
    shuffled = tuple(data.draw(st.permutations(valid.ranks[rank])))
    changed = replace(valid, ranks=(*valid.ranks[:rank], shuffled, *valid.ranks[rank + 1 :]))
    try:
        validate(changed)
    except ScheduleError:
        return
    for messages in MessageMode:
        simulation = simulate(changed, messages=messages)
        assert [len(ends) for ends in simulation.ends] == [len(listed) for listed in changed.ranks]
