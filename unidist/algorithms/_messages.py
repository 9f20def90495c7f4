"""Messages between two ranks, as the algorithms use them.

An empty message is not sent: both sides know its size. Both sides of every message here do the same
steps, send first, then receive, then wait for the send: `send` never waits for its receiver, so no cycle
of ranks can wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from unidist.buffer import Buffer
from unidist.communicator import Communicator
from unidist.errors import PeerLostError, StalledError


def send(channel: Communicator, buffer: Buffer, *, to: int) -> None:
    """Send `buffer` to rank `to` and wait until it may be changed again."""
    if buffer.count:
        channel.send(buffer, to=to).wait()


def receive(channel: Communicator, buffer: Buffer, *, source: int) -> None:
    """Wait for the next message of rank `source` and put it into `buffer`."""
    if buffer.count:
        channel.recv(buffer, source=source).wait()


def exchange(channel: Communicator, outgoing: Buffer, *, to: int, incoming: Buffer, source: int) -> None:
    """Send to one rank while receiving from another (or the same) one."""
    sending = channel.send(outgoing, to=to) if outgoing.count else None
    receive(channel, incoming, source=source)
    if sending is not None:
        sending.wait()


def send_to_all_others(channel: Communicator, buffer: Buffer) -> None:
    """Send `buffer` to every other rank at once."""
    if buffer.count:
        sending = [channel.send(buffer, to=rank) for rank in range(channel.size) if rank != channel.rank]
        for work in sending:
            work.wait()


def cut(buffer: Buffer, counts: Sequence[int]) -> list[Buffer]:
    """Return consecutive pieces of `buffer` with the given numbers of elements."""
    pieces, start = [], 0
    for count in counts:
        pieces.append(buffer.slice(start, count))
        start += count
    return pieces


def even_counts(total: int, parts: int) -> list[int]:
    """Return `parts` sizes that differ by at most one, the larger ones first, and add up to `total`."""
    small, larger = divmod(total, parts)
    return [small + (part < larger) for part in range(parts)]


@contextmanager
def speaking_for(communicator: Communicator, operation: str) -> Iterator[None]:
    """Turn the failure of a message into that of the operation: its name in the error, the communicator aborted."""
    try:
        yield
    except PeerLostError as exc:
        text = f"{operation} over {communicator.description}: {exc}"
        communicator.abort(text)
        kind = StalledError if isinstance(exc, StalledError) else PeerLostError
        raise kind(text, ranks=exc.ranks) from exc
