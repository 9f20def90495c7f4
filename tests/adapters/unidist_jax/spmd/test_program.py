"""Operations in programs over all ranks, which XLA runs: the numbers of numpy and of the other engines."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _programs import recorded, runtime
from part_pools import PartOfPool, PartPools
from unidist_command import Command

import unidist.jax as ud
from unidist.buffer import DType
from unidist.errors import ConfigurationError, MismatchError, OperationError, UsageError
from unidist_arrays.memory import NUMPY_DTYPES

pytestmark = pytest.mark.parallel

_AXIS = "unidist_ranks"


def _sample(shape: tuple[int, ...], dtype: Any, rank: int) -> np.ndarray:
    """Small whole numbers, which every type can hold and add."""
    return (np.arange(1, int(np.prod(shape)) + 1) % 3 + rank).astype(dtype).reshape(shape)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_every_operation_on_every_dtype(spmd_pools: dict[int, PartPools], size: int) -> None:
    def on_rank() -> None:
        with runtime(), recorded() as calls:
            rank = ud.rank()
            dtypes = [NUMPY_DTYPES[dtype] for dtype in DType]
            everyone = [[_sample((2 * size, 3), dtype, r) for dtype in dtypes] for r in range(size)]

            def body(arrays: list[Any]) -> list[Any]:
                real = [array for array in arrays if array.dtype.kind != "c"]
                return [
                    ud.allreduce(arrays, op=ud.Sum, name="sum"), ud.allreduce(real, op=ud.Max),
                    ud.allreduce(real, op=ud.Min), ud.allgather(arrays), ud.broadcast(arrays, size - 1),
                    ud.reducescatter(arrays, op=ud.Sum), [ud.alltoall(array) for array in arrays],
                ]  # fmt: skip

            found = ud.spmd(body)(everyone[rank])
            own = slice(2 * rank, 2 * rank + 2)
            for index, dtype in enumerate(dtypes):
                given = [arrays[index] for arrays in everyone]
                wide = [array.astype(np.complex128 if dtype.kind == "c" else np.float64) for array in given]
                total = np.sum(wide, axis=0).astype(dtype)
                exchanged = np.concatenate([array[own] for array in given])
                extremes = [None, None] if dtype.kind == "c" else [np.max(wide, axis=0), np.min(wide, axis=0)]
                wanted = [total, *extremes, np.concatenate(given), given[-1], total[own], exchanged]
                for results, each in zip(found, wanted, strict=True):
                    if each is not None:
                        assert results[index].dtype == dtype
                        np.testing.assert_array_equal(np.asarray(results[index]), each.astype(dtype))
            assert not calls

    spmd_pools[size].get(size).run(on_rank)


def test_samples_are_gathered_with_the_gradient_of_one_process(two_of_xla: PartOfPool) -> None:
    def on_rank() -> None:
        def loss(rows: Any) -> Any:
            return jnp.tanh(rows @ rows.T).mean()

        with runtime():
            rank, size = ud.rank(), ud.size()
            whole = np.linspace(-1.0, 1.0, 16).reshape(8, 2)
            own = slice(4 * rank, 4 * rank + 4)
            found = ud.spmd(jax.grad(lambda rows: loss(ud.gather_samples(rows))))(whole[own])
            # Each rank has computed the loss of all, and ranks' gradients are averaged.
            np.testing.assert_allclose(found, size * jax.grad(loss)(whole)[own], rtol=1e-12)

    two_of_xla.run(on_rank)


def test_every_reduction_with_factors_on_arrays_of_every_shape(two_of_xla: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            rank = ud.rank()
            reductions = {
                ud.Average: np.mean, ud.Sum: np.sum, ud.Min: np.min, ud.Max: np.max, ud.Product: np.prod,
            }  # fmt: skip
            shapes: list[tuple[int, ...]] = [(), (1,), (0,), (0, 4), (3, 5)]
            inputs = [[_sample(shape, np.float64, r) for shape in shapes] for r in range(2)]

            def body(arrays: list[Any]) -> list[Any]:
                return [
                    ud.allreduce(arrays, op=op, name=op.name, prescale_factor=2.0, postscale_factor=0.25)
                    for op in reductions
                ]

            for found, function in zip(ud.spmd(body)(inputs[rank]), reductions.values(), strict=True):
                for index, shape in enumerate(shapes):
                    wanted = 0.25 * function([2.0 * own[index] for own in inputs], axis=0)
                    assert found[index].shape == shape
                    np.testing.assert_allclose(found[index], wanted, rtol=1e-15)
            numbers = np.arange(-3, 4) * (1 + rank)
            average = ud.spmd(lambda x: ud.allreduce(x, prescale_factor=1.5))(numbers)
            np.testing.assert_array_equal(average, ud.allreduce(numbers, prescale_factor=1.5))  # by the other engine
            empty = ud.spmd(lambda x: [ud.allgather(x), ud.broadcast(x, 0), ud.alltoall(x), ud.reducescatter(x)])
            assert [array.shape for array in empty(np.zeros((0, 3)))] == [(0, 3)] * 4

    two_of_xla.run(on_rank)


def test_gradients_are_those_of_the_other_engines(two_of_xla: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            rank = ud.rank()
            x, weights = _sample((4, 3), np.float64, rank), np.arange(24.0).reshape(8, 3) + rank
            operations = {
                "allreduce": lambda x: ud.allreduce(x, op=ud.Sum, name="a", prescale_factor=3.0),
                "allgather": lambda x: ud.allgather(x, name="b"),
                "scalar": lambda x: ud.allgather(jnp.sum(x), name="c"),
                "broadcast": lambda x: ud.broadcast(x, 1, name="d"),
                "reducescatter": lambda x: ud.reducescatter(x, op=ud.Sum, name="e"),
                "alltoall": lambda x: ud.alltoall(x, name="f"),
            }

            def gradients(x: Any, weights: Any) -> Any:
                def loss(x: Any, name: str) -> Any:
                    found = operations[name](x)
                    return jnp.sum(
                        jnp.sin(found) * weights[: found.shape[0], : found.shape[-1] if found.ndim > 1 else 1]
                    )

                return {name: jax.grad(loss)(x, name) for name in operations}

            found, wanted = ud.spmd(gradients)(x, weights), jax.jit(gradients)(x, weights)
            for name, each in wanted.items():
                np.testing.assert_allclose(found[name], each, rtol=1e-14, err_msg=name)

    two_of_xla.run(on_rank)


def test_loops_branches_maps_and_trees(two_of_xla: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime(), recorded() as calls:
            rank = ud.rank()

            def summed(x: Any) -> Any:
                return ud.allreduce(x, op=ud.Sum)

            @ud.spmd
            def program(tree: Any, *, key: Any) -> Any:
                x, number = tree["x"], tree["number"]
                number = number + jax.lax.axis_index(_AXIS)
                rows = jax.vmap(summed)(x)
                loop = jax.lax.scan(lambda c, _: (summed(c), None), x, None, length=2)[0]
                branch = jax.lax.cond(summed(x)[0, 0] > 0, summed, lambda x: x, x)
                remat = jax.grad(jax.checkpoint(lambda x: jnp.sum(summed(x) ** 2)))(x)
                inner = jax.jit(summed)(x)
                return {"number": summed(number), "noise": jax.random.normal(key), "key": key}, (
                    rows, loop, branch, remat, inner,
                )  # fmt: skip

            x = np.ones((2, 2)) * (1 + rank)
            first, others = program({"x": x, "number": 2 * rank}, key=jax.random.key(rank))
            assert first["number"] == 2 + 1
            assert first["noise"] == jax.random.normal(jax.random.key(rank))
            assert jax.random.key_data(first["key"]).tolist() == jax.random.key_data(jax.random.key(rank)).tolist()
            for each, wanted in zip(others, (3, 6, 3, 12, 3), strict=True):
                np.testing.assert_array_equal(each, np.full((2, 2), wanted))
            assert not calls
            assert program({"x": x[:1], "number": 2 * rank}, key=jax.random.key(0))[1][0].shape == (1, 2)

    two_of_xla.run(on_rank)


def test_donated_arguments_are_gone_and_others_stay(two_of_xla: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            step = ud.spmd(lambda a, b, c: (a + ud.allreduce(b), c + 1.0), donate_argnums=(0, 2))
            a, b, c = jnp.zeros(4), jnp.full(4, float(ud.rank())), {"c": jnp.ones(3)}
            for _ in range(3):
                old = a
                a, c = step(a, b, c["c"] if isinstance(c, dict) else c)
                assert old.is_deleted()
            assert a.tolist() == [1.5] * 4
            assert c.tolist() == [4.0] * 3
            assert b.tolist() == [float(ud.rank())] * 4

    two_of_xla.run(on_rank)


def test_programs_that_differ_are_an_error_on_every_rank(two_of_xla: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            rank = ud.rank()
            step = ud.spmd(lambda x: ud.allreduce(x, op=ud.Sum))
            assert step(jnp.ones(2)).tolist() == [2.0, 2.0]
            with pytest.raises(MismatchError, match=r"rank 0: .* of float64\[2\]; rank 1: .* of float64\[3\]"):
                step(jnp.ones(2 + rank))
            with pytest.raises(MismatchError, match=r"nothing in the function depend on ud\.rank"):
                ud.spmd(lambda x: ud.allreduce(x) * ud.rank())(jnp.ones(2))
            with pytest.raises(MismatchError, match="different programs"):
                (ud.spmd(jnp.sin) if rank else step)(jnp.ones(2))
            assert step(jnp.ones(2)).tolist() == [2.0, 2.0]

    two_of_xla.run(on_rank)


def test_what_xla_does_not_have_is_an_error(two_of_xla: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            one = ud.add_process_set([0])
            x = jnp.ones(3)
            for function, error, text in (
                (lambda x: ud.barrier(), UsageError, r"barrier .* is in a program of ud\.spmd"),
                (lambda x: ud.send(x, 0), UsageError, "send to rank 0 is in a program"),
                (lambda x: ud.recv(x, 0), UsageError, "recv from rank 0 is in a program"),
                (lambda x: ud.allreduce(x, op=ud.Adasum), UsageError, "adasum .* is in a program"),
                (lambda x: ud.allreduce(x, process_set=one), UsageError, "over a process set"),
                (lambda x: ud.alltoall(x, [3, 0]), UsageError, "with splits="),
                (ud.alltoall, OperationError, "3 rows do not divide over 2 ranks"),
                (ud.reducescatter, OperationError, "3 rows do not divide over 2 ranks"),
                (lambda x: ud.allreduce(x * 1j, op=ud.Max), OperationError, "complex numbers have no Max"),
            ):
                if ud.rank() == 0 or "process set" not in text:
                    with pytest.raises(error, match=text):
                        ud.spmd(function)(x)
            assert ud.allreduce(x, op=ud.Sum).tolist() == [2.0] * 3  # at once: by the other engine
            ud.barrier()
            assert jax.jit(lambda x: ud.allreduce(x, op=ud.Sum))(x).tolist() == [2.0] * 3

    two_of_xla.run(on_rank)


def test_other_engines_have_no_such_programs(two_with_devices: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime(), pytest.raises(ConfigurationError, match="needs engine 'xla', and this job has 'shm': unidist"):
            ud.spmd(jnp.sin)(1.0)

    two_with_devices.run(on_rank)


_KILLED = """
import jax, jax.numpy as jnp, unidist.jax as ud
from unidist.errors import ConfigurationError, PeerLostError

