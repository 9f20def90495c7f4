"""Works under way, and groups made from groups. Each function runs on every rank."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator, ReduceOp, Work
from unidist.communicator_capabilities import ExchangesBlocks, SharesMemory
from unidist.errors import MismatchError, UsageError
from unidist.testing.cases._arrays import array_of, buffer_of
from unidist.testing.cases._placing import place

_POLL_LIMIT_SEC = 20.0


def barrier_times(communicator: Communicator) -> list[tuple[float, float]]:
    """Return when this rank came to each of some barriers and when it left; another rank is late each time."""
    times = []
    for late in range(communicator.size):
        if communicator.rank == late:
            _spin(0.01)
        came = time.monotonic()
        communicator.barrier().wait()
        times.append((came, time.monotonic()))
    return times


def works_are_waited_in_reverse(communicator: Communicator) -> None:
    """More operations are outstanding than any engine's queue holds, of several kinds and sizes."""
    size, rank = communicator.size, communicator.rank
    buffers = [
        place(communicator, np.full(1 + 97 * (i % 50), rank + i, np.int64), DType.INT64, engine=i % 3 == 0)
        for i in range(100)
    ]
    works = []
    for i, buffer in enumerate(buffers):
        if i % 5 == 4:
            works.append(communicator.broadcast(buffer, root=i % size))
        else:
            works.append(communicator.allreduce(buffer, buffer))
    for i in reversed(range(len(works))):
        works[i].wait()
        assert works[i].done(), f"work {i} is not done after its wait"
        expected = i % size + i if i % 5 == 4 else sum(other + i for other in range(size))
        assert (array_of(buffers[i]) == expected).all(), (
            f"operation {i} on rank {rank}: {array_of(buffers[i])[:3]}, expected {expected}"
        )


def polling_alone_completes(communicator: Communicator) -> None:
    """`done()` becomes True without a wait, on small and on large arrays, in both kinds of memory."""
    size, rank = communicator.size, communicator.rank
    for count in (1, 1000, 300_007):
        for engine in (False, True):
            buffer = place(communicator, np.full(count, rank, np.float32), DType.FLOAT32, engine=engine)
            work = communicator.allreduce(buffer, buffer, op=ReduceOp.MAX)
            limit = time.monotonic() + _POLL_LIMIT_SEC
            while not work.done():
                assert time.monotonic() < limit, f"done() stays False for float32[{count}] on rank {rank}"
            work.wait()
            assert (array_of(buffer) == size - 1).all(), f"float32[{count}] on rank {rank}"


