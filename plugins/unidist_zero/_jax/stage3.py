"""The inner step at stage 3: each rank holds its pieces of the parameters, and the loss is computed segment by segment.

A compiled step gathers the leaves of a segment, computes with them, and lets them go; in the backward pass once more,
in reverse order. The gradients of a segment are handed over as soon as they are there. The optimizer steps on this
rank's pieces, which are what the rank holds until the next step. `stage3_segments` cuts the loss into segments.

It serves stages 1 and 2, too, where the parameters have 16 bits: the pieces are the master weights. What was gathered
then stays until the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from typing_extensions import override

from unidist.errors import MismatchError, UsageError
from unidist.negotiation import gather_objects
from unidist_arrays.memory import NUMPY_DTYPES
from unidist_jax.compiled import bind
from unidist_jax.memory import jax_array
from unidist_jax.optimizer import Cell, GradientLeaves, TracedStep
from unidist_zero._jax.operations import PieceExchange
from unidist_zero._jax.stage3_operations import FinishPieces, GatherLeaves, GatherWhole, HandOver, LeafExchange
from unidist_zero._jax.stage3_segments import Leaves, MovesLeaves, SegmentedLoss
from unidist_zero._jax.step import ShardedStep

if TYPE_CHECKING:
    from unidist.framework import Tensor
    from unidist.gradients.buckets import ParameterInfo
    from unidist.optim.update import Update
    from unidist_zero.strategy import Zero

_NUM_SEGMENTS = 20
"""By default a segment, and a bucket of gradients, is this part of the parameters: a round has 48 operations early."""

_LEAST_BYTES = 1 << 20


class TracedShardedStep(ShardedStep, TracedStep):
    """See the module's text.

    Args:
        plain: the optimizer as it was.
        update: the framework-free side.
        strategy: the strategy.
    """

    def __init__(self, plain: optax.GradientTransformationExtraArgs, update: Update, strategy: Zero) -> None:
        super().__init__(plain, update, strategy)
        self._stage = strategy.stage
        self._bucket_mb = strategy.bucket_mb
        self._limit = 0
        self._order: list[int] | None = None

    @override
    def prepare(self, tree: Any) -> None:
        super().prepare(tree)
        nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
        self._limit = max(_LEAST_BYTES, nbytes // _NUM_SEGMENTS)
        if self._bucket_mb is not None:
            self._limit = int(self._bucket_mb * 2**20)
        if self._stage == 3:
            self._update.options = replace(self._update.options, bucket_bytes=self._limit)

    @override
    def _make_exchange(self, leaves: GradientLeaves) -> PieceExchange:
        exchange = LeafExchange(leaves.fused)
        self.cell = Cell(exchange, self)
        self._gather_whole = GatherWhole(self.cell)
        self._finish = FinishPieces(self.cell)
        self._gathers: dict[tuple[int, ...], GatherLeaves] = {}
        self._handed: dict[tuple[int, ...], HandOver] = {}
        return exchange

    @override
    def rebind(self) -> None:
        if self._exchange is not None:
            self.cell.release()
        self._order = None
        super().rebind()

    @override
    def init(self, params: Any, leaves: Callable[[], GradientLeaves]) -> Any:
        if self._exchange is None:  # else the parameters may be of the types of the masters, in a checkpoint
            self._exchange_of(leaves())
        return self._plain.init(self._masters(params))

    @override
    def held(self, params: Any, leaves: GradientLeaves) -> Any:
        self._exchange_of(leaves)
        return self._masters(params)

    @override
    def whole(self, held: Any) -> Any:
        return jax.tree.unflatten(jax.tree.structure(held), bind(self._gather_whole, self.rounded(held)))

    def rounded(self, held: Any) -> list[Any]:
        """Return this rank's pieces in the types of the parameters, by place."""
        dtypes = [NUMPY_DTYPES[info.dtype] for info in self.variables]
        return [piece.astype(dtype) for piece, dtype in zip(jax.tree.leaves(held), dtypes, strict=True)]

    def gather_operation(self, places: Sequence[int]) -> GatherLeaves:
        """Return the operation that gathers these leaves; it is kept, so that what was compiled for it is found."""
        return self._gathers.setdefault(tuple(places), GatherLeaves(self.cell, places))

    def hand_over_operation(self, places: Sequence[int]) -> HandOver:
        """Return the operation that takes the gradients of these leaves."""
        return self._handed.setdefault(tuple(places), HandOver(self.cell, places))

    @property
    def _own_exchange(self) -> LeafExchange:
        assert isinstance(self._exchange, LeafExchange)
        return self._exchange

    @property
    def variables(self) -> Sequence[ParameterInfo]:
        """The parameters by place."""
        return self._own_exchange.fused.variables

    def _segmented(self, loss_fn: Callable[[Any], Any], held: Any) -> SegmentedLoss:
        infos = self.variables
        types = [jax.ShapeDtypeStruct(info.shape, NUMPY_DTYPES[info.dtype]) for info in infos]
        params = jax.tree.unflatten(jax.tree.structure(held), types)
        return SegmentedLoss(loss_fn, params, self._limit, keeps=self._stage < 3)

    def _agree_on_order(self, loss: SegmentedLoss) -> None:
        """Exchange gradients in the order in which this program completes them. Collective the first time.

        Later programs, for batches of other shapes, keep that order: other ranks may not be tracing now.
        """
        if self._order is not None:
            return
        exchange = self._own_exchange
        order = exchange.bucket_order(loss.ready_order())
        everyone: list[list[int]] = gather_objects(self._update.communicator, order)
        if any(each != order for each in everyone):
            raise MismatchError(
                "zero=3: the ranks traced loss functions that use the parameters in different orders. Give every rank "
                "the same loss_fn, with branches that do not depend on the rank"
            )
        exchange.post_in_order(order)
        self._order = order

    @override
    def evaluate(self, loss_fn: Callable[[Any], Any], held: Any) -> Any:
        return self._segmented(loss_fn, held).value(_Movement(self, held))

    @override
    def train(
        self, loss_fn: Callable[[Any], tuple[Any, Any]], leaves: GradientLeaves, held: Any, state: Any
    ) -> tuple[Any, Any, Any]:
        self._check_moved()
        structure = jax.tree.structure(held)
        loss = self._segmented(loss_fn, held)
        self._agree_on_order(loss)
        movement = _Movement(self, held)
        _, others = loss.value_and_gradients(movement)
        movement.take_missing()
        complete, *pieces = bind(self._finish, [])

        def step() -> tuple[Any, Any]:
            updates, new = self._plain.update(jax.tree.unflatten(structure, pieces), state, held)
            return optax.apply_updates(held, updates), new

        held, state = self._if_complete(complete, step, lambda: (held, state))
        return others, held, state

    @override
    def flush(self, leaves: GradientLeaves, state: Any, params: Any, structure: Any) -> tuple[Any, Any] | None:
        """See `InnerStep.flush`; the parameters are those that this rank holds."""
        exchange = self._own_exchange
        result = leaves.fused.flush()
        if result is None or not result.complete:
            return None
        pieces = exchange.new_pieces()
        exchange.copy_reduced(pieces)
        exchange.fused.update.applied()
        updates, state = self._plain.update(
            jax.tree.unflatten(structure, [jax_array(piece) for piece in pieces]), state, params
        )
        return optax.apply_updates(params, updates), state

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
        raise UsageError(
            "with zero=3, and with zero beside precision, TrainStep computes the gradients itself: that does not work "
            "beside a strategy that runs the passes, such as pipeline. Use zero=1 without precision, or no zero"
        )


