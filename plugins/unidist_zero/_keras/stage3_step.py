"""The inner step at stage 3 in TensorFlow: the optimizer's variables are the fragments that the model has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from typing_extensions import override

from unidist.buffer import Buffer
from unidist.checkpoint.format.interface import STATE_ATTRIBUTE
from unidist.communicator import Communicator
from unidist.engines.single import SingleCommunicator
from unidist.errors import UsageError
from unidist.gradients.allreduce import AllReduceExchange
from unidist.gradients.buckets import ParameterInfo
from unidist.gradients.interface import ReducedGradients
from unidist.gradients.options import ExchangeOptions
from unidist.optim.update import Update
from unidist_tensorflow.framework import TensorFlowFramework
from unidist_tensorflow.gradients.tensors import Gradient
from unidist_tensorflow.memory import dtype_of
from unidist_zero._keras.fragments.variables import Fragment, FragmentedMixin
from unidist_zero._keras.shards import VariableShard
from unidist_zero._keras.stage3_model import FragmentedModel, described, fragment_model
from unidist_zero._keras.step import ShardedStep
from unidist_zero.sharding.partition import Segment


class FragmentStep(ShardedStep):
    """See the module's text. Gradients of fragments are summed over the ranks when they come here."""

    @property
    @override
    def keeps_parameters(self) -> bool:
        return False

    def __init__(self, optimizer: Any, plain: type[Any], update: Update) -> None:
        super().__init__(optimizer, plain, update)
        update.make_exchanges_by(self._make_exchange)
        _steps[update] = self

    def attach(self, model: Any) -> None:
        """Shard the model's variables, before the optimizer is built. Collective."""
        if self._optimizer.built:
            raise UsageError(
                "zero=3 needs an optimizer that is not built yet: give a new one, and load its state by unidist's load"
            )
        super().prepare(model.trainable_variables)
        fragment_model(model, self._update, self.check_rows)
        self.model: FragmentedModel = model.__dict__[STATE_ATTRIBUTE]

    @override
    def prepare(self, variables: Sequence[Any]) -> None:
        """Nothing: the variables are fragments now, see `attach`."""

    @override
    def held(self, variable: Any) -> ParameterInfo:
        return described(self._fragment(variable))

    @override
    def own_gradient(self, variable: Any, gradient: Gradient | None) -> Gradient | None:
        if gradient is None or not self.model.is_read(self._fragment(variable)):
            return None
        return gradient

    @override
    def equal_everywhere(self, model: Any) -> list[Any]:
        """See `InnerStep.equal_everywhere`: all but the fragments."""
        return [each for each in super().equal_everywhere(model) if not isinstance(each, FragmentedMixin)]

    def _make_exchange(self, parameters: Sequence[ParameterInfo], options: ExchangeOptions) -> FragmentGradientExchange:
        return FragmentGradientExchange(parameters, options=options, communicator=self.communicator)

    def _make_shards(self) -> list[VariableShard]:
        shards = []
        for place, variable in enumerate(self._variables):
            fragment = self._fragment(variable)
            piece = fragment.piece
            if piece is not None:
                of_place = type(piece)(place, piece.start, piece.count, piece.bucket, piece.offset, piece.owner)
                segment = Segment(piece.bucket, piece.offset, piece.count, (of_place,))
                shards.append(VariableShard(segment, fragment.storage, dtype_of(fragment.storage)))
        return shards

    @property
    def communicator(self) -> Communicator:
        """Over the shard group."""
        return self.model.communicator

    @property
    def _everyone(self) -> Communicator:
        return self.model.communicator

    def _memory(self, place: int, shard: VariableShard) -> Buffer:
        return self._update.buffer(shard.places[0])

    def _fill(self, shard: VariableShard, variables: Sequence[Any]) -> None:
        """Nothing: the fragment is what the model has."""
        return  # without it AutoGraph, which leaves texts out, would see nothing, and warn of it

    def _gather_shards(self, variables: Sequence[Any]) -> None:
        """Nothing: the next call gathers."""
        return  # see `_fill`

    def _fragment(self, variable: Any) -> Fragment:
        if not isinstance(variable, FragmentedMixin):
            raise UsageError(
                f"{variable.path!r} was not trained when the model was distributed, and zero=3 did not divide it. "
                "Set what is to be trained before distribute"
            )
        return variable.unidist_fragment


_steps: WeakKeyDictionary[Update, FragmentStep] = WeakKeyDictionary()


def attach(model: Any, update: Update) -> None:
    """Shard the model for the optimizer of an update; see `Strategy.attach`. Collective."""
    _steps[update].attach(model)


class FragmentGradientExchange(AllReduceExchange):
    """Gradients of fragments: added up over the passes of a window, and multiplied by the scale. Nothing is sent.

    Args:
        parameters: what this rank holds.
        options: `ExchangeOptions` of the optimizer.
        communicator: over the shard group.
    """

    def __init__(
        self,
        parameters: Sequence[ParameterInfo],
        *,
        options: ExchangeOptions,
        communicator: Communicator,
    ) -> None:
        super().__init__(parameters, framework=TensorFlowFramework(), host=SingleCommunicator(), options=options)
        self._divided_over = communicator

    @override
    def reduced(self) -> ReducedGradients:
        whole = super().reduced()
        return ReducedGradients(whole.memory, self._divided_over if self._divided_over.size > 1 else None, whole.copies)
