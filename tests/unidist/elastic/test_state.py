"""States with shares: what a lost rank leaves behind in the middle of a commit, and a rank 0 that has just joined."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from unidist.buffer import Buffer
from unidist.checkpoint.format.interface import MemoryState
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.pieces import Piece, TensorInfo
from unidist.communicator import Communicator
from unidist.elastic import state as state_module
from unidist.elastic.handlers import StatefulHandler
from unidist.elastic.peer.memory import Peers
from unidist.elastic.state import ObjectState, SharedHandler
from unidist.errors import PeerLostError
from unidist.negotiation.objects import gather_objects
from unidist.testing import ThreadWorld

LENGTH = 12


class Runtime:
    """What a state needs of a context: a communicator, and which generation it belongs to."""

    def __init__(self, communicator: Any, generation: int, worker: int) -> None:
        self.peers = Peers(communicator, generation, worker)


class LosesItsPeers:
    """A communicator whose next barrier tells this rank alone that a peer is lost, after all have come to it."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)

    def barrier(self) -> Any:
        work = self._communicator.barrier()

        class Lost:
            def wait(self) -> None:
                work.wait()
                raise PeerLostError("a peer is lost")

        return Lost()


class Counter:
    """A value with `state_dict`."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Member:
    """A process: its state has a share of one tensor, a plain value and an object, which all say the same step."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.state: Any = None
        self.counter = Counter()
        self._share: tuple[Part, bytearray] | None = None

    def join(self, runtime: Runtime) -> None:
        """Be in a generation, with this rank's share of the tensor."""
        _present.runtime = runtime
        communicator = runtime.peers.communicator
        start, stop = (LENGTH * each // communicator.size for each in (communicator.rank, communicator.rank + 1))
        self._share = Part.flat((LENGTH,), start, stop), bytearray(8 * (stop - start))
        if self.state is None:
            handlers = {
                "share": SharedHandler(self, lambda member: {"s": member.kept()}),
                "counter": StatefulHandler(self.counter),
            }
            self.state = ObjectState(_from_rank_0, handlers=handlers, step=0)  # type: ignore[arg-type]
            self.state._handlers["counter"].sync = lambda: self.counter.load_state_dict(
                _from_rank_0(self.counter.state_dict())
            )

    def kept(self) -> MemoryState:
        assert self._share is not None
        part, data = self._share
        buffer = Buffer.of(memoryview(data).cast("d"))
        return MemoryState([Piece(TensorInfo("t", (LENGTH,), buffer.dtype), part, buffer)], {})

    def train(self, step: int) -> None:
        assert self._share is not None
        part, data = self._share
        memoryview(data).cast("d")[:] = memoryview(bytearray(8 * part.count)).cast("d")
        for position in range(part.count):
            memoryview(data).cast("d")[position] = 100.0 * step + part.start + position
        self.state.step = self.counter.count = step

    def check(self, step: int) -> None:
        assert (self.state.step, self.counter.count) == (step, step)
        assert self._share is not None
        found = memoryview(self._share[1]).cast("d").tolist()
        self.train(step)
        assert memoryview(self._share[1]).cast("d").tolist() == found


_present = threading.local()


def _from_rank_0(value: Any) -> Any:
    return gather_objects(_present.runtime.peers.communicator, value)[0]


@pytest.fixture(autouse=True)
def contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each thread have a context."""
    monkeypatch.setattr(state_module.context, "current", lambda: _present.runtime)
    monkeypatch.setattr(state_module, "peers_of", lambda runtime: runtime.peers)


def world(members: list[Member], generation: int, act: Callable[[Member, Any], None], *, losing: int = -1) -> None:
    """Have all members act in a generation, each in a thread; `losing`: which of them hears of a loss in a barrier."""

    def main(communicator: Any) -> None:
        member = members[communicator.rank]
        member.join(Runtime(communicator, generation, member.number))
        act(member, communicator)

    with ThreadWorld(len(members)) as made:
        made.run(main)


def commit_twice(loser: int) -> list[Member]:
    """Return two members that have committed steps 1 and 2, one of which has not heard that all have the second."""
    members = [Member(0), Member(1)]

    def act(member: Member, communicator: Any) -> None:
        member.train(1)
        member.state.save()
        member.train(2)
        if member.number != loser:
            member.state.save()
            return
        _present.runtime.peers = Peers(LosesItsPeers(communicator), 0, member.number)  # type: ignore[arg-type]
        member.state._shares._communicator = _present.runtime.peers.communicator
        with pytest.raises(PeerLostError):
            member.state.save()

    world(members, 0, act)
    return members


def recover(member: Member, communicator: Any) -> None:
    member.state.restore()
    member.state.sync()
    member.check(2)


@pytest.mark.parametrize("loser", [0, 1])
@pytest.mark.parametrize("first", [0, 1])
def test_a_commit_that_one_rank_has_marked_is_that_of_all(loser: int, first: int) -> None:
    members = commit_twice(loser)
    world(members[first:] + members[:first], 1, recover)


def test_a_rank_that_was_in_a_broken_commit_goes_back_to_the_one_before() -> None:
    loser = commit_twice(0)[0]
    _present.runtime = None  # not that in which the commit was made
    loser.state.restore()
    assert (loser.state.step, loser.counter.count) == (1, 1)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_rank_that_joins_gets_the_values_whichever_rank_it_becomes(place: int) -> None:
    members = commit_twice(-1)
    newcomer = Member(7)

    def alone(communicator: Any) -> None:
        newcomer.join(Runtime(communicator, -1, 7))

    with ThreadWorld(1) as made:
        made.run(alone)
    world([*members[:place], newcomer, *members[place:]], 1, recover)
