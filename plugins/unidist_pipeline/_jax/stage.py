"""One stage of a loss, micro-batch by micro-batch: forward and backward, see `execution.executor.Stage`.

Each pass is a compiled function. What the backward pass needs of the forward pass leaves that as a result; weights are
left out of it, and put back, since compiled functions copy what they return.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from typing_extensions import override

from unidist_jax.memory import dtype_of
from unidist_jax.models import evaluate
from unidist_pipeline._jax.division import StageProgram
from unidist_pipeline.execution.executor import Stage
from unidist_pipeline.execution.messages import Form, Message, TensorForm

Leaves = Mapping[int, Any]
"""Parameters, or their gradients, by place."""


class CompiledStage:
    """The compiled functions of one stage, for micro-batches of one form.

    Args:
        program: the stage.
        parameters: the variables of all parameters, by place.
        inputs: the variables of the leaves of the batch.
        constants: of the whole program.
    """

    def __init__(
        self,
        program: StageProgram,
        parameters: Sequence[Any],
        inputs: Sequence[Any],
        constants: Mapping[Any, Any],
    ) -> None:
        self.program = program
        self._parameters = [parameters[place] for place in program.places]
        self._inputs = inputs
        self._constants = dict(constants)
        held = set(self._parameters)
        self._forms = [variable for variable in program.weights if variable not in held]
        self._whole = [variable for variable in program.weights if variable in held]
        self._formed = jax.jit(self._traced_forms)
        self._leaf_gradients = jax.jit(self._traced_leaf_gradients)
        self.zeros = jax.jit(self._traced_zeros)
        self.compute = jax.jit(self._traced)
        self.record = jax.jit(self._traced_record)
        self.pull = jax.jit(self._traced_pull, donate_argnums=(3,))

    def weights(self, leaves: Leaves) -> list[Any]:
        """Return the values of `program.weights` for the parameters."""
        values = dict(zip(self._parameters, (leaves[place] for place in self.program.places), strict=True))
        whole = [values[variable] for variable in self._whole]
        return [*whole, *self._formed(list(values.values()))] if self._forms else whole

    def leaf_gradients(self, leaves: Leaves, sums: Sequence[Any]) -> dict[int, Any]:
        """Return the gradients of the parameters from those of the weights."""
        own = [leaves[place] for place in self.program.places]
        is_same = not self._forms and all(leaf.dtype == each.dtype for leaf, each in zip(own, sums, strict=True))
        found = sums if is_same else self._leaf_gradients(own, list(sums))
        return dict(zip(self.program.places, found, strict=True))

    # Compiled functions

    def _traced_forms(self, leaves: Sequence[Any]) -> list[Any]:
        values = {**self._constants, **dict(zip(self._parameters, leaves, strict=True))}
        evaluate(self.program.form_equations, values)
        return [values[variable] for variable in self._forms]

    def _traced_zeros(self, weights: Sequence[Any]) -> list[Any]:
        """Return zeros to add gradients of the weights to, in at least 32 bits."""
        return [jnp.zeros(each.shape, jnp.promote_types(each.dtype, jnp.float32)) for each in weights]

    def _traced_leaf_gradients(self, leaves: Sequence[Any], sums: Sequence[Any]) -> list[Any]:
        count = len(self._whole)
        direct = dict(zip(self._whole, sums[:count], strict=True))
        forms, pull = jax.vjp(self._traced_forms, leaves)
        (found,) = pull([total.astype(form.dtype) for form, total in zip(forms, sums[count:], strict=True)])
        return [
            (of_forms + direct[variable] if variable in direct else of_forms).astype(leaf.dtype)
            for variable, leaf, of_forms in zip(self._parameters, leaves, found, strict=True)
        ]

    def _traced(
        self, weights: Sequence[Any], taken: Sequence[Any], others: Sequence[Any], batch: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return the values that are passed on: those of floating point, and others."""
        program = self.program
        values = {**self._constants, **dict(zip(self._inputs, batch, strict=True))}
        values.update(zip(program.weights, weights, strict=True))
        values.update(zip(filter(is_inexact, program.taken), taken, strict=True))
        values.update(zip((each for each in program.taken if not is_inexact(each)), others, strict=True))
        evaluate(program.equations, values)
        made = [(variable, values[variable]) for variable in program.made]
        return (
            [value for variable, value in made if is_inexact(variable)],
            [value for variable, value in made if not is_inexact(variable)],
        )

    def _traced_record(
        self, weights: Sequence[Any], taken: Sequence[Any], others: Sequence[Any], batch: Sequence[Any]
    ) -> tuple[list[Any], list[Any], Any]:
        """Return what `compute` returns, and what `pull` takes."""
        made, pull, beside = jax.vjp(
            lambda weights, taken: self._traced(weights, taken, others, batch), list(weights), list(taken), has_aux=True
        )
        of_weights, of_taken = pull.args_res
        return made, beside, dataclasses.replace(pull, args_res=[_marked(of_weights), of_taken])

    def _traced_pull(
        self, pull: Any, weights: Sequence[Any], gradients: Sequence[Any], sums: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return the sums with the gradients of the weights added, and the gradients of what was taken."""
        of_weights, of_taken = pull.args_res
        put_back = [
            weight if isinstance(kept, _LeftOut) else kept for kept, weight in zip(of_weights, weights, strict=True)
        ]
        own, of_inputs = dataclasses.replace(pull, args_res=[put_back, of_taken])(list(gradients))
        return [total + each.astype(total.dtype) for total, each in zip(sums, own, strict=True)], of_inputs


@jax.tree_util.register_pytree_node_class
class _LeftOut:
    """Takes the place of a weight that the backward pass needs."""

    def tree_flatten(self) -> tuple[tuple[()], None]:
        return (), None

    @classmethod
    def tree_unflatten(cls, _: None, __: tuple[()]) -> _LeftOut:
        return cls()


def _marked(residuals: Sequence[Any]) -> list[Any]:
    return [_LeftOut() if isinstance(each, jax.Array) else each for each in residuals]


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """A part of a batch, for one stage.

    Args:
        compiled: the stage's functions for it.
        inputs: the leaves of the batch.
        fraction: of the batch's samples that are in it: the weight of its mean loss.
    """

    compiled: CompiledStage
    inputs: Sequence[Any]
    fraction: float


class JaxStage(Stage):
    """See `Stage`. `begin_run` comes before each run.

    Args:
        number: of the stage.
        is_last: it computes the loss.
    """

    def __init__(self, number: int, *, is_last: bool) -> None:
        self._number, self._is_last = number, is_last
        self._microbatches: Sequence[MicroBatch] = ()
        self._scale: float | None = None
        self._losses: list[tuple[float, Any]] = []
        self._recorded: dict[int, Any] = {}
        self._weights: dict[CompiledStage, list[Any]] = {}
        self._sums: dict[CompiledStage, list[Any]] = {}

    def begin_run(self, microbatches: Sequence[MicroBatch], leaves: Leaves, scale: float | None) -> None:
        """Drop the last run, and begin one with these parameters; with a scale of the loss gradients are computed."""
        self._microbatches, self._scale = microbatches, scale
        self._losses.clear()
        self._recorded.clear()
        kinds = dict.fromkeys(each.compiled for each in microbatches)
        self._weights = {compiled: compiled.weights(leaves) for compiled in kinds}
        self._sums = {} if scale is None else {each: each.zeros(self._weights[each]) for each in kinds}

    @property
    def loss(self) -> float:
        """This stage's part of the mean loss."""
        return sum(fraction * float(loss) for fraction, loss in self._losses)

    def gradients(self, leaves: Leaves) -> list[dict[int, Any]]:
        """Return the gradients of the stage's parameters, in parts that are to be added up, and end the run."""
        found = [compiled.leaf_gradients(leaves, sums) for compiled, sums in self._sums.items()]
        self.end_run()
        return found

    def end_run(self) -> None:
        """Drop the weights, which the next step replaces."""
        self._weights, self._sums, self._microbatches = {}, {}, ()

    @override
    def forward(self, microbatch: int, received: Message | None) -> Message | None:
        part = self._microbatches[microbatch]
        arrays = [] if received is None else list(received.tensors)
        program = part.compiled.program
        taken = [array for array, variable in zip(arrays, program.taken, strict=True) if is_inexact(variable)]
        others = [array for array, variable in zip(arrays, program.taken, strict=True) if not is_inexact(variable)]
        weights = self._weights[part.compiled]
        if self._scale is None:
            floats, rest = part.compiled.compute(weights, taken, others, part.inputs)
        else:
            floats, rest, self._recorded[microbatch] = part.compiled.record(weights, taken, others, part.inputs)
        if self._is_last:
            self._losses.append((part.fraction, floats[0]))
            return None
        first, second = iter(floats), iter(rest)
        made = [next(first if is_inexact(variable) else second) for variable in program.made]
        forms = (TensorForm(tuple(each.shape), dtype_of(each), _has_gradient(each, self._scale)) for each in made)
        return Message(Form(tuple(forms)), made)

    @override
    def backward(self, microbatch: int, gradients: Message | None) -> Message | None:
        part, pull = self._microbatches[microbatch], self._recorded.pop(microbatch)
        compiled = part.compiled
        if gradients is None:
            assert self._scale is not None, "a run with backward passes"
            dtype = compiled.program.made[0].aval.dtype
            given = [jnp.asarray(self._scale * part.fraction, dtype)]
        else:
            given = list(gradients.tensors)
        self._sums[compiled], made = compiled.pull(pull, self._weights[compiled], given, self._sums[compiled])
        if self._number == 0:
            return None
        return Message(
            Form(tuple(TensorForm(tuple(each.shape), dtype_of(each)) for each in made), (True,) * len(made)), made
        )

    @override
    def backward_input(self, microbatch: int, gradients: Message | None) -> Message | None:
        """See `Stage.backward_input`: the gradients of the weights are computed along with those of the input."""
        return self.backward(microbatch, gradients)

    @override
    def backward_weight(self, microbatch: int) -> None:
        """Do nothing: `backward_input` has done it."""


def is_inexact(variable: Any) -> bool:
    """Return whether a variable is of floating point, so that gradients flow through it."""
    return bool(jnp.issubdtype(variable.aval.dtype, jnp.inexact))


def _has_gradient(array: Any, scale: float | None) -> bool:
    return scale is not None and bool(jnp.issubdtype(array.dtype, jnp.inexact))
