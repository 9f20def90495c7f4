"""Objects, parameters and optimizer state from one rank to all, by Horovod's names; and the end of it all."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unidist.horovod_api.scope import scope_of
from unidist.negotiation import allgather_object as allgather_pickled
from unidist.negotiation import broadcast_object as broadcast_pickled
from unidist.negotiation.process_sets import ProcessSet, global_process_set
from unidist.runtime import context
from unidist.runtime import shutdown as shut_down
from unidist_jax.compiled import flush
from unidist_jax.memory import as_jax
from unidist_jax.operations.movement import broadcast


def shutdown() -> None:
    """End unidist in this process, when the programs that were called have ended. `init()` may be called again."""
    if context.is_initialized():
        flush()
    shut_down()


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return rank `root_rank`'s object on every rank of the process set. It must be picklable (cloudpickle)."""
    operations, scope = context.current().operations(process_set), scope_of(process_set)
    return broadcast_pickled(operations, obj, root=scope.root(root_rank), name=name or "broadcast_object")


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks of the process set, in rank order. They must be picklable (cloudpickle)."""
    return allgather_pickled(context.current().operations(process_set), obj, name=name or "allgather_object")


def broadcast_parameters(params: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> Any:
    """Return a tree like `params` with the arrays of rank `root_rank`. JAX's arrays do not change: use what it returns.

    Args:
        params: a tree of arrays, of JAX or numpy, of the same structure, shapes and dtypes on every rank; other leaves
            stay as they are. Random keys travel as their data.
        root_rank: whose arrays they are, a world rank.
        process_set: the ranks that take part.
    """
    leaves, structure = jax.tree.flatten(params)
    data = {place: _data_of(leaf) for place, leaf in enumerate(leaves) if isinstance(leaf, _ARRAYS)}
    travelled = broadcast(
        [as_jax(each) for each in data.values()], root_rank, name="broadcast_parameters", process_set=process_set
    )
    for place, array in zip(data, travelled, strict=True):
        leaf = leaves[place]
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        leaves[place] = jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)) if is_key else array
    return jax.tree.unflatten(structure, leaves)


_ARRAYS = (jax.Array, np.ndarray, np.generic)


def broadcast_optimizer_state(state: Any, root_rank: int = 0) -> Any:
    """Return an optimizer state of optax with the arrays of rank `root_rank`; see `broadcast_parameters`."""
    return broadcast_parameters(state, root_rank)


def _data_of(leaf: Any) -> Any:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf
