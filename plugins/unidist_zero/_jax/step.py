"""ZeRO for optimizers of optax: the optimizer's `init` and `update` see this rank's pieces of the leaves only.

A compiled update calls the host twice. The first call takes the gradients and returns this rank's pieces of the reduced
ones; the second takes this rank's pieces of the updates and returns the updates of all leaves. The optimizer runs in
between, in XLA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from typing_extensions import override

from unidist.errors import UsageError
from unidist_jax.compiled import bind
from unidist_jax.memory import is_traced, jax_array
from unidist_jax.optimizer import Cell, GradientLeaves, InnerStep, LeafPiece, for_pieces, needs_whole_leaves
from unidist_zero._jax.operations import GatherUpdates, PieceExchange, ReducePieces
from unidist_zero._jax.pieces import cut
from unidist_zero.binding import ZeroBinding

if TYPE_CHECKING:
    from unidist.framework import Tensor
    from unidist.optim.interface import MakesInnerStep
    from unidist.optim.update import Update
    from unidist_zero.strategy import Zero


class JaxZero(ZeroBinding):
    """See `ZeroBinding`."""

    unsupported: ClassVar[tuple[str, ...]] = ("offload", "units", "prefetch", "shared")

    @override
    def inner_step(self, strategy: Zero) -> MakesInnerStep:
        from unidist_zero._jax.stage3 import TracedShardedStep

        def make(optimizer: Any, plain: type[Any], update: Update) -> Any:
            if not isinstance(optimizer, tuple):  # as those of optax are: of Keras
                from unidist_zero._jax.keras_step import KerasShardedStep

                return KerasShardedStep(optimizer, plain, update, strategy)
            has_masters = update.options.precision is not None  # then TrainStep computes the loss, too
            made = TracedShardedStep if strategy.stage == 3 or has_masters else ShardedStep
            return made(optimizer, update, strategy)

        return make

    @override
    def attach(self, strategy: Zero, model: Any, update: Update) -> None:
        """Do nothing: at stage 3 the inner step divides the parameters, see `TracedStep.held`."""


class ShardedStep(InnerStep):
    """See the module's text.

    Args:
        plain: the optimizer as it was.
        update: the framework-free side.
        strategy: says whether leaves may be cut.
    """

    sharded = True

    def __init__(self, plain: optax.GradientTransformationExtraArgs, update: Update, strategy: Zero) -> None:
        self._plain = plain
        self._update = update
        self._whole = strategy.whole
        self._always = update.accumulation.passes == 1 and update.scaler is None and not update.context.is_elastic
        self._exchange: PieceExchange | None = None
        self._reductions: dict[tuple[int, ...], ReducePieces] = {}

    @override
    def prepare(self, tree: Any) -> None:
        """See `InnerStep.prepare`: says whether leaves may be cut."""
        whole = self._whole == "true" or (self._whole == "auto" and needs_whole_leaves(self._plain, tree))
        self._update.options = replace(self._update.options, whole_tensors=whole)

    def _exchange_of(self, leaves: GradientLeaves) -> PieceExchange:
        if self._exchange is None:
            self._exchange = self._make_exchange(leaves)
            self._plain = for_pieces(self._plain, self._exchange.pieces)
            self._cell = Cell(self._exchange, self)
            self._gather = GatherUpdates(self._cell)
        return self._exchange

    def _make_exchange(self, leaves: GradientLeaves) -> PieceExchange:
        return PieceExchange(leaves.fused)

    @override
    def init(self, params: Any, leaves: Callable[[], GradientLeaves]) -> Any:
        self._exchange_of(leaves())
        return self._plain.init(self._masters(params))

    @override
    def rebind(self) -> None:
        """See `InnerStep.rebind`. What was compiled has the pieces of the old ranks, so it must not run any more."""
        if self._exchange is not None:
            self._cell.release()
        self._exchange, self._reductions = None, {}
        self.has_moved = True

    def _check_moved(self) -> None:
        if self.has_moved:
            raise UsageError(
                "the ranks have changed, and what each rank keeps a shard of was not taken along: give the distributed "
                "optimizer to the elastic state, JaxState(params, opt_state, optimizer=...); where the parameters are "
                "in shards, too (zero=3), use TrainStep(..., elastic=True)"
            )

    @override
    def pieces(self, leaves: Callable[[], GradientLeaves]) -> Sequence[LeafPiece]:
        return self._exchange_of(leaves()).pieces

    def _masters(self, params: Any) -> Any:
        """Return this rank's pieces of the parameters, in the types in which they are updated."""
        assert self._exchange is not None
        own, structure = jax.tree.flatten(cut(params, self._exchange.pieces))
        typed = [leaf.astype(dtype) for leaf, dtype in zip(own, self._exchange.dtypes, strict=True)]
        return jax.tree.unflatten(structure, typed)

    @override
    def update(
        self,
        leaves: GradientLeaves,
        gradients: Sequence[Tensor],
        early: Sequence[int],
        state: Any,
        params: Any,
        structure: Any,
        extra: dict[str, Any],
    ) -> tuple[Any, Any]:
        complete, pieces = self._reduced(leaves, gradients, early)

        def step() -> tuple[Any, Any]:
            return self._apply(pieces, state, params, structure, extra)

        def stay() -> tuple[Any, Any]:
            return jax.tree.map(jnp.zeros_like, jax.eval_shape(step)[0]), state

        return self._if_complete(complete, step, stay)

    def _reduced(
        self, leaves: GradientLeaves, gradients: Sequence[Tensor], early: Sequence[int]
    ) -> tuple[Any, list[Any]]:
        """Complete a pass; returns whether that completed an update, and this rank's pieces of the gradients."""
        self._check_moved()
        self._exchange_of(leaves)
        places = tuple(early)
        if places not in self._reductions:  # kept, so that what was compiled for the same call is found again
            self._reductions[places] = ReducePieces(self._cell, places)
        complete, *pieces = bind(self._reductions[places], gradients)
        return complete, pieces

    def _if_complete(
        self, complete: Any, step: Callable[[], tuple[Any, Any]], stay: Callable[[], tuple[Any, Any]]
    ) -> tuple[Any, Any]:
        if self._always:
            return step()
        if not is_traced(complete):
            return step() if complete else stay()
        first, second = jax.lax.cond(complete, step, stay)
        return first, second

    def _apply(
        self, pieces: Sequence[Any], state: Any, params: Any, structure: Any, extra: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Return the updates of all leaves, and the new state, for this rank's pieces of the reduced gradients."""
        assert self._exchange is not None
        own = None if params is None else cut(params, self._exchange.pieces)
        updates, state = self._plain.update(jax.tree.unflatten(structure, pieces), state, own, **extra)
        return jax.tree.unflatten(structure, bind(self._gather, jax.tree.leaves(updates))), state

    @override
    def flush(self, leaves: GradientLeaves, state: Any, params: Any, structure: Any) -> tuple[Any, Any] | None:
        exchange = self._exchange_of(leaves)
        result = leaves.fused.flush()
        if result is None or not result.complete:
            return None
        pieces = exchange.new_pieces()
        exchange.copy_reduced(pieces)
        reduced = [jax_array(piece) for piece in pieces]
        updates, state = self._apply(reduced, state, params, structure, {})
        return optax.apply_updates(params, updates), state

    @override
    def take_part(self) -> None:
        raise UsageError(
            "a rank that has joined cannot update its shard with zero and JAX, because its optimizer state is the "
            "script's; give every rank equally many batches (tail='drop'), or leave zero out"
        )
