"""Says whether leaves of the parameters may be cut, by trying the optimizer on small ones.

An element-wise optimizer (SGD, Adam) may step on any part of a leaf; one that looks at a leaf's form (Muon, Adafactor,
Lamb) only on all of it; and one that looks at all leaves together (a global norm in an `optax.chain`) on no part of the
parameters. The leaves of the trial have the paths, types and forms of the script's, see `unidist.optim.trial`, so that
masks and labels choose as they do for those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from unidist.errors import UsageError
from unidist.optim.trial import LATE_STEP, step_counters, trial_shape
from unidist_arrays.memory import Array
from unidist_jax.optimizer.leaf_piece import LeafPiece

if TYPE_CHECKING:
    import optax

_SCALES = (1e6, 1e3, 1.0)
"""Of the gradients of three steps. Whatever the limit of a norm, it shows: Adam takes common factors out again, but not
those of one step in the state that a step of similar size uses."""

_MOST_STEPS = 40
"""Tried until three updates are no zeros, as they are while optax.MultiSteps accumulates or a rate begins with 0."""

_LATE = (30, 1_000, LATE_STEP)
"""Numbers of steps at which it is tried again, as if it had made so many: a rule of later steps may begin, and the
learning rate, which is often a schedule of the optimizer's own, may have ended."""

_MOST_BIPARTITIONS = 3


def needs_whole_leaves(optimizer: optax.GradientTransformationExtraArgs, tree: Any) -> bool:
    """Return whether an optimizer needs each leaf as a whole; False: it treats each element by itself.

    The same on every rank that has the same optimizer and tree.

    Args:
        optimizer: of optax.
        tree: like the parameters; only its structure, and the shapes and types of its leaves, are used.

    Raises:
        UsageError: it looks at several leaves together, so no part of them can be updated by itself; or it cannot be
            tried.
    """
    with jax.ensure_compile_time_eval():
        trial = _Trial(optimizer, tree)
        try:
            whole = trial.updates(trial.everything)
        except Exception as exc:  # whatever a transformation of the script's own raises
            raise UsageError(
                "the optimizer could not be tried on small arrays, to see whether each rank may update a shard of the "
                f"parameters: {exc!r}. It must work without further arguments; or say zero:whole=true if it looks at "
                "each array by itself"
            ) from exc
        if trial.agrees(whole, trial.halves()):
            return False
        if all(trial.agrees(whole, pieces) for pieces in trial.bipartitions()):
            return True
    raise UsageError(
        "this optimizer looks at all parameters together (a global norm in an optax.chain, say), so no rank can update "
        "a shard of them. In place of optax.clip_by_global_norm use the strategy clip_norm beside zero (--strategy "
        "zero=1,clip_norm=1.0); else use the strategy 'data'"
    )


class _Outcome(NamedTuple):
    """The result of a trial.

    Args:
        updates: by step and leaf.
        state: the leaves of the optimizer's state at the end.
    """

    updates: list[list[Array]]
    state: list[Array]