def splits_of_every_kind(communicator: Communicator) -> None:
    """Halves, reversed order, single ranks, (), everybody, and a split of a split."""
    size, rank = communicator.size, communicator.rank
    everybody = list(range(size))
    half = everybody[: size // 2] if rank < size // 2 else everybody[size // 2 :]
    _check_group(communicator, half)
    _check_group(communicator, everybody)
    _check_group(communicator, everybody[::-1])
    _check_group(communicator, [rank])
    _check_group(communicator, [other for other in everybody if other % 2 == rank % 2][::-1])
    _check_group(communicator, everybody[1:] if rank else [])
    reverse = communicator.split(everybody[::-1])
    assert reverse is not None
    inner = reverse.split([0, *range(2, size)] if reverse.rank != 1 or size < 2 else [])
    if inner is not None:
        expected = tuple(everybody[::-1][i] for i in [0, *range(2, size)])
        assert inner.members == expected, (
            f"members of a nested split on rank {rank}: {inner.members}, expected {expected}"
        )
        _check_sum(inner)
        inner.close()
    reverse.close()
    _check_sum(communicator)


def a_split_without_this_rank_is_refused(communicator: Communicator) -> None:
    """On the spot, on the rank that passes it."""
    wrong = [[communicator.size], [communicator.rank] * 2]
    if communicator.size > 1:
        wrong.append([(communicator.rank + 1) % communicator.size])
    for ranks in wrong:
        try:
            communicator.split(ranks)
        except UsageError:
            continue
        raise AssertionError(f"split({ranks}) was not refused on rank {communicator.rank}")


def parent_and_child_interleave(communicator: Communicator) -> None:
    """Operations of a group and of its parts are under way together; ranks wait for them in different orders."""
    size, rank = communicator.size, communicator.rank
    part = communicator.split([other for other in range(size) if other % 2 == rank % 2])
    twin = communicator.split(range(size))
    assert part is not None
    assert twin is not None
    for count in (3, 2000, 70_001):
        for engine in (False, True):
            groups = (communicator, part, twin, communicator, part)
            buffers = [place(group, np.full(count, rank, np.int64), DType.INT64, engine=engine) for group in groups]
            works = [group.allreduce(buffer, buffer) for group, buffer in zip(groups, buffers, strict=True)]
            order = range(len(works)) if rank % 2 else range(len(works) - 1, -1, -1)
            for i in order:
                works[i].wait()
            for group, buffer in zip(groups, buffers, strict=True):
                expected = sum(group.members)
                assert (array_of(buffer) == expected).all(), f"{count} elements over {group.description} on rank {rank}"
    part.close()
    twin.close()


def allocated_memory_is_zeroed_and_outlives_the_communicator(communicator: Communicator) -> None:
    """Memory from `allocate` starts as zeros, also when used before, and stays after `close`."""
    for nbytes in (0, 1, 4097, 1 << 20):
        for _ in range(3):
            buffer = communicator.allocate(nbytes)
            assert buffer.count == nbytes
            assert buffer.dtype is DType.UINT8
            array = array_of(buffer)
            assert not array.any(), f"{nbytes} bytes are not zeroed on rank {communicator.rank}"
            array[:] = 255
            del array, buffer
    part = communicator.split(range(communicator.size))
    assert part is not None
    kept = part.allocate(100_000)
    array_of(kept)[:] = 7
    part.close()
    assert (array_of(kept) == 7).all()


def blocks_are_exchanged_in_one_call(communicator: Communicator) -> bool:
    """If all blocks are equal, the data behind them is reduced; if not, it is gathered. One rank may be late.

    Asked of communicators with the capability `ExchangesBlocks`; returns whether this is one.
    """
    if not isinstance(communicator, ExchangesBlocks):
        return False
    rank, size = communicator.rank, communicator.size
    block_bytes, stride = 24, 24 + 64
    memory = communicator.allocate(stride * (size + 1))
    own, everyone = memory.slice(0, stride), memory.slice(stride, stride * size)
    for step in range(6):
        is_late, differs, is_plain = step == 2 and rank == size - 1, step == 3, step == 4 and rank == 0
        block = bytes([step, rank if differs else 0]).ljust(block_bytes, b"-")
        values = np.arange(8.0) + rank + step
        result = np.zeros(8)
        if is_late:
            time.sleep(0.5)
        if is_plain:  # by the other way
            array_of(own)[:] = np.frombuffer(block + values.tobytes(), np.uint8)
            communicator.allgather(own, everyone).wait()
        else:
            source, target = Buffer.of(values), Buffer.of(result)
            is_equal = _at_once(communicator.exchange_blocks(own, everyone, block, source, target, scale=0.5))
            assert not (is_equal and differs and size > 1)
            if is_equal:  # where the ranks came soon enough
                assert (result == 0.5 * sum(np.arange(8.0) + each + step for each in range(size))).all()
        for each, found in enumerate(array_of(everyone).reshape(size, stride)):
            assert found[:2].tolist() == [step, each if differs else 0]
            assert (np.frombuffer(found[block_bytes:].tobytes()) == np.arange(8.0) + each + step).all()
        communicator.barrier().wait()
    if size > 1 and communicator.capabilities.detects_mismatch:
        with pytest.raises(MismatchError, match="agree"):
            _ = _at_once(communicator.exchange_blocks(own, everyone, block)) if rank else communicator.barrier().wait()
    communicator.barrier().wait()
    at_once = [_at_once(communicator.exchange_blocks(own, everyone, b"alone".ljust(block_bytes))) for _ in range(50)]
    assert any(at_once), "no exchange of equal blocks was complete at once"
    assert all(found[:5].tobytes() == b"alone" for found in array_of(everyone).reshape(size, stride))
    return True


def _at_once(exchanged: bool | Work) -> bool:
    """Wait for an exchange of blocks, and return whether it was complete at once with equal blocks."""
    if isinstance(exchanged, Work):
        exchanged.wait()
        return False
    return exchanged


def shared_memory_is_seen_by_all_and_written_to_by_each(communicator: Communicator) -> None:
    """All ranks see writes to `shared`; writes to `view` are private until `publish`, and then only its part is seen.

    Asked of communicators with the capability `SharesMemory`.
    """
    assert isinstance(communicator, SharesMemory)
    rank, size = communicator.rank, communicator.size
    part: Communicator | None = communicator.split(range(size))
    assert part is not None
    assert isinstance(part, SharesMemory)
    assert part.sharing_obstacle() == communicator.sharing_obstacle()
    if part.sharing_obstacle():
        return
    each = 50_000  # ends of ranks' parts are in the middle of pages
    memory = part.allocate_shared(size * each)
    shared, view = array_of(memory.shared), array_of(memory.view)
    assert (shared.size, view.size) == (size * each, size * each)
    assert not shared.any()
    assert not view.any()
    part.barrier().wait()
    own = slice(rank * each, (rank + 1) * each)
    expected = np.repeat(np.arange(1, size + 1, dtype=np.uint8), each)
    shared[own] = rank + 1
    part.barrier().wait()
    assert (view == expected).all(), "what all have written to their parts of the shared memory"
    part.barrier().wait()

    view[:] += 10  # on every rank: were it one memory, it would be added several times
    assert (view == expected + 10).all()
    part.barrier().wait()
    if size > 1:
        assert (array_of(memory.shared) == expected).all(), "nobody sees what another has written to its view"
    part.barrier().wait()
    memory.publish([(rank * each, each)])
    part.barrier().wait()
    assert (view == expected + 10).all(), "each has brought its own part to the shared memory"
    assert (shared == expected + 10).all()
    part.barrier().wait()

    if size > 1:
        view[((rank + 1) % size) * each] = 99  # the part of another
        memory.publish([(rank * each, each)])
        assert (view == expected + 10).all(), "and is forgotten"
    part.barrier().wait()
    other = part.allocate_shared(10)  # while the first is there; and it is there while the other one goes
    array_of(other.shared)[:1] = 1
    del other
    part.barrier().wait()
    assert not array_of(part.allocate_shared(0).shared).size
    part.close()
    assert (view == expected + 10).all(), "it outlives its communicator"


def ranks_that_share_differing_amounts(communicator: Communicator) -> None:
    """Ranks that ask for different amounts of shared memory all get MismatchError, and can go on."""
    assert isinstance(communicator, SharesMemory)
    if communicator.size == 1 or communicator.sharing_obstacle():
        return
    with pytest.raises(MismatchError, match="allocate_shared"):
        communicator.allocate_shared(1000 + communicator.rank)
    assert communicator.allocate_shared(1000).shared.count == 1000


def _check_group(communicator: Communicator, ranks: Sequence[int]) -> None:
    group = communicator.split(ranks)
    if not ranks:
        assert group is None, f"split(()) gave {group} on rank {communicator.rank}"
        return
    assert group is not None, f"split({list(ranks)}) gave None on rank {communicator.rank}"
    found = (group.rank, group.size, group.members)
    expected = (list(ranks).index(communicator.rank), len(ranks), tuple(communicator.members[rank] for rank in ranks))
    assert found == expected, f"split({list(ranks)}) on rank {communicator.rank}: {found}, expected {expected}"
    _check_sum(group)
    # Rank order inside the group is the one that was asked for.
    gathered = Buffer.allocate(group.size, DType.INT64)
    group.allgather(buffer_of(np.array([group.members[group.rank]]), DType.INT64), gathered).wait()
    assert tuple(array_of(gathered)) == group.members
    group.close()


def _check_sum(group: Communicator) -> None:
    for count in (5, 9001):
        buffer = buffer_of(np.full(count, group.members[group.rank], np.int64), DType.INT64)
        group.allreduce(buffer, buffer).wait()
        assert (array_of(buffer) == sum(group.members)).all(), f"sum over {group.description}"


def _spin(seconds: float) -> None:
    """Be late, at work."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        pass
