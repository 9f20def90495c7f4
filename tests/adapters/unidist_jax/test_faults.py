"""What goes wrong in compiled programs ends on every rank within seconds, with an error that says what it was."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from _programs import runtime
from part_pools import PartOfPool
from unidist_command import Command

import unidist.jax as ud
from unidist.errors import DeadlockError, MismatchError, PeerLostError, StalledError, UsageError

pytestmark = pytest.mark.parallel


def _error_of(function: Any, *arguments: Any) -> tuple[str, str]:
    """Return the kind and the text of the error with which a program ends."""
    try:
        with ud.translated():
            jax.block_until_ready(jax.jit(function)(*arguments))
    except (DeadlockError, MismatchError, PeerLostError, StalledError) as exc:
        return type(exc).__name__, str(exc)
    return "", ""


def _extra_operation(x: Any) -> Any:
    if ud.rank():
        x = ud.allreduce(x, name="extra")
    return ud.allreduce(x, name="loss")


def _other_shapes(x: Any) -> Any:
    return ud.allreduce(x[ud.rank() :], name="loss")


def _other_reductions(x: Any) -> Any:
    return ud.allreduce(x, op=ud.Sum if ud.rank() else ud.Average, name="loss")


def _other_collectives(x: Any) -> Any:
    return ud.broadcast(x, 0, name="loss") if ud.rank() else ud.allreduce(x, name="loss")


def _a_branch_of_one_rank(x: Any) -> Any:
    x = x * ud.rank()
    x = jax.lax.cond(x[0] > 0, ud.allreduce, lambda x: x, x)
    return ud.allreduce(x, name="loss")


def _a_python_branch_of_one_rank(x: Any) -> Any:
    if ud.rank():
        x = ud.allreduce(x)
    return ud.allgather(ud.allreduce(x))


def _one_iteration_more(x: Any) -> Any:
    return jax.lax.fori_loop(0, 2 + ud.rank(), lambda _, x: ud.allreduce(x, name="iteration"), x)


@pytest.mark.parametrize(
    ("program", "names"),
    [
        (_extra_operation, ["'extra'", "'loss'"]),
        (_other_shapes, ["'loss'"]),
        (_other_reductions, ["'loss'"]),
        (_other_collectives, ["'loss'"]),
        (_a_branch_of_one_rank, ["'allreduce.traced.1'", "'loss'"]),
        (_a_python_branch_of_one_rank, ["'allreduce.traced.2'"]),
    ],
)
def test_programs_that_differ_end_on_every_rank(two: PartOfPool, program: Any, names: list[str]) -> None:
    def on_rank() -> tuple[str, str]:
        with runtime():
            return _error_of(program, jnp.ones(4))

    for kind, text in two.run(on_rank):
        assert kind in ("MismatchError", "DeadlockError"), text
        for name in names:
            assert name in text


def test_a_rank_that_waits_for_one_that_goes_on_ends_too(two: PartOfPool) -> None:
    def on_rank() -> tuple[str, str]:
        with runtime():
            return _error_of(_one_iteration_more, jnp.ones(4))

    first, second = two.run(on_rank)
    assert first == ("", "")  # it has left
    assert second[0] in ("DeadlockError", "PeerLostError"), second
    assert "rank 0" in second[1]


def test_the_runtime_stays_usable_after_programs_that_differ(two: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            compiled = jax.jit(lambda x: ud.allreduce(x, op=ud.Sum, name="loss"))
            for _ in range(2):
                with pytest.raises(MismatchError, match="'loss'"), ud.translated():
                    compiled(jnp.ones(2 + ud.rank())).block_until_ready()
                assert compiled(jnp.ones(2)).tolist() == [2.0, 2.0]
                with pytest.raises(Exception, match="MismatchError: the ranks do not agree"):  # JAX's own
                    compiled(jnp.ones(2 + ud.rank())).block_until_ready()

    two.run(on_rank)


def test_a_tracer_a_donated_array_and_a_cut_one_are_named(two: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            with pytest.raises(UsageError, match="has no memory yet: it is traced by jit, grad or vmap"):
                jax.jit(ud.buffer)(jnp.ones(2))
            donated = jnp.ones(2)
            jax.jit(lambda x: x + 1, donate_argnums=0)(donated)
            for function in (ud.allreduce, ud.allgather, lambda x: ud.broadcast(x, 0), ud.alltoall, ud.reducescatter):
                with pytest.raises(UsageError, match="was donated to a compiled function and is gone"):
                    function(donated)
            with pytest.raises(UsageError, match="was donated"):
                ud.send(donated, 1 - ud.rank())
            assert ud.allreduce(1.0).item() == 1.0

    two.run(on_rank)


_KILLED = """
import threading, jax, jax.numpy as jnp, optax, unidist.jax as ud
from unidist.errors import PeerLostError

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of the launcher, when the first rank has failed
ud.init()
def loss(params, x):
    step = lambda c, _: (ud.allreduce(jnp.tanh(c @ c), name="activation"), None)
    return jnp.mean(jax.lax.scan(step, x * params["w"], None, length=REPEAT)[0])
train = ud.TrainStep(loss, {"w": jnp.ones(())}, optax.sgd(0.1))
x = jnp.ones((50, 50))
HOW
"""

_BY_STEP = """
train(x)
ud.barrier()
def die():
    time.sleep(0.3)
    open("died", "w").write(repr(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1:
    threading.Thread(target=die).start()
try:
    while True:
        train(x)
except PeerLostError as exc:
    print("lost", "rank 1" in str(exc), time.time() - float(open("died").read()), flush=True)
os._exit(3)
"""


@pytest.mark.parametrize("repeat", ["1", "100000"], ids=["among steps", "within one"])
def test_a_rank_that_is_killed_ends_the_others_within_a_second(command: Command, repeat: str) -> None:
    how = _BY_STEP
    if repeat != "1":  # the first step never ends, so a rank that dies is certainly within it
        how = how.replace("train(x)\nud.barrier()\n", "", 1)
    script = command.script(_KILLED.replace("REPEAT", repeat).replace("HOW", how))
    env = {"JAX_PLATFORMS": "cpu", "UNIDIST_ENGINE": "shm"}
    if repeat != "1":
        script = command.script((command.folder / script).read_text().replace("time.sleep(0.3)", "time.sleep(4)"))
    done = command.run("launch", "-np", "3", "--grace-period", "20", sys.executable, script, env=env)
    found = [line.split("lost ")[1].split() for line in done.stdout.splitlines() if "lost " in line]
    assert found, done.stderr
    assert len(found) == 2 or "[0,2]" in done.stdout, done.stdout
    for says_who, seconds in found:
        assert says_who == "True"
        assert float(seconds) < 30  # what is promised is 1; other tests may run