signal.signal(signal.SIGTERM, signal.SIG_IGN)
if rank == 1 and MODE == "late":
    jnp.ones(1)
ud.init()
step = ud.spmd(lambda x: jax.lax.scan(lambda c, _: (ud.allreduce(jnp.tanh(c @ c)), None), x, None, length=LENGTH)[0])
try:
    step(jnp.ones((50, 50))).block_until_ready()
except ConfigurationError as exc:
    print("refused", exc, flush=True)
    os._exit(3)
ud.barrier()
if rank == 1:
    threading.Timer(0.5, lambda: (open("died", "w").write(repr(time.time())), os.kill(os.getpid(), 9))).start()
try:
    with ud.translated():
        while True:
            step(jnp.ones((50, 50))).block_until_ready()
except PeerLostError as exc:
    print("lost", "rank 1" in str(exc), time.time() - float(open("died").read()), flush=True)
os._exit(3)
"""


_STUCK = """
import ctypes, jax, unidist.jax as ud

signal.signal(signal.SIGTERM, signal.SIG_IGN)
ud.init()
ud.barrier()
if rank == 1:
    os.kill(os.getpid(), 9)
semaphore = ctypes.create_string_buffer(64)
ctypes.CDLL(None).sem_wait(semaphore)  # as a collective of XLA that does not notice
"""


def test_a_wait_for_a_lost_rank_that_xla_does_not_notice_ends_the_process(command: Command) -> None:
    script = command.script(_STUCK)
    arguments = ("launch", "-np", "2", "--engine", "xla", "--grace-period", "60", sys.executable, script)
    done = command.run(*arguments, env={"JAX_PLATFORMS": "cpu", "UNIDIST_DEADLOCK_SEC": "0.5"})
    assert "rank 1 is gone, and rank 0 waits in a library for what does not come, at script.py:" in done.stderr


@pytest.mark.parametrize(
    "length", [1, pytest.param(3000, marks=pytest.mark.soak)], ids=["among programs", "within one"]
)
def test_a_rank_that_is_killed_is_a_lost_peer(command: Command, length: int) -> None:
    script = command.script("import threading\n" + _KILLED.replace("LENGTH", str(length)).replace("MODE", "''"))
    arguments = ("launch", "-np", "2", "--engine", "xla", "--grace-period", "30", sys.executable, script)
    done = command.run(*arguments, env={"JAX_PLATFORMS": "cpu"})
    if "rank 1 is gone, and rank 0 waits in a library" in done.stderr:
        return  # Gloo has not noticed
    assert "lost " in done.stdout, f"{done.stdout}\n{done.stderr}"
    found = done.stdout.split("lost ")[1].split()
    assert found[0] == "True", done.stderr
    assert float(found[1]) < 30  # what is promised is 1; other tests may run


@pytest.mark.soak
def test_a_rank_that_has_computed_before_is_refused_on_every_rank(command: Command) -> None:
    script = command.script("import threading\n" + _KILLED.replace("LENGTH", "1").replace("MODE", "'late'"))
    done = command.run("launch", "-np", "2", "--engine", "xla", sys.executable, script, env={"JAX_PLATFORMS": "cpu"})
    assert "rank(s) 1 have computed with JAX already: call ud.init() before that" in done.stderr
    assert "call ud.init() before anything computes with JAX" in done.stdout


_ON_GPUS = """
import jax, jax.numpy as jnp, optax, unidist.jax as ud
from unidist.errors import ConfigurationError
from unidist_jax import basics

