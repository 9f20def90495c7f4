"""What an agent tells a launcher that comes back."""

from __future__ import annotations

from unidist.control.messages import Beat, Output, Terminating, WorkerEnded, WorkerExit
from unidist_launch.agent.backlog import Backlog


def output(text: str) -> Output:
    return Output(0, 1, text.encode())


def test_output_is_kept_in_order_until_it_is_taken() -> None:
    backlog = Backlog()
    for text in "abc":
        backlog.note(output(text))
    backlog.taken()
    assert backlog.messages() == [output("b"), output("c")]
    for _ in range(5):
        backlog.taken()
    assert not backlog.messages()


def test_workers_that_run_and_those_that_have_ended_are_told_with_their_labels() -> None:
    backlog = Backlog()
    backlog.start(4, 0)
    backlog.start(5, 1)
    backlog.note(WorkerEnded(4))
    backlog.note(WorkerExit(4, 104, -9))
    workers = backlog.workers([(5, 1, 105)])
    backlog.note(output("its last words"))
    assert sorted(workers) == [(4, 0, 104, True), (5, 1, 105, False)]
    assert backlog.messages() == [output("its last words"), WorkerExit(4, 104, -9)]
    assert not backlog.is_terminating


def test_the_wish_of_a_scheduler_is_not_forgotten() -> None:
    backlog = Backlog()
    backlog.note(Terminating())
    backlog.note(Beat())
    assert backlog.is_terminating
    assert not backlog.messages()
