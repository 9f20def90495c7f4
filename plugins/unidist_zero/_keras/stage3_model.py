"""A Keras model at stage 3: its variables as fragments, its layers as FSDP units."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from typing_extensions import override

from unidist.checkpoint.format.interface import STATE_ATTRIBUTE, HasKeptState, KeepsState
from unidist.communicator import Communicator
from unidist.errors import UsageError
from unidist.gradients.buckets import ParameterInfo, plan_buckets
from unidist.mesh import REPLICA_AXES
from unidist.optim.update import Update
from unidist_tensorflow.memory import dtype_of
from unidist_tensorflow.optimizer import RowCheck
from unidist_zero._keras.fragments.buffers import TensorBuffers
from unidist_zero._keras.fragments.fsdp_units import Unit, find_units
from unidist_zero._keras.fragments.lazy_init import make_equal
from unidist_zero._keras.fragments.movement import UnitMovement
from unidist_zero._keras.fragments.variables import Fragment, check_can_be_fragmented, make_fragment
from unidist_zero.sharding.gathered_model import GathersParameters
from unidist_zero.sharding.partition import Partition, Piece, partition

if TYPE_CHECKING:
    from unidist.runtime_api import RuntimeAPI

_UNLIMITED = 1 << 62


class FragmentedModel(GathersParameters, HasKeptState):
    """The fragments and units of one model; its layers' calls gather from now on. Collective.

    Args:
        model: built, equal on every rank.
        update: of its optimizer, whose options say whether it needs whole variables.
        check_rows: refuses sparse gradients; None: their rows are added up.

    Attributes:
        communicator: over the shard group.
        partition: of the variables, numbered as in `fragments`.
        fragments: of the variables that are trained, in the model's order.
        units: gathered one by one.
    """

    def __init__(self, model: Any, update: Update, check_rows: RowCheck | None) -> None:
        self._model = model
        self._update = update
        variables = _distinct(model.trainable_variables)
        check_can_be_fragmented(variables)
        self._is_suspended = False
        plans = find_units(model, variables)
        unit_of = {id(variable): number for number, plan in enumerate(plans) for variable in plan.variables}
        infos = [
            ParameterInfo(str(each.path), tuple(each.shape), dtype_of(each), group=unit_of[id(each)])
            for each in variables
        ]
        whole, precision = update.options.whole_tensors, update.options.precision
        self._layouts = plan_buckets(infos, bucket_bytes=_UNLIMITED, first_bucket_bytes=_UNLIMITED)
        pieces = self._divide(update.context)
        masters = [info.dtype if precision is None else precision.master_dtype(info.dtype) for info in infos]
        self.fragments: list[Fragment] = [
            make_fragment(variable, pieces.get(number), masters[number], whole=whole)
            for number, variable in enumerate(variables)
        ]
        kinds = {info.dtype for info in infos}
        reduce_dtypes = {kind: kind if precision is None else precision.reduce_dtype(kind) for kind in kinds}
        for fragment in self.fragments:
            if update.context.is_elastic:
                fragment.open_window()
            fragment.install()
        self.units: list[Unit] = []
        for number, plan in enumerate(plans):
            numbers = [i for i, variable in enumerate(variables) if unit_of[id(variable)] == number]
            movement = UnitMovement(self.fragments, numbers, reduce_dtypes, check_rows)
            is_root = plan.layer is model
            self.units.append(Unit(plan.layer, movement, lambda: self._is_suspended, recomputes=not is_root))
        self._unit_of = unit_of
        self._connect()

    def _divide(self, context: RuntimeAPI) -> dict[int, Piece]:
        """Shard over the ranks of a context; returns this rank's piece of each variable of which it has some."""
        self._context = context
        self.communicator: Communicator = context.new_communicator(REPLICA_AXES)
        whole = self._update.options.whole_tensors
        self.partition: Partition = partition(self._layouts, self.communicator.size, whole=whole)
        return {piece.parameter: piece for piece in self.partition.pieces(self.communicator.rank)}

    def _connect(self) -> None:
        buffers = TensorBuffers(self.communicator)
        names = [unit.name for unit in self.units]
        for number, unit in enumerate(self.units):
            unit.movement.connect(self.partition, self.communicator, buffers, number=number, names=names)

    def divide_again(self, context: RuntimeAPI) -> None:
        """Shard over the ranks of this context, if it is another one; values are loaded next. Collective."""
        if context is self._context:
            return
        pieces = self._divide(context)
        with tf.init_scope():
            for number, fragment in enumerate(self.fragments):
                fragment.move(pieces.get(number), whole=self.partition.whole)
        self._connect()

    def is_read(self, fragment: Fragment) -> bool:
        """Return whether any call of its layer has read the variable: otherwise its gradient of zeros means None."""
        return id(fragment.variable) in self.units[self._unit_of[id(fragment.variable)]].read

    @override
    def kept_state(self) -> KeepsState:
        from unidist_zero._keras.state import FragmentedModelState

        return FragmentedModelState(self._model, {id(each.variable): each for each in self.fragments})

    @contextmanager
    @override
    def gathered(self) -> Iterator[None]:
        if self._is_suspended:
            raise UsageError("the model's variables are gathered already; leave the inner `gathered(model)` out")
        if not tf.executing_eagerly():
            raise UsageError("gathered(model) belongs outside of tf.function")
        for unit in self.units:
            for fragment, value in zip(unit.movement.fragments, unit.movement.gather_now(), strict=True):
                fragment.whole(value)
        self._is_suspended = True
        try:
            yield
        finally:
            self._is_suspended = False
            for fragment in self.fragments:
                fragment.store(fragment.variable)
                fragment.install()


def fragment_model(model: Any, update: Update, check_rows: RowCheck | None) -> None:
    """Shard a model's variables over the ranks, for the optimizer of `update`. Collective; rank 0's values count.

    Raises:
        UsageError: the model is not built, or has variables that cannot be sharded.
    """
    if not (model.built and model.trainable_variables):
        raise UsageError(
            f"zero=3 divides the variables of a model, and {model.name!r} has none yet: build it before distribute, by "
            "model.build(input_shape) or by calling it on one batch; within `with unidist_zero.deferred():` that "
            "takes no memory"
        )
    if STATE_ATTRIBUTE in model.__dict__:
        raise UsageError("the model is distributed already, and at zero=3 only one optimizer can update it")
    make_equal(model, update.num_ranks)
    model.__dict__[STATE_ATTRIBUTE] = FragmentedModel(model, update, check_rows)


def described(fragment: Fragment) -> ParameterInfo:
    """Describe what this rank holds of a variable."""
    storage = fragment.storage
    return ParameterInfo(fragment.path, tuple(storage.shape), dtype_of(storage))


def _distinct(variables: Sequence[Any]) -> list[Any]:
    return list({id(variable): variable for variable in variables}.values())
