"""ZeRO for optimizers of Keras on JAX, stages 1 and 2: the optimizer is built for this rank's pieces of the variables.

It stays the script's own object, so learning rates, schedules, `iterations` and loss scales are unchanged; only the
variables that it knows are pieces. A step takes the pieces of the reduced gradients from the exchange, lets the
optimizer's own class update the pieces of the variables, and gathers these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from typing_extensions import override

from unidist.buffer import HOST
from unidist.communicator import ReduceOp
from unidist.errors import UsageError
from unidist_arrays.fused_exchange import ExchangeResult
from unidist_arrays.memory import Array, buffer_of_array
from unidist_jax.compiled import ShapeDtype, bind
from unidist_jax.keras import InnerStep
from unidist_jax.memory import array_of, jax_array
from unidist_jax.optimizer import Cell, GradientLeaves, LeafPiece, copy_array
from unidist_keras.elementwise import needs_whole_variables
from unidist_keras.variables import variable_at
from unidist_zero._jax.operations import GatherUpdates, PieceExchange, PieceOperation, ReducePieces
from unidist_zero.sharding.reduce_scatter import ReduceScatterExchange

if TYPE_CHECKING:
    from unidist.optim.update import Update
    from unidist_zero.strategy import Zero


class KerasShardedStep(InnerStep):
    """See the module's text.

    Args:
        optimizer: the bound optimizer.
        plain: its class before it was bound.
        update: the framework-free side.
        strategy: says whether variables may be cut.
    """

    sharded = True

    def __init__(self, optimizer: Any, plain: type[Any], update: Update, strategy: Zero) -> None:
        self._optimizer = optimizer
        self._plain = plain
        self._update = update
        self._whole = strategy.whole
        self._inner = getattr(optimizer, "inner_optimizer", optimizer)
        self._variables: list[Any] = []  # of the model
        self._shards: list[Any] = []  # of this rank, as variables, by place
        self._exchange: PieceExchange | None = None

    @property
    @override
    def is_built(self) -> bool:
        return bool(self._shards)

    @property
    def _pieces(self) -> list[LeafPiece]:
        assert self._exchange is not None
        return self._exchange.pieces

    @override
    def prepare(self, variables: Sequence[Any]) -> None:
        kind = self._plain if self._inner is self._optimizer else type(self._inner)
        forms = [(variable.path, tuple(variable.shape)) for variable in variables]
        whole = self._whole == "true" or (self._whole == "auto" and needs_whole_variables(self._inner, kind, forms))
        self._update.options = replace(self._update.options, whole_tensors=whole)

    @override
    def build(self, variables: Sequence[Any], leaves: Callable[[], GradientLeaves]) -> None:
        self._variables = list(variables)
        self._exchange = PieceExchange(leaves().fused)
        self._cell = Cell(self._exchange, self)
        self._reduces = [ReducePieces(self._cell, early) for early in ((), range(len(self._variables)))]
        self._gather = GatherUpdates(self._cell)
        decaying = [bool(self._inner._use_weight_decay(variable)) for variable in self._variables]
        shards = [_shard(piece, each) for piece, each in zip(self._pieces, self._variables, strict=True)]
        if not all(decaying):
            excluded = [shard for shard, decays in zip(shards, decaying, strict=True) if not decays]
            self._inner.exclude_from_weight_decay(var_list=excluded)
        self._plain.build(self._optimizer, list(shards))
        self._shards = shards
        self._clip_whole = self._inner._clip_gradients
        self._inner.__dict__["_clip_gradients"] = self._clip
        if self._inner is not self._optimizer:  # a LossScaleOptimizer, which skips a step if a gradient is not finite
            self._optimizer.__dict__["check_finite"] = self._check_finite

    @override
    def pieces(self) -> Sequence[LeafPiece]:
        return self._pieces

    # Steps

    @override
    def reduce(self, leaves: GradientLeaves, gradients: Sequence[Any], early: Sequence[int]) -> tuple[Any, list[Any]]:
        complete, *reduced = bind(self._reduces[bool(early)], gradients)
        return complete, reduced

    @override
    def flushed(self, result: ExchangeResult) -> list[Any]:
        assert self._exchange is not None
        reduced = self._exchange.new_pieces()
        self._exchange.copy_reduced(reduced)
        return [jax_array(piece) for piece in reduced]

    @override
    def step(self, state: Sequence[Any], reduced: Sequence[Any], values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        own = [piece.of(value) for piece, value in zip(self._pieces, values, strict=True)]
        new_own, new_state = self._plain.stateless_apply(self._optimizer, state, reduced, own)
        new_values = [
            value if variable.constraint is None else variable.constraint(value)
            for variable, value in zip(self._variables, bind(self._gather, new_own), strict=True)
        ]
        return new_values, new_state

    @override
    def finalize(self, variables: Sequence[Any]) -> None:
        if not self._shards or not self._inner.use_ema:
            return
        assert self._exchange is not None
        averages = self._inner._model_variables_moving_average
        own = [
            array_of((shard if average is None else average).value)
            for shard, average in zip(self._shards, averages, strict=True)
        ]
        whole = [array_of(variable.value).copy() for variable in self._variables]
        self._exchange.gather(own, whole)
        for variable, value in zip(self._variables, whole, strict=True):
            variable.assign(value)

    @override
    def take_part(self) -> None:
        raise UsageError(
            "a rank that has joined cannot update its shard with zero and JAX; give every rank equally many batches "
            "(tail='drop'), or leave zero out"
        )

    # What Keras asks of all gradients together

    def _clip(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Clip pieces of gradients as Keras clips whole ones."""
        inner = self._inner
        by_each = bool(inner.clipnorm and inner.clipnorm > 0)
        if not by_each and not (inner.global_clipnorm and inner.global_clipnorm > 0):
            return list(self._clip_whole(gradients))  # each element by itself, or not at all
        kinds = [jnp.promote_types(gradient.dtype, jnp.float32) for gradient in gradients]
        squares = [jnp.sum(jnp.square(each.astype(kind))) for each, kind in zip(gradients, kinds, strict=True)]
        [sums] = bind(_Reduced(self._cell, ReduceOp.SUM), [jnp.stack(squares)])
        if by_each:
            scales = inner.clipnorm / jnp.maximum(jnp.sqrt(sums), inner.clipnorm)
        else:
            norm = jnp.sqrt(jnp.sum(sums))
            scale = inner.global_clipnorm * jnp.minimum(1 / norm, 1 / inner.global_clipnorm)
            scales = jnp.full(len(gradients), scale + (norm - norm))  # as Keras: NaN if the norm is not finite
        return [gradient * scale.astype(gradient.dtype) for gradient, scale in zip(gradients, scales, strict=True)]

    def _check_finite(self, gradients: Sequence[Any]) -> Any:
        """Return whether the gradients of all ranks are finite; the same on all, shard groups hold equal ones."""
        finite = self._plain.check_finite(self._optimizer, gradients)
        [everywhere] = bind(_Reduced(self._cell, ReduceOp.MIN), [jnp.asarray(finite, jnp.int32)])
        return everywhere > 0


class _Reduced(PieceOperation):
    """An all-reduce of an array over the ranks with other shards.

    Args:
        cell: the exchange.
        op: the reduction.
    """

    def __init__(self, cell: Cell[PieceExchange], op: ReduceOp) -> None:
        super().__init__(cell)
        self._op = op

    @property
    @override
    def title(self) -> str:
        return "the exchange of norms by a distributed optimizer with zero"

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        return list(operands)

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        (exchange,) = self._cell.value.fused.update.exchanges
        assert isinstance(exchange, ReduceScatterExchange)
        copy_array(results[0], operands[0])
        memory = buffer_of_array(results[0])
        exchange.shard_groups[HOST].communicator.allreduce(memory, memory, op=self._op).wait()


def _shard(piece: LeafPiece, variable: Any) -> Any:
    """Return a variable for a piece, with the path of the model's: optimizers and exclusions go by it."""
    return variable_at(variable.path, piece.of(variable.value), variable.dtype)
