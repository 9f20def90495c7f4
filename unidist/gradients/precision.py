"""The types in which a model computes, is stored and is updated, as chosen by a precision strategy.

Plain data, derived from the `Plan` alone, so the launcher, the ranks and the estimator get the same answer:

    precision = plan.precision
    kept_as = info.dtype if precision is None else precision.master_dtype(info.dtype)

The strategy with the capability `ChoosesPrecision` prepares the model before any strategy partitions it
(`Plan.prepare`). Its choice is also in `ExchangeOptions.precision`, for the owner of the exchange and, as
`update.options.precision`, for the binding of a strategy that shards updates.

- Without a strategy that shards updates, the parameters stay float32 and forward computes in `compute`
  (`parameters` is FLOAT32). Gradients are float32, and nothing else depends on the precision.
- With one (`ShardsUpdates`), the model's float32 parameters are converted to `parameters`, in place, before the
  optimizer is bound. From then on parameters and gradients have 16 bits, as `ParameterInfo.dtype` shows. The binding of
  that strategy keeps a master copy of its shard of each parameter whose `master_dtype` differs, in that type (made from
  the parameter before the first step, after rank 0's were broadcast). It updates the copy, and writes the rounded
  result to the parameter. Optimizer state has the master's type. Gradients are added up in `reduce_dtype`.
- With `rounding`, whether updates are sharded or not, the model's float32 parameters are converted to `parameters`, and
  nothing is kept in more bits: `master` is the same type, that of optimizer state too. The binding computes each update
  in float32, and rounds what it has updated.

Parameters of types other than float32 (including float64) are not converted; `master_dtype` applies to 16-bit ones,
wherever they come from. `GradientExchange.pending_factor` is the factor for a reduced gradient that is converted to the
master's type; it includes one over the loss scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from unidist.buffer import DType
from unidist.errors import ConfigurationError


class Rounding(StrEnum):
    """The ways to bring an update that was computed in float32 to the 16 bits in which its results are kept."""

    STOCHASTIC = "stochastic"
    """To either neighbour, with the probability that makes the mean of many the value. Equal on ranks that hold the
    same element, whatever their number."""
    NEAREST = "nearest"
    """To the nearest neighbour. Updates below half the distance to it are lost."""


@dataclass(frozen=True)
class LossScaling:
    """The loss is multiplied by a factor, so that small gradients do not vanish in float16.

    Args:
        initial: the factor at the start, above 0; a power of two loses nothing.
        growth_interval: number of updates without an overflow after which the factor doubles, at least 1; None: it
            never changes, not even after an overflow.
    """

    initial: float = 2.0**16
    growth_interval: int | None = 2000

    def __post_init__(self) -> None:
        if not 0 < self.initial < float("inf"):
            raise ConfigurationError(f"loss scale {self.initial:g}: give a number above 0")
        if self.growth_interval is not None and self.growth_interval < 1:
            raise ConfigurationError(f"growth interval {self.growth_interval}: give at least 1 update")


@dataclass(frozen=True)
class Precision:
    """The types of one run.

    Args:
        compute: type of the forward and backward computation.
        parameters: type in which the model's float32 parameters are stored; FLOAT32: unchanged.
        master: type in which 16-bit parameters are updated, in a copy kept by the strategy that shards updates.
        reduce: type in which 16-bit gradients are added up over the ranks; None: their own type.
        scaling: of the loss; None if gradients cannot vanish.
        rounding: of parameters and optimizer state after each update, where they are kept in 16 bits and nothing is in
            more; None: a binding has masters, or parameters have 32 bits.
    """

    compute: DType
    parameters: DType = DType.FLOAT32
    master: DType = DType.FLOAT32
    reduce: DType | None = None
    scaling: LossScaling | None = None
    rounding: Rounding | None = None

    def parameter_dtype(self, dtype: DType) -> DType:
        """Return the type in which a parameter that the script made as `dtype` is stored."""
        return self.parameters if dtype is DType.FLOAT32 else dtype

    def master_dtype(self, dtype: DType) -> DType:
        """Return the type in which a parameter stored as `dtype`, and its optimizer state, is updated."""
        return self.master if is_narrow(dtype) else dtype

    def reduce_dtype(self, dtype: DType) -> DType:
        """Return the type in which gradients of type `dtype` are added up over the ranks."""
        return self.reduce if self.reduce is not None and is_narrow(dtype) else dtype


def is_narrow(dtype: DType) -> bool:
    """Return whether this is a floating-point type of 16 bits."""
    return dtype in (DType.FLOAT16, DType.BFLOAT16)
