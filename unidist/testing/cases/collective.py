"""Collectives against numpy. Each function runs on every rank and returns the digests of its results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from unidist.buffer import Buffer, DType, copy
from unidist.communicator import Communicator, ReduceOp, Work
from unidist.errors import UsageError
from unidist.testing.cases._arrays import Array, array_of, buffer_of, decode, encode, exact_values, reduced, storage
from unidist.testing.cases._placing import Mode, Outcomes, in_turn, modes_for, place, room

Unsupported = Collection[tuple[DType, ReduceOp]]
_Ways = tuple[int, list[tuple[Mode, float]]]

COUNTS = (0, 1, 3, 64, 1000, 5003)
LARGE = 300_007
LARGEST = 3_000_017


def allreduce_of_every_type(
    communicator: Communicator, dtypes: Sequence[DType], unsupported: Unsupported, in_pairs: bool = False
) -> dict[str, int]:
    """Every dtype, reduction and memory mode, with scales; combinations without meaning are refused."""
    size, outcomes = communicator.size, Outcomes(communicator.rank)
    rng = np.random.default_rng(1)
    turns = itertools.count()
    for dtype in dtypes:
        for op in ReduceOp:
            if (dtype, op) in unsupported or (dtype.is_complex and op in (ReduceOp.MIN, ReduceOp.MAX)):
                _refused(communicator, dtype, op)
                continue
            for count, ways in _two_of_the_ways(size, turns) if in_pairs else _every_way(size):
                values = [exact_values(rng, count, dtype, op) for _ in range(size)]
                for mode, scale in ways:
                    usable = 1.0 if dtype is DType.BOOL else scale
                    _allreduce(communicator, outcomes, values, dtype, op, usable, mode)
    return outcomes.digests


def _every_way(size: int) -> Iterator[_Ways]:
    """Yield every count, with each kind of memory where that matters."""
    for turn, count in enumerate(COUNTS):
        yield count, [(mode, _scales(size)[(turn + i) % 3]) for i, mode in enumerate(modes_for(count, turn))]


def _two_of_the_ways(size: int, turns: Iterator[int]) -> Iterator[_Ways]:
    """Yield two of them, others at every call: in 15 calls each count meets each kind of memory."""
    for turn in itertools.islice(turns, 2):
        yield COUNTS[turn % len(COUNTS)], [(in_turn(turn), _scales(size)[turn // len(COUNTS) % 3])]


def _scales(size: int) -> tuple[float, float, float]:
    return 1.0, 1.0 / size, 0.5


def allreduce_of_large_arrays(communicator: Communicator, dtypes: Sequence[DType]) -> dict[str, int]:
    """Arrays larger than anything that an engine keeps for staging, in every memory mode."""
    outcomes = Outcomes(communicator.rank)
    for dtype in (DType.INT16, DType.BFLOAT16, DType.COMPLEX128, DType.FLOAT32):
        if dtype in dtypes:
            pattern = np.arange(LARGEST if dtype is DType.FLOAT32 else LARGE) % 5
            values = [encode(pattern * (rank + 1), dtype) for rank in range(communicator.size)]
            for mode in Mode:
                _allreduce(communicator, outcomes, values, dtype, ReduceOp.SUM, 0.5, mode)
    return outcomes.digests


def allreduce_rounds_little_and_identically(communicator: Communicator, dtypes: Sequence[DType]) -> dict[str, int]:
    """Random numbers: within the rounding of their type, and the same bits on every rank."""
    size, outcomes = communicator.size, Outcomes(communicator.rank)
    rng = np.random.default_rng(2)
    for dtype in dtypes:
        if not dtype.is_floating:
            continue
        for count in (1000, 70_001):
            values = [encode(rng.standard_normal(count), dtype) for _ in range(size)]
            wide = [decode(array, dtype).astype(np.float64) for array in values]
            exact, magnitude = np.sum(wide, axis=0), np.sum(np.abs(wide), axis=0)
            epsilon = {DType.FLOAT16: 2**-11, DType.BFLOAT16: 2**-8, DType.FLOAT32: 2**-24}.get(dtype, 2**-53)
            for mode in Mode:
                what = f"allreduce of random {dtype}[{count}] in {mode}"
                target = _run_allreduce(communicator, values[communicator.rank], dtype, ReduceOp.SUM, 1.0, mode)
                found = array_of(target)
                error = np.abs(decode(found, dtype).astype(np.float64) - exact)
                assert (error <= size * epsilon * magnitude).all(), (
                    f"{what}: error up to {error.max()} on rank {communicator.rank}"
                )
                outcomes.check(what, target, found)
    return outcomes.digests


def integer_means_are_exact_and_truncate(communicator: Communicator, dtypes: Sequence[DType]) -> dict[str, int]:
    """1/n divides exactly; what does not divide is truncated toward zero, on negative numbers too."""
    size, rank, outcomes = communicator.size, communicator.rank, Outcomes(communicator.rank)
    for dtype in dtypes:
        if storage(dtype).kind not in "iu" or dtype is DType.BFLOAT16:
            continue
        base = np.arange(14) if storage(dtype).kind == "u" else np.arange(-7, 7)
        buffer = buffer_of(encode(base, dtype), dtype)
        communicator.allreduce(buffer, buffer, scale=1.0 / size).wait()
        outcomes.check(f"mean of equal {dtype}", buffer, encode(base, dtype))
        buffer = buffer_of(encode(base + (1 if rank == 0 else 0), dtype), dtype)
        communicator.allreduce(buffer, buffer, scale=1.0 / size).wait()
        expected = np.trunc((base * size + 1) / size)
        outcomes.check(f"mean of unequal {dtype}", buffer, encode(expected, dtype))
    return outcomes.digests


def nan_reaches_every_rank(
    communicator: Communicator, dtypes: Sequence[DType], ops: Sequence[ReduceOp]
) -> dict[str, int]:
    """A NaN on any one rank is NaN in the result, for small and for large arrays."""
    outcomes = Outcomes(communicator.rank)
    for dtype in dtypes:
        if not dtype.is_floating:
            continue
        for op in ops:
            for count in (5, 5003):
                for culprit in range(communicator.size):
                    values = np.ones(count)
                    if communicator.rank == culprit:
                        values[culprit % count] = np.nan
                    buffer = buffer_of(encode(values, dtype), dtype)
                    communicator.allreduce(buffer, buffer, op=op).wait()
                    found = np.isnan(decode(array_of(buffer), dtype))
                    expected = np.arange(count) == culprit % count
                    assert (found == expected).all(), (
                        f"{op} of {dtype}[{count}] with a NaN of rank {culprit}: {found.nonzero()[0]}"
                    )
    return outcomes.digests


def allgather(communicator: Communicator, dtypes: Sequence[DType], in_pairs: bool = False) -> dict[str, int]:
    """Even, uneven, zero and large counts."""
    size, rank, outcomes = communicator.size, communicator.rank, Outcomes(communicator.rank)
    rng = np.random.default_rng(3)
    layouts: list[list[int]] = [[1] * size, [700] * size, [0] * size, [3 * i for i in range(size)]]
    layouts += [[1000 * (size - i) for i in range(size)], [LARGE // size + i for i in range(size)]]
    layouts += [[5003 if i == size - 1 else 0 for i in range(size)]]
    modes, number = tuple(Mode), 0
    for dtype in dtypes:
        for counts in layouts if dtype in (DType.UINT8, DType.FLOAT32, DType.COMPLEX128) else layouts[1:4]:
            values = [exact_values(rng, count, dtype, ReduceOp.SUM) for count in counts]
            number += 1
            for mode in (modes[number % len(modes)],) if in_pairs else modes:
                what = f"allgather of {dtype}{counts} in {mode}"
                source = place(communicator, values[rank], dtype, engine=mode.engine_on(rank))
                target = room(communicator, sum(counts), dtype, engine=mode.engine_on(rank))
                if mode.in_place_on(rank):
                    own = target.slice(sum(counts[:rank]), counts[rank])
                    copy(source, own)
                    source = own
                even = len(set(counts)) == 1
                communicator.allgather(source, target, counts=None if even else counts).wait()
                outcomes.check(what, target, np.concatenate(values))
    return outcomes.digests


def broadcast(communicator: Communicator, dtypes: Sequence[DType]) -> dict[str, int]:
    """From every root, in every kind of memory."""
    rank, outcomes = communicator.rank, Outcomes(communicator.rank)
    rng = np.random.default_rng(4)
    for root in range(communicator.size):
        for count in (0, 1, 1000, 9001, LARGE):
            dtype = dtypes[(root + count) % len(dtypes)]
            values = exact_values(rng, count, dtype, ReduceOp.SUM)
            for mode in (Mode.ORDINARY, Mode.ENGINE, Mode.MIXED):
                what = f"broadcast of {dtype}[{count}] from rank {root} in {mode}"
                if rank == root:
                    buffer = place(communicator, values, dtype, engine=mode.engine_on(rank))
                else:
                    buffer = room(communicator, count, dtype, engine=mode.engine_on(rank))
                communicator.broadcast(buffer, root=root).wait()
                outcomes.check(what, buffer, values)
    return outcomes.digests


def reducescatter(
    communicator: Communicator, dtypes: Sequence[DType], unsupported: Unsupported, in_pairs: bool = False
) -> dict[str, int]:
    """Even, uneven and zero pieces; also with this rank's piece of the source as target."""
    size, rank, outcomes = communicator.size, communicator.rank, Outcomes(communicator.rank)
    rng = np.random.default_rng(5)
    layouts: list[list[int]] = [[1] * size, [640] * size, [0] * size, [5 * i for i in range(size)]]
    layouts += [[2000 * (size - i) for i in range(size)], [LARGE // size] * size]
    number = 0
    for turn, dtype in enumerate(dtypes):
        for op in ReduceOp:
            if (dtype, op) in unsupported or (dtype.is_complex and op in (ReduceOp.MIN, ReduceOp.MAX)):
                continue
            wide = dtype in (DType.FLOAT32, DType.INT64) and op is ReduceOp.SUM
            usual = [layouts[number % 5]] if in_pairs else [layouts[(turn + i) % 5] for i in range(2)]
            for counts in layouts if wide else usual:
                values = [exact_values(rng, sum(counts), dtype, op) for _ in range(size)]
                scale = 1.0 if dtype is DType.BOOL or turn % 2 else 0.5
                expected = reduced(values, dtype, op, scale)
                start = sum(counts[:rank])
                modes = tuple(Mode) if wide else (Mode.ORDINARY, Mode.ENGINE_IN_PLACE)
                number += 1
                for mode in (modes[number % len(modes)],) if in_pairs else modes:
                    what = f"reducescatter {op} of {dtype}{counts} scale={scale:g} in {mode}"
                    source = place(communicator, values[rank], dtype, engine=mode.engine_on(rank))
                    if mode.in_place_on(rank):
                        target = source.slice(start, counts[rank])
                    else:
                        target = room(communicator, counts[rank], dtype, engine=mode.engine_on(rank))
                    even = len(set(counts)) == 1
                    communicator.reducescatter(
                        source, target, op=op, scale=scale, counts=None if even else counts
                    ).wait()
                    outcomes.check(what, target, expected[start : start + counts[rank]], identical=False)
                    if not mode.in_place_on(rank):
                        outcomes.check(f"{what}: the source", source, values[rank], identical=False)
    return outcomes.digests


def alltoall(communicator: Communicator, dtypes: Sequence[DType]) -> dict[str, int]:
    """Use a different count for every pair of ranks; many of them 0."""
    size, rank, outcomes = communicator.size, communicator.rank, Outcomes(communicator.rank)
    rng = np.random.default_rng(6)
    for factor in (0, 1, 1000, 20_000):
        dtype = dtypes[factor % len(dtypes)] if factor < 1000 else DType.FLOAT32
        matrix = [[factor * ((3 * i + 5 * j) % 4) for j in range(size)] for i in range(size)]
        values = [exact_values(rng, sum(row), dtype, ReduceOp.SUM) for row in matrix]
        received = [matrix[i][rank] for i in range(size)]
        parts = [values[i][sum(matrix[i][:rank]) : sum(matrix[i][: rank + 1])] for i in range(size)]
        for mode in (Mode.ORDINARY, Mode.ENGINE, Mode.MIXED):
            source = place(communicator, values[rank], dtype, engine=mode.engine_on(rank))
            target = room(communicator, sum(received), dtype, engine=mode.engine_on(rank))
            communicator.alltoall(source, target, send_counts=matrix[rank], receive_counts=received).wait()
            outcomes.check(f"alltoall of {dtype}{matrix} in {mode}", target, np.concatenate(parts), identical=False)
    return outcomes.digests


def wrong_arguments_are_refused_on_the_spot(communicator: Communicator) -> None:
    """What one rank can see alone raises UsageError at the call, and the communicator goes on."""
    size = communicator.size
    four, five = buffer_of(np.ones(4, np.float32), DType.FLOAT32), buffer_of(np.ones(5, np.float32), DType.FLOAT32)
    whole = buffer_of(np.ones(4, np.int32), DType.INT32)
    attempts: list[tuple[str, Callable[[], Work]]] = [
        ("target of another size", lambda: communicator.allreduce(four, five)),
        ("target of another dtype", lambda: communicator.allreduce(four, whole)),
        ("root outside of the group", lambda: communicator.broadcast(four, root=size)),
        ("negative root", lambda: communicator.broadcast(four, root=-1)),
        ("to outside of the group", lambda: communicator.send(four, to=size)),
        ("source outside of the group", lambda: communicator.recv(four, source=-1)),
        ("counts for too many ranks", lambda: communicator.allgather(four, four, counts=[1] * (size + 1))),
        ("counts that do not add up", lambda: communicator.reducescatter(four, four, counts=[5] * size)),
        (
            "send_counts that do not add up",
            lambda: communicator.alltoall(four, four, send_counts=[9] * size, receive_counts=[0] * size),
        ),
    ]
    for what, attempt in attempts:
        try:
            attempt()
        except UsageError:
            continue
        raise AssertionError(f"{what}: no UsageError on rank {communicator.rank}")
    communicator.allreduce(four, four).wait()
    assert (array_of(four) == size).all()


def _refused(communicator: Communicator, dtype: DType, op: ReduceOp) -> None:
    buffer = buffer_of(np.zeros(3, storage(dtype)), dtype)
    try:
        communicator.allreduce(buffer, buffer, op=op)
    except UsageError:
        return
    raise AssertionError(
        f"allreduce {op} of {dtype} has no meaning here, but was not refused on rank {communicator.rank}"
    )


def _allreduce(
    communicator: Communicator,
    outcomes: Outcomes,
    values: list[Array],
    dtype: DType,
    op: ReduceOp,
    scale: float,
    mode: Mode,
) -> None:
    what = f"allreduce {op} of {dtype}[{len(values[0])}] scale={scale:g} in {mode}"
    target = _run_allreduce(communicator, values[communicator.rank], dtype, op, scale, mode, what)
    rounding = 0.0 if scale in (1.0, 0.5, 0.25, 0.125) else 2.0
    outcomes.check(what, target, reduced(values, dtype, op, scale), ulps=rounding)


def _run_allreduce(
    communicator: Communicator, values: Array, dtype: DType, op: ReduceOp, scale: float, mode: Mode, what: str = ""
) -> Buffer:
    rank = communicator.rank
    source = place(communicator, values, dtype, engine=mode.engine_on(rank))
    in_place = mode.in_place_on(rank)
    target = source if in_place else room(communicator, len(values), dtype, engine=mode.engine_on(rank))
    communicator.allreduce(source, target, op=op, scale=scale).wait()
    if not in_place:
        Outcomes(rank).check(f"{what}: the source", source, values)
    return target
