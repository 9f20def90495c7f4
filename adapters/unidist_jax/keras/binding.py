"""The state of one bound Keras optimizer on JAX, whose steps have no side effects.

Keras compiles a training step that calls `stateless_apply` with the values of all variables. There the gradients go to
the host and come back reduced, in one call of the compiled program; the optimizer's own class does the rest.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import keras
from typing_extensions import override

from unidist.buffer import DType
from unidist.elastic.rebinding import follow_generations
from unidist.errors import ConfigurationError, PluginError, UsageError
from unidist.gradients.buckets import ParameterInfo
from unidist.mesh import REPLICA_AXES
from unidist.negotiation.objects import gather_objects
from unidist.optim.update import Update
from unidist.runtime import context
from unidist.runtime_api import RuntimeAPI
from unidist.training.mean_loss import MeanLoss
from unidist_arrays.fused_exchange import ExchangeResult, FusedExchange
from unidist_arrays.memory import Array
from unidist_jax.compiled import HostOperation, ShapeDtype, bind, take_failure
from unidist_jax.compiled import flush as flush_programs
from unidist_jax.framework import JaxFramework
from unidist_jax.jax_state import is_tracing
from unidist_jax.keras.inner_step import InnerStep, Values, WholeStep
from unidist_jax.memory import is_traced
from unidist_jax.operations import broadcast
from unidist_jax.optimizer import GradientLeaves
from unidist_keras.arguments import with_groups
from unidist_keras.losses.weight import WeightsLoss
from unidist_keras.running_statistics import SharesStatistics, average_statistics, statistics_of


class Binding(WeightsLoss, SharesStatistics):
    """The state of one bound optimizer.

    Args:
        optimizer: the optimizer, already of its new class.
        plain: its class before.
        update: the framework-free side, without parameters so far.

    Attributes:
        inner: what updates the variables.
        scale_local: gradients of local variables are divided by the number of ranks, as those that are averaged.
        groups: lists of variables whose gradients travel together, or None; until the first update.
        model: of whose trainable variables it is the optimizer; None: nobody has said so.
    """

    def __init__(self, optimizer: Any, plain: type[Any], update: Update) -> None:
        self.scale_local = True
        self.groups: Sequence[Sequence[Any]] | None = None
        self.model: Any = None
        self._optimizer = optimizer
        self._plain = plain
        self._update = self.distributed_update = update
        self._leaves: GradientLeaves | None = None
        self._built_for: list[Any] | None = None  # what `build` was called for, after the optimizer was bound
        self._local: set[int] = set()
        self._initial: Callable[[], Sequence[Any]] | None = None
        self._is_stepping = False
        self._is_handing_over = False
        self._early: Sequence[int] = ()
        self.inner = self._make_inner()
        take_failure()  # of programs that the script has called before, and looked at itself
        follow_generations(self)

    def rebind(self, context: RuntimeAPI) -> None:
        """Go on in a new generation of an elastic job, with the same compiled programs. Collective.

        Raises:
            ConfigurationError: the optimizer was built on some ranks only.
        """
        if len(set(gather_objects(context.axis(REPLICA_AXES), self._leaves is None))) > 1:
            raise ConfigurationError(
                "a distributed optimizer was built on some ranks, and on others not yet: make its elastic state, "
                "KerasState(model), on every rank before the elastic function begins"
            )
        if self._leaves is None:
            self._update.rebind(context)
        else:
            self._leaves.fused.prepare()

    def _make_inner(self) -> InnerStep:
        brings = self._update.inner_steps
        if brings is None:
            return WholeStep(self._optimizer, self._plain)
        make = brings.inner_step(JaxFramework(), self._update.context)
        made = make(self._optimizer, self._plain, self._update)
        if not isinstance(made, InnerStep):
            raise PluginError(f"{type(made).__qualname__} does not derive from unidist_jax.keras.InnerStep")
        return made

    @property
    def passes(self) -> int:
        """Passes that make one update."""
        return self._update.accumulation.passes

    def register_local(self, variable: Any) -> None:
        """Leave a variable out of the exchange; before the first update, the same ones on every rank."""
        if self._leaves is not None:
            raise UsageError("register_local_var() belongs before the first update: the exchange is set up already")
        if self.inner.sharded or self._update.rules is not None:
            raise UsageError(
                "local variables and a strategy that shards, clips or scales gradients do not go together: leave "
                "register_local_var out"
            )
        if self.passes > 1 or self._update.context.is_elastic:
            raise UsageError(
                f"local variables with {self.passes} passes per update, or in an elastic job: on JAX only exchanged "
                "gradients are summed up over passes. Leave register_local_var out, let each pass make an update, or "
                "use KERAS_BACKEND=tensorflow"
            )
        self._local.add(id(variable))

    # Building

    def broadcast_when_built(self, variables: Callable[[], Sequence[Any]]) -> None:
        """Give every rank rank 0's variables as soon as they exist: when the optimizer is built."""
        self._initial = variables

    def broadcast_initial(self) -> None:
        """Do the broadcast that `broadcast_when_built` has deferred. Collective, the first time."""
        if self._initial is not None:
            initial, self._initial = self._initial, None
            broadcast_variables(initial(), root_rank=0)

    def built_anywhere(self) -> bool:
        """Return whether any rank has built the optimizer: maybe only rank 0 has loaded it. Collective."""
        return any(gather_objects(self._update.communicator, bool(self._optimizer.built)))

    def build(self, variables: Sequence[Any]) -> None:
        """Build the optimizer for these variables of the model. Collective if they are to be made equal, or sharded."""
        self._built_for = list(variables)
        self.broadcast_initial()
        self.inner.build(self._built_for, self.exchange)
        self._optimizer.built = True
        if self._update.context.is_elastic:
            self.exchange()  # here, where every rank does it, and not while some trace their first step

    def build_to_load(self) -> None:
        """Shard the state of an optimizer, so that it can be loaded. Collective if it shards, and is not built."""
        if not self.inner.sharded or self.inner.is_built or self.model is None:
            return
        if not all(layer.built for layer in self.model._flatten_layers()):
            return  # loading a model that has no weights yet is an error
        with keras.name_scope(self._optimizer.name, caller=self._optimizer):
            self.build(self.model.trainable_variables)

    @property
    def trained(self) -> list[Any]:
        """The variables of the model that the optimizer is for."""
        return list(self._optimizer._trainable_variables if self._built_for is None else self._built_for)

    def exchange(self) -> GradientLeaves:
        """Return the exchange of this optimizer's gradients, agreed on by all ranks. Collective the first time."""
        if self._leaves is None:
            variables = [each for each in self.trained if id(each) not in self._local]
            for variable in variables:
                if getattr(variable, "overwrite_with_gradient", False):
                    raise UsageError(
                        f"{variable.path!r} is overwritten with its gradient (float8), which is not distributed"
                    )
            self.inner.prepare(variables)
            places = {id(variable): place for place, variable in enumerate(variables)}
            self._update.options = with_groups(self._update.options, self.groups, id, places)
            # Keras says float64 also where JAX computes in 32 bits; during `fit` variables have no values to ask.
            dtypes = [DType(jax.dtypes.canonicalize_dtype(each.dtype).name) for each in variables]
            infos = [
                ParameterInfo(each.path, tuple(each.shape), dtype)
                for each, dtype in zip(variables, dtypes, strict=True)
            ]
            exchange = FusedExchange(
                self._update,
                infos,
                keeps_results=False,
                gathers=False,
                step_on_joined=_step_on_joined(self.inner) if self.inner.sharded else None,
            )
            exchange.prepare()
            self._leaves = GradientLeaves(exchange)
        return self._leaves

    # Steps

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Exchange the gradients, and update the variables; see `DistributedOptimizerMixin.apply`."""
        if self._is_stepping:  # the optimizer's own class calls it
            self._plain.apply(self._optimizer, grads, trainable_variables)
            return
        gradients = list(grads)
        if not gradients:
            return
        if not self.inner.is_built:
            if trainable_variables is None:
                raise ValueError("the optimizer is not built: give the variables along with the gradients")
            with keras.name_scope(self._optimizer.name, caller=self._optimizer):
                self.build(list(trainable_variables))
        ordered = self._ordered(gradients, trainable_variables)
        state = [variable.value for variable in self._optimizer.variables]
        values = [variable.value for variable in self.trained]
        self._assign(*self.stateless_apply(state, ordered, values))

    def _ordered(self, gradients: list[Any], variables: Any) -> list[Any]:
        """Return the gradients in the order of the optimizer's variables."""
        trained = self.trained
        given = trained if variables is None else list(variables)
        if len(given) != len(gradients):
            raise UsageError(f"{len(gradients)} gradients for {len(given)} variables: give one for each")
        found = {id(variable): gradient for variable, gradient in zip(given, gradients, strict=True)}
        missing = [variable.path for variable in trained if found.get(id(variable)) is None]
        if missing or len(found) != len(trained):
            raise UsageError(
                f"a distributed optimizer on JAX needs a gradient for each of its {len(trained)} variables, and for no "
                f"other; {len(found)} were given, without {missing or 'any that is missing'}. Give zeros where a "
                "variable was not used, or build the optimizer for those that are trained"
            )
        return [found[id(variable)] for variable in trained]

    def _assign(self, values: Values, state: Values) -> None:
        for variable, value in zip(self.trained, values, strict=True):
            variable.assign(value)
        for variable, value in zip(self._optimizer.variables, state, strict=True):
            variable.assign(value)

    def stateless_apply(self, state: Values, gradients: Sequence[Any], values: Values) -> tuple[list[Any], list[Any]]:
        """Exchange the gradients; return new values of the variables, and the new state. See Keras' method."""
        check_can_distribute()
        leaves = self.exchange()
        variables = self.trained
        if len(gradients) != len(variables) or any(gradient is None for gradient in gradients):
            raise UsageError(
                f"{len(gradients)} gradients for {len(variables)} variables: give one for each, and zeros for those "
                "that were not used"
            )
        weighted = self.weighted_gradients(gradients)
        if self._early and any(now is not given for now, given in zip(weighted, gradients, strict=True)):
            raise UsageError(
                "this train step does not scale its loss by the optimizer (optimizer.scale_loss), so gradients have "
                "left without the weight of this rank's samples: derive the model with a train_step of your own"
            )
        own = [
            jax.numpy.asarray(gradient, variable.dtype) for gradient, variable in zip(weighted, variables, strict=True)
        ]
        exchanged = [gradient for gradient, each in zip(own, variables, strict=True) if id(each) not in self._local]
        early, self._early = self._early, ()
        complete, reduced = self.inner.reduce(leaves, exchanged, early)
        return self._stepped(complete, state, self._with_local(own, reduced), values)

    @contextmanager
    def overlapping(self) -> Iterator[None]:
        """Let `handing_over` do so within the block, which computes gradients once, and gives them to the step."""
        self._is_handing_over = True
        try:
            yield
        finally:
            self._is_handing_over, self._early = False, ()

    def handing_over(self, variables: Sequence[Any], values: Values) -> list[Any]:
        """Return values of the variables whose gradients travel while the backward pass goes on; see `overlapping`."""
        handing = list(values)
        if not self._is_handing_over or list(map(id, variables)) != list(map(id, self.trained)):
            return handing
        leaves = self.exchange()
        exchanged = [index for index, each in enumerate(self.trained) if id(each) not in self._local]
        for index, value in zip(exchanged, leaves.handing_over([values[i] for i in exchanged]), strict=True):
            handing[index] = value
        self._early = range(len(exchanged))
        return handing

    def _with_local(self, own: list[Any], reduced: list[Any]) -> list[Any]:
        """Return the reduced gradients, with this rank's own ones of local variables in between."""
        if not self._local:
            return reduced
        factor = 1 / self._update.num_ranks if self.scale_local else 1.0
        left = iter(reduced)
        return [
            gradient * factor if id(variable) in self._local else next(left)
            for gradient, variable in zip(own, self.trained, strict=True)
        ]

    def _stepped(self, complete: Any, state: Values, reduced: Values, values: Values) -> tuple[list[Any], list[Any]]:
        def step() -> tuple[list[Any], list[Any]]:
            with self._stepping():
                return self.inner.step(list(state), list(reduced), list(values))

        def stay() -> tuple[list[Any], list[Any]]:
            return list(values), list(state)

        is_counted = self._update.accumulation.passes > 1 or self._update.context.is_elastic
        if not is_counted and self._update.scaler is None:
            return step()
        if not is_traced(complete):
            return step() if complete else stay()
        new_values, new_state = jax.lax.cond(complete, step, stay)
        return new_values, new_state

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """Let `apply` be that of the optimizer's own class within the block."""
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    def accumulate_steps(self, steps: int) -> None:
        """Let the next update take this many passes; every rank calls it between the same two updates."""
        self.exchange().fused.accumulate_steps(steps)

    @override
    def times(self, value: Any, weight: Any) -> Any:
        return value * jax.numpy.asarray(weight, value.dtype)

    @override
    def num_samples(self, inputs: Any) -> Any:
        return inputs.shape[0]

    @override
    def weight_of(self, samples: Any) -> Any:
        return bind(WeightOfSamples(), [jax.numpy.asarray(samples, float)])[0]

    @override
    def after_step(self, model: Any, given: Sequence[Any], result: Any) -> Any:
        logs, (trainable, others, *rest) = result
        return logs, (trainable, self.with_mean_statistics(model, given[0][1], others), *rest)

    def with_mean_statistics(self, model: Any, before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
        """Return values of a model's variables that are not trainable, with its statistics' means. Collective.

        Args:
            model: whose variables they are.
            before: the values before a step; what the step has not touched is the same object after it.
            after: the values after it.
        """
        wanted = {id(each) for each in statistics_of(model)}
        variables = enumerate(model.non_trainable_variables)
        places = [i for i, each in variables if id(each) in wanted and after[i] is not before[i]]
        found = list(after)
        for index, mean in zip(places, self.means([found[index] for index in places]), strict=True) if places else ():
            found[index] = mean
        return found

    @override
    def _averaged(self, flat: Any) -> Any:
        return bind(MeanOfStatistics(), [flat])[0]

    def flush(self) -> bool:
        """Apply a window that was cut short; returns whether there was anything to apply."""
        if self._leaves is None or self._update.accumulation.passes == 1:
            return False
        flush_programs()  # which may not have handed over their gradients yet
        result = self._leaves.fused.flush()
        if result is None or not result.complete:
            return False
        state = [variable.value for variable in self._optimizer.variables]
        values = [variable.value for variable in self.trained]
        self._assign(*self._stepped(True, state, self.inner.flushed(result), values))
        if not self.inner.sharded:
            self._update.applied()
        return True


class WeightOfSamples(HostOperation):
    """The weight of this rank's loss, given the number of its samples: see `MeanLoss.weight_of`."""

    can_be_batched = False

    @property
    @override
    def title(self) -> str:
        return "the exchange of the numbers of samples"

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        return list(operands)

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        results[0][...] = context.current().owned(MeanLoss).weight_of(float(operands[0]))


class MeanOfStatistics(HostOperation):
    """See `average_statistics`."""

    can_be_batched = False

    @property
    @override
    def title(self) -> str:
        return "the exchange of running statistics"

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        return list(operands)

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        results[0][...] = operands[0]
        average_statistics(results[0])


def _step_on_joined(inner: InnerStep) -> Callable[[ExchangeResult], None]:
    """Return what an exchange calls on a rank that has joined; it does not refer to the optimizer, see `Cell`."""
    take_part = weakref.WeakMethod(inner.take_part)

    def step(result: ExchangeResult) -> None:
        bound = take_part()
        if bound is not None:
            bound()

    return step


def raise_failure(*, wait: bool = False) -> None:
    """Raise the error with which a compiled step has ended, if nobody has so far.

    Keras goes on after a step that has failed: it looks at results in `pythonify_logs` alone, which swallows errors.

    Args:
        wait: for the steps that were called.

    Raises:
        UnidistError: an operation in a step has failed.
    """
    if is_tracing():
        return
    if wait:
        flush_programs()
    failure = take_failure()
    if failure is not None:
        raise failure


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    """Give every rank one rank's values of variables. Collective.

    Args:
        variables: equally many of the same shapes and types on every rank.
        root_rank: whose values they get.
    """
    values = broadcast([variable.value for variable in variables], root_rank, name="broadcast_variables")
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def check_can_distribute() -> None:
    """Raise ConfigurationError if something else distributes training, or Keras does not run on JAX."""
    if keras.backend.backend() != "jax":
        raise ConfigurationError(
            f"Keras runs on {keras.backend.backend()!r}, and this is unidist's JAX adapter: set KERAS_BACKEND=jax"
        )
    distribution = keras.distribution.distribution()
    if distribution is not None:
        raise ConfigurationError(
            f"keras.distribution is active ({type(distribution).__name__}): two things would distribute training, and "
            "unidist's operations run in programs for one device. Leave keras.distribution.set_distribution out"
        )
