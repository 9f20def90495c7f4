"""Elastic state for JAX, by Horovod's names: trees of arrays as values of a state."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from unidist.checkpoint.format.interface import KeepsState
from unidist.elastic.durable.parts import DurableParts, parts_of
from unidist.elastic.handlers import update_handlers
from unidist.elastic.state import Handler, HostsUpdatedInterrupt, ObjectState, SharedHandler, State
from unidist.elastic.state import run as run_elastic
from unidist.elastic.step_training import Policy
from unidist.errors import PeerLostError
from unidist.optim.update import update_of
from unidist_arrays.memory import Array
from unidist_jax.checkpoint import (
    JaxStates,
    KeptOptimizer,
    KeptParameters,
    ModelState,
    state_of_ranks,
)
from unidist_jax.compiled import flush, translated
from unidist_jax.memory import array_of, as_jax
from unidist_jax.operations import broadcast_parameters
from unidist_jax.optimizer import BoundOptimizer

__all__ = ["HostsUpdatedInterrupt", "JaxState", "ObjectState", "Policy", "State", "run"]

Result = TypeVar("Result")


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap a training function `func(state, ...)`: its state is synchronised before it starts.

    See `unidist.elastic.state.run`. A compiled program that lost a peer ends with an error of JAX's, which is
    recognised here. What was compiled before goes on in the next generation.
    """

    @functools.wraps(func)
    def raising(state: State, *args: Any, **kwargs: Any) -> Result:
        with ending_programs():
            return func(state, *args, **kwargs)

    return run_elastic(raising)


@contextmanager
def ending_programs() -> Iterator[None]:
    """Raise PeerLostError where a program has lost a peer, and let all programs end before the generation does."""
    try:
        with translated():
            yield
    except (PeerLostError, HostsUpdatedInterrupt):
        flush()
        raise


class _Kept:
    """A copy of a leaf of a tree in host memory: a step that fails has been given the array itself.

    Args:
        leaf: of any type; one that is no array is kept as it is.
        earlier: a copy that is not needed any more, whose memory is used again where it fits.
    """

    def __init__(self, leaf: Any, earlier: _Kept | None) -> None:
        self._other = leaf
        self._array: Array | None = None
        self._impl: str | None = None
        self._is_jax = isinstance(leaf, jax.Array)
        if not isinstance(leaf, jax.Array | np.ndarray):
            return
        self._other = None
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            self._impl, leaf = str(jax.random.key_impl(leaf)), jax.random.key_data(leaf)
        source = array_of(leaf)
        memory = None if earlier is None else earlier._array
        if memory is None or memory.shape != source.shape or memory.dtype != source.dtype:
            memory = np.empty(source.shape, source.dtype)
        np.copyto(memory, source)
        self._array = memory

    def leaf(self) -> Any:
        """Return a copy of the leaf."""
        if self._array is None:
            return self._other
        if not self._is_jax:
            return self._array.copy()
        array = jnp.array(self._array, copy=True)
        return array if self._impl is None else jax.random.wrap_key_data(array, impl=self._impl)


