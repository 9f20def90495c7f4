"""Deadlocks of large programs, in every way in which a script waits for their results."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _programs import runtime
from part_pools import PartOfPool

import unidist.jax as ud
from unidist.errors import DeadlockError, PeerLostError

pytestmark = pytest.mark.parallel

SIZE = 400
"""Large enough that XLA runs a program on other threads."""
BOUND_SEC = 30.0
"""A deadlock is seen within 5 seconds, on a machine with nothing else to do; without the detection it takes minutes."""
LONG_SEC = 6.0


def _program(name: str) -> Callable[[Any], Any]:
    return jax.jit(lambda x: ud.allreduce(x @ x, name=name) @ x)


def _asarray(x: Any) -> None:
    np.asarray(x)


def _float(x: Any) -> None:
    float(jnp.sum(x))


WAYS: dict[str, Callable[[Any], Any]] = {
    "block_until_ready(tree)": lambda x: jax.block_until_ready({"a": [x]}),
    "x.block_until_ready()": lambda x: x.block_until_ready(),
    "np.asarray(x)": _asarray,
    "float": _float,
    "device_get": jax.device_get,
}


def _seconds_to_end(function: Callable[[], Any]) -> float:
    began = time.monotonic()
    with pytest.raises((DeadlockError, PeerLostError)), ud.translated():
        function()
    return time.monotonic() - began


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_wait_for_results_that_cannot_come_end(two: PartOfPool, way: str) -> None:
    def on_rank() -> float:
        with runtime():
            program = _program("a" if ud.rank() == 0 else "b")
            return _seconds_to_end(lambda: WAYS[way](program(jnp.ones((SIZE, SIZE)))))

    assert max(two.run(on_rank)) < BOUND_SEC


def test_a_program_of_one_rank_and_a_call_of_the_other_end(two: PartOfPool) -> None:
    def on_rank() -> float:
        with runtime():
            if ud.rank() == 0:
                return _seconds_to_end(lambda: np.asarray(_program("a")(jnp.ones((SIZE, SIZE)))))
            return _seconds_to_end(ud.barrier)

    assert max(two.run(on_rank)) < BOUND_SEC


def test_a_train_step_that_one_rank_skips_ends(two: PartOfPool) -> None:
    def on_rank() -> float:
        def loss(params: Any, x: Any) -> Any:
            return jnp.mean((x @ params["w"]) ** 2)

        with runtime():
            step = ud.TrainStep(loss, {"w": jnp.ones((SIZE, SIZE))}, optax.sgd(0.1))
            step(jnp.ones((SIZE, SIZE)))
            if ud.rank() == 0:
                return _seconds_to_end(lambda: step(jnp.ones((SIZE, SIZE))))
            return _seconds_to_end(ud.barrier)

    assert max(two.run(on_rank)) < BOUND_SEC


def _sleep() -> None:
    time.sleep(LONG_SEC)


def _compute() -> None:
    until = time.monotonic() + LONG_SEC
    while time.monotonic() < until:
        pass


def _wait_for_data() -> None:
    with pytest.raises(queue.Empty):
        queue.Queue[int]().get(timeout=LONG_SEC)


@pytest.mark.parametrize("pause", [_sleep, _compute, _wait_for_data])
def test_a_rank_that_goes_on_later_is_in_no_deadlock(two: PartOfPool, pause: Callable[[], None]) -> None:
    """Rank 0 has an operation under way on another thread, and then makes the call that rank 1 waits for."""

    def on_rank() -> float:
        with runtime(), ThreadPoolExecutor(1) as other:
            program = _program("a")
            if ud.rank() == 0:
                result = other.submit(lambda: np.asarray(program(jnp.ones((SIZE, SIZE)))))
                pause()
                ud.barrier()
                return float(result.result()[0, 0])
            ud.barrier()
            return float(program(jnp.ones((SIZE, SIZE)))[0, 0])

    assert two.run(on_rank) == [float(SIZE * SIZE)] * 2
