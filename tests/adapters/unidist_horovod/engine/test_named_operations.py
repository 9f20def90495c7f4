"""Named operations passed on to Horovod, which matches them by itself."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from horovod_bindings import ENVIRONMENTS, skip_without

from unidist.buffer import Buffer, DType
from unidist.communicator import ReduceOp
from unidist.errors import DuplicateNameError, MismatchError, PeerLostError, StalledError, UsageError
from unidist.negotiation import OperationKind, Request
from unidist.negotiation.named import NamedOperations, NegotiatesNames, NegotiationOptions
from unidist.testing._rank_side import EngineConnector
from unidist.testing.fixtures import RankPoolFactory

pytestmark = pytest.mark.parallel
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module", params=["torch", "tensorflow"])  # not in turn: few ranks are alive at a time
def binding(request: pytest.FixtureRequest) -> str:
    """Each of Horovod's bindings."""
    skip_without(request.param)
    return str(request.param)


@pytest.fixture
def run(rank_pool: RankPoolFactory, binding: str) -> Callable[..., list[Any]]:
    """Return `run(size, case, ...)`: `case(operations, ...)` on every rank, over new named operations."""

    def run(size: int, case: Callable[..., Any], *args: Any, timeout: float = 20, group: Any = None) -> list[Any]:
        connector = EngineConnector("horovod", secrets.token_hex(4), timedelta(seconds=60))
        arguments = (connector, case, args, group, timedelta(seconds=timeout))
        return rank_pool(size, env=ENVIRONMENTS[binding]).run(_on_rank, arguments, timeout=timedelta(seconds=180))

    return run


def _on_rank(
    connector: EngineConnector, case: Callable[..., Any], args: tuple[Any, ...], group: Any, timeout: timedelta
) -> Any:
    world = connector.connect("named")
    chosen = range(world.size) if group is None else group
    base = world.split(chosen if world.rank in chosen else ())
    operations = None
    if base is not None:
        assert isinstance(base, NegotiatesNames)
        base.timeout = timeout
        operations = base.named_operations(NegotiationOptions())
    try:
        result = None if operations is None else case(operations, *args)
        world.barrier().wait()
        return result
    finally:
        if operations is not None:
            operations.close()
        connector.close(world)


def allreduce(name: str, values: Array, **options: Any) -> Request:
    data = Buffer.of(values)
    return Request(name, OperationKind.ALLREDUCE, source=data, target=data, shape=values.shape, **options)


def test_names_match_in_any_order_and_many_at_a_time(run: Callable[..., list[Any]]) -> None:
    def case(operations: NamedOperations) -> None:
        arrays = {f"t{i}": np.full((3, i + 1), operations.rank + i, np.float32) for i in range(40)}
        names = list(arrays) if operations.rank % 2 else list(arrays)[::-1]
        handles = {name: operations.submit(allreduce(name, arrays[name], scale=0.5)) for name in names}
        for name, handle in handles.items():
            handle.wait()
            assert handle.done()
            expected = sum(rank + int(name[1:]) for rank in range(operations.size)) / 2
            assert (arrays[name] == expected).all(), name

    run(3, case)


def test_every_type_and_reduction(run: Callable[..., list[Any]]) -> None:
    def case(operations: NamedOperations) -> None:
        dtypes = [each for each in DType if each is not DType.BFLOAT16]  # numpy has none
        for dtype, op in itertools.product(dtypes, ReduceOp):
            values = np.array([operations.rank + 1, 2, 1], dtype.value)
            request = allreduce(f"{op} {dtype}", values, op=op)
            if dtype.is_complex and op is not ReduceOp.SUM:
                with pytest.raises(UsageError, match="complex"):
                    operations.submit(request)
                continue
            operations.submit(request).wait()
            ranks = np.array([[rank + 1, 2, 1] for rank in range(operations.size)]).astype(dtype.value)
            by_op = {"sum": ranks.sum, "product": ranks.prod, "min": ranks.min, "max": ranks.max}
            assert (values == by_op[op](axis=0).astype(dtype.value)).all(), (op, dtype, values)

    run(2, case)


def gather(name: str, rows: int, rank: int, dtype: str = "float32") -> Request:
    values = np.full((rows, 2), rank, dtype)
    return Request(
        name,
        OperationKind.ALLGATHER,
        source=Buffer.of(values),
        shape=values.shape,
        allocate_output=lambda found: Buffer.allocate(2 * sum(found), DType(dtype)),
    )


