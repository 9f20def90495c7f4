"""Strategies, which distribute training over ranks, and the plan of a run.

A strategy is a dataclass: its first field is the value of `--strategy NAME=VALUE`, the other fields
are the options of `NAME=VALUE:OPTION=...`. The small classes at the end of the module are capabilities that a strategy
may have besides this interface; other code finds them by isinstance.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from unidist.mesh import DATA_AXIS, Divides, Mesh
from unidist.optim.interface import BringsInnerStep
from unidist.registry import load_object

if TYPE_CHECKING:
    from unidist.framework import Framework
    from unidist.gradients.buckets import ParameterInfo
    from unidist.gradients.interface import GradientExchange
    from unidist.gradients.options import ExchangeOptions
    from unidist.gradients.precision import Precision
    from unidist.launcher import SideProcess
    from unidist.optim.interface import MakesStepRunner
    from unidist.optim.rules import GradientRule
    from unidist.optim.update import Update
    from unidist.runtime_api import Plugins, RuntimeAPI


C = TypeVar("C")


@dataclass(frozen=True)
class Plan:
    """The checked strategies of a run and their mesh, known before any process starts.

    Args:
        strategies: every strategy of the run, in the order given, including default ones.
        mesh: the arrangement of the ranks.
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
    def divides_model(self) -> bool:
        """Whether a strategy divides the model, also where a process of an elastic job is alone and holds all of it."""
        return any(item.axis not in (None, DATA_AXIS) and item.axis_size != 1 for item in self.strategies)

    @property
    def innermost_first(self) -> tuple[Strategy, ...]:
        """The strategies in the order in which they partition a model: inner axes first, which cut finer."""
        return tuple(sorted(self.strategies, key=lambda item: -item.axis_order if item.axis is not None else -math.inf))

    def all(self, capability: type[C]) -> list[C]:
        """Return every strategy that has a capability, in the order given."""
        return [item for item in self.strategies if isinstance(item, capability)]

    def find(self, capability: type[C]) -> C | None:
        """Return the strategy that has a capability which at most one strategy of a run has; None if there is none."""
        return next((item for item in self.strategies if isinstance(item, capability)), None)

    def the(self, capability: type[C]) -> C:
        """Return the one strategy that has a capability which every plan has: `plan.the(GradientOwner)`."""
        found = self.find(capability)
        assert found is not None, f"a plan without a {capability.__name__}: it was not made by make_plan"
        return found

    # The questions to strategies that adapters and other strategies have, each asked in this class alone

    @property
    def owner(self) -> GradientOwner:
        """The strategy that exchanges the gradients."""
        return self.the(GradientOwner)

    @property
    def steps_alone(self) -> bool:
        """Whether a rank may make a step while the others make none: see `GradientOwner.steps_alone`."""
        return self.owner.steps_alone

    @property
    def shards_updates(self) -> ShardsUpdates | None:
        """The strategy by which each rank updates a shard of the parameters; None: each updates all that it has."""
        return self.find(ShardsUpdates)

    @property
    def owns_parameters(self) -> OwnsParameters | None:
        """The strategy that keeps the parameters outside of the models; None: models have them."""
        return self.find(OwnsParameters)

    @property
    def runs_steps(self) -> RunsSteps | None:
        """The strategy that runs forward and backward passes itself; None: the script's loop does, or `TrainStep`."""
        return self.find(RunsSteps)

    @property
    def gate(self) -> UpdateGate | None:
        """The strategy that counts the backward passes of an update; None: each pass is one, or the script counts."""
        return self.find(UpdateGate)

    @property
    def gradient_rules(self) -> list[ActsOnGradients]:
        """The strategies that change reduced gradients before the inner step, in the order in which they do."""
        return self.all(ActsOnGradients)

    @property
    def chooses_precision(self) -> ChoosesPrecision | None:
        """The strategy that chooses types; None: each parameter has its own."""
        return self.find(ChoosesPrecision)

    @property
    def precision(self) -> Precision | None:
        """The types in which the model computes, is stored and is updated; None: each parameter in its own type."""
        chooser = self.chooses_precision
        return None if chooser is None else chooser.precision(self)

    @property
    def dividers(self) -> list[str]:
        """The names of strategies because of which a rank has a part of the model, or does not run its passes."""
        divided = [axis for axis, size in self.mesh.axes.items() if axis != DATA_AXIS and size > 1]
        return [item.name for item in self.strategies if isinstance(item, RunsSteps) or item.axis in divided]

    @property
    def keeps_division(self) -> list[KeepsDivision]:
        """The strategies whose division of the model outlives a change of the ranks, innermost first."""
        return [item for item in self.innermost_first if isinstance(item, KeepsDivision)]

    def prepare(self, model: Any, context: RuntimeAPI) -> Any:
        """Return the model as this rank holds it: first its types are changed, then each strategy partitions it.

        Every rank calls it with the whole model. Collective if a strategy's `partition` is.
        """
        if self.chooses_precision is not None:
            model = self.chooses_precision.prepare(model, self, context)
        for item in self.innermost_first:
            model = item.partition(model, context)
        return model


