"""What goes wrong between the ranks of tcp after they have connected: calls that differ, cut messages, garbage."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from unidist.jobs.pool.pool import RankPool

pytest.importorskip("unidist_tcp._tcp", reason="the C code is not built")
pytestmark = pytest.mark.parallel

Pools = Callable[..., RankPool]
ENV = {"UNIDIST_ENGINE": "tcp", "UNIDIST_HIERARCHICAL": "0", "UNIDIST_TIMEOUT_SEC": "30"}


def test_differing_calls_are_a_mismatch_on_every_rank(rank_pool: Pools) -> None:
    """Two ranks of three see it; the third one is told. Not one of them gets a number."""

    def on_rank() -> list[tuple[str, str]]:
        from unidist.buffer import Buffer, DType
        from unidist.communicator import ReduceOp
        from unidist.errors import UnidistError
        from unidist.runtime import context

        world = context.init().world
        is_odd = world.rank == 2
        ones = [1] * world.size
        found = []
        for what in ("count", "dtype", "reduction", "scale", "root", "kind", "counts", "large"):
            part = world.split(range(world.size))
            assert part is not None
            n = 300_000 if what == "large" else 9
            n += 3 if is_odd and what in ("count", "large") else 0
            dtype = DType.INT32 if is_odd and what == "dtype" else DType.FLOAT32
            op = ReduceOp.MAX if is_odd and what == "reduction" else ReduceOp.SUM
            buffer = Buffer.allocate(n, dtype)
            try:
                if what == "kind" and is_odd:
                    part.barrier().wait()
                elif what == "root":
                    part.broadcast(buffer, root=1 if is_odd else 0).wait()
                elif what == "counts":
                    counts = [2, 0, 1] if is_odd else ones
                    target = Buffer.allocate(3, dtype)
                    part.allgather(Buffer.allocate(counts[part.rank], dtype), target, counts=counts).wait()
                else:
                    scale = 0.5 if is_odd and what == "scale" else 1.0
                    part.allreduce(buffer, buffer, op=op, scale=scale).wait()
                part.barrier().wait()  # who was through may hear of it here
                found.append((what, "nothing"))
            except UnidistError as exc:
                found.append((f"{what}: {exc}", type(exc).__name__))
            world.barrier().wait()
            part.close()
        context.shutdown()
        return found

    for outcomes in rank_pool(3, env=ENV).run(on_rank):
        assert len(outcomes) == 8
        for text, kind in outcomes:
            assert kind == "MismatchError", text
            assert "rank 2 called" in text


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"GET / HTTP/1.1\r\n\r\n" + bytes(200), id="no frame"),
        pytest.param(b"TCP1\x01\0\0\0" + bytes(40) + b"\xff" * 16, id="longer than any frame"),
        pytest.param(b"TCP1\x01\0\0\0", id="half a frame"),
    ],
)
def test_garbage_on_a_connection_is_a_lost_peer(rank_pool: Pools, data: bytes) -> None:
    def on_rank() -> tuple[int, tuple[int, ...], str]:
        import contextlib
        import os
        import socket

        from unidist.buffer import Buffer, DType
        from unidist.errors import PeerLostError
        from unidist.runtime import context

        def lanes() -> list[int]:
            """Return the descriptors of the engine's connections, which ask an idle peer every second."""
            found = []
            for name in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as sock:
                    if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1:
                        found.append(int(name))
            return found

        world = context.init().world
        buffer = Buffer.allocate(100_000, DType.FLOAT32)
        world.allreduce(buffer, buffer).wait()
        descriptors = lanes()
        word = Buffer.allocate(1, DType.UINT8)  # rank 0 is through with what comes before the garbage
        (world.send(word, to=1) if world.rank == 0 else world.recv(word, source=0)).wait()
        if world.rank == 1:
            for descriptor in descriptors:
                os.set_blocking(descriptor, True)
                os.write(descriptor, data)
        found: tuple[tuple[int, ...], str] = ((), "noticed nothing")
        try:
            for _ in range(1000):
                world.allreduce(buffer, buffer).wait()
        except PeerLostError as exc:
            found = exc.ranks, str(exc)
        context.shutdown()
        return len(descriptors), *found

    (num_lanes, ranks, text), (_, _, other) = rank_pool(2, env=ENV).run(on_rank)
    assert num_lanes == 2
    assert ranks == (1,), text
    assert "it sent what is no frame of this protocol" in text
    assert other != "noticed nothing"


def test_a_rank_killed_in_the_middle_of_a_message_is_named(rank_pool: Pools) -> None:
    def on_rank(victim: int) -> Any:
        import os
        import signal

        from unidist.buffer import Buffer, DType
        from unidist.errors import PeerLostError
        from unidist.runtime import context

        child = os.fork() if int(os.environ["UNIDIST_RANK"]) == victim else -1
        if child > 0:
            os.waitpid(child, 0)
            return (), ""
        world = context.init().world
        buffer = Buffer.allocate(50_000_000, DType.UINT8)
        while child == 0:  # one message after the other, until it sees itself in the middle of one
            sent = world._connections.transport.num_bytes_sent  # type: ignore[attr-defined]
            work, before = world.send(buffer, to=0), sent()
            while not work.done():
                if 3_000_000 < sent() - before < 40_000_000:
                    os.kill(os.getpid(), signal.SIGKILL)
        try:
            while world.rank == 0:
                world.recv(buffer, source=victim).wait()
            world.barrier().wait()
        except PeerLostError as exc:
            found = exc.ranks, str(exc)
        else:
            found = (), "noticed nothing"
        context.shutdown()
        return found

    outcomes = rank_pool(3, env=ENV).run(on_rank, (1,))
    for rank in (0, 2):
        ranks, text = outcomes[rank]
        assert ranks == (1,), text
        assert re.search("closed the connection|connection to it broke", text), "it was not told by silence"


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("another version", r"rank 1 runs version 63 of the engine tcp, and rank 0 version 02; install one version"),
        ("no encryption", r"rank\(s\) 0, 2 encrypt what they send .* and rank\(s\) 1 do not"),
    ],
)
def test_one_rank_that_does_not_fit_is_a_line_on_every_rank(rank_pool: Pools, what: str, text: str) -> None:
    def on_rank() -> str:
        import os

        from unidist.errors import ConfigurationError
        from unidist.runtime import context
        from unidist.settings.environment import set_variables
        from unidist_tcp import handshake

        own, is_odd = handshake.PROTOCOL, os.environ["UNIDIST_RANK"] == "1"
        handshake.PROTOCOL = 0x63 if is_odd and what == "another version" else own
        try:
            with set_variables({"UNIDIST_TLS": "0"} if is_odd and what == "no encryption" else {}):
                context.init()
        except ConfigurationError as exc:
            return str(exc)
        finally:
            handshake.PROTOCOL = own
        context.shutdown()
        return "connected"

    # Other ranks than those above, of which one has not taken part in an init().
    for found in rank_pool(3, env={**ENV, "UNIDIST_TLS": "1"}).run(on_rank):
        assert re.search(text, found), found
        assert "\n" not in found
