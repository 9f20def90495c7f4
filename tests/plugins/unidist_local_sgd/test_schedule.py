"""Which fragment is synchronized when, and what is in it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unidist_local_sgd.schedule import Due, SynchronizationSchedule, divide


def test_one_fragment_is_synchronized_after_every_window() -> None:
    schedule = SynchronizationSchedule(3)
    assert [position for position in range(1, 10) if schedule.due(position)] == [3, 6, 9]
    assert schedule.due(3) == Due((), (0,))


def test_fragments_are_synchronized_one_after_another() -> None:
    schedule = SynchronizationSchedule(6, fragments=3)
    sent = {position: schedule.due(position).send for position in range(1, 13)}
    assert {position: each for position, each in sent.items() if each} == {
        2: (0,), 4: (1,), 6: (2,), 8: (0,), 10: (1,), 12: (2,),
    }  # fmt: skip


def test_a_delayed_result_is_applied_before_the_next_is_sent() -> None:
    schedule = SynchronizationSchedule(4, fragments=2, delay=3)
    assert schedule.due(2) == Due((), (0,))
    assert schedule.due(4) == Due((), (1,))
    assert schedule.due(5) == Due((0,), ())
    assert schedule.due(7) == Due((1,), ())
    assert schedule.due(6) == Due((), (0,))
    assert schedule.due(9) == Due((0,), ())


@given(st.data())
def test_each_fragment_is_sent_once_in_every_window_and_applied_after_the_delay(data: st.DataObject) -> None:
    every = data.draw(st.integers(1, 12))
    fragments = data.draw(st.integers(1, every))
    delay = data.draw(st.integers(0, every - 1))
    schedule = SynchronizationSchedule(every, fragments, delay)
    pending: dict[int, int] = {}
    sent: list[list[int]] = [[] for _ in range(fragments)]
    for position in range(1, 4 * every + 1):
        due = schedule.due(position)
        for fragment in due.apply:
            assert position - pending.pop(fragment) == delay > 0
        for fragment in due.send:
            assert fragment not in pending
            sent[fragment].append(position)
            if delay:
                pending[fragment] = position
    for positions in sent:
        assert len(positions) == 4
        assert 1 <= positions[0] <= every
        assert {b - a for a, b in itertools.pairwise(positions)} == {every}
    assert len({positions[0] for positions in sent}) == fragments, "never two at once"


@pytest.mark.parametrize(
    ("counts", "fragments", "expected"),
    [
        ([35, 7, 28, 4, 4, 1], 1, [range(6)]),
        ([35, 7, 28, 4, 4, 1], 2, [range(2), range(2, 6)]),
        ([35, 7, 28, 4, 4, 1], 3, [range(1), range(1, 3), range(3, 6)]),
        ([1, 1, 100], 3, [range(1), range(1, 2), range(2, 3)]),
        ([100, 1, 1], 3, [range(1), range(1, 2), range(2, 3)]),
        ([0, 0], 2, [range(1), range(1, 2)]),
    ],
)
def test_parameters_are_divided_in_order(counts: list[int], fragments: int, expected: list[range]) -> None:
    assert divide(counts, fragments) == expected


@given(st.data())
def test_every_parameter_is_in_one_fragment_and_none_is_empty(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=12))
    fragments = data.draw(st.integers(1, len(counts)))
    found = divide(counts, fragments)
    assert len(found) == fragments
    assert all(found)
    assert [index for part in found for index in part] == list(range(len(counts)))
