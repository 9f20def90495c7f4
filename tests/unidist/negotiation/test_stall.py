"""Operations that some ranks never submit are reported, and end at the timeout."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import numpy as np
import pytest

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator, ReportsArrivals
from unidist.errors import PeerLostError, StalledError
from unidist.negotiation import NegotiationOptions, Negotiator, OperationKind, Request
from unidist.negotiation._stall import Situation, stall_line, wanted_lines
from unidist.testing.recording import RecordingCommunicator
from unidist.testing.threads import ThreadWorld


def allreduce(name: str) -> Request:
    buffer = Buffer.of(np.ones(2, np.float32))
    return Request(name, OperationKind.ALLREDUCE, buffer, buffer, (2,))


class ArrivalsCommunicator(RecordingCommunicator, ReportsArrivals):
    """Knows who has come, from counters that the ranks of the test share."""

    def __init__(self, inner: Communicator, arrived: list[int]) -> None:
        super().__init__(inner)
        self.arrived = arrived

    def _record(self, operation: str, buffer: Buffer) -> None:
        self.arrived[self.rank] += 1

    def waiting_for(self) -> Sequence[int]:
        return [rank for rank, count in enumerate(self.arrived) if count < self.arrived[self.rank]]


class Reports(logging.Handler):
    """Collects warnings, and lets a thread wait for them."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.changed = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self.changed:
            self.lines.append(record.getMessage())
            self.changed.notify_all()

    def wait_for(self, name: str) -> str:
        """Return the first report on operation `name`. On a busy machine there may be others, of slow ranks."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.on(name), timeout=30)
            return self.on(name)[0]

    def on(self, name: str) -> list[str]:
        return [line for line in self.lines if line.startswith(repr(name))]


@pytest.fixture
def reports() -> Iterator[Reports]:
    handler = Reports()
    logger = logging.getLogger("unidist.negotiation")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def pass_fence(negotiator: Negotiator) -> None:
    """Return when every rank has come here; by then all know what each has submitted before."""
    negotiator.submit(Request("fence", OperationKind.BARRIER)).wait()


NEVER = timedelta(0)
SOON = timedelta(seconds=0.05)


def test_an_operation_that_a_rank_never_submits_is_reported_with_that_rank(reports: Reports) -> None:
    def main(communicator: Communicator) -> None:
        negotiator = Negotiator(communicator, NegotiationOptions(stall_check=SOON if communicator.rank == 1 else NEVER))
        first = {0: "missing", 2: "other"}.get(communicator.rank)
        handles = [negotiator.submit(allreduce(first), background=True)] if first else []
        pass_fence(negotiator)
        if communicator.rank == 1:
            handles.append(negotiator.submit(allreduce("missing"), background=True))
        reports.wait_for("missing")
        for name in {"missing", "other"} - {handle.request.name for handle in handles}:
            handles.append(negotiator.submit(allreduce(name), background=True))
        for handle in handles:
            handle.wait()
        communicator.barrier().wait()
        negotiator.close()

    with ThreadWorld(3) as world:
        world.run(main)
    line = reports.wait_for("missing")
    assert "'missing' (allreduce float32 (2,) sum) has waited" in line
    assert "on rank 1: submitted by ranks 0, 1, not by rank 2" in line


def test_each_name_is_reported_once(reports: Reports) -> None:
    def main(communicator: Communicator) -> None:
        if communicator.rank == 1:
            return
        negotiator = Negotiator(communicator, NegotiationOptions(stall_check=timedelta(seconds=0.01)))
        handles = [negotiator.submit(allreduce(name), background=True) for name in "ab"]
        for name in "ab":
            reports.wait_for(name)
        with pytest.raises(StalledError):
            handles[0].wait(timedelta(seconds=0.2))
        negotiator.close()

    with ThreadWorld(2) as world:
        world.run(main)
    assert sorted(line.split("'")[1] for line in reports.lines) == ["a", "b"]


def test_a_stall_check_of_zero_reports_nothing(reports: Reports) -> None:
    def main(communicator: Communicator) -> None:
        negotiator = Negotiator(communicator, NegotiationOptions(stall_check=NEVER))
        if communicator.rank == 0:
            with pytest.raises(StalledError):
                negotiator.submit(allreduce("a")).wait(timedelta(seconds=0.2))
        negotiator.close()

    with ThreadWorld(2) as world:
        world.run(main)
    assert not reports.lines


def test_ranks_that_never_came_are_named_when_the_communicator_knows(reports: Reports) -> None:
    arrived = [0, 0, 0]

    def main(communicator: Communicator) -> None:
        negotiator = Negotiator(
            ArrivalsCommunicator(communicator, arrived),
            NegotiationOptions(stall_check=SOON if communicator.rank == 0 else NEVER),
        )
        pass_fence(negotiator)
        came = arrived[1]
        communicator.barrier().wait()
        if communicator.rank == 2:
            reports.wait_for("x")
        elif communicator.rank == 0:
            while arrived[1] == came:  # until rank 1 waits for the others
                threading.Event().wait(0.001)
        handle = negotiator.submit(allreduce("x"))
        handle.wait()
        communicator.barrier().wait()
        negotiator.close()

    with ThreadWorld(3) as world:
        world.run(main)
    assert (
        "submitted by rank 0; rank 2 has submitted nothing; what rank 1 submitted is not known yet"
        in reports.wait_for("x")
    )


@pytest.mark.parametrize("background", [False, True])
def test_the_timeout_of_the_communicator_ends_the_wait_on_every_rank(background: bool) -> None:
    def main(communicator: Communicator) -> None:
        negotiator = Negotiator(communicator, NegotiationOptions(stall_check=NEVER))
        handle = negotiator.submit(allreduce(f"only_{communicator.rank}"), background=background)
        with pytest.raises(PeerLostError, match=r"gave up waiting for other ranks.*Every rank must submit the same"):
            handle.wait()
        with pytest.raises(PeerLostError):
            negotiator.submit(allreduce("later"))
        negotiator.close()

    with ThreadWorld(2, timeout=timedelta(seconds=0.3)) as world:
        world.run(main, timeout=timedelta(seconds=60))


def test_the_error_also_lists_what_others_wait_for() -> None:
    def main(communicator: Communicator) -> None:
        negotiator = Negotiator(communicator)
        handle = negotiator.submit(allreduce(f"only_{communicator.rank}"), background=True)
        pass_fence(negotiator)
        limit = SOON if communicator.rank == 0 else None
        with pytest.raises(
            PeerLostError, match=r"'only_0' .*not by rank 1; 'only_1' is submitted by rank 1, not by this rank"
        ):
            handle.wait(limit)
        negotiator.close()

    with ThreadWorld(2) as world:
        world.run(main)


class TestWords:
    """The sentences of a report."""

    request = Request("grad", OperationKind.BROADCAST, target=Buffer(0, 0, DType.INT8), root=1)

    def test_of_an_announced_operation(self) -> None:
        situation = Situation(0, 4, {"grad": {0, 3}}, frozenset({2}))
        assert stall_line(self.request, 61.2, situation) == (
            "'grad' (broadcast int8 () from root 1) has waited 61.2 s on rank 0: submitted by ranks 0, 3, "
            "not by ranks 1, 2; rank 2 has submitted nothing since"
        )

    def test_of_an_operation_whose_exchange_is_still_open(self) -> None:
        line = stall_line(self.request, 5, Situation(0, 2, {}))
        assert line.endswith("submitted by rank 0; nothing is known of rank 1")
        situation = Situation(1, 4, {}, frozenset({2}))
        assert stall_line(self.request, 5, situation).endswith(
            "submitted by rank 1; rank 2 has submitted nothing; what ranks 0, 3 submitted is not known yet"
        )
        assert situation.missing("grad") == [2]

    def test_of_an_operation_that_is_being_executed(self) -> None:
        situation = Situation(0, 3, {}, frozenset({1, 2}), frozenset({"grad"}))
        assert "all ranks have submitted it, but ranks 1, 2 did not come to its execution" in stall_line(
            self.request, 5, situation
        )

    def test_of_what_this_rank_owes(self) -> None:
        situation = Situation(0, 3, {"a": {1}, "b": {0, 1}, "c": {2}})
        assert wanted_lines({"b", "c"}, situation) == ["'a' is submitted by rank 1, not by this rank"]


def test_a_stall_shutdown_ends_the_wait_before_the_timeout() -> None:
    release = threading.Event()

    def main(communicator: Communicator) -> None:
        negotiator = Negotiator(
            communicator, NegotiationOptions(stall_check=NEVER, stall_shutdown=timedelta(seconds=0.3))
        )
        try:
            if communicator.rank == 0:
                release.wait(60)
                return
            began = time.monotonic()
            data = Buffer.allocate(1, DType.FLOAT32)
            with pytest.raises(StalledError, match="rank 0"):
                negotiator.submit(Request("x", OperationKind.ALLREDUCE, data, data, (1,))).wait()
            assert time.monotonic() - began < 30
        finally:
            release.set()
            negotiator.close()

    with ThreadWorld(2, timeout=timedelta(seconds=60)) as world:
        world.run(main)
