"""The strategy `precision=bf16|fp16|fp32`."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from typing_extensions import override

from unidist.buffer import DType
from unidist.cost_model.memory import WorkingMemory
from unidist.cost_model.memory_interface import EstimatesMemory
from unidist.errors import ConfigurationError
from unidist.gradients.precision import LossScaling, Precision, Rounding
from unidist.strategy.interface import ChoosesPrecision, Plan, Strategy

if TYPE_CHECKING:
    from collections.abc import Callable

    from unidist.cost_model.figures import Workload
    from unidist.cost_model.memory import RankMemory
    from unidist.framework import Framework
    from unidist.optim.update import Update
    from unidist.runtime_api import RuntimeAPI
    from unidist_precision.binding import PrecisionBinding

_log = logging.getLogger("unidist")

DTYPES = {"bf16": DType.BFLOAT16, "fp16": DType.FLOAT16, "fp32": DType.FLOAT32}

Name = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True)
class MixedPrecision(Strategy, ChoosesPrecision, EstimatesMemory):
    """Lets the model compute in 16 bits (Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740).

    With plain data parallelism parameters, gradients and optimizer state stay float32. With a strategy that shards
    updates (zero) the model's parameters and gradients are of 16 bits, and each rank keeps float32 master weights of
    its shard. Parameters that are not float32 are left alone.

    Args:
        dtype: bf16 (the range of float32, 8 significant bits), fp16 (11 bits, little range: the loss is scaled), or
            fp32: nothing is computed in 16 bits; parameters that are of 16 bits anyway get master weights where updates
            are sharded.
        reduce: 16-bit gradients are added up over the ranks in this type, fp32 or their own; default: their own.
        loss_scale: fp16: the loss is multiplied by it at first; default 65536.
        growth_interval: fp16: the scale doubles after so many updates without an overflow, and halves at each one; 0
            keeps it as it is. Default 2000.
        states: bf16: parameters and optimizer state are kept in bfloat16, and no master weights beside them; fp32, the
            default: what is updated has 32 bits.
        rounding: of what `states=bf16` keeps, after each update: stochastic (the default), or nearest.
    """

    name: ClassVar[str] = "precision"

    dtype: Name
    reduce: Name | None = None
    loss_scale: float | None = None
    growth_interval: int | None = None
    states: Literal["fp32", "bf16"] | None = None
    rounding: Literal["stochastic", "nearest"] | None = None

    def validate(self, plan: Plan) -> None:
        """Check the options against each other, and `reduce` against what the gradients are."""
        for option, value in (("dtype", self.dtype), ("reduce", self.reduce or "fp32")):
            if value not in DTYPES:
                raise ConfigurationError(f"precision: {option}={value!r}; choices: {', '.join(DTYPES)}")
        if self.dtype != "fp16" and (self.loss_scale is not None or self.growth_interval is not None):
            raise ConfigurationError(
                f"precision={self.dtype} does not scale the loss: only the gradients of fp16 vanish. Leave loss_scale "
                "and growth_interval out"
            )
        if self.growth_interval is not None and self.growth_interval < 0:
            raise ConfigurationError(
                f"precision:growth_interval={self.growth_interval}: give a number of updates, or 0 for a fixed scale"
            )
        self._check_states(plan)
        sharded = _shards_updates(plan)
        if self.reduce == "fp32" and self.states == "bf16" and not sharded:
            raise ConfigurationError(
                "precision=bf16:states=bf16:reduce=fp32: without zero, gradients of 16 bits are added up in their own "
                "type; leave reduce out, or add zero=1"
            )
        narrow = sharded or self.states == "bf16"
        if self.reduce not in (None, "fp32") and not (narrow and self.reduce == self.dtype):
            raise ConfigurationError(
                f"precision={self.dtype}:reduce={self.reduce}: 16-bit gradients are added up in their own type or in "
                "fp32, and without zero they are float32; to let those travel in 16 bits use "
                f"data:compression={self.reduce}"
            )
        self.precision(plan)

    def _check_states(self, plan: Plan) -> None:
        if self.states == "bf16" and plan.runs_steps is not None:
            raise ConfigurationError(
                f"precision=bf16:states=bf16 and {plan.runs_steps.name}: a weight that two parts of the model share "
                "would be rounded in two ways; leave states out"
            )
        if self.states == "bf16" and (plan.owns_parameters is not None or plan.steps_alone):
            raise ConfigurationError(
                f"precision=bf16:states=bf16 and {plan.owner.name}: it is for parameters that all ranks update "
                "together; leave states out"
            )
        if self.states == "bf16" and self.dtype != "bf16":
            raise ConfigurationError(
                f"precision={self.dtype}:states=bf16: parameters and state are kept in one type; use "
                "precision=bf16:states=bf16"
            )
        if self.rounding is not None and self.states != "bf16":
            raise ConfigurationError(
                f"precision:rounding={self.rounding} is for what states=bf16 keeps in 16 bits; add states=bf16, or "
                "leave rounding out"
            )

    @override
    def precision(self, plan: Plan) -> Precision:
        compute = DTYPES[self.dtype]
        scaling = None
        if self.dtype == "fp16":
            scaling = LossScaling()
            if self.loss_scale is not None:
                scaling = replace(scaling, initial=self.loss_scale)
            if self.growth_interval is not None:
                scaling = replace(scaling, growth_interval=self.growth_interval or None)
        is_narrow = self.states == "bf16"
        return Precision(
            compute,
            parameters=compute if is_narrow or _shards_updates(plan) else DType.FLOAT32,
            master=compute if is_narrow else DType.FLOAT32,
            reduce=None if self.reduce is None else DTYPES[self.reduce],
            scaling=scaling,
            rounding=Rounding(self.rounding or Rounding.STOCHASTIC) if is_narrow else None,
        )

    @override
    def prepare(self, model: Any, plan: Plan, context: RuntimeAPI) -> Any:
        if self.dtype == "fp32":
            return model
        framework = context.plugins.framework_of(model)
        binding = self._binding(framework, context)
        if self.states == "bf16" and not binding.rounds_updates:
            raise ConfigurationError(
                f"precision=bf16:states=bf16 is not for models of {framework.name}, whose binding does not round "
                "updates; leave states out"
            )
        return binding.prepare(model, self.precision(plan))

    def attach(self, model: Any, update: Update, framework: Framework) -> None:
        """Let the model compute in its types from now on."""
        if self.dtype != "fp32":
            report = self._binding(framework, update.context).attach(model, DTYPES[self.dtype], update.scaler)
            update.follow(_FirstUpdate(f"strategy precision={self.dtype}", report, update.context))

    def _binding(self, framework: Framework, context: RuntimeAPI) -> PrecisionBinding:
        binding: PrecisionBinding = context.plugins.binding(self.name, framework)
        return binding

    @override
    def estimate(self, memory: RankMemory, workload: Workload, plan: Plan) -> RankMemory:
        types = self.precision(plan)
        width = types.parameters.itemsize
        sized = memory.widths(
            parameters=width,
            gradients=width,
            master=types.master.itemsize if width < types.master.itemsize else 0,
            optimizer=types.master.itemsize * workload.states_each,
        )
        sized = replace(sized, activations=replace(sized.activations, itemsize=types.compute.itemsize))
        if width == types.compute.itemsize:
            return sized
        copied = round(workload.model.parameters * sized.parameters.share * types.compute.itemsize / width)
        return sized.add(WorkingMemory(f"weights in {self.dtype}", copied))


class _FirstUpdate:
    """Warns after the first update if parts of the model did not compute in 16 bits. Follows the updates.

    Args:
        subject: begins the warning.
        report: says what did not, or nothing.
        context: only rank 0 of it warns.
    """

    name = "precision_report"

    def __init__(self, subject: str, report: Callable[[], str], context: RuntimeAPI) -> None:
        self._subject = subject
        self._report = report
        self._is_due = context.topology.rank == 0

    def on_step(self, step: int) -> None:
        """See `FollowsUpdates.on_step`; looks once."""
        if self._is_due:
            self._is_due = False
            if found := self._report():
                _log.warning("%s: %s", self._subject, found)

    def state(self) -> dict[str, Any]:
        """Return nothing: there is no state."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Do nothing."""


def _shards_updates(plan: Plan) -> bool:
    return plan.shards_updates is not None