class Strategy(ABC):
    """A way to distribute training. A trivial implementation is `unidist.builtin.identity.Identity`.

    Attributes:
        name: in `--strategy`.
        axis: the mesh axis that it claims, or None. No two strategies of a run claim the same one.
        axis_order: position of the axis in the mesh; smaller is further out (pipeline 0, data 50, tensor 100).
            The ranks of innermost axes are on one host.
        axis_divides: what is divided over the ranks of the axis: ("model",) if each holds another part of the model,
            ("sequence",) if each computes other tokens of the same samples with the whole model, ("samples", "model")
            if each has other samples and some parameters are divided (experts). Gradients are averaged over
            `unidist.mesh.REPLICA_AXES`, samples divided over `SAMPLE_AXES`. The data axis divides samples.
        keeps_replicas: after each update, ranks that hold the same parameter have the same value; `--verify` compares
            them. False for a strategy that lets them differ for a while (local SGD).
    """

    name: ClassVar[str]
    axis: ClassVar[str | None] = None
    axis_order: ClassVar[int] = 75
    axis_divides: ClassVar[tuple[Divides, ...]] = ("model",)
    keeps_replicas: ClassVar[bool] = True

    @property
    def axis_size(self) -> int | None:
        """Number of ranks on the claimed axis; None: the ranks that the other axes leave."""
        return None

    def validate(self, plan: Plan) -> None:  # noqa: B027 - having nothing to check is a valid strategy
        """Check sizes and conflicts with the other strategies. Pure; runs in the launcher before any process starts.

        Raises:
            ConfigurationError: names this strategy, the other one or the size, and what to do.
        """

    def partition(self, model: Any, context: RuntimeAPI) -> Any:
        """Return the part of the model that this rank holds. Called once by `distribute` and `TrainStep`.

        Strategies without an axis are called first, then those with one, from the innermost axis outwards. Every rank
        calls it with the whole model, with the same values on all ranks. A strategy that cuts parameters, or leaves
        some to other ranks, attaches a `checkpoint.PlacesParameters` to the model that it returns (which consults the
        one that is already attached). A parameter that is cut should stay the same object if the framework allows it,
        because the optimizer refers to it. The default returns the model unchanged.
        """
        return model

    @property
    def changes_model(self) -> bool:
        """Whether it needs the model, so that binding an optimizer alone is not enough. Default: it has `partition`."""
        return type(self).partition is not Strategy.partition

    @property
    def returns_parts(self) -> bool:
        """Whether the model may return this rank's part of an output, because the user asked for it. Default: never.

        `--verify` then leaves outputs alone that have another shape than those of the whole model.
        """
        return False

    def output_obstacle(self, model: Any, context: RuntimeAPI) -> str:
        """Return why the divided model computes something else of one rank's samples than the whole one, by design.

        `--verify` then does not compare the outputs of the first batch, and says why. Default: "", they are the same.

        Args:
            model: the whole one, before `partition`; the same on every rank.
            context: the runtime.
        """
        return ""

    def prepare_update(self, update: Update, framework: Framework) -> None:  # noqa: B027 - optional event
        """Called on every rank when the updates of an optimizer are planned, before it is bound. Not collective.

        A strategy that keeps something for each optimizer lets it `update.follow`; the options of the exchange may be
        changed here.

        Args:
            update: of one optimizer, without parameters so far.
            framework: of the optimizer.
        """

    def attach(self, model: Any, update: Update, framework: Framework) -> None:  # noqa: B027 - optional event
        """Called by `distribute` on every rank when the optimizer is bound, in the order of the strategies.

        Args:
            model: after `partition` of all strategies.
            update: the optimizer's updates; its loss scaler exists, if the loss is scaled.
            framework: of the model.
        """

    def on_step(self, step: int) -> None:  # noqa: B027 - optional event
        """Called on every rank after update number `step` (from 1) was applied."""

    def state(self) -> dict[str, Any]:
        """Return the state of this strategy for a checkpoint; plain values only."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned, possibly at another world size.

        Raises:
            UsageError: the state contains something that this strategy does not know.
        """
        if state:
            from unidist.errors import UsageError

            raise UsageError(f"strategy {self.name!r} keeps no state, but was given {sorted(state)}")


