"""Messages over gloo end when the other side aborts or dies, also where gloo itself would wait for ever."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest

from unidist.buffer import Buffer, DType
from unidist.errors import PeerLostError
from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("torch", reason="the engine gloo is PyTorch's")
pytestmark = pytest.mark.parallel
WAIT, SOON = timedelta(seconds=30), 15.0


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
