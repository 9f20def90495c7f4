"""Which data worker makes which batch."""

from __future__ import annotations

from unidist_data_service.client import BatchWindow


def test_each_worker_has_as_many_batches_under_way_as_allowed() -> None:
    window = BatchWindow([0, 1], ahead=2)
    assert [window.choose() for _ in range(5)] == [(0, 0), (1, 1), (2, 0), (3, 1), None]
    window.came(1)
    assert window.choose() == (4, 1)
    assert window.choose() is None


def test_the_others_are_asked_at_once_for_the_batches_of_a_lost_worker() -> None:
    window = BatchWindow([0, 1], ahead=2)
    for _ in range(4):
        window.choose()
    assert window.lost(0) == [0, 2]
    assert [window.choose() for _ in range(3)] == [(0, 1), (2, 1), None]
    assert [window.worker_of(batch) for batch in range(4)] == [1, 1, 1, 1]
    assert window.workers == [1]


def test_batches_are_asked_for_once_and_in_order() -> None:
    window = BatchWindow([3, 5], ahead=3)
    asked = []
    for _ in range(20):
        chosen = window.choose()
        if chosen is None:
            window.came(asked[len(asked) - 4])
            window.came(asked[len(asked) - 5])
        else:
            asked.append(chosen[0])
    assert asked == list(range(len(asked)))