class _Movement(MovesLeaves):
    """Moves leaves in and gradients out of a program that is being traced.

    Args:
        step: whose operations are used.
        held: this rank's pieces.
    """

    def __init__(self, step: TracedShardedStep, held: Any) -> None:
        self._step = step
        self._pieces = step.rounded(held)
        self._missing = set(range(len(self._pieces)))

    @override
    def gather(self, places: Sequence[int], after: Sequence[Any]) -> Leaves:
        operation = self._step.gather_operation(places)
        operands = [*(self._pieces[place] for place in places), _number_of(after)]
        return dict(zip(places, bind(operation, operands), strict=True))

    @override
    def take(self, gradients: Leaves) -> None:
        places = sorted(gradients)
        bind(self._step.hand_over_operation(places), [gradients[place] for place in places])
        self._missing.difference_update(places)

    def take_missing(self) -> None:
        """Take zeros for the parameters that the loss does not depend on."""
        if not self._missing:
            return
        infos = self._step.variables
        self.take({place: jnp.zeros(infos[place].shape, NUMPY_DTYPES[infos[place].dtype]) for place in self._missing})


def _number_of(arrays: Sequence[Any]) -> Any:
    """Return a number that cannot be known before these arrays have been computed."""
    plain = [each for each in arrays if each.size and not jnp.issubdtype(each.dtype, jax.dtypes.extended)]
    firsts = [jnp.real(each.reshape(-1)[0]).astype(jnp.float32) for each in plain]
    return sum(firsts, start=jnp.zeros((), jnp.float32))
