"""Messages over gloo end when the other side aborts or dies, also where gloo itself would wait for ever."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from unidist.buffer import Buffer, DType
from unidist.errors import PeerLostError, StalledError
from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("torch", reason="the engine gloo is PyTorch's")
pytestmark = pytest.mark.parallel
WAIT, SOON = timedelta(seconds=90), 30.0


def _aborts_with_a_message_under_way() -> float:
    import unidist.torch as ud
    from unidist.settings.environment import set_variables

    with set_variables({"UNIDIST_ENGINE": "gloo"}):
        ud.init()
    try:
        world = ud.world()
        group = world.split(range(2))
        assert group is not None
        work = group.recv(Buffer.allocate(4, DType.UINT8), source=1 - ud.rank())  # kept: it holds the connection, too
        world.barrier().wait()
        begin = time.monotonic()
        if ud.rank() == 0:
            group.abort("enough")
        with pytest.raises(PeerLostError):
            work.wait(WAIT)
        took = time.monotonic() - begin
        world.barrier().wait()
        return took
    finally:
        ud.shutdown()


def test_an_abort_ends_a_message_on_both_sides(rank_pool: RankPoolFactory) -> None:
    assert max(rank_pool(2).run(_aborts_with_a_message_under_way)) < SOON


def _loses_the_receiver(folder: str) -> float:
    """Send more than a connection holds to a child that is stopped, and then killed."""
    import torch.distributed as dist

    from unidist_torch.engines.gloo import GlooCommunicator
    from unidist_torch.engines.store import SharedStore

    child = os.fork()
    rank = int(child == 0)
    try:
        pair = GlooCommunicator(
            SharedStore(dist.FileStore(f"{folder}/store", 2), lambda: None), "pair", rank, (0, 1), WAIT, device_index=0
        )
        token, large = Buffer.allocate(1, DType.UINT8), Buffer.allocate(16 << 20, DType.UINT8)
        if child == 0:
            work = pair.recv(large, source=0)
            pair.send(token, to=0).wait()
            os.kill(os.getpid(), signal.SIGSTOP)
        pair.recv(token, source=1).wait()
        os.waitpid(child, os.WUNTRACED)
        work = pair.send(large, to=1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        begin = time.monotonic()
        with pytest.raises(PeerLostError, match="to rank 1 on rank 0"):
            work.wait()
        pair.close()
        return time.monotonic() - begin
    finally:
        if child == 0:
            os._exit(1)


def test_a_message_that_is_half_sent_when_its_receiver_dies(rank_pool: RankPoolFactory, tmp_path: Path) -> None:
    (took,) = rank_pool(1).run(_loses_the_receiver, (str(tmp_path),))
    assert took < SOON


def _closes_after_a_stall() -> float:
    from unidist.runtime import context
    from unidist.settings.environment import set_variables

    with set_variables({"UNIDIST_ENGINE": "gloo", "UNIDIST_DEADLOCK_SEC": "0"}):
        world = context.init().world
    took = 0.0
    try:
        group = world.split(range(2))
        assert group is not None
        if world.rank == 0:
            with pytest.raises(StalledError):
                group.barrier().wait(timedelta(seconds=0.5))
            begin = time.monotonic()
            group.close()
            took = time.monotonic() - begin
        world.barrier().wait()
        group.close()
    finally:
        context.shutdown()
    return took


def test_a_group_is_closed_at_once_where_a_peer_did_not_come(rank_pool: RankPoolFactory) -> None:
    assert max(rank_pool(2).run(_closes_after_a_stall)) < SOON


def _loses_a_rank_that_connects() -> float:
    """Connect to a child that dies when it has told its address; return the longest time until that was noticed."""
    from unidist.control import ControlServer, KeyValues, KeyValueService
    from unidist_torch.engines import gloo
    from unidist_torch.engines.store import SharedStore, _JobStore

    class Dying(_JobStore):
        def set(self, key: str, value: bytes | str) -> None:
            super().set(key, value)
            os.kill(os.getpid(), signal.SIGKILL)

    longest = 0.0
    for number in range(4):  # which of the two connects to the other is chance
        with ControlServer(KeyValueService(), b"secret", host="127.0.0.1") as server:
            child = os.fork()
            try:
                rank = int(child == 0)
                values = KeyValues(("127.0.0.1", server.port), b"secret", rank=rank, timeout=WAIT)
                store = SharedStore((Dying if child == 0 else _JobStore)(values, WAIT), values.close)
                begin = time.monotonic()
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(gloo, "_FIRST_ATTEMPT", timedelta(seconds=1))
                    with pytest.raises(PeerLostError):
                        gloo.GlooCommunicator(store, f"pair {number}", rank, (0, 1), WAIT, device_index=0)
                longest = max(longest, time.monotonic() - begin)
            finally:
                if child == 0:
                    os._exit(1)
            os.waitpid(child, 0)
    return longest


def test_a_rank_that_dies_while_ranks_connect_is_noticed(rank_pool: RankPoolFactory) -> None:
    (took,) = rank_pool(1).run(_loses_a_rank_that_connects)
    assert took < SOON


def test_attempts_to_connect_take_the_timeout_together() -> None:
    from unidist_torch.engines.gloo import _attempts

    assert list(_attempts(timedelta(seconds=1))) == [timedelta(seconds=1)]
    many = list(_attempts(timedelta(minutes=30)))
    assert many[0] == timedelta(seconds=5)
    assert sum(many, timedelta()) == timedelta(minutes=30)


def _leaves_while_one_connects(slow: int) -> bool:
    """Make groups that one rank connects slowly; close each, and end the job, at once.

    Several: which of two ranks connects to the other is chance, and only one that is connected to can be too late.
    """
    from unidist.runtime import context
    from unidist.settings.environment import set_variables
    from unidist_torch.engines.store import _JobStore

    with set_variables({"UNIDIST_ENGINE": "gloo"}), pytest.MonkeyPatch.context() as patch:
        world = context.init().world
        try:
            if world.rank == slow:
                found = _JobStore.wait

                def wait(store: _JobStore, *arguments: Any) -> None:
                    found(store, *arguments)
                    time.sleep(0.05)

                patch.setattr(_JobStore, "wait", wait)
            for _ in range(6):
                group = world.split(range(world.size))
                assert group is not None
                group.close()
        finally:
            context.shutdown()
    return True


@pytest.mark.parametrize("slow", [0, 2])
def test_a_group_may_be_left_while_others_still_connect(rank_pool: RankPoolFactory, slow: int) -> None:
    assert all(rank_pool(3).run(_leaves_while_one_connects, (slow,)))