@pytest.mark.parametrize("group", [None, (2, 0), (1, 2)])
def test_uneven_rows_come_in_the_order_of_the_group(run: Callable[..., list[Any]], group: Any) -> None:
    def case(operations: NamedOperations) -> tuple[Any, ...]:
        size, rank = operations.size, operations.rank
        gathered = operations.submit(gather("g", rank, rank))
        splits = tuple(range(1, size + 1))
        values = np.repeat(np.arange(size), splits) + 10 * rank
        exchanged = operations.submit(
            Request(
                "x",
                OperationKind.ALLTOALL,
                source=Buffer.of(values),
                shape=values.shape,
                splits=splits,
                allocate_output=lambda found: Buffer.allocate(sum(found), DType.INT64),
            )
        )
        gathered.wait()
        exchanged.wait()
        found = np.frombuffer(gathered.result.bytes(), np.float32).reshape(-1, 2)[:, 0].tolist()
        return gathered.rows, found, exchanged.rows, np.frombuffer(exchanged.result.bytes(), np.int64).tolist()

    outcomes = [each for each in run(3, case, group=group) if each is not None]
    size = 3 if group is None else len(group)
    order = range(3) if group is None else group
    by_rank = run(3, _rank_of, group=group)
    for world_rank, outcome in zip([r for r in range(3) if r in order], outcomes, strict=True):
        rank = by_rank[world_rank]
        rows, found, received, values = outcome
        assert rows == tuple(range(size))
        assert found == [other for other in range(size) for _ in range(other)]
        assert received == (rank + 1,) * size
        assert values == [rank + 10 * other for other in range(size) for _ in range(rank + 1)]


def _rank_of(operations: NamedOperations) -> int:
    return operations.rank


@pytest.mark.parametrize(("op", "dtype"), [("sum", "float32"), ("max", "int32"), ("sum", "uint8")])
def test_reducescatter_keeps_the_rows_of_each_rank(run: Callable[..., list[Any]], op: str, dtype: str) -> None:
    def case(operations: NamedOperations) -> list[Any]:
        values = (np.arange(14).reshape(7, 2) + operations.rank).astype(dtype)
        rows = [3, 2, 2][operations.rank]
        target = np.zeros((rows, 2), dtype)
        request = Request(
            "rs",
            OperationKind.REDUCESCATTER,
            source=Buffer.of(values),
            target=Buffer.of(target),
            shape=(7, 2),
            op=ReduceOp(op),
        )
        operations.submit(request).wait()
        return target.tolist()

    found = np.concatenate(run(3, case))
    whole = [np.arange(14).reshape(7, 2) + rank for rank in range(3)]
    assert (found == (np.sum(whole, axis=0) if op == "sum" else np.max(whole, axis=0))).all()


def test_adasum_of_orthogonal_vectors_is_their_sum_and_of_equal_ones_their_mean(
    run: Callable[..., list[Any]],
) -> None:
    def case(operations: NamedOperations) -> tuple[Any, Any]:
        orthogonal = np.zeros(4, np.float32)
        orthogonal[operations.rank] = 3
        equal = np.full(4, 2.0)
        for name, values in (("o", orthogonal), ("e", equal)):
            data = Buffer.of(values)
            request = Request(name, OperationKind.ADASUM, source=data, target=data, shape=(4,))
            operations.submit(request).wait()
        return orthogonal.tolist(), equal.tolist()

    for orthogonal, equal in run(4, case):
        assert orthogonal == [3, 3, 3, 3]
        assert equal == [2, 2, 2, 2]


def _different(what: str, rank: int) -> Request:
    odd = rank == 1
    data = Buffer.of(np.ones(4, np.float32))
    more = Buffer.of(np.ones(5, np.float32))
    if what == "shape":
        chosen = more if odd else data
        return Request("m", OperationKind.ALLREDUCE, source=chosen, target=chosen, shape=(chosen.count,))
    if what == "dtype":
        chosen = Buffer.of(np.ones(4, np.uint8 if odd else np.int8))  # both travel as int32
        return Request("m", OperationKind.ALLREDUCE, source=chosen, target=chosen, shape=(4,))
    if what == "dtype of gather":
        return gather("m", 2, rank, "uint32" if odd else "int32")
    if what == "op":
        return allreduce("m", np.ones(4), op=ReduceOp.MAX if odd else ReduceOp.SUM)
    if what == "scale":
        return allreduce("m", np.ones(4), scale=0.5 if odd else 1.0)
    if what == "root":
        return Request("m", OperationKind.BROADCAST, target=data, shape=(4,), root=rank)
    if what == "kind" and odd:
        return Request("m", OperationKind.BARRIER)
    return allreduce("m", np.ones(4))


