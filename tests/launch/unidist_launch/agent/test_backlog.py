"""What an agent tells a launcher that comes back."""

from __future__ import annotations

from typing import Any

from unidist_launch.agent.backlog import Backlog


def output(text: str) -> dict[str, Any]:
    return {"type": "output", "rank": 0, "stream": 1, "data": text}


def test_output_is_kept_in_order_until_it_is_taken() -> None:
    backlog = Backlog()
    for text in "abc":
        backlog.note(output(text))
    backlog.taken()
    assert [message["data"] for message in backlog.messages()] == ["b", "c"]
    for _ in range(5):
        backlog.taken()
    assert not backlog.messages()


def test_workers_that_run_and_those_that_have_ended_are_told_with_their_labels() -> None:
    backlog = Backlog()
    backlog.start(4, 0)
    backlog.start(5, 1)
    backlog.note({"type": "ended", "worker": 4})
    backlog.note({"type": "exit", "worker": 4, "pid": 104, "returncode": -9})
    facts = backlog.facts([(5, 1, 105)])
    backlog.note(output("its last words"))
    assert sorted(facts["workers"]) == [[4, 0, 104, True], [5, 1, 105, False]]
    assert [message["type"] for message in backlog.messages()] == ["output", "exit"]
    assert not facts["terminating"]


def test_the_wish_of_a_scheduler_is_not_forgotten() -> None:
    backlog = Backlog()
    backlog.note({"type": "terminating"})
    backlog.note({"type": "beat"})
    assert backlog.facts([]) == {"workers": [], "terminating": True}
