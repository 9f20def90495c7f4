"""JAX: all-reduces within `jit`, and a training step of the GPT, beside JAX's own collectives over gloo.

Run by `python -m benchmarks` on two ranks. JAX's own group spans the same two processes (`jax.distributed`), so both
are measured in one run. All-reduces donate their argument: that is how a program uses them that wants to be fast.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Part

import unidist.jax as ud
from benchmarks.gpt import CONTEXT, VOCABULARY
from benchmarks.gpt_step import BATCH
from benchmarks.jax_gpt import loss_of, parameters
from unidist_bench import BenchmarkRanks, side_by_side

_SIZES = {"25 MB": (25_000_000 // 4, 1), "16 B": (4, 100)}
"""Elements, and calls in a row that are measured as one."""
_AXIS = "ranks"


def main(output: str, repetitions: int, port: str) -> None:
    """Measure, and let rank 0 write the medians in seconds."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    jax.distributed.initialize(f"127.0.0.1:{port}", size, rank)
    ud.init()
    mesh = Mesh(np.array(jax.devices()), (_AXIS,))
    meeting = BenchmarkRanks(ud.barrier, ud.allgather_object)
    medians: dict[str, float] = {}
    for title, (count, inner) in _SIZES.items():
        contenders: dict[str, Callable[[], None]] = {}
        contenders[f"{title}, unidist"] = _repeated(jax.jit(ud.allreduce, donate_argnums=0), jnp.ones(count))
        spread = NamedSharding(mesh, Part(_AXIS))
        everyones = jax.make_array_from_process_local_data(spread, np.ones(count, np.float32))
        contenders[f"{title}, psum"] = _repeated(_over(mesh, lambda x: jax.lax.pmean(x, _AXIS)), everyones)
        medians |= side_by_side(contenders, meeting, repetitions=repetitions, inner=inner)
    steps = {}
    for name, make in (("no communication", _alone), ("unidist", _by_unidist), ("pmean", lambda: _by_pmean(mesh))):
        steps[f"GPT step, {name}"] = make()
    medians |= side_by_side(steps, meeting, repetitions=repetitions)
    if rank == 0:
        with open(output, "w") as file:
            json.dump(medians, file)
    ud.shutdown()
    jax.distributed.shutdown()


def _over(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    spread = jax.shard_map(function, mesh=mesh, in_specs=Part(_AXIS), out_specs=Part(_AXIS))
    return jax.jit(spread, donate_argnums=0)


def _repeated(function: Callable[[Any], Any], first: Any) -> Callable[[], None]:
    """Return a function that calls another one on what that has returned before."""
    latest = [first]

    def run() -> None:
        latest[0] = function(latest[0]).block_until_ready()

    return run


def _ids() -> jax.Array:
    return jnp.asarray(np.random.default_rng(ud.rank()).integers(VOCABULARY, size=(BATCH, CONTEXT + 1)))


def _alone() -> Callable[[], None]:
    return _loop(jax.jit(_update(lambda gradients: gradients), donate_argnums=(0, 1)), parameters(), _ids())


def _by_unidist() -> Callable[[], None]:
    step, ids = ud.TrainStep(loss_of, parameters(), optax.adamw(3e-4)), _ids()
    return lambda: step(ids).block_until_ready() and None


def _by_pmean(mesh: Mesh) -> Callable[[], None]:
    whole, spread = NamedSharding(mesh, Part()), NamedSharding(mesh, Part(_AXIS))
    update = _update(lambda gradients: jax.lax.pmean(gradients, _AXIS))
    step = jax.shard_map(
        update, mesh=mesh, in_specs=(Part(), Part(), Part(_AXIS)), out_specs=(Part(), Part()), check_vma=False
    )
    params = jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(whole, np.asarray(leaf)), parameters())
    ids = jax.make_array_from_process_local_data(spread, np.asarray(_ids()))
    return _loop(jax.jit(step, donate_argnums=(0, 1)), params, ids)


_OPTIMIZER = optax.adamw(3e-4)


def _update(exchange: Callable[[Any], Any]) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    def update(params: Any, state: Any, ids: Any) -> tuple[Any, Any]:
        updates, state = _OPTIMIZER.update(exchange(jax.grad(loss_of)(params, ids)), state, params)
        return optax.apply_updates(params, updates), state

    return update


def _loop(step: Callable[[Any, Any, Any], tuple[Any, Any]], params: Any, ids: Any) -> Callable[[], None]:
    latest = [params, jax.jit(_OPTIMIZER.init)(params)]

    def run() -> None:
        latest[:] = step(*latest, ids)
        jax.block_until_ready(latest)

    return run


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