class GradientOwner(ABC):
    """Capability: exchanges the gradients on the data axis. A run has exactly one owner (default: `data`)."""

    name: ClassVar[str]

    @property
    def completes_in_backward(self) -> bool:
        """Whether gradients are complete when the backward pass returns; else they are at the step."""
        return True

    @property
    def steps_alone(self) -> bool:
        """Whether a rank may make a step while the others make none: then the loss of a step is the rank's own."""
        return False

    @abstractmethod
    def make_exchange(
        self, parameters: Sequence[ParameterInfo], context: RuntimeAPI, framework: Framework, options: ExchangeOptions
    ) -> GradientExchange:
        """Return the exchange for these parameters. Collective over the ranks that exchange with each other.

        Args:
            parameters: equal on every rank.
            context: the runtime.
            framework: does arithmetic on gradients.
            options: the script's options for this exchange, equal on every rank. An owner that does not support one of
                them refuses it: `options.check_supported_by(self.name)`.
        """


class ShardsUpdates(BringsInnerStep):
    """Capability of a `GradientOwner`: each rank of the data axis updates only a shard of the parameters.

    Its exchange produces this rank's shard of the reduced gradients (`GradientExchange.reduced`). Its inner step for
    the framework updates that shard and sends the new parameters to all ranks.
    """

    name: ClassVar[str]


class OwnsParameters(BringsInnerStep):
    """Capability of a `GradientOwner`: keeps the parameters outside of the models, where pushed changes are applied.

    Its exchange gives each rank its own gradients (`unidist.gradients.LocalExchange`). Its inner step pushes those, or
    what the rank's own optimizer has made of them, and fetches parameters into the model.

    For a checkpoint all ranks hold the same parameters: such a strategy is also `unidist.optim.ChecksBeforeSave`, and
    makes its ranks equal in `before_save`.
    """

    @abstractmethod
    def pull(self) -> None:
        """Bring the newest parameters into this rank's model. Adapters call it before they evaluate.

        Not collective. Does nothing before the first update.
        """


class RunsSteps(ABC):
    """Capability: runs the forward and backward passes of a step itself, instead of the script's loop.

    A run has at most one such strategy. It needs `TrainStep` (on Keras `model.fit` too); `distribute` of PyTorch
    refuses it.
    """

    name: ClassVar[str]

    @abstractmethod
    def step_runner(self, framework: Framework, context: RuntimeAPI) -> MakesStepRunner:
        """Return the factory of step runners for models that `partition` has returned.

        The runner derives from the adapter's class: `unidist_torch.models.StepRunner`,
        `unidist_tensorflow.training.StepRunner`.

        Raises:
            ConfigurationError: the strategy has no binding to this framework; lists those that it has.
        """


class ChoosesPrecision(ABC):
    """Capability: chooses the types in which the model computes, is stored and is updated. At most one per run.

    `unidist.gradients.precision` describes how they are used; other code reads `Plan.precision`.
    """

    name: ClassVar[str]

    @abstractmethod
    def precision(self, plan: Plan) -> Precision:
        """Return the types of a run with this plan. Pure."""

    @abstractmethod
    def prepare(self, model: Any, plan: Plan, context: RuntimeAPI) -> Any:
        """Return the model with its parameters and layers in these types.

        Called once by `distribute`, on every rank, before any strategy's `partition`.

        Raises:
            UsageError: nothing in the model has a type that it would change.
        """


class ActsOnGradients(ABC):
    """Capability: changes the reduced gradients before the inner step, for example clips them.

    If several strategies do, their rules are applied in the order of the strategies.
    """

    name: ClassVar[str]

    @abstractmethod
    def gradient_rule(self) -> GradientRule:
        """Return a rule for one optimizer; called when the optimizer is bound."""


