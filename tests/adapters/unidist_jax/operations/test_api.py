"""The public operations on arrays: at once and compiled, on two and three ranks, against numpy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _programs import MODES, call, runtime
from part_pools import PartOfPool, PartPools

import unidist.jax as ud
from unidist.buffer import DType
from unidist.errors import MismatchError, OperationError, UsageError
from unidist.negotiation.process_sets import global_process_set
from unidist_arrays import operations
from unidist_arrays.memory import NUMPY_DTYPES
from unidist_jax.operations.collectives import AllReduce

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, jax_pools: PartPools) -> PartOfPool:
    return jax_pools.get(request.param, engine="shm")


def _sample(shape: tuple[int, ...], dtype: np.dtype, rank: int) -> np.ndarray:
    """Small whole numbers, which every type can hold and add."""
    return (np.arange(1, int(np.prod(shape)) + 1) % 3 + rank).astype(dtype).reshape(shape)


@pytest.mark.parametrize("mode", MODES)
def test_every_operation_on_every_dtype(ranks: PartOfPool, mode: str) -> None:
    def on_rank() -> None:
        with runtime():
            size, rank = ud.size(), ud.rank()
            dtypes = [NUMPY_DTYPES[dtype] for dtype in DType]
            everyone = [[_sample((2 * size, 3), dtype, r) for dtype in dtypes] for r in range(size)]

            def body(arrays: list[Any]) -> list[Any]:
                return [
                    ud.allreduce(arrays, op=ud.Sum, name="sum"),
                    ud.grouped_allreduce([array for array in arrays if array.dtype.kind != "c"], op=ud.Max),
                    ud.allgather(arrays, name="rows"),
                    ud.grouped_allgather(arrays),
                    ud.broadcast(arrays, size - 1),
                    ud.reducescatter(arrays, op=ud.Sum),
                    ud.grouped_reducescatter(arrays, op=ud.Sum),
                    [ud.alltoall(array) for array in arrays],
                ]

            found = call(mode, body, everyone[rank])
            own = slice(2 * rank, 2 * rank + 2)
            for index, dtype in enumerate(dtypes):
                given = [arrays[index] for arrays in everyone]
                wide = np.complex128 if dtype.kind == "c" else np.float64
                total = np.sum([array.astype(wide) for array in given], axis=0).astype(dtype)
                rows = np.concatenate(given)
                exchanged = np.concatenate([array[own] for array in given])
                wanted = [total, given[-1], rows, rows, given[-1], total[own], total[own], exchanged]
                for place, (results, each) in enumerate(zip(found, wanted, strict=True)):
                    if place == 1 and dtype.kind == "c":  # has no order
                        continue
                    assert results[index].dtype == dtype
                    np.testing.assert_array_equal(results[index], each)

    ranks.run(on_rank)


@pytest.mark.parametrize("mode", MODES)
def test_every_reduction_on_arrays_of_every_shape(ranks: PartOfPool, mode: str) -> None:
    def on_rank() -> None:
        with runtime():
            size, rank = ud.size(), ud.rank()
            reductions = {
                ud.Average: np.mean, ud.Sum: np.sum, ud.Min: np.min, ud.Max: np.max, ud.Product: np.prod,
            }  # fmt: skip
            shapes: list[tuple[int, ...]] = [(), (1,), (0,), (0, 4), (3, 5), (2000,)]
            inputs = [[_sample(shape, np.dtype(np.float64), r) for shape in shapes] for r in range(size)]

            def body(arrays: list[Any]) -> list[Any]:
                return [
                    ud.allreduce(arrays, op=op, name=op.name, prescale_factor=2.0, postscale_factor=0.25)
                    for op in reductions
                ]

            for found, function in zip(call(mode, body, inputs[rank]), reductions.values(), strict=True):
                for index, shape in enumerate(shapes):
                    wanted = 0.25 * function([2.0 * own[index] for own in inputs], axis=0)
                    assert found[index].shape == shape
                    np.testing.assert_allclose(found[index], wanted, rtol=1e-15)
            empty = np.zeros((0, 3), np.float32)
            moved = call(mode, lambda x: [ud.allgather(x), ud.broadcast(x, 0), ud.alltoall(x)], empty)
            assert [array.shape for array in moved] == [(0, 3)] * 3
            scalars = call(mode, lambda x: ud.allgather(x), np.float32(rank))
            np.testing.assert_array_equal(scalars, np.arange(size, dtype=np.float32))

    ranks.run(on_rank)


@pytest.mark.parametrize("mode", MODES)
def test_trees_numbers_and_arrays_of_numpy(two: PartOfPool, mode: str) -> None:
    def on_rank() -> None:
        with runtime():
            rank = ud.rank()
            tree = {"a": np.full(2, rank, np.float32), "b": [1 + rank, 2.5, True, None], "c": (np.int64(7), 1j)}

            def body() -> Any:
                return ud.allreduce(tree, op=ud.Sum), ud.broadcast(tree, 1), ud.allgather(tree["b"]), ud.allreduce({})

            summed, sent, gathered, nothing = call(mode, body)
            assert jax.tree.structure(summed) == jax.tree.structure(tree)
            assert summed["a"].tolist() == [1.0, 1.0]
            assert [each.item() for each in summed["b"][:3]] == [3, 5.0, True]
            assert [each.item() for each in summed["c"]] == [14, 2j]
            assert sent["b"][0].item() == 2
            assert [each.tolist() for each in gathered[:3]] == [[1, 2], [2.5, 2.5], [True, True]]
            assert nothing == {}

    two.run(on_rank)


def test_arrays_that_a_compiled_function_closes_over_are_part_of_the_program(two: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            constant = jnp.arange(2.0) + ud.rank()
            compiled = jax.jit(lambda x: [each(constant) + x for each in (ud.allgather, ud.alltoall)])
            for step in range(3):
                gathered, exchanged = compiled(float(step))
                assert gathered.tolist() == [0.0 + step, 1.0 + step, 1.0 + step, 2.0 + step]
                assert exchanged.tolist() == [ud.rank() + 0.0 + step, ud.rank() + 1.0 + step]
            assert ud.allreduce(1.0).item() == 1.0

    two.run(on_rank)


def test_rows_that_differ_between_ranks(ranks: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            size, rank = ud.size(), ud.rank()
            rows = [np.full((r + 1, 2), r, np.float32) for r in range(size)]
            np.testing.assert_array_equal(ud.allgather(rows[rank], name="rows"), np.concatenate(rows))
            splits = list(range(1, size + 1))  # rank r gets r + 1 rows from each
            own = np.repeat(np.arange(size), splits) + 10 * rank
            received, counts = ud.alltoall(own, splits)
            np.testing.assert_array_equal(counts, np.full(size, rank + 1, np.int32))
            np.testing.assert_array_equal(received, np.repeat(10 * np.arange(size) + rank, rank + 1))
            odd = np.arange(size + 1, dtype=np.float32)  # the first rank gets one more
            bounds = [0, *range(2, size + 2)]
            for mode in MODES:
                share = call(mode, lambda x: ud.reducescatter(x, op=ud.Sum, name="odd"), odd)
                np.testing.assert_array_equal(share, size * odd[bounds[rank] : bounds[rank + 1]])

    ranks.run(on_rank)


def test_a_compiled_gather_of_rows_that_differ_is_an_error_on_every_rank(ranks: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            size, rank = ud.size(), ud.rank()
            # With three ranks the sum of the rows is what the program of rank 1 was compiled for.
            with pytest.raises(OperationError, match=r"'rows': the ranks give 1, 2.* rows"), ud.translated():
                jax.block_until_ready(jax.jit(lambda x: ud.allgather(x, name="rows"))(jnp.ones((rank + 1, 2))))
            with pytest.raises(OperationError, match="the ranks give"), ud.translated():
                jax.block_until_ready(jax.jit(lambda x: ud.alltoall(x, name="all"))(jnp.ones(size * (rank + 1))))
            with pytest.raises(UsageError, match=r"alltoall 'a' with splits= within a compiled function"):
                jax.jit(lambda x: ud.alltoall(x, [1] * size, name="a"))(jnp.ones(size))
            with pytest.raises(OperationError, match=f"{size + 1} rows do not divide over {size} ranks"):
                jax.jit(lambda x: ud.alltoall(x, name="a"))(jnp.ones(size + 1))
            assert ud.allreduce(1, op=ud.Sum).item() == size

    ranks.run(on_rank)


@pytest.mark.parametrize("mode", MODES)
def test_process_sets(jax_pools: PartPools, mode: str) -> None:
    def on_rank() -> None:
        with runtime():
            ends = ud.add_process_set([0, 2])
            if ud.rank() == 1:
                with pytest.raises(UsageError, match="does not belong"):
                    ud.allreduce(jnp.ones(1), process_set=ends)
                return

            def body(x: Any) -> Any:
                gradient = jax.grad(lambda x: jnp.sum(ud.allreduce(x, op=ud.Sum, process_set=ends) * (x * 0 + 1)))
                return [
                    ud.allreduce(x, process_set=ends),
                    ud.broadcast(x, 2, process_set=ends),
                    ud.allgather(x, process_set=ends),
                    ud.reducescatter(x, process_set=ends, op=ud.Sum),
                    ud.alltoall(x, process_set=ends),
                    gradient(x),
                ]

            mean, root, rows, share, exchanged, gradient = call(mode, body, np.full(2, float(ud.rank())))
            assert mean.tolist() == [1.0, 1.0]
            assert root.tolist() == [2.0, 2.0]
            assert rows.tolist() == [0.0, 0.0, 2.0, 2.0]
            assert share.tolist() == [2.0]
            assert exchanged.tolist() == [0.0, 2.0]
            assert gradient.tolist() == [2.0, 2.0]
            assert ud.allgather_object(ud.rank(), process_set=ends) == [0, 2]
            with pytest.raises(NotImplementedError, match="Adasum runs over all ranks"):
                ud.allreduce(jnp.ones(1), op=ud.Adasum, process_set=ends)

    jax_pools.get(3, engine="shm").run(on_rank)


@pytest.mark.parametrize("mode", MODES)
def test_compression(two: PartOfPool, mode: str) -> None:
    def on_rank() -> None:
        with runtime():
            x = np.array([1.0, 2.5, -3.0]) + ud.rank()
            for compression in (ud.Compression.none, ud.Compression.fp16, ud.Compression.bf16):
                found = call(mode, lambda t, c=compression: ud.allreduce([t, 3], compression=c, op=ud.Sum), x)
                assert found[0].dtype == np.float64
                assert found[0].tolist() == [3.0, 6.0, -5.0]
                assert found[1].item() == 6
            wide = call(mode, lambda t: ud.allreduce(t, compression=ud.Compression.fp16), np.array([1.0 + 2**-20]))
            assert wide.tolist() == [1.0]  # it was rounded on the way
            rows = call(mode, lambda t: ud.reducescatter(t, compression=ud.Compression.bf16, op=ud.Sum), np.ones(2))
            assert rows.tolist() == [2.0]

    two.run(on_rank)


def _gradients(rank: int, size: int, ud: Any, take: Any, grad: Any) -> dict[str, list[Any]]:
    """Return the gradients of every differentiable operation, for the same numbers in any framework."""
    shape = (2 * size, 2)
    x = 1.0 + np.arange(4.0 * size).reshape(shape) + rank

    def weights(count: int) -> Any:
        return take(np.arange(2.0 * count).reshape(count, 2) * (rank + 1))

    reductions = {
        f"{op.name} {factors}": (lambda x, op=op, factors=factors: ud.allreduce(x, op=op, **factors), 2 * size)
        for op in (ud.Average, ud.Sum, ud.Min, ud.Max, ud.Product)
        for factors in ({}, {"prescale_factor": 2.0, "postscale_factor": 0.5})
    }
    functions = {
        **reductions,
        "grouped": (lambda x: ud.grouped_allreduce([x, 2 * x])[1], 2 * size),
        "allgather": (ud.allgather, 2 * size * size),
        "broadcast": (lambda x: ud.broadcast(x, size - 1), 2 * size),
        "reducescatter mean": (lambda x: ud.reducescatter(x, op=ud.Average), 2),
        "reducescatter sum": (lambda x: ud.reducescatter(x, op=ud.Sum, prescale_factor=2.0), 2),
        "alltoall": (ud.alltoall, 2 * size),
        "fp16": (lambda x: ud.allreduce(x, compression=ud.Compression.fp16), 2 * size),
    }
    found = {}
    for name, (function, rows) in functions.items():
        factor = weights(rows)
        found[name] = np.asarray(grad(lambda x, f=function, w=factor: (f(x) * w).sum(), take(x))).tolist()
    return found


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_those_of_pytorch(ranks: PartOfPool, mode: str) -> None:
    pytest.importorskip("torch")

    def in_torch() -> dict[str, list[Any]]:
        import torch

        import unidist.torch as ut

        def gradient(function: Any, x: Any) -> Any:
            x.requires_grad_()
            return torch.autograd.grad(function(x), x)[0]

        ut.init()
        try:
            return _gradients(ut.rank(), ut.size(), ut, torch.tensor, gradient)
        finally:
            ut.shutdown()

    def in_jax() -> dict[str, list[Any]]:
        def gradient(function: Any, x: Any) -> Any:
            return call(mode, jax.grad(function), x)

        with runtime():
            return _gradients(ud.rank(), ud.size(), ud, jnp.asarray, gradient)

    def both() -> None:
        wanted, found = in_torch(), in_jax()
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            np.testing.assert_allclose(found[name], gradient, rtol=1e-12, err_msg=name)

    ranks.run(both)


def test_gradients_of_rows_that_differ_between_ranks(ranks: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            size, rank = ud.size(), ud.rank()
            count = size * (size + 1) // 2
            weights = np.arange(count) * (rank + 1.0)
            found = jax.grad(lambda x: jnp.sum(ud.allgather(x, name="rows") * weights))(jnp.ones(rank + 1))
            start = rank * (rank + 1) // 2
            np.testing.assert_allclose(found, (np.arange(count) * (size + 1) / 2)[start : start + rank + 1])

            splits = list(range(1, size + 1))
            weights = np.arange(size * (rank + 1.0)) + 100 * rank
            found = jax.grad(lambda x: jnp.sum(ud.alltoall(x, splits, name="all")[0] * weights))(jnp.ones(count + 1))
            wanted = [100 * to + rank * (to + 1) + row for to in range(size) for row in range(to + 1)]
            np.testing.assert_allclose(found, [*wanted, 0.0])  # the last row stayed here

    ranks.run(on_rank)


def test_gradients_of_integers_and_of_gradients(two: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():

            def loss(x: Any, count: Any) -> Any:
                scaled, total = ud.allreduce([x, count], op=ud.Sum)
                return jnp.sum(scaled * total)

            x, count = jnp.arange(3.0), jnp.asarray(2 + ud.rank())
            for gradient in (jax.grad(loss), jax.jit(jax.grad(loss))):
                assert gradient(x, count).tolist() == [10.0] * 3  # 5, added up over two ranks

            def slope(x: Any) -> Any:
                return jnp.sum(jax.grad(lambda x: jnp.sum(ud.allreduce(x, op=ud.Sum) ** 3))(x))

            # The sum over ranks of 3 s^2, for s = 2 x; once more: 2 * 2 * (6 s)
            assert jax.jit(jax.grad(slope))(x).tolist() == [48.0 * value for value in range(3)]

    two.run(on_rank)


def test_mapped_over_a_dimension(ranks: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            size, rank = ud.size(), ud.rank()
            everyone = [_sample((3, 2 * size, 2), np.dtype(np.float64), r) + np.arange(3)[:, None, None]
                        for r in range(size)]  # fmt: skip
            own = slice(2 * rank, 2 * rank + 2)
            wanted = {
                "sum": np.sum(everyone, axis=0),
                "gather": np.concatenate(everyone, axis=1),
                "broadcast": everyone[1],
                "scatter": np.sum(everyone, axis=0)[:, own],
                "alltoall": np.concatenate([array[:, own] for array in everyone], axis=1),
                "scalar": np.stack([array[:, 0, 0] for array in everyone], axis=1),
                "tree": np.sum(everyone, axis=0) + size,
            }

            def body(x: Any) -> dict[str, Any]:
                whole, one = ud.allreduce((x, jnp.ones(2)), op=ud.Sum)
                return {
                    "sum": ud.allreduce(x, op=ud.Sum),
                    "gather": ud.allgather(x),
                    "broadcast": ud.broadcast(x, 1),
                    "scatter": ud.reducescatter(x, op=ud.Sum),
                    "alltoall": ud.alltoall(x),
                    "scalar": ud.allgather(x[0, 0]),
                    "tree": whole + one,
                }

            for axis in (0, 1, 2):
                given = np.moveaxis(everyone[rank], 0, axis)
                for run in (jax.vmap(body, axis), jax.jit(jax.vmap(body, axis))):
                    found = run(given)
                    for name, array in wanted.items():
                        np.testing.assert_array_equal(found[name], array, err_msg=name)
            gradient = jax.vmap(jax.grad(lambda x: jnp.sum(ud.allgather(x) * 2)))(everyone[rank])
            np.testing.assert_array_equal(gradient, np.full((3, 2 * size, 2), 2.0))
            if size == 2:
                with pytest.raises(UsageError, match=r"adasum 'a' cannot be used within jax\.vmap"):
                    jax.vmap(lambda x: ud.allreduce(x, op=ud.Adasum, name="a"))(jnp.ones((2, 2)))

    ranks.run(on_rank)


def test_adasum(two: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            x = np.array([1.0, 2.0]) if ud.rank() else np.array([3.0, 0.0])
            for mode in MODES:
                found = call(mode, lambda x: ud.allreduce(x, op=ud.Adasum, name="adasum"), x)
                a, b = np.array([3.0, 0.0]), np.array([1.0, 2.0])
                np.testing.assert_allclose(found, (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b)

    two.run(on_rank)


def test_loops_branches_and_recomputation(two: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            rank = ud.rank()

            def total(x: Any) -> Any:
                return ud.allreduce(x, op=ud.Sum, name="total")

            def scanned(x: Any) -> Any:
                return jax.lax.scan(lambda c, step: (total(c) + step, total(step)), x, jnp.arange(3.0))

            carry, steps = jax.jit(scanned)(jnp.float64(rank))
            assert (carry.item(), steps.tolist()) == (8.0, [0.0, 2.0, 4.0])  # ((1 + 0) * 2 + 1) * 2 + 2

            def until(x: Any) -> Any:
                return jax.lax.while_loop(lambda c: total(c) < 20, lambda c: total(c + 1), x)

            assert jax.jit(until)(jnp.float64(0)).item() == 14.0

            def branched(x: Any) -> Any:
                return jax.lax.cond(total(x) > 5, lambda x: ud.allreduce(x) * 10, lambda x: ud.allgather(x)[0], x)

            assert jax.jit(branched)(jnp.float64(rank)).item() == 0.0
            assert jax.jit(branched)(jnp.float64(rank + 3)).item() == 35.0

            def loss(x: Any) -> Any:
                return jnp.sum(jnp.sin(total(jnp.sin(total(x)))))

            x = jnp.arange(3.0) + rank
            plain = jax.grad(loss)(x)
            for wrapped in (jax.jit(jax.grad(loss)), jax.grad(jax.checkpoint(loss)), jax.grad(jax.jit(loss))):
                np.testing.assert_allclose(wrapped(x), plain, rtol=1e-12)
            np.testing.assert_allclose(jax.jit(jax.grad(jax.checkpoint(loss)))(x), plain, rtol=1e-12)
            assert jax.grad(lambda x: scanned(x)[0])(jnp.float64(rank)).item() == 8.0  # the sum of two, three times
            assert jax.jit(lambda x: jax.jit(total)(jax.jit(total)(x)))(x).tolist() == [2.0, 6.0, 10.0]
            assert jax.lax.map(total, jnp.arange(2.0)).tolist() == [0.0, 2.0]

    two.run(on_rank)


@pytest.mark.parametrize("mode", MODES)
def test_messages(ranks: PartOfPool, mode: str) -> None:
    def on_rank() -> None:
        with runtime():
            size, rank = ud.size(), ud.rank()

            def body(x: Any) -> Any:
                if rank:
                    x = ud.recv(x, rank - 1) + ud.recv(x, rank - 1)
                if rank < size - 1:
                    ud.send(x + 1, rank + 1)
                    ud.send(2 * x, rank + 1)
                ud.barrier()
                return x

            wanted = 1.0
            for _ in range(rank):
                wanted = (wanted + 1) + 2 * wanted
            assert call(mode, body, np.ones(3, np.float32)).tolist() == [wanted] * 3
            with pytest.raises(OperationError, match=rf"send to rank {size}: choices: 0 to {size - 1}"):
                call(mode, lambda x: ud.send(x, size), np.ones(1))
            if rank == 1:
                call(mode, lambda x: jax.vmap(lambda row: ud.send(row, 0))(x), np.arange(4.0).reshape(2, 2))
            elif rank == 0:  # a mapped message is one message
                found = call(mode, lambda x: jax.vmap(lambda row: ud.recv(row, 1))(x), np.zeros((2, 2)))
                assert found.tolist() == [[0.0, 1.0], [2.0, 3.0]]

    ranks.run(on_rank)


def test_join_serves_the_others(two: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            step = jax.jit(lambda x: ud.allreduce(x, op=ud.Sum, name="step"))
            for number in range(3 - ud.rank()):
                assert step(jnp.ones(2)).tolist() == ([2.0, 2.0] if number < 2 else [1.0, 1.0])
            assert ud.join() == 0

    two.run(on_rank)


def test_objects_parameters_and_state(two: PartOfPool) -> None:
    def on_rank() -> None:
        import optax

        with runtime():
            rank = ud.rank()
            assert ud.broadcast_object({"rank": rank}, 1) == {"rank": 1}
            assert ud.allgather_object("ab"[rank]) == ["a", "b"]
            params = {"w": jnp.full(2, 1.0 + rank), "key": jax.random.key(rank), "name": "linear", "n": np.ones(1)}
            found = ud.broadcast_parameters(params, 1)
            assert found["w"].tolist() == [2.0, 2.0]
            assert jax.random.key_data(found["key"]).tolist() == jax.random.key_data(jax.random.key(1)).tolist()
            assert found["name"] == "linear"
            state = optax.adam(0.1).init({"w": jnp.ones(2) * rank})
            _, state = optax.adam(0.1).update({"w": jnp.full(2, 1.0 + rank)}, state)
            shared = ud.broadcast_optimizer_state(state, 1)
            np.testing.assert_allclose(shared[0].mu["w"], [0.2, 0.2])
            assert type(shared[0]) is type(state[0])

    two.run(on_rank)


def test_says_what_cannot_be_exchanged(two: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            jax.config.update("jax_enable_x64", False)
            try:
                for value in (np.zeros(2), np.float64(1), {"a": [np.arange(2)]}):
                    with pytest.raises(UsageError, match=r"it would be cut to .*jax_enable_x64"):
                        ud.allreduce(value)
                    with pytest.raises(UsageError, match="it would be cut to"):
                        jax.jit(lambda value=value: ud.allreduce(value))()
                with pytest.raises(UsageError, match="1099511627776 of type int cannot be exchanged"):
                    ud.allreduce(2**40)
            finally:
                jax.config.update("jax_enable_x64", True)
            for value, text in (
                ("text", "'text' of type str"),
                (np.array([None]), "of type ndarray"),
                (jnp.zeros(2, jnp.int4), "arrays of int4"),
                (jax.random.key(0), r"arrays of key<fry>"),
            ):
                with pytest.raises(UsageError, match=text):
                    ud.allreduce(value)
            with pytest.raises(OperationError, match="name=3"):
                ud.allreduce(1.0, name=3)  # type: ignore[arg-type]
            with pytest.raises(OperationError, match="op=9 is no reduction"):
                ud.allreduce(1.0, op=9)  # type: ignore[arg-type]
            with pytest.raises(OperationError, match="a scalar has none"):
                ud.reducescatter(1.0)
            with pytest.raises(OperationError, match="give one array, not a tree of 2"):
                ud.alltoall([jnp.ones(2), jnp.ones(2)])
            with pytest.raises(OperationError, match="root_rank=2"):
                ud.broadcast(1.0, 2)
            with pytest.raises(MismatchError, match="'shape'"):
                ud.allreduce(jnp.ones(1 + ud.rank()), name="shape")
            with pytest.raises(TypeError, match="forward-mode"):
                jax.jvp(ud.allreduce, (jnp.ones(1),), (jnp.ones(1),))
            with pytest.raises(UsageError, match="is traced by jit, grad or vmap"):
                jax.jit(lambda x: ud.buffer(x))(jnp.ones(1))
            assert ud.allreduce(1.0).item() == 1.0

    two.run(on_rank)


def test_the_gradient_of_a_reducescatter_has_both_factors() -> None:
    ud.init()
    try:
        found = jax.grad(lambda x: ud.reducescatter(x, op=ud.Sum, prescale_factor=2.0, postscale_factor=0.25).sum())(
            jnp.ones(4)
        )
    finally:
        ud.shutdown()
    np.testing.assert_array_equal(np.asarray(found), np.full(4, 0.5, np.float32))


def test_a_compiled_allreduce_makes_its_requests_once(ranks: PartOfPool) -> None:
    def on_rank() -> tuple[int, list[float]]:
        made = []
        make = operations.allreduce_requests

        def counted(*args: Any, **kwargs: Any) -> Any:
            made.append(args)
            return make(*args, **kwargs)

        with runtime(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(operations, "allreduce_requests", counted)
            given, result = np.full(3, ud.rank() + 1.0), np.empty(3)
            run = AllReduce("again", global_process_set, ud.Sum, 1.0, 1.0).prepared([given], [result])
            sums = []
            for _ in range(3):
                run()
                sums.append(float(result[0]))
                given += 1
            return len(made), sums

    found = ranks.run(on_rank)
    size = len(found)
    first = size * (size + 1) / 2
    assert found == [(1, [first, first + size, first + 2 * size])] * size
