"""Records of calls: by engines and works that know nothing of them, as third parties write them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from threading import get_ident
from typing import Any

import pytest
from typing_extensions import override

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator, Work
from unidist.engines.single import SingleCommunicator
from unidist.errors import DeadlockError, MismatchError, OperationError, PeerLostError, UsageError
from unidist.negotiation import NamedHandle, NamedOperations, OperationKind, Request
from unidist.observation import Call, GroupCalls, Stack, observe, stacks


class Pending(Work):
    """Remembers what was on the stack while it was waited for."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.seen: Stack = []

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        self.seen = list(stacks[get_ident()])
        if self.error is not None:
            raise self.error

    @override
    def done(self) -> bool:
        return True


class Engine(SingleCommunicator):
    """One of two ranks of an engine that does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.size, self.members, self.description = 2, (0, 1), "engine, ranks 0, 1"
        self.error: Exception | None = None
        self.seen: Stack = []

    @override
    def barrier(self) -> Work:
        self.seen = list(stacks[get_ident()])
        if self.error is not None:
            raise self.error
        return Pending()

    @override
    def send(self, buffer: Buffer, *, to: int) -> Work:
        return Pending(self.error)

    @override
    def recv(self, buffer: Buffer, *, source: int) -> Work:
        return Pending()

    @override
    def split(self, ranks: Any) -> Communicator | None:
        return Engine() if ranks else None


class Handle(NamedHandle):
    """An operation that has ended as the test says."""

    rows = ()
    result = Buffer(0, 0, DType.UINT8)

    def __init__(self) -> None:
        self.seen: Stack = []
        self.ended = False

    @override
    def done(self) -> bool:
        return self.ended

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        self.seen = list(stacks[get_ident()])


class Names(NamedOperations):
    """Named operations that do nothing."""

    rank, size = 0, 2

    @override
    def submit(self, request: Request, *, background: bool = False) -> NamedHandle:
        return Handle()

    @override
    def join(self, serve: Any) -> int:
        assert self.observed is not None
        assert self.observed.joined
        return 1

    @override
    def close(self) -> None:
        """Nothing to do."""


class Observing:
    """Records the groups that it is given."""

    def __init__(self) -> None:
        self.groups: dict[str, GroupCalls] = {}
        self.asked: list[Call] = []
        self.found: BaseException | None = None

    def add(self, group: GroupCalls, communicator: Communicator) -> None:
        self.groups[group.name] = group

    def instead_of(self, error: PeerLostError, call: Call) -> BaseException:
        self.asked.append(call)
        return self.found or error


@pytest.fixture
def observer() -> Iterator[Observing]:
    yield Observing()
    assert not stacks[get_ident()], "something was left on the stack"


@pytest.fixture
def engine(observer: Observing) -> Engine:
    made = Engine()
    observe(made, "world", observer)
    return made


def test_a_communicator_of_one_rank_and_one_that_nobody_observes_keep_no_record(observer: Observing) -> None:
    assert observe(SingleCommunicator(), "world", observer).observed is None
    engine = Engine()
    work = engine.barrier()
    work.wait()
    assert engine.seen == []
    assert work.observed_call is None
    assert observer.groups == {}


def test_a_collective_is_counted_and_on_the_stack_while_it_is_issued_and_waited_for(engine: Engine) -> None:
    work = engine.barrier()
    assert engine.observed is not None
    assert engine.observed.collectives == 1
    assert engine.observed.thread == get_ident()
    assert engine.seen == [work.observed_call]
    assert stacks[get_ident()] == []
    work.wait()
    assert isinstance(work, Pending), "the engine's own work comes back"
    assert work.seen == [work.observed_call]
    call = work.observed_call
    assert call is not None
    assert (call.operation, call.kind, call.number) == ("barrier", "collective", 1)


def test_messages_are_counted_by_peer(engine: Engine) -> None:
    buffer = Buffer.allocate(3, DType.UINT8)
    engine.send(buffer, to=1)
    engine.send(buffer, to=1)
    received = engine.recv(buffer, source=1).observed_call
    assert engine.observed is not None
    assert (engine.observed.sent, engine.observed.received) == ({1: 2}, {1: 1})
    assert received is not None
    assert (received.kind, received.peer, received.data) == ("recv", 1, buffer)


def test_works_that_are_complete_belong_to_no_call(engine: Engine) -> None:
    buffer = Buffer.allocate(3, DType.UINT8)
    assert engine.allreduce(buffer, buffer).observed_call is None
    assert engine.observed is not None
    assert engine.observed.collectives == 1


def test_parts_are_observed_under_the_names_that_all_their_ranks_give_them(engine: Engine, observer: Observing) -> None:
    part, nothing, second = engine.split((0, 1)), engine.split(()), engine.split((0, 1))
    assert nothing is None
    assert part is not None
    assert second is not None
    assert list(observer.groups) == ["world", "world.1[0, 1]", "world.3[0, 1]"]
    assert part.observed is observer.groups["world.1[0, 1]"]
    assert observer.groups["world"].collectives == 3


@pytest.mark.parametrize(("error", "count"), [(UsageError("x"), 0), (OperationError("x"), 0), (MismatchError("x"), 1)])
def test_what_is_refused_before_it_is_issued_does_not_count(engine: Engine, error: Exception, count: int) -> None:
    engine.error = error
    with pytest.raises(type(error)):
        engine.barrier()
    assert engine.observed is not None
    assert engine.observed.collectives == count


def test_the_observer_knows_a_better_error_for_a_lost_peer(engine: Engine, observer: Observing) -> None:
    engine.error = PeerLostError("lost")
    with pytest.raises(PeerLostError, match="lost"):
        engine.barrier()
    observer.found = DeadlockError("both wait")
    with pytest.raises(DeadlockError, match="both wait"):
        engine.barrier()
    work = engine.send(Buffer.allocate(3, DType.UINT8), to=1)
    with pytest.raises(DeadlockError, match="both wait"):
        work.wait()
    assert [call.operation for call in observer.asked] == ["barrier", "barrier", "send"]


def test_named_operations_are_pending_until_they_are_done() -> None:
    names, group = Names(), GroupCalls("world", (0, 1), "world")
    group.handles = {}
    names.observed = group
    handle = names.submit(Request("loss", OperationKind.BARRIER))
    assert isinstance(handle, Handle)
    handle.wait()
    assert handle.seen == [handle.observed_call]
    assert handle.observed_call is not None
    assert (handle.observed_call.operation, handle.observed_call.name) == ("barrier", "loss")
    assert group.entered("named", 0, "loss", 1)
    assert not group.entered("named", 0, "accuracy", 1)
    handle.ended = True
    assert not group.entered("named", 0, "loss", 1)
    handle.wait()
    assert not group.handles, "the handle has the tensors of the operation, which nobody wants any longer"


def test_one_that_has_joined_takes_part_in_every_named_operation() -> None:
    names, group = Names(), GroupCalls("world", (0, 1), "world")
    names.observed = group
    assert names.join(print) == 1
    assert not group.joined
    group.joined = True
    assert group.entered("named", 0, "any", 1)
    assert group.entered("join", 0, "", 1)
    assert not group.entered("collective", 1, "", 1)