@pytest.mark.parametrize("what", ["shape", "dtype", "dtype of gather", "op", "scale", "root", "kind"])
def test_a_mismatch_is_raised_on_every_rank_and_the_rest_goes_on(run: Callable[..., list[Any]], what: str) -> None:
    def case(operations: NamedOperations) -> str:
        around = np.ones(3)
        other = operations.submit(allreduce("other", around))
        with pytest.raises(MismatchError) as caught:
            operations.submit(_different(what, operations.rank)).wait()
        other.wait()
        assert (around == operations.size).all()
        again = np.ones(3)
        operations.submit(allreduce("m", again)).wait()
        assert (again == operations.size).all()
        return str(caught.value)

    for text in run(2, case):
        assert "'m'" in text
        assert "Mismatched" in text


def test_a_name_under_way_is_refused_at_once(run: Callable[..., list[Any]]) -> None:
    def case(operations: NamedOperations) -> None:
        values = np.ones(3)
        if operations.rank == 0:
            handle = operations.submit(allreduce("d", values))
            assert not handle.done()
            with pytest.raises(DuplicateNameError):
                operations.submit(allreduce("d", np.ones(3)))
            operations.submit(Request("go", OperationKind.BARRIER)).wait()
        else:
            operations.submit(Request("go", OperationKind.BARRIER)).wait()
            handle = operations.submit(allreduce("d", values))
        handle.wait()
        assert (values == operations.size).all()

    run(2, case)


def test_join_gives_zeros_and_tells_who_was_last(run: Callable[..., list[Any]]) -> None:
    def case(operations: NamedOperations) -> int:
        for step in range(1 + operations.rank):
            values = np.ones(3)
            operations.submit(allreduce(f"s{step}", values)).wait()
            assert (values == operations.size - step).all()
        return operations.join(_never)

    assert run(3, case) == [2, 2, 2]


def _never(name: str) -> None:
    raise AssertionError(f"Horovod serves {name} by itself")


def test_a_gather_while_a_rank_has_joined_is_a_mismatch(run: Callable[..., list[Any]]) -> None:
    def case(operations: NamedOperations) -> int:
        if operations.rank:
            with pytest.raises(MismatchError, match="Join"):
                operations.submit(gather("g", 1, 1)).wait()
        return operations.join(_never)

    run(2, case)


def test_an_operation_that_a_rank_never_submits_names_it(run: Callable[..., list[Any]]) -> None:
    def case(operations: NamedOperations) -> tuple[str, Any]:
        if operations.rank == 2:
            return "", ()
        with pytest.raises(PeerLostError) as caught:
            operations.submit(allreduce("lonely", np.ones(3))).wait()
        with pytest.raises(PeerLostError):
            operations.submit(allreduce("later", np.ones(3)))
        return type(caught.value).__name__, caught.value.ranks

    outcomes = run(3, case, timeout=3)
    stalled = [ranks for kind, ranks in outcomes[:2] if kind == StalledError.__name__]
    assert stalled
    assert set(stalled) == {(2,)}


def test_closing_ends_what_is_under_way_on_the_others(run: Callable[..., list[Any]]) -> None:
    def case(operations: NamedOperations) -> str:
        with pytest.raises(PeerLostError) as caught:
            _submit_and_close_on_rank_0(operations)
        if operations.rank == 0:
            with pytest.raises(UsageError):
                operations.submit(allreduce("after", np.ones(3)))
        return str(caught.value)

    assert all("rank 0 aborted" in text and "closed" in text for text in run(2, case))


def _submit_and_close_on_rank_0(operations: NamedOperations) -> None:
    handle = operations.submit(allreduce(f"only{operations.rank}", np.ones(3)))
    if operations.rank == 0:
        operations.close()
        operations.close()
    handle.wait()
