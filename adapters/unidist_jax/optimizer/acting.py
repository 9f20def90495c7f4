"""Parameters between two updates, for those that act on them: `Update.actors`.

Whether they want to act is known on the host only, so a program asks, and hands the parameters over within a branch.
`TrainStep` gets the new parameters themselves. A loop of the script's own gets their differences to the old ones, which
it adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from typing_extensions import override

from unidist.buffer import Buffer
from unidist.errors import UsageError
from unidist.optim.actors import Actors, TrainedState
from unidist.optim.update import Update
from unidist_arrays.memory import Array
from unidist_arrays.trained_arrays import TrainedArrays, copies_of
from unidist_jax.compiled import HostOperation, ShapeDtype, bind, flush
from unidist_jax.memory import is_traced
from unidist_jax.optimizer.cell import Cell
from unidist_jax.optimizer.exchange import copy_array

_FLAG = ShapeDtype((), np.dtype(bool))


class TreeState(TrainedState):
    """Trees of the script, while it lends them."""

    def __init__(self) -> None:
        self._lent: TrainedArrays | None = None

    @property
    @override
    def is_at_hand(self) -> bool:
        return self._lent is not None

    @override
    def values(self) -> Sequence[Buffer]:
        return self._arrays.values()

    @override
    def store(self, values: Sequence[Buffer]) -> None:
        self._arrays.store(values)

    @override
    def slots(self) -> Mapping[str, Buffer]:
        return self._arrays.slots()

    @override
    def store_slots(self, slots: Mapping[str, Buffer]) -> None:
        self._arrays.store_slots(slots)

    @property
    def _arrays(self) -> TrainedArrays:
        if self._lent is None:
            raise UsageError("arrays of JAX do not change, and the script has them: they are at hand in a step only")
        return self._lent

    @contextmanager
    def lent(self, params: Any, opt_state: Any) -> Iterator[Callable[[], tuple[Any, Any]]]:
        """Give access to two trees within the block, which gets a function that returns the trees as they are then.

        Args:
            params: the parameters.
            opt_state: of the optimizer; its floating-point arrays are slots, scalars are left out.
        """
        flush()
        leaves, structure = jax.tree.flatten(params)
        kept, kept_structure = jax.tree.flatten(opt_state)
        places = [
            place
            for place, leaf in enumerate(kept)
            if isinstance(leaf, jax.Array) and leaf.ndim and jnp.issubdtype(leaf.dtype, jnp.floating)
        ]
        arrays = [np.array(leaf, order="C", copy=True) for leaf in leaves]
        slots = {str(place): np.array(kept[place], order="C", copy=True) for place in places}

        def trees() -> tuple[Any, Any]:
            found = [jax.device_put(array, leaf.sharding) for array, leaf in zip(arrays, leaves, strict=True)]
            changed = [
                jax.device_put(slots[str(place)], leaf.sharding) if str(place) in slots else leaf
                for place, leaf in enumerate(kept)
            ]
            return jax.tree.unflatten(structure, found), jax.tree.unflatten(kept_structure, changed)

        self._lent = TrainedArrays(arrays, slots)
        try:
            yield trees
        finally:
            self._lent = None


class ActingStep:
    """Lets those that act on parameters act after the steps of one optimizer, at once or in a program.

    Args:
        update: the framework-free side.
    """

    def __init__(self, update: Update) -> None:
        self._update = update
        cell = Cell(update, self)
        self._ask, self._act_before, self._act_after = _Ask(cell), _ActBefore(cell), _ActAfter(cell)

    def __bool__(self) -> bool:
        return self._update.actors is not None

    def parameters(self, old: Any, new: Any) -> Any:
        """Return the parameters as they are after what is done with them. Where the program runs it may be collective.

        Args:
            old: the parameters before the step, a tree.
            new: those after it.
        """
        flat, structure = jax.tree.flatten(new)
        found = self._acted(jax.tree.leaves(old), flat, lambda values: values, flat)
        return jax.tree.unflatten(structure, found)

    def updates(self, params: Any, updates: Any) -> Any:
        """Return the updates that lead to such parameters.

        Args:
            params: the parameters before the step; None if the script did not give them.
            updates: of the inner step, a tree like `params`.

        Raises:
            UsageError: without parameters.
        """
        if params is None:
            raise UsageError(
                f"{self._update.actors and self._update.actors.names}: acts on parameters, so it needs them: "
                "optimizer.update(gradients, state, params)"
            )
        old, new = jax.tree.leaves(params), jax.tree.leaves(optax.apply_updates(params, updates))
        flat, structure = jax.tree.flatten(updates)

        def differences(values: list[Any]) -> list[Any]:
            return [(value - before).astype(each.dtype) for value, before, each in zip(values, old, flat, strict=True)]

        return jax.tree.unflatten(structure, self._acted(old, new, differences, flat))

    def _acted(
        self, old: list[Any], new: list[Any], result: Callable[[list[Any]], list[Any]], otherwise: list[Any]
    ) -> Any:
        is_before, is_after = bind(self._ask, [])
        _choose(is_before, lambda: bind(self._act_before, old)[0], lambda: jnp.zeros((), bool))
        return _choose(is_after, lambda: result(bind(self._act_after, new)), lambda: otherwise)


class _Operation(HostOperation):
    can_be_batched: ClassVar[bool] = False

    def __init__(self, cell: Cell[Update]) -> None:
        self._cell = cell

    @property
    def _actors(self) -> Actors:
        actors = self._cell.value.actors
        assert actors is not None, "there were some when the program was made"
        return actors

    @property
    @override
    def title(self) -> str:
        return f"what {self._actors.names} does with parameters between two updates"


class _Ask(_Operation):
    """Two flags: somebody wants to act on the parameters before the last step, and on those after it.

    The step is counted already, where it made an update: a pass within a window, or one that overflowed, has not.
    """

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        return [_FLAG, _FLAG]

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        actors, step = self._actors, self._cell.value.step
        is_update = actors.is_behind
        results[0][...] = is_update and actors.wanted_before(step)
        results[1][...] = is_update and actors.wanted_after(step)


class _ActBefore(_Operation):
    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        return [_FLAG]

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        self._actors.act_before(self._cell.value.step, TrainedArrays(copies_of(operands)))
        results[0][...] = True


class _ActAfter(_Operation):
    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        return list(operands)

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        for operand, result in zip(operands, results, strict=True):
            copy_array(result, operand)
        self._actors.act_after(self._cell.value.step, TrainedArrays(results))


def _choose(flag: Any, first: Callable[[], Any], second: Callable[[], Any]) -> Any:
    """Return what one of two functions returns: at once, or in a program when it runs."""
    if not is_traced(flag):
        return first() if flag else second()
    return jax.lax.cond(flag, first, second)