class TreeHandler(Handler):
    """Keeps a tree. Trees are replaced in each step, so setting one keeps nothing: the next commit does.

    Args:
        value: the tree.
        keeps_previous: a commit may fail after `save`, so do not write into the copy of the commit before.
    """

    def __init__(self, value: Any, *, keeps_previous: bool = False) -> None:
        self._keeps_previous = keeps_previous
        self._kept: list[_Kept] = []
        self._previous: list[_Kept] = []
        self._structure: Any = None
        super().__init__(value)

    @override
    def set_value(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Copy the arrays to host memory."""
        leaves, structure = jax.tree.flatten(self.value)
        with translated():
            jax.block_until_ready([leaf for leaf in leaves if isinstance(leaf, jax.Array)])
        memory = self._previous if self._keeps_previous else self._kept
        copies = [_Kept(leaf, into) for leaf, into in itertools.zip_longest(leaves, memory[: len(leaves)])]
        self._kept, self._previous = copies, self._kept if self._keeps_previous else []
        self._structure = structure

    def restore(self) -> None:
        """Make a tree of the copies."""
        self.value = jax.tree.unflatten(self._structure, [each.leaf() for each in self._kept])

    def sync(self) -> None:
        """Take the tree of rank 0, of the same structure; its numbers are arrays then. Collective."""
        self.value = broadcast_parameters(jax.tree.map(_as_array, self.value))


def _as_array(leaf: Any) -> Any:
    is_number = isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex)
    return as_jax(leaf) if is_number else leaf


class ShardedStateHandler(SharedHandler):
    """Keeps an optimizer state of which each rank has pieces.

    Args:
        value: the state.
        params: returns the parameters.
        optimizer: the bound optimizer.
    """

    def __init__(self, value: Any, params: Callable[[], Any], optimizer: BoundOptimizer) -> None:
        self._params, self._optimizer = params, optimizer
        super().__init__(value, self._sections, JaxStates.framework.convert)

    @override
    def set_value(self, value: Any) -> None:
        self.value = value

    def _sections(self, value: Any) -> Mapping[str, KeepsState]:
        params = self._params()
        fitting = state_of_ranks(params, value, self._optimizer)
        return {"optimizer": KeptOptimizer(params, fitting, self._optimizer, self.set_value).kept_state()}


class JaxState(ObjectState):
    """State of a training run in JAX: `JaxState(params=params, opt_state=opt_state, epoch=0)`.

        state.params, state.opt_state, loss = step(state.params, state.opt_state, batch)
        state.commit()

    Args:
        params: a tree with arrays in it.
        opt_state: of an optimizer of optax over it.
        optimizer: the distributed optimizer: its scale of the loss and its number of updates are part of the state.
            Needed with `zero`, where each rank has a shard of the state. Then the state is made on every rank, and
            `commit` is an exchange.
        values: further attributes; trees with arrays of JAX in them are handled as such. The others must be picklable.

    Raises:
        UsageError: an array was donated to a step.
    """

    _optimizer: BoundOptimizer | None
    _trees: dict[str, Handler]

    def __init__(
        self, params: Any = None, opt_state: Any = None, *, optimizer: BoundOptimizer | None = None, **values: Any
    ) -> None:
        values.update(params=params, opt_state=opt_state)
        object.__setattr__(self, "_optimizer", optimizer)
        is_sharded = optimizer is not None and optimizer.binding.inner.sharded
        trees: dict[str, Handler] = {
            name: TreeHandler(value, keeps_previous=is_sharded)
            for name, value in values.items()
            if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value))
        }
        if optimizer is not None and is_sharded:
            trees["opt_state"] = ShardedStateHandler(opt_state, lambda: trees["params"].value, optimizer)
        object.__setattr__(self, "_trees", trees)
        super().__init__(
            handlers={**update_handlers({"optimizer": update_of(optimizer)}), **trees},
            **{name: each for name, each in values.items() if name not in trees},
        )

    @override
    def save(self) -> None:
        flush()  # what the script has called, and does not look at
        with translated():
            jax.block_until_ready([jax.tree.leaves(handler.value) for handler in self._trees.values()])
        super().save()

    @override
    def restore(self) -> None:
        super().restore()
        self._take_trees()

    @override
    def sync(self) -> None:
        super().sync()
        self._take_trees()

    def _take_trees(self) -> None:
        for name, handler in self._trees.items():
            object.__setattr__(self, name, handler.value)

    @override
    def durable_parts(self) -> DurableParts:
        def put(name: str) -> Callable[[Any], object]:
            return functools.partial(setattr, self, name)

        trees = {name: handler.value for name, handler in self._trees.items()}
        params, opt_state = trees.pop("params", None), trees.pop("opt_state", None)
        others: dict[str, KeepsState] = {name: ModelState(tree, put(name)) for name, tree in trees.items()}
        models, optimizers = {}, {}
        if params is not None:
            models["model"] = KeptParameters(params, put("params"))
            if opt_state is not None:
                if self._optimizer is not None:
                    opt_state = state_of_ranks(params, opt_state, self._optimizer)
                optimizers["optimizer"] = KeptOptimizer(params, opt_state, self._optimizer, put("opt_state"))
        return parts_of(JaxStates(), models, optimizers, {}, {**others, **self._plain_sections()})
