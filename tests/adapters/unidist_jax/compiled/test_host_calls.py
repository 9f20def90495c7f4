"""Calls of compiled programs: each of them runs, one at a time, in the order in which they were traced."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _programs import on_one_rank, recorded, runtime
from part_pools import PartOfPool
from unidist_command import Command

import unidist.jax as ud
from unidist.errors import DeadlockError, MismatchError, NotInitializedError, UsageError
from unidist_jax.compiled import HostOperation, ShapeDtype, bind

pytestmark = pytest.mark.parallel


class Note(HostOperation):
    """Writes down that it has run, and how many run at a time; returns its operand."""

    running, most = 0, 0
    notes: list[str] = []  # noqa: RUF012 - shared on purpose

    def __init__(self, name: str, *, fails: bool = False) -> None:
        self.name, self.fails = name, fails

    @property
    def title(self) -> str:
        return f"note {self.name!r}"

    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        return list(operands)

    def run(self, operands: Any, results: Any) -> None:
        Note.running += 1
        Note.most = max(Note.most, Note.running)
        time.sleep(0.002)
        self.notes.append(self.name)
        for operand, result in zip(operands, results, strict=True):
            np.copyto(result, operand)
        Note.running -= 1
        if self.fails:
            raise MismatchError(f"{self.name} failed")


def _notes() -> list[str]:
    """Return the list of what has run since now."""
    Note.notes.clear()
    Note.most = 0
    return Note.notes


def _note(name: str, value: Any, **options: Any) -> Any:
    return bind(Note(name, **options), [value])[0]


def _unused(x: Any) -> Any:
    _note("unused", jax.lax.stop_gradient(x))
    return jnp.sin(x)


def _in_scan(x: Any) -> Any:
    jax.lax.scan(lambda carry, _: (_unused(carry), None), x, None, length=3)
    return jnp.sin(x)


def _in_loop(x: Any) -> Any:
    return jax.lax.while_loop(lambda c: c < 3, lambda c: (_unused(c), c + 1)[1], x)


@on_one_rank
def test_calls_whose_results_nobody_uses_run() -> None:
    for function, count in (
        (_unused, 1),
        (lambda x: (jax.jit(_unused)(x), 2 * x)[1], 1),
        (_in_scan, 3),
        (lambda x: (jax.jit(_in_scan)(x), x)[1], 3),
        (jax.grad(_unused), 1),
        (jax.grad(_in_scan), 3),
        (jax.grad(jax.jit(_in_scan)), 3),
        (jax.checkpoint(_in_scan), 3),
        (jax.grad(jax.checkpoint(_in_scan)), 3),
        (jax.grad(jax.checkpoint(jax.jit(_in_scan))), 3),
        (lambda x: jax.lax.fori_loop(0, 3, lambda _, c: _unused(c), x), 3),
        (lambda x: (jax.lax.cond(x > 0, _unused, jnp.cos, x), x)[1], 1),
        (lambda x: (_in_loop(x), x)[1], 2),
        (lambda x: jax.vmap(lambda row: (_unused(row), row)[1])(jnp.stack([x, x])), 1),
    ):
        notes = _notes()
        jax.block_until_ready(jax.jit(function)(1.0))
        assert notes == ["unused"] * count


@on_one_rank
def test_equal_calls_run_twice() -> None:
    notes = _notes()
    operation = Note("same")

    def twice(x: Any) -> Any:
        return bind(operation, [x])[0] + bind(operation, [x])[0]

    inner = jax.jit(lambda x: _note("inner", x))
    assert jax.jit(twice)(1.0) == 2.0
    assert jax.jit(lambda x: inner(x) + inner(x))(1.0) == 2.0
    assert notes == ["same"] * 2 + ["inner"] * 2


@on_one_rank
def test_what_does_not_change_stays_in_its_loop() -> None:
    def loss(x: Any, constant: Any = 2.0) -> Any:
        carry, _ = jax.lax.scan(lambda c, _: (c * _note("each", jnp.asarray(constant)), None), x, None, length=3)
        return carry

    for function in (loss, jax.grad(loss), jax.grad(jax.jit(loss))):
        notes = _notes()
        assert jax.jit(function)(1.0) == 8.0
        assert notes == ["each"] * 3


@on_one_rank
def test_functions_that_take_nothing_run_in_their_places() -> None:
    """XLA of jaxlib 0.11 ends the process where it inlines such a function itself, with the same constant twice."""

    def constants() -> Any:
        twice = jax.lax.fori_loop(0, 3, lambda _, c: c * _note("inner", jnp.asarray(2.0)), 1.0)
        return jax.lax.fori_loop(0, 3, lambda _, c: c * 2.0, twice)

    def outer() -> Any:
        _note("outer", 1.0)
        return jax.lax.scan(lambda c, _: (c + jax.jit(jax.jit(constants))(), None), 0.0, None, length=2)[0]

    for function in (outer, jax.jit(outer), lambda: jax.jit(outer)() + jax.jit(constants)()):
        notes = _notes()
        again = 64.0 if function.__name__ == "<lambda>" else 0.0
        assert jax.jit(function)() == 128.0 + again
        assert notes == ["outer", *["inner"] * (9 if again else 6)]


@on_one_rank
def test_independent_calls_run_one_at_a_time_in_the_order_of_the_trace() -> None:
    notes = _notes()

    def program(xs: list[Any]) -> list[Any]:
        found = []
        for index, x in enumerate(xs):
            for _ in range((7 * index) % 5):  # work of different length before each
                x = jnp.tanh(x @ x)
            found.append(_note(str(index), jnp.sum(x)))
        return found

    xs = [jnp.ones((100, 100)) for _ in range(32)]
    compiled = jax.jit(program)
    for _ in range(3):
        notes.clear()
        jax.block_until_ready(compiled(xs))
        assert notes == [str(index) for index in range(32)]
    assert Note.most == 1


@on_one_rank
def test_programs_that_nobody_waits_for_keep_their_order() -> None:
    notes = _notes()

    def named(name: str) -> Any:
        return jax.jit(lambda x: _note(name, jnp.tanh(x @ x)))

    first, second, x = named("first"), named("second"), jnp.ones((200, 200))
    for _ in range(5):
        first(x)
        second(x)
    ud.flush()
    assert notes == ["first", "second"] * 5


@on_one_rank
def test_loops_and_inner_functions_keep_their_places() -> None:
    notes = _notes()

    def program(x: Any) -> Any:
        _note("begin", x)
        _in_scan(x)
        jax.jit(lambda x: _note("inner", x))(2 * x)
        jax.lax.cond(x > 0, lambda: _note("yes", 1.0), lambda: _note("no", 1.0))
        return _note("end", x)

    jax.block_until_ready(jax.jit(program)(1.0))
    assert notes == ["begin", *["unused"] * 3, "inner", "yes", "end"]


@on_one_rank
def test_programs_are_called_on_jaxs_fast_path() -> None:
    notes = _notes()
    monkeypatch = pytest.MonkeyPatch()
    from jax._src import pjit

    found = []
    plain = pjit._get_fastpath_data
    monkeypatch.setattr(pjit, "_get_fastpath_data", lambda *a, **k: found.append(plain(*a, **k)) or found[-1])
    compiled = jax.jit(lambda x: _unused(x) + jax.lax.fori_loop(0, 2, lambda _, c: _note("loop", c), x))
    compiled(1.0)
    assert found[-1] is not None
    asked = len(found)
    compiled(1.0).block_until_ready()
    monkeypatch.undo()
    assert len(found) == asked  # on the slow path, every call would ask again
    assert notes == ["unused", "loop", "loop"] * 2


@on_one_rank
def test_on_jaxs_slow_path_programs_do_the_same() -> None:
    from unidist_jax.compiled import order

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(order, "_in_one_equation", lambda program: program)  # as with another version of JAX
    compiled = jax.jit(lambda x: (_unused(x), _in_scan(x), _note("in place", x))[2], donate_argnums=0)
    for _ in range(2):
        notes = _notes()
        x = jnp.arange(100.0)
        address = x.unsafe_buffer_pointer()
        assert compiled(x).unsafe_buffer_pointer() == address
        assert notes == ["unused"] * 4 + ["in place"]
    monkeypatch.undo()


@on_one_rank
def test_programs_with_effects_of_jax_beside_ours_run_too() -> None:
    notes = _notes()
    from jax.experimental import io_callback

    def program(x: Any) -> Any:
        y = _note("before", x)
        z = io_callback(
            lambda value: (notes.append("jax"), value)[1], jax.ShapeDtypeStruct((), y.dtype), y, ordered=True
        )
        return _note("after", z)

    compiled = jax.jit(program)
    for _ in range(2):
        notes.clear()
        assert compiled(1.0) == 1.0
        assert notes == ["before", "jax", "after"]


@pytest.mark.parametrize("keep_unused", [False, True])
@on_one_rank
def test_a_donated_array_is_changed_in_place(keep_unused: bool) -> None:
    compiled = jax.jit(lambda x, y: _note("in place", x), donate_argnums=0, keep_unused=keep_unused)
    x = jnp.arange(1000.0)
    address = x.unsafe_buffer_pointer()
    found = compiled(x, 1.0)
    assert found.unsafe_buffer_pointer() == address
    assert found.tolist() == list(range(1000))
    with pytest.raises(UsageError, match=r"an array float64\[1000\] was donated to a compiled function and is gone"):
        ud.buffer(x)


@on_one_rank
def test_an_array_that_is_not_donated_stays_as_it_is() -> None:
    class Doubles(Note):
        def run(self, operands: Any, results: Any) -> None:
            np.multiply(operands[0], 2, out=results[0])

    x = jnp.arange(3.0)
    assert jax.jit(lambda x: bind(Doubles("double"), [x])[0] + x)(x).tolist() == [0.0, 3.0, 6.0]
    assert x.tolist() == [0.0, 1.0, 2.0]


@on_one_rank
def test_errors_are_texts_in_jax_and_our_own_when_translated() -> None:
    compiled = jax.jit(lambda x, y: _note("early", x) if y is None else _note("late", jnp.tanh(x @ x), fails=True))
    with pytest.raises(jax.errors.JaxRuntimeError, match="MismatchError: late failed"):
        compiled(jnp.ones((300, 300)), 1).block_until_ready()
    with pytest.raises(MismatchError, match=r"^late failed$") as caught, ud.translated():
        compiled(jnp.ones((300, 300)), 1).block_until_ready()
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)
    failed = compiled(jnp.ones((300, 300)), 1)
    ud.flush()  # does not raise: the error comes up where the result is used
    with pytest.raises(MismatchError), ud.translated():
        failed.block_until_ready()
    with pytest.raises(ZeroDivisionError), ud.translated():
        _ = 1 / 0
    with pytest.raises(UsageError, match="note 'early' has no gradient"):
        jax.grad(lambda x: compiled(x, None))(1.0)
    with pytest.raises(jax.errors.JaxRuntimeError, match="callback"), ud.translated():
        jax.block_until_ready(jax.jit(lambda x: jax.pure_callback(_raise, x, x))(1.0))
    assert compiled(jnp.ones(1), None) == 1.0


def _raise(value: Any) -> Any:
    raise RuntimeError(f"in a callback of {value}")


@on_one_rank
def test_no_call_runs_after_one_that_failed() -> None:
    notes = _notes()

    def program(x: Any) -> Any:
        return _note("first", x, fails=True), _note("second", x + 1)

    with pytest.raises(MismatchError), ud.translated():
        jax.block_until_ready(jax.jit(program)(1.0))
    assert notes == ["first"]


def test_messages_in_loops_that_are_recomputed_are_refused(two: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():

            def loop(x: Any) -> Any:
                return jax.lax.scan(lambda c, _: (c * ud.recv(jnp.ones(()), 1 - ud.rank()), None), x, None, length=2)[0]

            with pytest.raises(UsageError, match=r"recv from rank . is in a loop .* within jax.checkpoint"):
                jax.jit(jax.grad(jax.checkpoint(loop)))(1.0)
            for number in (2.0, 3.0, 4.0, 5.0):
                ud.send(number, 1 - ud.rank())
            assert jax.jit(jax.grad(loop))(1.0) == 6.0

            def body_alone(x: Any) -> Any:
                body = jax.checkpoint(lambda c: c * ud.recv(jnp.ones(()), 1 - ud.rank()))
                return jax.lax.scan(lambda c, _: (body(c), None), x, None, length=2)[0]

            assert jax.jit(jax.grad(body_alone))(1.0) == 20.0

    two.run(on_rank)


def test_messages_barriers_and_reductions_meet_across_loops_and_programs(two: PartOfPool) -> None:
    def on_rank() -> list[str]:
        with runtime(), recorded() as calls:
            rank = ud.rank()

            @jax.jit
            def loop(x: Any) -> Any:
                def body(carry: Any, step: Any) -> tuple[Any, Any]:
                    ud.barrier()
                    if rank:
                        got = ud.recv(step, 0)
                    else:
                        ud.send(step * 10, 1)
                        got = step
                    return carry + ud.allreduce(got, op=ud.Sum, name="sum"), got

                return jax.lax.scan(body, x, jnp.arange(3.0))

            @jax.jit
            def after(x: Any) -> Any:
                if rank:
                    ud.send(x, 0)
                    return x
                return ud.recv(x, 1)

            for _ in range(3):
                total, got = loop(jnp.zeros(()))
                last = after(jnp.full((300, 300), float(rank)))
            ud.send(jnp.float64(rank), 1 - rank)  # at once, behind what is still to run
            assert ud.recv(jnp.zeros(()), 1 - rank).item() == 1 - rank
            assert total.item() == 33.0
            assert got.tolist() == [0.0, 10.0 * rank + (1 - rank), 20.0 * rank + 2 * (1 - rank)]
            assert last[0, 0] == 1.0
            return list(calls)

    first, second = two.run(on_rank)
    each = ["barrier 'barrier.traced.0'", "send to rank 1", "allreduce 'sum'"]
    assert first == [*each * 3, "recv from rank 1"] * 3
    each[1] = "recv from rank 0"
    assert second == [*each * 3, "send to rank 0"] * 3


def test_programs_in_opposite_orders_are_an_error_on_both_ranks(two: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():

            def program(x: Any) -> Any:
                names = ("a", "b") if ud.rank() else ("b", "a")
                return [ud.allreduce(x, name=name) for name in names]

            with pytest.raises(DeadlockError, match="allreduce 'a'"), ud.translated():
                jax.block_until_ready(jax.jit(program)(jnp.ones(2)))

    two.run(on_rank)


def test_rank_dependent_work_does_not_reorder_calls(two: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            rank = ud.rank()

            def program(xs: list[Any]) -> list[Any]:
                found = []
                for index, x in enumerate(xs):
                    for _ in range((7 * index + 13 * rank) % 4):
                        x = jnp.tanh(x @ x)
                    found.append(ud.allreduce(0 * jnp.sum(x) + index, op=ud.Sum, name=f"item {index}"))
                return found

            xs = [jnp.ones((100, 100)) for _ in range(24)]
            found = jax.jit(program)(xs)
            assert [value.item() for value in found] == [2.0 * index for index in range(24)]

    two.run(on_rank)


def test_a_program_after_the_end_of_the_runtime_is_an_error(two: PartOfPool) -> None:
    def on_rank() -> None:
        compiled = jax.jit(lambda x: ud.allreduce(x, op=ud.Sum, name="loss"))
        with runtime():
            assert compiled(jnp.ones(1)).item() == 2.0
            pending = compiled(jnp.ones((500, 500)))
        assert pending[0, 0] == 2.0  # `shutdown` has waited for it
        for _ in range(2):
            with pytest.raises(NotInitializedError, match="call init"), ud.translated():
                compiled(jnp.ones(1)).block_until_ready()
        with pytest.raises(NotInitializedError):
            ud.allreduce(1.0)
        with runtime():  # another runtime uses the same program
            assert compiled(jnp.ones(1)).item() == 2.0

    two.run(on_rank)


def test_programs_of_several_threads(two: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            found: dict[int, float] = {}

            def work(number: int) -> None:
                compiled = jax.jit(lambda x: ud.allreduce(x * number, op=ud.Sum, name=f"thread {number}"))
                found[number] = sum(compiled(jnp.ones(())).item() for _ in range(20))

            threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert found == {number: 40.0 * number for number in range(3)}

    two.run(on_rank)


@on_one_rank
def test_what_was_compiled_can_be_collected() -> None:
    import weakref

    def made() -> Any:
        large = jnp.ones(1000)
        compiled = jax.jit(lambda x: _note("collected", x) + large.sum())
        compiled(1.0).block_until_ready()
        return weakref.ref(large)

    reference = made()
    jax.clear_caches()
    gc.collect()
    assert reference() is None


def test_a_script_that_ends_with_a_program_under_way_ends(command: Command) -> None:
    script = command.script(
        """
        import jax, jax.numpy as jnp, unidist.jax as ud

        ud.init()
        compiled = jax.jit(lambda x: ud.allreduce(jnp.tanh(x @ x), name="loss"))
        for _ in range(5):
            compiled(jnp.ones((500, 500)))
        print("the end")
        """
    )
    done = command.run("launch", "-np", "2", sys.executable, script, env={"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.replace("[0-1]", "[0] the end [1]").count("the end") == 2
    assert not done.stderr
