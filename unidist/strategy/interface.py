"""The strategy: one way of spreading training over ranks.

A strategy is a dataclass: its first field is the value of `--strategy NAME=VALUE`, the other fields
are the options of `NAME=VALUE:OPTION=...`. What it can do beyond this interface is told by the small
classes at the end of the module, which other code asks for by isinstance.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from unidist.mesh import Mesh
from unidist.registry import load_object

if TYPE_CHECKING:
    from unidist.framework import Framework
    from unidist.gradients.buckets import ParameterInfo
    from unidist.gradients.interface import GradientExchange
    from unidist.gradients.options import ExchangeOptions
    from unidist.gradients.precision import Precision
    from unidist.optim.interface import MakesInnerStep, MakesStepRunner
    from unidist.optim.rules import GradientRule
    from unidist.optim.update import Update
    from unidist.runtime_api import Plugins, RuntimeAPI


C = TypeVar("C")


@dataclass(frozen=True)
class Plan:
    """All that is known of a run before any process starts.

    Args:
        strategies: every strategy of the run, in the order given, the default ones included.
        mesh: how the ranks are arranged.
    """

    strategies: tuple[Strategy, ...]
    mesh: Mesh

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.mesh.world_size

    @property
    def model_axes(self) -> tuple[str, ...]:
        """The axes along which the model itself is divided: ranks on them hold different parts of it."""
        return self.mesh.model_axes

    @property
    def innermost_first(self) -> tuple[Strategy, ...]:
        """The strategies in the order in which they partition a model: those on inner axes cut finer, and first."""
        return tuple(sorted(self.strategies, key=lambda item: -item.axis_order if item.axis is not None else -math.inf))

    def all(self, capability: type[C]) -> list[C]:
        """Return every strategy that has a capability, in the order given."""
        return [item for item in self.strategies if isinstance(item, capability)]

    def find(self, capability: type[C]) -> C | None:
        """Return the strategy that has a capability which at most one strategy of a run has; None if none has."""
        return next((item for item in self.strategies if isinstance(item, capability)), None)

    def the(self, capability: type[C]) -> C:
        """Return the one strategy that has a capability which every plan has: `plan.the(GradientOwner)`."""
        found = self.find(capability)
        assert found is not None, f"a plan without a {capability.__name__}: it was not made by make_plan"
        return found

    @property
    def precision(self) -> Precision | None:
        """In which types the model computes, is kept and is updated; None: everything in its own type."""
        chooser = self.find(ChoosesPrecision)
        return None if chooser is None else chooser.precision(self)

    def prepare(self, model: Any, context: RuntimeAPI) -> Any:
        """Return the model as this rank holds it: its types first, then what each strategy makes of it.

        Every rank calls it with the whole model. Collective where a strategy's `partition` is.
        """
        for chooser in self.all(ChoosesPrecision):
            model = chooser.prepare(model, self, context)
        for item in self.innermost_first:
            model = item.partition(model, context)
        return model


class Strategy(ABC):
    """One way of spreading training. A trivial implementation is `unidist.builtin.identity.Identity`.

    Attributes:
        name: the word in `--strategy`.
        axis: the mesh axis that it claims, or None. No two strategies of a run claim the same one.
        axis_order: where the axis lies; smaller is further out (pipeline 0, data 50, tensor 100).
            Innermost axes get ranks of one host.
    """

    name: ClassVar[str]
    axis: ClassVar[str | None] = None
    axis_order: ClassVar[int] = 75

    @property
    def axis_size(self) -> int | None:
        """Ranks on the claimed axis; None leaves it to what the other axes leave over."""
        return None

    def validate(self, plan: Plan) -> None:  # noqa: B027 - having nothing to check is a valid strategy
        """Check sizes and conflicts with the other strategies. Pure; runs in the launcher before any process starts.

        Raises:
            ConfigurationError: names this strategy, the other one or the size, and what to do.
        """

    def partition(self, model: Any, context: RuntimeAPI) -> Any:
        """Return the model as this rank shall hold it. Called once by `distribute` and `TrainStep`.

        Strategies that claim an axis are asked from the innermost axis outwards, those without one first. Every rank
        calls it alike, with the whole model, in which all ranks have the same values. A strategy that cuts parameters,
        or leaves some to other ranks, makes the model that it returns carry a `checkpoint.PlacesParameters`
        (which asks the one that it finds on the model it was given). A parameter that is cut stays the same object
        where the framework allows it: the optimizer holds it. The default returns the model unchanged.
        """
        return model

    @property
    def changes_model(self) -> bool:
        """True: it must see the model, so binding an optimizer alone will not do. The default: it has a `partition`."""
        return type(self).partition is not Strategy.partition

    def attach(self, model: Any, update: Update, framework: Framework) -> None:  # noqa: B027 - optional event
        """Called by `distribute` on every rank when the optimizer is bound, in the order of the strategies.

        Args:
            model: as `partition` of all strategies has left it.
            update: the optimizer's updates; its loss scaler, where there is one, exists.
            framework: the model's.
        """

    def on_step(self, step: int) -> None:  # noqa: B027 - optional event
        """Called on every rank after update number `step` (from 1) was applied."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must keep of this strategy; plain values only."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` returned, possibly at another world size.

        Raises:
            UsageError: there is something in it that this strategy does not know.
        """
        if state:
            from unidist.errors import UsageError

            raise UsageError(f"strategy {self.name!r} keeps no state, but was given {sorted(state)}")


class GradientOwner(ABC):
    """Capability: exchanges the gradients on the data axis. A run has exactly one owner (default: `data`)."""

    @property
    def completes_in_backward(self) -> bool:
        """True: gradients are complete when the backward pass returns; False: at the step."""
        return True

    @abstractmethod
    def make_exchange(
        self, parameters: Sequence[ParameterInfo], context: RuntimeAPI, framework: Framework, options: ExchangeOptions
    ) -> GradientExchange:
        """Return the exchange for these parameters. Collective over the ranks that exchange with each other.

        Args:
            parameters: equal on every rank.
            context: the runtime.
            framework: does arithmetic on gradients.
            options: what the script asks of this exchange, equal on every rank. An owner that does not honour one of
                them refuses it: `options.check_supported_by(self.name)`.
        """


class ShardsUpdates(ABC):
    """Capability of a `GradientOwner`: each rank of the data axis updates a shard of the parameters only.

    Its exchange leaves this rank's shard of the reduced gradients (`GradientExchange.reduced`), and its inner step for
    the framework steps on that shard and brings the new parameters to all ranks.
    """

    @abstractmethod
    def inner_step(self, framework: Framework, context: RuntimeAPI) -> MakesInnerStep:
        """Return what makes the inner step of one optimizer; called when the optimizer is bound.

        The inner step derives from the adapter's class: `unidist_torch.optimizer.InnerStep`,
        `unidist_tensorflow.optimizer.InnerStep`.

        Raises:
            ConfigurationError: there is no binding to this framework; lists those that there are.
        """


class RunsSteps(ABC):
    """Capability: runs the forward and backward passes of a step itself, in place of a script's loop.

    A run has at most one such strategy. It needs `TrainStep` (on Keras `model.fit` too); `distribute` of PyTorch
    refuses it.
    """

    @abstractmethod
    def step_runner(self, framework: Framework, context: RuntimeAPI) -> MakesStepRunner:
        """Return what makes the runner of a model that `partition` has returned.

        The runner derives from the adapter's class: `unidist_torch.models.StepRunner`,
        `unidist_tensorflow.training.StepRunner`.

        Raises:
            ConfigurationError: there is no binding to this framework; lists those that there are.
        """


class ChoosesPrecision(ABC):
    """Capability: decides in which types the model computes, is kept and is updated. A run has at most one.

    `unidist.gradients.precision` says who does what with the answer; others ask `Plan.precision`.
    """

    @abstractmethod
    def precision(self, plan: Plan) -> Precision:
        """Return the types of a run with this plan. Pure."""

    @abstractmethod
    def prepare(self, model: Any, plan: Plan, context: RuntimeAPI) -> Any:
        """Return the model with its parameters and layers in these types.

        Called once by `distribute`, on every rank alike, before any strategy may `partition` the model.

        Raises:
            UsageError: nothing in the model has a type that this changes.
        """


class ActsOnGradients(ABC):
    """Capability: changes the reduced gradients before the inner step: clips them, say.

    Where several strategies do, their rules apply in the order in which they are given.
    """

    @abstractmethod
    def gradient_rule(self) -> GradientRule:
        """Return a rule for one optimizer; called when the optimizer is bound."""


class UpdateGate(ABC):
    """Capability: decides how many backward passes make one update. A run has at most one gate."""

    @property
    @abstractmethod
    def passes_per_update(self) -> int:
        """Backward passes whose gradients are added up, without communication, before one update. At least 1."""

    @property
    @abstractmethod
    def averages_passes(self) -> bool:
        """True: the update uses the mean over the passes; False: their sum."""


class SurvivesLoss(ABC):
    """Capability: says whether it can be used in an elastic job, in which ranks are lost, come and go.

    Without this capability a strategy can be if it neither divides the model nor is a `ShardsUpdates`; see
    `unidist.strategy.elastic_support`.
    """

    @abstractmethod
    def elastic_obstacle(self, plan: Plan) -> str:
        """Return why it cannot be, with what to do instead; "" if it can. Pure; the launcher asks too."""


class NamesPlugins(ABC):
    """Capability: an option of the strategy names something that a plugin registers."""

    @abstractmethod
    def check_plugins(self, plugins: Plugins) -> None:
        """Check that it is there. Pure; runs in the launcher before any process starts.

        Raises:
            ConfigurationError: it is not; lists the choices.
        """


@dataclass(frozen=True)
class StrategySpec:
    """A kind of strategy, not yet imported.

    Args:
        name: the word in `--strategy`.
        path: "module:Class" of an `unidist.strategy.interface.Strategy` dataclass.
        summary: one line for lists.
    """

    kind: ClassVar[str] = "strategy"
    hook: ClassVar[str] = "unidist_register_strategies"

    name: str
    path: str
    summary: str

    def load(self) -> type[Strategy]:
        """Import and return the class."""
        strategy: type[Strategy] = load_object(self.path, f"strategy {self.name!r}")
        return strategy
