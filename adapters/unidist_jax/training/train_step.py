"""`TrainStep`: one call that trains on a batch, the same with every strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from typing_extensions import override

from unidist.checkpoint.format.interface import PlacesParameters
from unidist.elastic.batches import BatchShare
from unidist.elastic.step_training import Policy, Progress, Redistributable, StepTraining
from unidist.errors import ConfigurationError, PluginError, UsageError
from unidist.runtime import context
from unidist.strategy.plan import StrategyLike
from unidist.training.mean_loss import SampleWeight
from unidist.training.train_step import PlannedStep, Trees
from unidist_arrays.memory import digest_of_array
from unidist_jax.checkpoint import Training
from unidist_jax.compiled import translated
from unidist_jax.elastic import TrainingState, ending_programs, translating
from unidist_jax.framework import JaxFramework, by_path
from unidist_jax.models import DividedParameters, StepRunner
from unidist_jax.operations import allreduce, broadcast_parameters
from unidist_jax.optimizer import TracedStep
from unidist_jax.optimizer.binding import Binding
from unidist_jax.spmd import is_chosen, spmd, way_to_another_engine
from unidist_jax.training.compute_types import ComputeTypes
from unidist_jax.training.distributed_optimizer import bind_to, divided
from unidist_jax.training.local_devices import LocalDevices
from unidist_jax.training.loss_divisor import LossDivisor
from unidist_jax.training.parameter_trees import merged, split
from unidist_jax.training.verification import step_check

if TYPE_CHECKING:
    from unidist.control.elastic.member import Member
    from unidist.optim.update import Update


class TrainStep(PlannedStep, Training):
    """Forward, backward, exchange and update in one compiled call, which is the same with every strategy.

        step = ud.TrainStep(loss_fn, params, optax.adamw(1e-3))
        for x, y in ud.shard((features, labels), batch_size=32):
            loss = step(x, y)

    Gradients are exchanged while the backward pass runs. Copies rank 0's parameters to all ranks. Collective, and so is
    every call.

    Args:
        loss_fn: `loss_fn(params, *batch)` returns the mean loss over the samples, a scalar. It is traced by `jax.jit`.
        params: a tree built in the same way on every rank. Its arrays are of floating point, and are trained. Leaves
            that are no arrays (functions, texts) are passed to `loss_fn` as they are. Arrays that are on several
            devices of this process (with a `NamedSharding`) stay there, and the rows of a batch are divided over them.
        optimizer: of optax.
        strategy: a strategy line ("zero=1,accumulate=2"), strategy objects, or a list of both; default: the command
            line's (`unidist launch --strategy`), else plain data parallelism.
        has_aux: `loss_fn` returns `(loss, aux)`, and so do the step and `evaluate`; `aux` is a tree of arrays, of this
            rank alone (running statistics, say).
        elastic: for jobs whose ranks join and leave (`unidist launch --min-np`). True, or a `ud.elastic.Policy`: each
            call is a transaction, and the arrays of `ud.shard` are redistributed, see docs/elastic.md. False: nothing.
            Default: True if the batches come from such arrays and no `ud.elastic.run` leads the training. In other jobs
            True divides the samples in the same way.
        weight: takes what `loss_fn` takes after the parameters, without the arguments by name, and returns by what the
            loss of this batch is divided, a scalar: `lambda x, y: (y != -100).sum()`. It is compiled. Then losses and
            gradients are those of sum(losses) / sum(weights) over all ranks, micro-batches of a pipeline, and passes of
            an update (`accumulate=N`); so is `evaluate`. 0: nothing counts, as in a batch of padding; `loss_fn` must
            not divide by it (`jnp.maximum(count, 1)`). If so on all ranks, the loss is 0 and the gradients are zeros.
            Default: what `loss_fn` is found to divide by, or the number of samples, and each pass and each micro-batch
            counts the same.

    Attributes:
        params: the parameters after the last step. The arrays of earlier steps are donated to the next one. With
            `zero=3`, `zero` beside `precision`, `tensor` or `pipeline` each rank keeps its part, and reading this
            gathers all: then it is collective. With `pipeline` they are whole until the first call, whose batch shows
            who needs what.
        opt_state: the optimizer state that this rank keeps; with `pipeline` None until the first call.
        optimizer: the bound optimizer.

    Raises:
        ConfigurationError: the strategies do not fit the world, each other, or JAX.
        UsageError: a leaf of the parameters is a Python number.
        NotInitializedError: `init()` was not called.
    """

    _trees = Trees(jax.tree.leaves, jax.tree.map)
    _runs_take_mean = True
    _sampled = slice(1)  # the arguments of `loss_fn`, not those that have names

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        params: Any,
        optimizer: optax.GradientTransformation,
        strategy: StrategyLike = None,
        *,
        has_aux: bool = False,
        elastic: bool | Policy | None = None,
        weight: Callable[..., Any] | None = None,
    ) -> None:
        runtime = context.current()
        plan = runtime.plan_for(strategy)
        self._count, given = weight, None if weight is None else jax.jit(weight)
        super().__init__(plan, JaxFramework(), elastic=elastic, weight=given)
        self._is_one_program = is_chosen()
        if elastic and self._is_one_program:
            raise ConfigurationError(f"elastic training needs another engine than xla: {way_to_another_engine()}")
        if weight is not None and self._is_one_program and plan.gate is not None:
            raise ConfigurationError(
                f"weight=... and {plan.gate.name}={plan.gate.passes_per_update} need another engine than xla, whose "
                f"program divides by a constant: {way_to_another_engine()}"
            )
        self._held: Any = None
        self._loss_fn, self._has_aux = loss_fn, has_aux
        self._aux: Any = None
        self._types = ComputeTypes(plan.precision)
        params, self._rest = split(params)
        params = broadcast_parameters(params)
        self._loss_divisor = LossDivisor(self._loss_of_script, params, given)
        self._devices = LocalDevices(params)
        prepared, optimizer = divided(plan, params, optimizer)
        self._division = prepared if isinstance(prepared, DividedParameters) else None
        params = prepared if self._division is None else self._division.tree
        self.optimizer = bind_to(plan, optimizer, params, average=True, places=self.places)
        self._binding: Binding = self.optimizer.binding
        runs = self._make_runner is not None
        traces = isinstance(self._binding.inner, TracedStep)
        self._devices.check_left_whole(divides=self._division is not None or runs or traces)
        is_divided = self._division is not None or runs or traces or plan.shards_updates is not None
        check = step_check(self, runtime, plan, shares_state=not is_divided)
        if not self._is_one_program:
            self._replica_check = check
            self._means()
        self._runner: StepRunner | None = None
        if runs:
            self._runner = self._made_runner()
            self._inner, self.opt_state = None, None
            self._hold(params)
            return
        self.opt_state = jax.jit(self.optimizer.init)(params)
        self._leaves = self._binding.leaves(params)
        inner = self._binding.inner
        self._inner = inner if isinstance(inner, TracedStep) else None
        self._hold(params)
        options = self._devices.compiler_options(runtime.settings.timeout)
        compiled = spmd if self._is_one_program else functools.partial(jax.jit, compiler_options=options)
        self._run = compiled(self._traced, donate_argnums=(0, 1))
        self._evaluate = compiled(self._evaluated)
        self._differentiate = jax.jit(self._differentiated, compiler_options=options)

    def __call__(self, *batch: Any, **state: Any) -> Any:
        """Train on this rank's batch; returns the mean loss over the samples of all ranks, or `(loss, aux)`.

        Where ranks have different numbers of samples (the first dim of the first array), losses and gradients weigh as
        much as there are samples. If ranks step alone (`local_sgd`), the loss is that of this rank's batch.

        Args:
            batch: what `loss_fn` takes after the parameters. Other shapes than before are compiled again. The strategy
                `precision` casts what is float32.
            state: further arguments of `loss_fn` by name, which are not cast: running statistics, random keys.

        Returns:
            The loss. A step of an elastic job that was broken off, and a rank's first one where the others are further,
            return that of the last step that counts (NaN: there was none).

        Raises:
            PeerLostError: a rank is gone. Not in elastic training.
            UsageError: the loss is no scalar of floating point; elastic training is asked for, and the batches do not
                come from `ud.shard`.
        """
        return self._with_aux(self._train(batch, state))

    def evaluate(self, *batch: Any, **state: Any) -> Any:
        """Return the mean loss over the samples of all ranks, or `(loss, aux)`, without an update. Collective.

        In elastic training, where ranks join and leave in between, it is not: it returns that of this rank's batch.
        """
        return self._with_aux(self._mean_loss_of(batch, state))

    def flush(self) -> bool:
        """Apply a window of `accumulate=N` that was cut short; returns whether there was one. Collective."""
        self._held, self.opt_state, applied = self.optimizer.flush(self.opt_state, self._held)
        return applied

    @property
    def params(self) -> Any:
        """The parameters; see the class."""
        params = self._held if self._inner is None else self._inner.whole(self._held)
        if self._division is not None:
            with translated():
                params = jax.block_until_ready(jax.jit(self._division.whole)(params))
        return merged(params, self._rest)

    @params.setter
    def params(self, params: Any) -> None:
        params = split(params)[0]
        self._hold(params if self._division is None else self._division.held(params))

    def _hold(self, params: Any) -> None:
        """Keep parameters, in arrays of our own, since they are donated."""
        if self._inner is not None:
            params = self._inner.held(params, self._leaves)
        self._held = jax.tree.map(jnp.array, params)

    # See `PlannedStep`

    def _with_aux(self, loss: Any) -> Any:
        aux, self._aux = self._aux, None
        return (loss, aux) if self._has_aux else loss

    @property
    @override
    def _bound_update(self) -> Update:
        return self._binding.distributed_update

    @override
    def _weighed(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        arguments: tuple[Any, ...] = batch[0]
        return arguments

    @override
    def _divisor(self, batch: tuple[Any, ...]) -> float:
        found = None
        if self._runner is not None:
            self._loss_divisor.check_micro_batches(*batch)
        elif context.current().topology.world_size > 1:
            found = self._loss_divisor.function_for(*batch)
        return self._num_samples(batch) if found is None else float(found(*batch))

    @override
    def _run_batch(self, batch: tuple[Any, ...], weight: SampleWeight | None) -> Any:
        """Do one pass, and the update if it completes the window."""
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(self._held)[:1]):
            raise UsageError(
                "the parameters are gone: an earlier step, to which they were donated, has failed. Set .params and "
                ".opt_state to those of a checkpoint, or make a new TrainStep"
            )
        scaler = self._binding.distributed_update.scaler
        scale = None if scaler is None else np.float32(scaler.scale)
        if scaler is not None:
            scaler.was_applied = True
        arguments, state = batch
        factor = None if weight is None else weight.factor()
        if self._runner is not None:
            factor = self._of_parts(batch, weight, factor)
            loss = self._run_by(self._runner, batch, scale=scale, weight=factor, trains=True)
            return loss if weight is None else self._scalar(weight.mean(lambda: float(loss)), loss)
        arguments = self._devices.divided(arguments)
        with translated():
            self._held, self.opt_state, result = self._run(self._held, self.opt_state, scale, factor, arguments, state)
            loss, self._aux = jax.block_until_ready(result)
        if self._is_one_program:
            self._binding.count_pass()
        if self._given_weight is not None and weight is not None:
            loss = self._scalar(weight.without_unit(float(loss)), loss)
        return loss

    def _of_parts(self, batch: tuple[Any, ...], weight: SampleWeight | None, factor: float | None) -> float | None:
        """Return the factor for a runner, which takes the mean over the samples, see `_made_runner`."""
        if self._given_weight is None or weight is None or factor is None:
            return factor
        return factor * self._num_samples(batch) / (weight.samples or 1.0)

    @override
    def _evaluate_batch(self, batch: tuple[Any, ...]) -> Any:
        if self._runner is not None:
            weight = None
            if self._given_weight is not None:
                weight = SampleWeight(None, self._samples_of(batch), is_given=True)
            factor = self._of_parts(batch, weight, 1.0)
            return self._run_by(self._runner, batch, scale=None, weight=factor, trains=False)
        arguments, state = batch
        with translated():
            result = jax.block_until_ready(self._evaluate(self._held, self._devices.divided(arguments), state))
        loss, self._aux = result
        return loss

    @override
    def _digests_of(self, batch: tuple[Any, ...]) -> Mapping[str, bytes]:
        if not self._is_whole or self._inner is not None:
            return super()._digests_of(batch)
        arguments, state = batch
        loss, gradients = self._differentiate(self._held, self._devices.divided(arguments), state)
        named = {f"the gradient of {path!r}": leaf for path, leaf in by_path(gradients).items()}
        return {name: digest_of_array(value) for name, value in {"the loss": loss, **named}.items()}

    @override
    def _scalar(self, value: float, like: Any) -> Any:
        return jnp.asarray(value, (jax.tree.leaves(self._held)[0] if like is None else like).dtype)

    @override
    def _pull(self) -> None:
        self._held = self._binding.inner.pulled(self._held)

    @override
    def _make_training(self, membership: Member | None, data: Redistributable, policy: Policy) -> StepTraining:
        if self._has_aux:
            raise UsageError(
                "elastic training and has_aux=True: what loss_fn returns beside the loss is not taken back with a step "
                "that is broken off. Use elastic=False and ud.elastic.run"
            )
        return super()._make_training(membership, data, translating(policy))

    @override
    def _make_state(self, progress: Progress, others: Mapping[str, Any]) -> TrainingState:
        return TrainingState(self, progress, others)

    @override
    def _train_share(self, batch: tuple[Any, ...], share: BatchShare) -> float:
        self._loss_divisor.check_micro_batches(*batch)
        with ending_programs():
            return super()._train_share(batch, share)

    @override
    def _accumulate(self, passes: int) -> None:
        self._binding.accumulate_steps(passes)

    # Steps that a strategy runs

    def _made_runner(self) -> StepRunner:
        if self._has_aux:
            raise UsageError(
                "has_aux=True and a strategy that runs the passes itself (pipeline): what loss_fn returns beside the "
                "loss would be of micro-batches. Return the loss alone"
            )
        given = self._count  # not compiled by itself: a pipeline looks into what it divides

        def loss_of(params: Any, batch: Any, state: Any) -> Any:
            loss = self._loss(params, batch, state)[0]
            if given is None:
                return loss
            return loss * (given(*batch) / self._num_samples((batch, state))).astype(loss.dtype)

        runner = self._make_runner(self._division, loss_of, self.optimizer)
        if not isinstance(runner, StepRunner):
            raise PluginError(f"{type(runner).__qualname__} does not derive from unidist_jax.models.StepRunner")
        return runner

    def _run_by(
        self, runner: StepRunner, batch: tuple[Any, ...], *, scale: Any, weight: float | None, trains: bool
    ) -> Any:
        self._held, self.opt_state, loss = runner.run(
            self._held, self.opt_state, *batch, scale=scale, weight=1.0 if weight is None else weight, trains=trains
        )
        return loss

    # Checkpoints, see `Training`

    @property
    @override
    def held(self) -> Any:
        if self._runner is not None and self.opt_state is None:
            raise UsageError(
                "the parameters are divided at the first call of this step, whose batch shows which rank needs what; "
                "so call it, or step.evaluate(*batch), once before save and load"
            )
        return self._held

    @held.setter
    def held(self, held: Any) -> None:
        self._held = held

    @property
    @override
    def places(self) -> PlacesParameters | None:
        return None if self._division is None else self._division.places

    @property
    @override
    def state_places(self) -> PlacesParameters | None:
        return None if self._division is None else self._division.state_places

    @property
    @override
    def holds_pieces(self) -> bool:
        return self._inner is not None

    # Compiled functions

    def _traced(
        self, held: Any, state: Any, scale: Any, weight: Any, batch: Sequence[Any], more: Any
    ) -> tuple[Any, Any, Any]:
        if self._is_one_program:
            weight = self._loss_divisor.weight_in_program(batch, more)

        def loss_of(params: Any) -> tuple[Any, Any]:
            loss, aux = self._loss(params, batch, more)
            loss = _times(loss, weight)
            return loss if scale is None else loss * scale.astype(loss.dtype), (loss, aux)

        if self._inner is not None:
            (loss, aux), held, state = self._inner.train(loss_of, self._leaves, held, state)
        else:
            leaves = self._binding.leaves(held)

            def loss_handing_over(params: Any) -> Any:
                flat, structure = jax.tree.flatten(params)
                return loss_of(jax.tree.unflatten(structure, leaves.handing_over(flat)))

            differentiated = loss_of if self._is_one_program else loss_handing_over
            (_, (loss, aux)), gradients = jax.value_and_grad(differentiated, has_aux=True)(held)
            early = () if self._is_one_program else range(len(leaves.variables))
            held, state = self._binding.apply(gradients, state, held, early=early)
        if self._plan.steps_alone and (weight is None or self._given_weight is not None):  # a mean makes ranks wait
            return held, state, (loss, aux)
        return held, state, (allreduce(loss, name="loss of a training step"), aux)

    def _differentiated(self, params: Any, batch: Sequence[Any], more: Any) -> tuple[Any, Any]:
        return jax.value_and_grad(lambda params: self._loss(params, batch, more)[0])(params)

    def _evaluated(self, held: Any, batch: Sequence[Any], more: Any) -> tuple[Any, Any]:
        def loss_of(params: Any) -> tuple[Any, Any]:
            return self._loss(params, batch, more)

        loss, aux = loss_of(held) if self._inner is None else self._inner.evaluate(loss_of, held)
        if self._is_one_program:
            loss = _times(loss, self._loss_divisor.weight_in_program(batch, more))
            loss = allreduce(loss, name="loss of an evaluation")
        return loss, aux

    def _loss(self, params: Any, batch: Sequence[Any], state: dict[str, Any]) -> tuple[Any, Any]:
        """Return this rank's loss, and what the script's function returned beside it."""
        narrow, batch = self._types.narrowed(params), self._types.narrowed(batch)

        def compute(params: Any) -> Any:
            return self._loss_fn(merged(params, self._rest), *batch, **state)

        loss = compute(narrow) if self._division is None else self._division.evaluate(compute, narrow)
        aux = None
        if self._has_aux:
            if not isinstance(loss, tuple) or len(loss) != 2:
                raise UsageError(
                    f"with has_aux=True loss_fn returns (loss, aux), but it returned {type(loss).__name__}"
                )
            loss, aux = loss
        _check_loss(loss)
        return self._types.widened(loss), aux

    def _loss_of_script(self, params: Any, given: tuple[Sequence[Any], dict[str, Any]]) -> Any:
        result = self._loss_fn(merged(params, self._rest), *given[0], **given[1])
        return result[0] if self._has_aux else result


def _times(loss: Any, weight: Any) -> Any:
    return loss if weight is None else loss * jnp.asarray(weight, loss.dtype)


def _check_loss(loss: Any) -> None:
    leaves = jax.tree.leaves(loss)
    if not jax.tree_util.all_leaves([loss]):
        raise UsageError(
            f"loss_fn returned a {type(loss).__name__} of {len(leaves)} values; TrainStep needs the mean loss over the "
            "samples alone, a scalar of floating point. For (loss, aux) say TrainStep(..., has_aux=True)"
        )
    if jnp.ndim(loss) or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise UsageError(
            f"loss_fn returned {jnp.result_type(loss)}{list(jnp.shape(loss))}; TrainStep needs the mean loss over the "
            "samples, a scalar of floating point"
        )
