"""Runs the steps of a pipeline: cuts batches, runs the stages, gives gradients to the optimizer."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from unidist.buffer import Buffer, DType
from unidist.errors import UsageError
from unidist.negotiation.objects import gather_objects
from unidist.runtime import context as runtime
from unidist_jax.compiled import translated
from unidist_jax.framework import JaxFramework
from unidist_jax.memory import array_of
from unidist_jax.models import LossFunction, StepRunner
from unidist_jax.optimizer import BoundOptimizer
from unidist_pipeline._jax.division import Division, StageProgram
from unidist_pipeline._jax.parameters import StagedParameters
from unidist_pipeline._jax.program import traced
from unidist_pipeline._jax.stage import CompiledStage, JaxStage, MicroBatch
from unidist_pipeline._jax.tied import TiedGradients
from unidist_pipeline.execution.microbatches import bounds, sizes
from unidist_pipeline.execution.rank import PipelineRank

if TYPE_CHECKING:
    from unidist_pipeline.strategy import Pipeline

_PRINTED_BYTES = 1 << 16


class PipelineRunner(StepRunner):
    """See `StepRunner`. Collective over all ranks when it is made.

    Args:
        strategy: the user's choices.
        params: this rank's.
        loss_fn: see `LossFunction`.
        optimizer: the bound one.
    """

    def __init__(
        self, strategy: Pipeline, params: StagedParameters, loss_fn: LossFunction, optimizer: BoundOptimizer
    ) -> None:
        self._context = runtime.current()
        self._strategy, self._params, self._loss_fn, self._optimizer = strategy, params, loss_fn, optimizer
        params.release()
        self._rank = PipelineRank(self._context, strategy, JaxFramework())
        self._placement = self._rank.schedule(1).placement
        self._own = [stage for stage, rank in enumerate(self._placement) if rank == self._rank.rank]
        last = len(self._placement) - 1
        self._stages = {number: JaxStage(number, is_last=number == last) for number in self._own}
        self._compiled: dict[Hashable, dict[int, CompiledStage]] = {}
        self._markers: Sequence[int] | None = None
        self._tied: TiedGradients | None = None
        self._loss_type: Any = None
        self._added = jax.jit(_added)
        self._update = jax.jit(self._traced_update, donate_argnums=(1, 2))

    @override
    def run(
        self,
        held: Any,
        opt_state: Any,
        batch: Sequence[Any],
        state: Mapping[str, Any],
        *,
        scale: float | None,
        weight: float,
        trains: bool,
    ) -> tuple[Any, Any, Any]:
        with self._rank.guarded(), translated():
            leaves = jax.tree.leaves(tuple(batch))
            named, structure = jax.tree.leaves(dict(state)), jax.tree.structure((tuple(batch), dict(state)))
            num_samples = _num_samples(leaves)
            pieces = bounds(sizes(num_samples, self._strategy.num_microbatches))
            parts = [
                [
                    *(leaf[start:stop] if np.ndim(leaf) else leaf for leaf in leaves),
                    *(_own_key(leaf, index) for leaf in named),
                ]
                for index, (start, stop) in enumerate(pieces)
            ]
            word = "training" if trains else "evaluation"
            keys: list[Hashable] = [(structure, *map(str, map(jax.typeof, part))) for part in parts]
            own: dict[int, Any] = {}

            def begin() -> None:
                nonlocal held, opt_state
                of_parts = [self._compiled_for(key, structure, part) for key, part in zip(keys, parts, strict=True)]
                if opt_state is None:
                    held = self._params.held(held)
                    opt_state = jax.jit(self._optimizer.init)(held)
                own.update(self._params.leaves(held))
                fractions = [(stop - start) / num_samples for start, stop in pieces]
                for number, stage in self._stages.items():
                    microbatches = [
                        MicroBatch(compiled[number], part, fraction)
                        for compiled, part, fraction in zip(of_parts, parts, fractions, strict=True)
                    ]
                    stage.begin_run(microbatches, own, weight * (scale or 1.0) if trains else None)

            self._rank.run(
                self._stages,
                description=f"{word} on {', '.join(map(_described, [*leaves, *named]))}",
                keys=[(word, key) for key in keys],
                forward_only=not trains,
                before=begin,
            )
            total = self._total()
            if trains:
                gradients = self._gradients(own)
                own.clear()
                held, opt_state = jax.block_until_ready(self._update(gradients, opt_state, held))
            else:
                for stage in self._stages.values():
                    stage.end_run()
            return held, opt_state, jnp.asarray(weight * total, self._loss_type)

    def _traced_update(self, gradients: Any, opt_state: Any, held: Any) -> tuple[Any, Any]:
        return self._optimizer.binding.apply(gradients, opt_state, held, early=())

    def _gradients(self, leaves: Mapping[int, Any]) -> Any:
        """Return the gradients of this rank's parameters, a tree like theirs."""
        assert self._tied is not None
        parts = [part for stage in self._stages.values() for part in stage.gradients(leaves)]
        gradients = parts[0] if len(parts) == 1 and parts[0].keys() == leaves.keys() else self._added(leaves, parts)
        self._tied.add_up(gradients)
        return self._params.tree_of(gradients)

    def _total(self) -> float:
        """Return the loss of this pipeline's batch."""
        buffer = Buffer.allocate(1, DType.FLOAT64)
        numbers = buffer.bytes().cast("d")
        numbers[0] = sum(stage.loss for stage in self._stages.values())
        self._rank.communicator.allreduce(buffer, buffer).wait()
        return numbers[0]

    # Dividing

    def _compiled_for(self, key: Hashable, structure: Any, part: Sequence[Any]) -> dict[int, CompiledStage]:
        """Return this rank's stages for micro-batches of a form. Collective over the pipeline when it is a new one."""
        if key not in self._compiled:

            def loss(leaves: list[Any], arguments: list[Any]) -> Any:
                batch, state = jax.tree.unflatten(structure, arguments)
                return self._loss_fn(jax.tree.unflatten(self._params.structure, leaves), batch, state)

            program = traced(loss, self._params.types, part)
            self._loss_type = program.loss.aval.dtype
            stages = self._divided(Division(program))
            self._check_equal(stages)
            self._compiled[key] = {
                number: CompiledStage(stages[number], program.parameters, program.inputs, program.constants)
                for number in self._own
            }
        return self._compiled[key]

    def _divided(self, division: Division) -> list[StageProgram]:
        """Return the stages of a program; those of the first one decide who holds what. Collective then."""
        if self._markers is not None:
            stages = division.stages(self._markers)
            self._check_held(stages)
            return stages
        count = len(self._placement)
        names = self._strategy.split_points
        markers = division.balanced(count) if names is None else division.named(names, count)
        uses = [list(stage.places) for stage in division.stages(markers)]
        # The pipelines may have batches of different shapes, for which the division might be another one.
        markers, uses = self._context.broadcast_object((markers, uses), root=0, name="division of a pipeline")
        holders = {}
        for place in range(len(self._params.types)):
            users = [self._placement[stage] for stage, places in enumerate(uses) if place in places]
            holders[place] = sorted(set(users or [self._placement[0]]))
        self._params.divide(holders)
        self._tied = TiedGradients(self._rank, holders)
        self._markers = markers
        stages = division.stages(markers)
        self._check_held(stages)
        return stages

    def _check_held(self, stages: Sequence[StageProgram]) -> None:
        for number, stage in enumerate(stages):
            for place in stage.places:
                if self._placement[number] not in self._params.holders[place]:
                    path = list(self._params.types)[place]
                    raise UsageError(
                        f"pipeline: for inputs of these shapes, stage {number} uses the parameter {path!r}, which it "
                        "did not for those of the first call, so its rank does not have it. Begin with such inputs, or "
                        "let shapes not decide which parameters are used where"
                    )

    def _check_equal(self, stages: Sequence[StageProgram]) -> None:
        """Raise UsageError if the ranks have traced different programs."""
        text = "; ".join(
            f"{[(each.primitive.name, [str(out.aval) for out in each.outvars]) for each in stage.equations]}"
            f"{stage.places}{[str(variable.aval) for variable in stage.made]}"
            for stage in stages
        )
        found = gather_objects(self._rank.communicator, hashlib.blake2b(text.encode(), digest_size=16).hexdigest())
        if len(set(found)) > 1:
            raise UsageError(
                "the ranks of a pipeline trace different losses for the same inputs: what loss_fn computes must not "
                f"depend on the rank. Digests, by rank of the pipeline: {', '.join(found)}"
            )