basics.choose_device = lambda topology: True  # as on a host with GPUs
if rank == 1 and LATE:
    jnp.ones(1)
ud.init()
assert jax.process_count() == (1 if LATE else 2)
step = ud.TrainStep(lambda w, x: ((w - x) ** 2).sum(), jnp.zeros(2), optax.sgd(0.25))
loss = float(step(jnp.full(2, float(rank))))
print("trained", loss, step.params.tolist(), flush=True)
try:
    ud.TrainStep(lambda w, x: (w * x).sum(), jnp.zeros(2), optax.sgd(0.25), "zero=1")
except ConfigurationError as exc:
    print("refused", exc, flush=True)
"""


def test_a_script_on_gpus_trains_by_xla(command: Command) -> None:
    script = command.script(_ON_GPUS.replace("LATE", "False"))
    done = command.run("launch", "-np", "2", sys.executable, script, env={"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    assert "trained 1.0 [0.25, 0.25]" in done.stdout
    assert "another engine: train on CPUs with JAX_PLATFORMS=cpu" in done.stdout


@pytest.mark.soak
def test_a_script_on_gpus_that_has_computed_before_is_told(command: Command) -> None:
    script = command.script(_ON_GPUS.replace("LATE", "True"))
    done = command.run("launch", "-np", "2", sys.executable, script, env={"JAX_PLATFORMS": "cpu"})
    assert done.stderr.count("JAX has computed before ud.init(), so XLA cannot exchange arrays between the GPUs") == 1