class _Trial:
    """Small leaves and gradients, stepped on as a whole and as a rank would that has some of their elements.

    Args:
        optimizer: of optax.
        tree: see `needs_whole_leaves`.
    """

    def __init__(self, optimizer: optax.GradientTransformationExtraArgs, tree: Any) -> None:
        self._optimizer = optimizer
        leaves, self._structure = jax.tree.flatten(tree)
        generator = np.random.default_rng(0)
        self._params: list[Array] = []
        self._gradients: list[list[Array]] = [[] for _ in _SCALES]
        for leaf in leaves:
            dtype = np.dtype(leaf.dtype)
            dtype = np.dtype(np.float32) if dtype.itemsize == 2 else dtype  # so that little differences show
            values = generator.standard_normal((1 + len(_SCALES), *trial_shape(leaf.shape)), np.float32)
            self._params.append(values[0].astype(dtype))
            ramp = generator.uniform(0.1, 1.0) * np.linspace(0.1, 1.0, values[0].size).reshape(values[0].shape)
            unevenness: tuple[Any, ...] = (
                1.0,
                ramp,
                1.0,
            )  # ranks with different parts find different ratios of two steps' norms
            for scale, uneven, value, gradients in zip(_SCALES, unevenness, values[1:], self._gradients, strict=True):
                gradients.append((scale * uneven * value).astype(dtype))

    @property
    def everything(self) -> list[LeafPiece]:
        """All elements of all leaves."""
        return [LeafPiece(leaf.shape, 0, leaf.size) for leaf in self._params]

    def halves(self) -> list[LeafPiece]:
        """Return the pieces of a rank that has the last part of every leaf: random leaves often start the same."""
        return [LeafPiece(leaf.shape, leaf.size // 2, -(-leaf.size // 2)) for leaf in self._params]

    def bipartitions(self) -> list[list[LeafPiece]]:
        """Return the pieces of ranks that have some leaves as a whole and nothing of the others."""
        whole = self.everything
        bits = range((len(whole) - 1).bit_length())
        return [
            [piece if i >> bit & 1 else LeafPiece(piece.shape, 0, 0) for i, piece in enumerate(whole)]
            for bit in bits[:_MOST_BIPARTITIONS]
        ]

    def updates(self, pieces: Sequence[LeafPiece]) -> _Outcome:
        """Return the result of a rank with these pieces."""

        def tree(leaves: Sequence[Array]) -> Any:
            own = [piece.of(leaf) for piece, leaf in zip(pieces, leaves, strict=True)]
            return jax.tree.unflatten(self._structure, [jnp.asarray(leaf) for leaf in own])

        params = tree(self._params)
        state = _compiled(self._optimizer.init, params)(params)
        step_once = _compiled(self._step, tree(self._gradients[0]), state, params)
        found: list[list[Array]] = []
        counting: set[int] = set()
        most = _MOST_STEPS
        for late in (None, *_LATE):
            if late is not None:
                state = _counted(state, counting, late - 2)
            num_counted = 0
            records: list[dict[int, float]] = []
            for step in range(most):
                gradients = tree(self._gradients[step % len(_SCALES)])
                updates, state, params = step_once(gradients, state, params)
                found.append([np.asarray(update) for update in jax.tree.leaves(updates)])
                records.append(_whole_numbers(state))
                num_counted += any(bool(np.any(update)) for update in found[-1])
                if num_counted == len(_SCALES):
                    break
            counting |= step_counters(records)
            if not counting:
                break
            most = min(most, len(records))
        numbers = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(jnp.result_type(leaf), jnp.number)]
        return _Outcome(found, [np.asarray(leaf) for leaf in numbers])

    def _step(self, gradients: Any, state: Any, params: Any) -> tuple[Any, Any, Any]:
        updates, state = self._optimizer.update(gradients, state, params, value=jnp.asarray(0.5))
        params = jax.tree.map(lambda leaf, update: (leaf + update).astype(leaf.dtype), params, updates)
        return updates, state, params

    def agrees(self, whole: _Outcome, pieces: Sequence[LeafPiece]) -> bool:
        """Return whether a rank with these pieces gets the updates of one that has everything.

        So must be what its state has beside arrays like the leaves: a norm, or a rate that is estimated (Prodigy).
        """
        try:
            found = self.updates(pieces)
        except Exception:  # whatever a transformation raises for arrays of another form
            return False
        for own, expected in zip(found.updates, whole.updates, strict=False):
            for piece, update, all_of_it in zip(pieces, own, expected, strict=True):
                if piece.count and not _alike(update, piece.of(all_of_it)):
                    return False
        of_others = {piece.shape for piece in pieces if not piece.count}
        return len(found.state) == len(whole.state) and all(
            mine.shape != expected.shape or mine.shape in of_others or _alike(mine, expected)
            for mine, expected in zip(found.state, whole.state, strict=True)
        )


def _compiled(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """Return a function as one program: at once, each of its operations would be compiled by itself.

    Args:
        function: of trees of arrays.
        arguments: like those that it will be called with.

    Returns:
        The function itself where it cannot be a program: it looks at values, say, or returns what is no array.
    """
    program = jax.jit(function)
    try:
        program.trace(*arguments)
    except Exception:  # whatever a transformation of the script's own raises; at once it may work
        return function
    return program


def _whole_numbers(state: Any) -> dict[int, float]:
    """Return the whole numbers of a state, by their place among its leaves."""
    leaves = enumerate(jax.tree.leaves(state))
    return {
        place: float(leaf)
        for place, leaf in leaves
        if not jnp.shape(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.integer)
    }


def _counted(state: Any, counting: set[int], steps: int) -> Any:
    """Return the state with so many steps in its numbers that count them."""
    leaves, structure = jax.tree.flatten(state)
    leaves = [jnp.full_like(leaf, steps) if place in counting else leaf for place, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, leaves)


def _alike(found: Array, expected: Array) -> bool:
    if found.shape != expected.shape:
        return False
    numbers = np.isfinite(expected)  # a schedule may have none for late steps
    largest = float(np.max(np.abs(expected), initial=0.0, where=numbers))
    return bool(np.allclose(found[numbers], expected[numbers], rtol=0.0, atol=1e-5 * largest))