class UpdateGate(ABC):
    """Capability: decides how many backward passes make one update. At most one per run."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def passes_per_update(self) -> int:
        """Number of backward passes whose gradients are added up, without communication, per update. At least 1."""

    @property
    @abstractmethod
    def averages_passes(self) -> bool:
        """Whether the update uses the mean over the passes; else it uses their sum."""


class SurvivesLoss(ABC):
    """Capability: decides whether it can be used in an elastic job, in which ranks fail, join and leave.

    A strategy without this capability can be used if it neither divides the model nor is a `ShardsUpdates`; see
    `unidist.strategy.elastic_support`.
    """

    @abstractmethod
    def elastic_obstacle(self, plan: Plan) -> str:
        """Return why it cannot be used, and what to do instead; "" if it can. Pure; also called by the launcher."""


class KeepsDivision(ABC):
    """Capability of a strategy that divides the model: the model stays divided when ranks of an elastic job change.

    A rank that stays keeps its part. One that joins has built the whole model, alone, and divides it as the others have
    divided theirs. A strategy without this capability, nor `SurvivesLoss`, cannot divide a model in an elastic job.
    """

    name: ClassVar[str]

    @abstractmethod
    def division(self, model: Any, context: RuntimeAPI) -> Any:
        """Return the choices by which `partition` has divided this rank's model; picklable, equal on every rank."""

    def before_joining(self, model: Any, context: RuntimeAPI) -> Any:
        """Return the object that will be this rank's part of the model, on a rank that has not joined the others yet.

        The script goes on with it, and `rejoin`, which is given the whole model, returns the same object. The default
        returns the model: for strategies that divide it in place.
        """
        return model

    @abstractmethod
    def rejoin(self, model: Any, context: RuntimeAPI, division: Any) -> Any:
        """Return this rank's part of the model, by the choices of ranks that were there before.

        Called instead of `partition` on a rank that joins, in the same order of strategies, while the others call
        `rebind`. Both begin with the same communicators, and exchange nothing else. The values of the part are loaded
        afterwards.

        Args:
            model: whole; its values do not matter.
            context: the runtime of the new generation.
            division: what `division` has returned on such a rank.
        """

    @abstractmethod
    def rebind(self, model: Any, context: RuntimeAPI) -> None:
        """Let this rank's part of the model communicate with the ranks of a new generation. See `rejoin`."""


class RunsSideProcesses(ABC):
    """Capability: needs processes beside the ranks, such as parameter servers.

    `unidist launch` starts them before the ranks and ends them after the ranks, on any host of the job. They and the
    ranks find each other by `unidist.control.job_values`. What else starts ranks has no such processes, so a rank that
    needs one says so when `job_values` raises.
    """

    @abstractmethod
    def side_processes(self, plan: Plan) -> Sequence[SideProcess]:
        """Return the processes that a job with this plan needs; none if it needs none. Pure; called by the launcher.

        Called once, after the plan was checked and before any process starts.
        """


class OutlivesRanks(ABC):
    """Capability: ranks may go on without one that is lost, in a job that is not elastic."""

    @abstractmethod
    def tolerates_lost_ranks(self, plan: Plan) -> bool:
        """Return whether the others can go on when a rank other than 0 is lost. Pure; called by the launcher.

        If so, a rank that a signal has ended, or whose host is lost, does not end the job. One whose script has failed
        does.
        """


class NamesPlugins(ABC):
    """Capability: an option of the strategy is the name of something that a plugin registers."""

    @abstractmethod
    def check_plugins(self, plugins: Plugins) -> None:
        """Check that it is registered. Pure; runs in the launcher before any process starts.

        Raises:
            ConfigurationError: it is not registered; lists the choices.
        """


@dataclass(frozen=True)
class StrategySpec:
    """A kind of strategy, not yet imported.

    Args:
        name: in `--strategy`.
        path: "module:Class" of an `unidist.strategy.interface.Strategy` dataclass.
        summary: one line for lists.
        launch_options: its options that `unidist launch` has as well, `--NAME N`: names and help. They are whole
            numbers, from 0.
    """

    kind: ClassVar[str] = "strategy"
    hook: ClassVar[str] = "unidist_register_strategies"

    name: str
    path: str
    summary: str
    launch_options: tuple[tuple[str, str], ...] = ()

    def load(self) -> type[Strategy]:
        """Import and return the class."""
        strategy: type[Strategy] = load_object(self.path, f"strategy {self.name!r}")
        return strategy
