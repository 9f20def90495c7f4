"""Calls operations: on the leaves of a tree, by name, at once or within a trace, with Horovod's gradients."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unidist.errors import OperationError
from unidist.horovod_api.scope import scope_of
from unidist.negotiation.process_sets import ProcessSet
from unidist.runtime import context
from unidist_jax.compiled import HostOperation, bind
from unidist_jax.jax_state import is_tracing
from unidist_jax.memory import as_jax, is_traced
from unidist_jax.spmd import AXIS, is_within

Leaves = Sequence[Any]


class _TracedNames:
    """Numbers of the operations without a name that this runtime has traced, per kind."""

    def __init__(self, runtime: context.Context) -> None:
        del runtime  # what `Context.owned` gives
        self.counters: dict[str, itertools.count[int]] = defaultdict(lambda: itertools.count(1))

    def close(self) -> None:
        """Reset the state; the context calls this when it closes."""
        self.counters.clear()


def name_of(kind: str, name: str | None, leaves: Leaves, process_set: ProcessSet) -> str:
    """Return the name of an operation: as given, or numbered, in order of the calls at once or of the traced ones.

    Raises:
        OperationError: the name is no text; or an operation that is traced in an elastic job has none.
    """
    scope = scope_of(process_set)
    if name is None and (is_tracing() or is_traced(*leaves)):
        if context.current().is_elastic:
            raise OperationError(
                f"{kind} without a name within a compiled function, in an elastic job: ranks that join later trace it "
                f"again, and cannot know its number. Give it a name: ud.{kind}(..., name='...')"
            )
        counter = context.current().owned(_TracedNames).counters[f"{kind}.{process_set.process_set_id}"]
        return f"{kind}.traced.{next(counter)}"
    return scope.name(kind, name)


def leaves_of(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a tree as JAX's arrays, and what puts such leaves together again.

    Raises:
        UsageError: a leaf is nothing that can be exchanged.
    """
    leaves, structure = jax.tree.flatten(tree)
    return [as_jax(leaf) for leaf in leaves], structure


def call(operation: HostOperation, leaves: Leaves, backward: Callable[[list[Any]], Leaves] | None = None) -> list[Any]:
    """Run an operation on leaves, or add it to what is being traced; returns its results.

    Args:
        operation: what to run.
        leaves: its operands.
        backward: makes the gradients of the operands from those of the results; a collective itself, so every rank
            differentiates through the operation if one does. None: the operation has no gradient.
    """
    if backward is None or not is_traced(*leaves):
        return _bind(operation, leaves)

    @jax.custom_vjp
    def run(*operands: Any) -> list[Any]:
        return _bind(operation, operands)

    def run_backward(_: None, gradients: list[Any]) -> tuple[Any, ...]:
        floating = [place for place, leaf in enumerate(leaves) if _has_gradient(leaf)]
        made = iter(backward([jnp.asarray(gradients[place]) for place in floating])) if floating else iter(())
        return tuple(next(made) if _has_gradient(leaf) else np.zeros(leaf.shape, jax.dtypes.float0) for leaf in leaves)

    run.defvjp(lambda *operands: (run(*operands), None), run_backward)  # through `run`: gradients of gradients
    return list(run(*leaves))


def _bind(operation: HostOperation, operands: Leaves) -> list[Any]:
    return operation.lowered(operands, AXIS) if is_within() else bind(operation, operands)


def own_place(process_set: ProcessSet) -> Any:
    """Return the number of this rank in a process set: within a program over all ranks, one that is found there."""
    return jax.lax.axis_index(AXIS) if is_within() else scope_of(process_set).rank


def _has_gradient(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def only(results: list[Any], *, title: str) -> Any:
    """Return the only result of an operation on one array."""
    if len(results) != 1:
        raise OperationError(f"{title}: give one array, not a tree of {len(results)}")
    return results[0]
