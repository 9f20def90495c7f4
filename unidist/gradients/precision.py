"""The types in which a model computes, is stored and is updated, as chosen by a precision strategy.

Plain data, derived from the `Plan` alone, so the launcher, the ranks and the estimator get the same answer:

    precision = plan.precision
    kept_as = info.dtype if precision is None else precision.master_dtype(info.dtype)

Who does what. The strategy with the capability `ChoosesPrecision` prepares the model before any strategy partitions it
(`Plan.prepare`); what it decides is also in `ExchangeOptions.precision`, for the owner of the exchange and, as
`update.options.precision`, for the half of a strategy that shards updates.

- Without a strategy that shards updates the parameters stay float32 and forward computes in `compute`
  (`parameters` is FLOAT32): gradients are float32, and nobody else has to know.
- With one (`ShardsUpdates`) the model's float32 parameters *become* `parameters`, in place, before the optimizer is
  bound: parameters and gradients are of 16 bits from then on, and `ParameterInfo.dtype` says so. The half of that
  strategy keeps, for each parameter of a type for which `master_dtype` differs, a copy of its share in that type (made
  from the parameter before the first step, after rank 0's were broadcast), steps on the copy, and writes the result to
  the parameter, rounded. Optimizer state is of the master's type. Gradients are added up in `reduce_dtype`.

Parameters of other types than float32 (float64 too) are left alone; `master_dtype` holds for 16-bit ones however they
came about. What a reduced gradient has to be multiplied by when it is brought to the master's type, one over the loss
scale among it, is `GradientExchange.pending_factor`.
"""

from __future__ import annotations

from dataclasses import dataclass

from unidist.buffer import DType
from unidist.errors import ConfigurationError


@dataclass(frozen=True)
class LossScaling:
    """The loss is multiplied by a factor, so that small gradients do not vanish in float16.

    Args:
        initial: the factor at the start, above 0; a power of two loses nothing.
        growth_interval: the factor doubles after so many updates without an overflow, at least 1; None: it stays what
            it is, also after an overflow.
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
        compute: forward and backward compute in it.
        parameters: what the model's float32 parameters are kept as; FLOAT32: they stay.
        master: 16-bit parameters are updated in this type, by a copy that the strategy which shards updates keeps.
        reduce: 16-bit gradients are added up over the ranks in this type; None: in their own.
        scaling: scale the loss; None where gradients cannot vanish.
    """

    compute: DType
    parameters: DType = DType.FLOAT32
    master: DType = DType.FLOAT32
    reduce: DType | None = None
    scaling: LossScaling | None = None

    def parameter_dtype(self, dtype: DType) -> DType:
        """Return the type that a parameter which the script made as `dtype` is kept as."""
        return self.parameters if dtype is DType.FLOAT32 else dtype

    def master_dtype(self, dtype: DType) -> DType:
        """Return the type in which a parameter kept as `dtype` is updated, its optimizer state included."""
        return self.master if is_narrow(dtype) else dtype

    def reduce_dtype(self, dtype: DType) -> DType:
        """Return the type in which gradients of type `dtype` are added up over the ranks."""
        return self.reduce if self.reduce is not None and is_narrow(dtype) else dtype


def is_narrow(dtype: DType) -> bool:
    """Return whether this is a floating-point type of 16 bits."""
    return dtype in (DType.FLOAT16, DType.BFLOAT16)