def _num_samples(leaves: Sequence[Any]) -> int:
    """Return the first dim of the arrays of a batch."""
    counts = {int(np.shape(leaf)[0]) for leaf in leaves if np.ndim(leaf)}
    if len(counts) != 1:
        raise UsageError(
            "a pipeline cuts a batch into micro-batches along the first dim of its arrays: there must be one, of "
            f"the same size in all. Found: {', '.join(map(str, map(jax.typeof, leaves))) or 'no arrays'}. Give others "
            "by name: step(x, y, mask=mask) calls loss_fn(params, x, y, mask=mask)"
        )
    return counts.pop()


def _added(leaves: Mapping[int, Any], parts: Sequence[Mapping[int, Any]]) -> dict[int, Any]:
    """Return the sums of gradients; zeros for the parameters that no stage uses."""
    return {
        place: sum((part[place] for part in parts if place in part), start=jnp.zeros_like(leaf))
        for place, leaf in leaves.items()
    }


def _own_key(leaf: Any, microbatch: int) -> Any:
    """Return an argument by name for one micro-batch: of a random key another one for each, else the argument."""
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) and not leaf.ndim
    return jax.random.fold_in(leaf, microbatch) if is_key else leaf


def _described(leaf: Any) -> str:
    """Return shape, type and a digest of (some of) the values: ranks with different data would compute nonsense."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = array_of(leaf) if isinstance(leaf, jax.Array) else np.ascontiguousarray(leaf)
    flat = array.reshape(-1).view(np.uint8)
    step = -(-flat.size // _PRINTED_BYTES) | 1  # odd, so that it does not always meet the same byte of a number
    digest = hashlib.blake2b(flat[::step].tobytes(), digest_size=8).hexdigest()
    return f"{array.dtype}{list(array.shape)} (digest {digest})"
