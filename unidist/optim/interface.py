"""Contracts between an update, the strategies that follow it, and the adapters that bind it to optimizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from unidist.framework import Tensor

if TYPE_CHECKING:
    from unidist.buffer import Buffer
    from unidist.framework import Framework
    from unidist.optim.update import Update
    from unidist.runtime_api import RuntimeAPI


class FollowsUpdates(Protocol):
    """An observer of one optimizer's updates; every `Strategy` is one."""

    @property
    def name(self) -> str:
        """The name under which a checkpoint keeps its state."""

    def on_step(self, step: int) -> None:
        """Called on every rank after update number `step` (from 1) was applied."""

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; plain values only."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned, possibly at another world size."""


class KnowsHolders(Protocol):
    """Knows which ranks hold a parameter of a divided model; every `checkpoint.PlacesParameters` does."""

    def copies(self, path: str) -> int:
        """See `PlacesParameters.copies`."""

    def gradient_axis(self, path: str) -> str:
        """See `PlacesParameters.gradient_axis`."""

    def cut_axis(self, path: str) -> str | None:
        """See `PlacesParameters.cut_axis`."""


class ChecksBeforeSave(ABC):
    """Capability of an observer of updates: it looks at the state before a checkpoint is written."""

    @abstractmethod
    def before_save(self) -> None:
        """Called on every rank when a checkpoint begins. May be collective; an exception ends the save."""

    def before_load(self) -> None:  # noqa: B027 - nothing to do is a valid answer
        """Called on every rank before a checkpoint replaces parameters and the optimizer's state."""


class KeepsTensors(ABC):
    """Capability of an observer of updates: its state includes tensors, equal on every rank, beside plain values.

    A checkpoint has them in a section that jobs with other strategies leave alone.
    """

    @abstractmethod
    def tensors(self) -> Mapping[str, tuple[Sequence[int], Buffer]]:
        """Return shape and host memory of each tensor by name; the memory does not change while it is being saved."""

    @abstractmethod
    def load_tensors(self, found: Mapping[str, tuple[Sequence[int], Buffer]]) -> None:
        """Restore what `tensors` returned: all that the checkpoint has of this observer, if it has anything."""


class OutlivesGenerations(ABC):
    """Capability of an observer of updates: between two exchanges ranks differ, also when an elastic job changes them.

    The state of an elastic job keeps a copy of what the observer has with each commit. After every change of the ranks
    it synchronizes, whether a rank was lost or not.
    """

    @abstractmethod
    def kept(self) -> Any:
        """Return a copy of this rank's state, for `restore`; called with each commit, and not collective."""

    @abstractmethod
    def restore(self, kept: Any) -> None:
        """Bring back what `kept` returned, after a rank was lost; not collective."""

    @abstractmethod
    def make_equal(self) -> None:
        """Make parameters and optimizer state equal on all ranks, before these change by agreement. Collective."""

    @abstractmethod
    def synchronize_generation(self, context: RuntimeAPI) -> None:
        """Make the state fit for all ranks of a new generation. Collective over all of them.

        Called before rank 0 gives its parameters and its optimizer state to all ranks. Some hold the commit of rank 0,
        others an older one or, if they have just joined, none.

        Args:
            context: of the generation; the update may not be in it yet.
        """


class InnerStep(Protocol):
    """The step between reduced gradients and new parameters, of one bound optimizer.

    This is the part that is the same for every framework. Each adapter extends it for its kind of optimizer, as an
    ABC: `unidist_torch.optimizer.InnerStep`, `unidist_tensorflow.optimizer.InnerStep`.
    """

    @property
    def sharded(self) -> bool:
        """Whether this rank updates only its shard of the parameters, so that it has no whole gradients."""


class MakesInnerStep(Protocol):
    """Makes the inner step of one optimizer when it is bound."""

    def __call__(self, optimizer: Any, plain: type[Any], update: Update, /) -> InnerStep:
        """Return the inner step.

        Args:
            optimizer: the framework's optimizer, already of its new class.
            plain: its class before it was bound.
            update: the framework-free part.
        """


class BringsInnerStep(ABC):
    """Capability of a `GradientOwner`: brings the step between the gradients of its exchange and new parameters.

    Without it, every rank calls the step of the optimizer's own class with all gradients.
    """

    @abstractmethod
    def inner_step(self, framework: Framework, context: RuntimeAPI) -> MakesInnerStep:
        """Return the factory of inner steps for this framework; called when an optimizer is bound.

        The inner step derives from the adapter's class: `unidist_torch.optimizer.InnerStep`,
        `unidist_tensorflow.optimizer.InnerStep`.

        Raises:
            ConfigurationError: the strategy has no binding to this framework; lists those that it has.
        """


class StepRunner(Protocol):
    """Runs the forward and backward passes of a training step. Every rank calls its methods in the same order.

    Each adapter has an ABC with more about its types, from which implementations derive:
    `unidist_torch.models.StepRunner`, `unidist_tensorflow.training.StepRunner`.
    """

    def run(self, inputs: Any, targets: Any) -> Tensor:
        """Compute the loss and every gradient of this rank's parameters, and pass the gradients to the optimizer.

        Args:
            inputs: for the model, as its forward pass takes them.
            targets: for the loss function.

        Returns:
            The loss of this rank's batch, a scalar; equal on all ranks along the axes of the model.
        """

    def evaluate(self, inputs: Any, targets: Any) -> Tensor:
        """Return the loss of this rank's batch in evaluation mode, without gradients; equal as that of `run`."""

    def predict(self, inputs: Any) -> Any:
        """Return the model's outputs in evaluation mode, on every rank along the axes of the model."""


class MakesStepRunner(Protocol):
    """Makes the runner of a model's steps."""

    def __call__(self, model: Any, loss_fn: Any, optimizer: Any, /) -> StepRunner:
        """Return the runner.

        Args:
            model: as `Strategy.partition` has returned it.
            loss_fn: the script's loss function; None if the framework compiles it into the model later.
            optimizer: the bound optimizer.
        """


class BindsOptimizers(Protocol):
    """Binds updates to a framework's optimizers; each adapter has such a function, `bind` in its folder `optimizer`.

    A framework needs one to train; the arithmetic that strategies ask for is `unidist.framework.Framework`.
    """

    def __call__(self, optimizer: Any, update: Update, *, names: Mapping[str, Tensor] | None = None) -> Any:
        """Make the optimizer's step go through `update`, and return it (the same class for isinstance). Collective.

        From then on the binding reports every gradient to `update` as it becomes ready, and calls `update.finish()`
        before the inner step; `unidist.optim.update` has the order of calls.

        Args:
            optimizer: the framework's own optimizer.
            update: the framework-free part.
            names: paths of the optimizer's parameters, if known; used in messages.
        """
