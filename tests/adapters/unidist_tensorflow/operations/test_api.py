"""The public operations on tensors: in eager mode, in functions and in sessions, on several engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from _modes import MODES, call, in_session, runtime

import unidist.tensorflow as ud
from unidist.errors import DuplicateNameError, MismatchError, NotInitializedError, PeerLostError, UsageError
from unidist.jobs.pool.pool import RankPool
from unidist_tensorflow.memory import DTYPES, NUMPY_DTYPES

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel


@pytest.fixture(params=[pytest.param("shm-2", marks=pytest.mark.soak), "shm-3", "single-1"])
def ranks(request: pytest.FixtureRequest, pool: Pool) -> RankPool:
    engine, size = request.param.split("-")
    return pool(int(size), engine)


@pytest.fixture
def two(pool: Pool) -> RankPool:
    return pool(2, "shm")


def _sample(shape: tuple[int, ...], dtype: np.dtype, rank: int) -> np.ndarray:
    """Small whole numbers, which every type can hold and add."""
    count = int(np.prod(shape))
    return (np.arange(1, count + 1) % 3 + rank).astype(dtype).reshape(shape)


@pytest.mark.parametrize("mode", MODES)
def test_every_operation_on_every_dtype(ranks: RankPool, mode: str) -> None:
    def on_rank() -> None:
        with runtime():
            size, rank = ud.size(), ud.rank()
            dtypes = [NUMPY_DTYPES[dtype] for dtype in DTYPES.values()]

            def body(*tensors: tf.Tensor) -> list[list[tf.Tensor]]:
                return [
                    ud.grouped_allreduce(tensors, op=ud.Sum, name="sum"),
                    ud.grouped_allgather(tensors, name="gather"),
                    [ud.broadcast(tensor, size - 1, name=f"b{index}") for index, tensor in enumerate(tensors[::5])],
                    ud.grouped_reducescatter(tensors, op=ud.Sum),
                    [ud.alltoall(tensor, name=f"a{index}") for index, tensor in enumerate(tensors[::5])],
                ]

            everyone = [[_sample((2 * size, 3), dtype, r) for dtype in dtypes] for r in range(size)]
            summed, gathered, sent, scattered, exchanged = call(mode, body, *everyone[rank])
            for index, dtype in enumerate(dtypes):
                own = [inputs[index] for inputs in everyone]
                wide = np.complex128 if dtype.kind == "c" else np.float64
                total = np.sum([x.astype(wide) for x in own], axis=0).astype(dtype)
                np.testing.assert_array_equal(summed[index], total)
                np.testing.assert_array_equal(gathered[index], np.concatenate(own))
                np.testing.assert_array_equal(scattered[index], total[2 * rank : 2 * rank + 2])
                assert summed[index].dtype == gathered[index].dtype == scattered[index].dtype == dtype
            for index in range(len(sent)):
                own = [inputs[5 * index] for inputs in everyone]
                np.testing.assert_array_equal(sent[index], own[-1])
                np.testing.assert_array_equal(
                    exchanged[index], np.concatenate([x[2 * rank : 2 * rank + 2] for x in own])
                )

    ranks.run(on_rank)


@pytest.mark.parametrize("mode", MODES)
def test_reductions_shapes_and_scaling(ranks: RankPool, mode: str) -> None:
    def on_rank() -> None:
        with runtime():
            size, rank = ud.size(), ud.rank()
            reductions = {
                ud.Average: np.mean, ud.Sum: np.sum, ud.Min: np.amin, ud.Max: np.amax, ud.Product: np.prod,
            }  # fmt: skip
            shapes = [(), (1,), (0, 4), (3, 5), (2000,)]

            def body(*tensors: tf.Tensor) -> list[list[tf.Tensor]]:
                return [
                    [
                        ud.allreduce(
                            tensor, op=op, name=f"{int(op)}.{index}", prescale_factor=2.0, postscale_factor=0.25
                        )
                        for index, tensor in enumerate(tensors)
                    ]
                    for op in reductions
                ]

            inputs = [[_sample(shape, np.dtype(np.float64), r) for shape in shapes] for r in range(size)]
            for found, function in zip(call(mode, body, *inputs[rank]), reductions.values(), strict=True):
                for index, shape in enumerate(shapes):
                    wanted = 0.25 * function([2.0 * own[index] for own in inputs], axis=0)
                    assert found[index].shape == shape
                    np.testing.assert_allclose(found[index], wanted, rtol=1e-15)

            average = call(mode, lambda x: ud.allreduce(x, name="default"), np.full((50,), 49, np.int64))
            np.testing.assert_array_equal(average, np.full((50,), 49, np.int64))

    ranks.run(on_rank)


@pytest.mark.parametrize("mode", MODES)
def test_inputs_are_scaled_before_they_are_added_up(ranks: RankPool, mode: str) -> None:
    def on_rank() -> None:
        with runtime():
            size, rank = ud.size(), ud.rank()
            halves = {"op": ud.Sum, "prescale_factor": 0.5}

            def body(*tensors: tf.Tensor) -> list[Any]:
                return [
                    [ud.allreduce(tensor, name=f"one{index}", **halves) for index, tensor in enumerate(tensors)],
                    ud.grouped_allreduce(tensors, name="group", **halves),
                    [ud.reducescatter(tensor, name=f"rs{index}", **halves) for index, tensor in enumerate(tensors)],
                    ud.grouped_reducescatter(tensors, **halves),
                ]

            integers = np.repeat(np.array([3], np.int32), size)
            tops = [np.full(size, value, dtype) for value, dtype in ((3e38, np.float32), (60000.0, np.float16))]
            reduced, grouped, scattered, rows = call(mode, body, integers, *tops)
            for results, part in ((reduced, slice(None)), (grouped, slice(None)), (scattered, [rank]), (rows, [rank])):
                np.testing.assert_array_equal(results[0], np.full(size, size * 1, np.int32)[part])
                for result, top in zip(results[1:], tops, strict=True):
                    with np.errstate(over="ignore"):
                        np.testing.assert_array_equal(
                            result, (top * top.dtype.type(0.5) * size).astype(top.dtype)[part]
                        )
            assert integers[0] == 3

    ranks.run(on_rank)


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_differ_between_ranks(ranks: RankPool, mode: str) -> None:
    def on_rank() -> None:
        with runtime():
            size, rank = ud.size(), ud.rank()
            rows = [np.full((r + 1, 2), r, np.float32) for r in range(size)]
            gathered = call(mode, lambda x: ud.allgather(x, name="rows"), rows[rank])
            np.testing.assert_array_equal(gathered, np.concatenate(rows))
            scalars = call(mode, lambda x: ud.allgather(x, name="scalar"), np.float32(rank))
            np.testing.assert_array_equal(scalars, np.arange(size, dtype=np.float32))

            splits = np.arange(1, size + 1, dtype=np.int32)  # rank r gets r + 1 rows from each
            own = np.repeat(np.arange(size), splits).astype(np.int64) + 10 * rank
            received, counts = call(mode, lambda x, s: ud.alltoall(x, s, name="all"), own, splits)
            np.testing.assert_array_equal(counts, np.full(size, rank + 1, np.int32))
            np.testing.assert_array_equal(received, np.repeat(10 * np.arange(size) + rank, rank + 1))
            assert counts.dtype == np.int32

            odd = np.arange(size + 1, dtype=np.float32)  # the first rank gets one more
            share = call(mode, lambda x: ud.reducescatter(x, op=ud.Sum, name="odd"), odd)
            bounds = [0, *range(2, size + 2)]
            np.testing.assert_array_equal(share, size * odd[bounds[rank] : bounds[rank + 1]])

    ranks.run(on_rank)


def test_static_shapes_are_kept(two: RankPool) -> None:
    def on_rank() -> None:
        with runtime(), tf.Graph().as_default():
            x = tf.compat.v1.placeholder(tf.float32, [5, None, 3])
            assert ud.allreduce(x).shape.as_list() == [5, None, 3]
            assert ud.allgather(x).shape.as_list() == [None, None, 3]
            assert ud.broadcast(x, 0).shape.as_list() == [5, None, 3]
            assert ud.reducescatter(x).shape.as_list() == [3 - ud.rank(), None, 3]
            assert ud.alltoall(x).shape.as_list() == [None, None, 3]
            assert ud.alltoall(x, [2, 3])[1].shape.as_list() == [2]
            assert ud.grouped_allreduce([x, x[0]])[1].shape.as_list() == [None, 3]
            assert ud.allreduce(tf.compat.v1.placeholder(tf.float32)).shape.rank is None
            assert ud.rank_op().shape == ud.join().shape == ()

    two.run(on_rank)


def test_names_in_graphs_are_horovods(two: RankPool) -> None:
    def on_rank() -> None:
        with runtime(), tf.Graph().as_default():
            x = tf.compat.v1.placeholder(tf.float32, [2], name="input/x")
            y = tf.compat.v1.placeholder(tf.float32, [2], name="y")
            ud.allreduce(x)
            ud.allreduce(x)
            ud.allgather(x, name="mine")
            ud.grouped_allreduce([x, y])
            names = {operation.name for operation in x.graph.get_operations()}
            assert {"HorovodAllreduce_input_x_0", "HorovodAllreduce_input_x_0_1", "mine"} <= names
            assert "HorovodGroupedAllreduce_input_x_0_y_0" in names
            with tf.name_scope(f"scope{ud.rank()}"):  # differs between the ranks, which do not look at it
                z = ud.allreduce(x, name="inner", ignore_name_scope=True, op=ud.Sum)
            with tf.compat.v1.Session() as session:
                assert session.run(z, {x: [1, 2]}).tolist() == [2, 4]

    two.run(on_rank)


@pytest.mark.parametrize("mode", MODES)
def test_indexed_slices(ranks: RankPool, mode: str) -> None:
    def on_rank() -> None:
        with runtime():
            size, rank = ud.size(), ud.rank()

            def body(values: tf.Tensor, indices: tf.Tensor, dense: tf.Tensor) -> list[tf.Tensor]:
                slices = tf.IndexedSlices(values, indices, tf.constant([5, 2]))
                alone = ud.allreduce(slices, op=ud.Sum)
                mixed = ud.grouped_allreduce([dense, slices], name="mixed")
                assert isinstance(alone, tf.IndexedSlices)
                return [tf.convert_to_tensor(each) for each in (alone, *mixed)]

            values, indices = np.full((rank + 1, 2), 6.0), np.arange(rank + 1, dtype=np.int64)
            alone, dense, mixed = call(mode, body, values, indices, np.full(3, float(rank)))
            wanted = np.zeros((5, 2))
            for r in range(size):
                wanted[: r + 1] += 6.0
            np.testing.assert_array_equal(alone, wanted)
            np.testing.assert_allclose(mixed, wanted / size, rtol=1e-15)
            np.testing.assert_allclose(dense, np.full(3, (size - 1) / 2))
            slices = tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant([5, 2]))
            for arguments in ({"op": ud.Max}, {"op": ud.Adasum}, {"prescale_factor": 2.0}):
                with pytest.raises(NotImplementedError):
                    ud.allreduce(slices, **arguments)

    ranks.run(on_rank)


@pytest.mark.parametrize("mode", MODES)
def test_compression_and_variables(two: RankPool, mode: str) -> None:
    def on_rank() -> None:
        with runtime():
            x = np.array([1.0, 2.5, -3.0], np.float64) + ud.rank()
            for compression in (ud.Compression.none, ud.Compression.fp16, ud.Compression.bf16):
                found = call(mode, lambda t, c=compression: ud.allreduce(t, compression=c, op=ud.Sum), x)
                assert found.dtype == np.float64
                np.testing.assert_array_equal(found, [3.0, 6.0, -5.0])
            whole = call(mode, lambda t: ud.allreduce(t, compression=ud.Compression.fp16), np.array([7, 9]))
            np.testing.assert_array_equal(whole, [7, 9])
            if mode != "session":
                variable = tf.Variable([1.0 + ud.rank()])
                assert call(mode, lambda: ud.allreduce(variable, op=ud.Sum, name="variable")).tolist() == [3.0]

    two.run(on_rank)


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_variables_are_broadcast_in_place(ranks: RankPool, mode: str) -> None:
    def on_rank() -> None:
        import keras

        with runtime():
            root, rank = ud.size() - 1, ud.rank()
            variables = [tf.Variable([1.0 * rank, 2.0]), tf.Variable(rank), keras.Variable([[3.0 * rank]])]
            variables.append(tf.Variable(tf.fill([2], tf.cast(rank, tf.bfloat16))))

            def body() -> list[tf.Tensor]:
                return ud.broadcast_(variables, root)

            values = (tf.function(body) if mode == "function" else body)()
            for found in (values, [tf.convert_to_tensor(variable) for variable in variables]):
                assert [np.asarray(x).astype(float).tolist() for x in found] == [
                    [1.0 * root, 2.0], root, [[3.0 * root]], [root, root],
                ]  # fmt: skip
            variables[1].assign_add(rank)  # the memory is the variable's own
            assert variables[1].numpy() == root + rank
            ud.broadcast_variables(variables, root_rank=0)
            assert variables[1].numpy() == root

    ranks.run(on_rank)


def test_global_variables_of_a_graph(two: RankPool) -> None:
    def on_rank() -> None:
        with runtime():
            for use_resource in (True, False):
                with tf.Graph().as_default():
                    made = [
                        tf.compat.v1.get_variable(f"v{i}", initializer=10.0 * ud.rank() + i, use_resource=use_resource)
                        for i in range(5)
                    ]
                    hook = ud.BroadcastGlobalVariablesHook(1)
                    with tf.compat.v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
                        assert session.run(made) == [10.0 + i for i in range(5)]
            with tf.Graph().as_default():
                variable = tf.compat.v1.get_variable("v", initializer=float(ud.rank()))
                everything, in_place = ud.broadcast_global_variables(1), ud.broadcast_([variable], 0)
                with tf.compat.v1.Session() as session:
                    session.run(tf.compat.v1.global_variables_initializer())
                    session.run(everything)
                    assert session.run(variable) == 1.0
                    variable.load(float(ud.rank()), session)
                    assert session.run(in_place) == [0.0]
                    assert session.run(variable) == 0.0
            with pytest.raises(RuntimeError, match="eager"):
                ud.broadcast_global_variables(0)

    two.run(on_rank)


@pytest.mark.parametrize("mode", MODES)
def test_topology_as_operations(ranks: RankPool, mode: str) -> None:
    def on_rank() -> None:
        with runtime():
            pair = ud.add_process_set([0])

            def body() -> list[tf.Tensor]:
                number = pair.process_set_id
                included = [ud.process_set_included_op(n) for n in (0, number, 77)]
                return [
                    ud.rank_op(),
                    ud.size_op(),
                    ud.local_rank_op(),
                    ud.local_size_op(),
                    ud.size_op(number),
                    *included,
                ]

            size, rank = ud.size(), ud.rank()
            if size == 1:
                return
            assert [int(x) for x in call(mode, body)] == [rank, size, rank, size, 1, 1, int(rank == 0), -2]

    if ranks.num_proc > 1:  # with one rank, the set would be the global one
        ranks.run(on_rank)


@pytest.mark.parametrize("mode", MODES)
def test_process_sets(pool: Pool, mode: str) -> None:
    def on_rank() -> None:
        with runtime():
            ends = ud.add_process_set([0, 2])
            unknown = ud.ProcessSet([0, 1])
            with pytest.raises(ValueError, match="is not registered"):  # no matter how a graph is made
                call(mode, lambda x: [ud.allreduce(x, process_set=unknown)], np.ones(1))
            if ud.rank() == 1:
                with pytest.raises(UsageError, match="does not belong"):
                    ud.allreduce(tf.constant(1.0), process_set=ends)
                return

            def body(x: tf.Tensor) -> list[tf.Tensor]:
                return [
                    ud.allreduce(x, process_set=ends, name="mean"),
                    ud.broadcast(x, 2, process_set=ends, name="root"),
                    ud.allgather(x, process_set=ends, name="rows"),
                    ud.reducescatter(x, process_set=ends, op=ud.Sum, name="share"),
                ]

            mean, root, rows, share = call(mode, body, np.full(2, float(ud.rank())))
            assert mean.tolist() == [1.0, 1.0]
            assert root.tolist() == [2.0, 2.0]
            assert rows.tolist() == [0.0, 0.0, 2.0, 2.0]
            assert share.tolist() == [2.0]
            assert ud.allgather_object(ud.rank(), process_set=ends) == [0, 2]

    pool(3, "shm").run(on_rank)


@pytest.mark.parametrize("mode", MODES)
def test_join_serves_the_others(two: RankPool, mode: str) -> None:
    def on_rank() -> None:
        with runtime():
            for step in range(3 - ud.rank()):
                found = call(mode, lambda x: ud.allreduce(x, op=ud.Sum, name="step"), np.ones(2))
                assert found.tolist() == ([2.0, 2.0] if step < 2 else [1.0, 1.0])
            assert call(mode, ud.join) == 0

    two.run(on_rank)


@pytest.mark.parametrize("mode", MODES)
def test_messages(ranks: RankPool, mode: str) -> None:
    def on_rank() -> None:
        with runtime():
            size, rank = ud.size(), ud.rank()

            def body(x: tf.Tensor) -> tf.Tensor:
                if rank:
                    first, second = ud.recv(x, rank - 1), None
                    if tf.executing_eagerly() or mode == "function":
                        second = ud.recv(x, rank - 1)
                    else:
                        with tf.control_dependencies([first]):
                            second = ud.recv(x, rank - 1)
                    x = first + second
                if rank < size - 1:
                    one = ud.send(x + 1, rank + 1)
                    with tf.control_dependencies([one] if mode == "session" else []):
                        two = ud.send(2 * x, rank + 1)
                    with tf.control_dependencies([two] if mode == "session" else []):
                        x = tf.identity(x)
                return x

            wanted = 1.0
            for _ in range(rank):
                wanted = (wanted + 1) + 2 * wanted
            assert call(mode, body, np.ones(3, np.float32)).tolist() == [wanted] * 3

    ranks.run(on_rank)


def test_objects(ranks: RankPool) -> None:
    def on_rank() -> None:
        with runtime():
            size, rank = ud.size(), ud.rank()
            assert ud.broadcast_object({"from": rank}, root_rank=size - 1) == {"from": size - 1}
            assert ud.allgather_object([rank] * rank) == [[r] * r for r in range(size)]
            again = ud.broadcast_object_fn(root_rank=0)
            assert [again(("object", rank, turn)) for turn in range(3)] == [("object", 0, turn) for turn in range(3)]

    ranks.run(on_rank)


def test_barrier_in_a_session_and_in_a_function(two: RankPool) -> None:
    def on_rank() -> None:
        with runtime():
            ud.barrier()
            runs: list[int] = []

            @tf.function
            def body(x: tf.Tensor) -> tf.Tensor:
                ud.barrier()
                tf.numpy_function(lambda: runs.append(1) or np.int64(0), [], tf.int64)
                return x

            body(tf.constant(1))
            assert runs == [1]
            with tf.Graph().as_default():
                barrier = ud.barrier()
                with tf.compat.v1.Session() as session:
                    session.run(barrier)

    two.run(on_rank)


# Errors


def test_mismatches_in_eager_mode_are_errors_of_both_families(two: RankPool) -> None:
    def on_rank() -> None:
        with runtime():
            for number, tensor in enumerate([tf.ones(2 + ud.rank()), tf.ones(2, [tf.int32, tf.int64][ud.rank()])]):
                with pytest.raises(MismatchError, match=f"bad{number}") as caught:
                    ud.allreduce(tensor, name=f"bad{number}", op=ud.Sum)
                assert isinstance(caught.value, tf.errors.FailedPreconditionError)
            with pytest.raises(tf.errors.FailedPreconditionError):
                ud.broadcast(tf.ones(2), ud.rank(), name="roots")
            with pytest.raises(tf.errors.InvalidArgumentError, match="splits") as caught:
                ud.alltoall(tf.ones(4), [4, 1], name="splits")
            assert isinstance(caught.value, UsageError)
            assert ud.allreduce(tf.constant(1.0), op=ud.Sum).numpy() == 2.0

    two.run(on_rank)


@pytest.mark.parametrize("mode", ["function", "session"])
def test_mismatches_in_graphs_leave_the_runtime_usable(two: RankPool, mode: str) -> None:
    def on_rank() -> None:
        from unidist_tensorflow.operations.graph import take_failure

        with runtime():

            def body(x: tf.Tensor) -> list[tf.Tensor]:
                return [ud.allreduce(x, name="bad"), ud.allreduce(x[:1], name="good", op=ud.Sum)]

            for _ in range(3):
                with pytest.raises(tf.errors.OpError, match=r"bad.*rank"):
                    call(mode, body, np.ones(2 + ud.rank()))
                assert isinstance(take_failure(), MismatchError)
                assert take_failure() is None
                ud.barrier()
            assert call(mode, body, np.ones(2))[1].tolist() == [2.0]

    two.run(on_rank)


def test_a_function_runs_again_after_a_run_that_failed(two: RankPool) -> None:
    def on_rank() -> None:
        with runtime():

            @tf.function
            def body(x: tf.Tensor) -> list[tf.Tensor]:
                results = [ud.allreduce(x, name=f"item{index}", op=ud.Sum) for index in range(6)]
                return [
                    *results,
                    ud.allreduce(x[: 1 + tf.cast(x[0], tf.int32) * ud.rank()], name="sometimes", op=ud.Sum),
                ]

            for step in range(6):
                x = tf.constant([float(step % 2), 1.0, 2.0])
                if step % 2:
                    with pytest.raises(tf.errors.OpError, match="sometimes"):
                        body(x)
                else:
                    assert [value.numpy()[-1] for value in body(x)] == [4.0] * 6 + [0.0]
                ud.barrier()

    two.run(on_rank)


def test_errors_before_init_and_of_arguments(pool: Pool) -> None:
    def on_rank() -> None:
        for kind in (NotInitializedError, ValueError, tf.errors.FailedPreconditionError):
            with pytest.raises(kind):
                ud.allreduce(tf.constant(1.0))
        assert call("eager", ud.process_set_included_op) == -1
        with runtime():
            with pytest.raises(UsageError, match="string"):
                ud.allreduce(tf.constant("text"))
            with pytest.raises(ValueError, match="average"):
                ud.allreduce(tf.constant(1.0), average=True, op=ud.Sum)
            with pytest.warns(DeprecationWarning, match="average"):
                assert ud.allreduce(tf.constant(2.0), average=False).numpy() == 2.0
            with pytest.raises(UsageError, match="Average or Sum"):
                ud.reducescatter(tf.ones(2), op=ud.Max)
            with pytest.raises(UsageError, match="scalar"):
                ud.alltoall(tf.constant(1.0))
            assert issubclass(PeerLostError, ud.HorovodInternalError)
            assert issubclass(DuplicateNameError, ValueError)

    pool(1, "single").run(on_rank)


def test_adasum_needs_a_power_of_two(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():
            for mode in MODES:
                with pytest.raises(NotImplementedError, match="power of 2"):
                    call(mode, lambda x: ud.allreduce(x, op=ud.Adasum), np.ones(4))

    pool(3, "shm").run(on_rank)


@pytest.mark.parametrize("mode", MODES)
def test_adasum_of_two_ranks(two: RankPool, mode: str) -> None:
    def on_rank() -> None:
        with runtime():
            both = [np.array([1.0, 2.0, 0.0]), np.array([0.0, 1.0, 3.0])]
            dot, a, b = both[0] @ both[1], both[0] @ both[0], both[1] @ both[1]
            wanted = (1 - dot / (2 * a)) * both[0] + (1 - dot / (2 * b)) * both[1]
            found = call(mode, lambda x: ud.allreduce(x, op=ud.Adasum), both[ud.rank()])
            np.testing.assert_allclose(found, wanted, rtol=1e-12)

    two.run(on_rank)


def test_a_lost_peer_ends_an_operation_in_a_function(two: RankPool) -> None:
    def on_rank() -> str:
        from unidist_tensorflow.elastic import state as elastic

        ud.init()
        if ud.rank():
            ud.barrier()
            ud.shutdown()
            return ""

        @elastic.run
        def train(state: elastic.State) -> None:
            tf.function(lambda x: ud.allreduce(x, name="alone"))(tf.ones(3))

        state = elastic.ObjectState(step=0)
        state.sync = lambda: None  # type: ignore[method-assign]  # the other rank takes no part
        ud.barrier()
        with pytest.raises(PeerLostError) as caught:
            train(state)
        ud.shutdown()
        return str(caught.value)

    assert "rank" in two.run(on_rank)[0]


def test_keras_symbols_are_not_needed_in_sessions(two: RankPool) -> None:
    def on_rank() -> None:
        with runtime():
            x = np.array([1.0, 2.0])
            assert in_session(lambda t: ud.allreduce(tf.cast(t, tf.bfloat16), op=ud.Sum), x).tolist() == [2.0, 4.0]

    two.run(on_rank)
