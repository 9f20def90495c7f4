"""What the strategy decides, and what it refuses, before any process starts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from unidist.buffer import DType
from unidist.cost_model.figures import ModelFigures, Workload
from unidist.errors import ConfigurationError
from unidist.gradients.precision import LossScaling, Precision, Rounding
from unidist.optim.loss_scaling import LossScaler
from unidist.runtime.plugin_manager import PluginManager
from unidist.strategy.interface import Plan
from unidist.strategy.plan import build, make_plan
from unidist_planner.memory.estimate import estimate
from unidist_precision.binding import PrecisionBinding


def plan_of(line: str, world_size: int = 4) -> Plan:
    registry = PluginManager().load().strategies
    return make_plan(build(line, registry), world_size, registry)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("precision=bf16", Precision(DType.BFLOAT16)),
        ("precision=fp32", Precision(DType.FLOAT32)),
        ("precision=fp16", Precision(DType.FLOAT16, scaling=LossScaling(65536.0, 2000))),
        (
            "precision=fp16:loss_scale=1024:growth_interval=0",
            Precision(DType.FLOAT16, scaling=LossScaling(1024.0, None)),
        ),
        ("zero=1,precision=bf16", Precision(DType.BFLOAT16, parameters=DType.BFLOAT16)),
        (
            "precision=bf16:reduce=fp32,zero=2",
            Precision(DType.BFLOAT16, parameters=DType.BFLOAT16, reduce=DType.FLOAT32),
        ),
        (
            "precision=bf16:states=bf16",
            Precision(
                DType.BFLOAT16,
                parameters=DType.BFLOAT16,
                master=DType.BFLOAT16,
                rounding=Rounding.STOCHASTIC,
            ),
        ),
        (
            "zero=1,precision=bf16:states=bf16:rounding=nearest",
            Precision(
                DType.BFLOAT16,
                parameters=DType.BFLOAT16,
                master=DType.BFLOAT16,
                rounding=Rounding.NEAREST,
            ),
        ),
        ("precision=bf16:states=fp32", Precision(DType.BFLOAT16)),
    ],
)
def test_the_types_follow_from_the_plan(line: str, expected: Precision) -> None:
    assert plan_of(line).precision == expected


def test_without_the_strategy_there_is_no_precision() -> None:
    assert plan_of("clip_norm=1").precision is None


def test_only_narrow_parameters_have_masters_and_are_reduced_otherwise() -> None:
    types = Precision(DType.BFLOAT16, parameters=DType.BFLOAT16, reduce=DType.FLOAT32)
    assert [types.parameter_dtype(dtype) for dtype in (DType.FLOAT32, DType.FLOAT64)] == ["bfloat16", "float64"]
    assert [types.master_dtype(dtype) for dtype in (DType.BFLOAT16, DType.FLOAT64)] == ["float32", "float64"]
    assert [types.reduce_dtype(dtype) for dtype in (DType.FLOAT16, DType.FLOAT64)] == ["float32", "float64"]
    assert Precision(DType.FLOAT16).reduce_dtype(DType.FLOAT16) == "float16"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("precision=fp8", "bf16"),
        ("precision", "needs a value"),
        ("precision=bf16:reduce=int8", "reduce"),
        ("precision=bf16:reduce=bf16", "data:compression=bf16"),
        ("zero=1,precision=bf16:reduce=fp16", "own type"),
        ("precision=bf16:loss_scale=8", "does not scale the loss"),
        ("precision=fp32:growth_interval=8", "does not scale the loss"),
        ("precision=fp16:loss_scale=0", "above 0"),
        ("precision=fp16:loss_scale=inf", "is not finite"),
        ("precision=fp16:loss_scale=nan", "is not a number"),
        ("precision=fp16:growth_interval=-1", "growth_interval=-1"),
        ("precision=bf16:states=fp16", "precision:states: 'fp16'. Did you mean 'bf16'?"),
        ("precision=fp16:states=bf16", "use precision=bf16:states=bf16"),
        ("precision=bf16:states=bf16:rounding=down", "precision:rounding: 'down'. Choices"),
        ("precision=bf16:rounding=nearest", "add states=bf16, or leave rounding out"),
        ("precision=bf16:states=bf16:reduce=fp32", "leave reduce out, or add zero=1"),
        ("pipeline=2,precision=bf16:states=bf16", "and pipeline: a weight that two parts of the model share"),
        ("parameter_server=async,precision=bf16:states=bf16", "for parameters that all ranks update together"),
        ("local_sgd=2,precision=bf16:states=bf16", "for parameters that all ranks update together"),
        ("precision=fp16,precision=bf16", "given 2 times"),
        ("clip_norm", "needs a value"),
        ("clip_norm=0", "clip_norm=0: give a limit above 0"),
        ("clip_norm=inf", "is not finite"),
        ("clip_norm=1:p=0", "order of a norm"),
        ("clip_norm=1:p=nan", "is not a number"),
        ("clip_norm=1:q=2", "'q'"),
        ("clip_value=-1", "clip_value=-1: give a limit above 0"),
        ("clip_value=high", "number"),
    ],
)
def test_bad_options_are_errors_in_the_launcher(line: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan_of(line)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        # Bytes of each parameter with Adam: parameters, gradients, master copies, optimizer, copies that forward makes.
        ("precision=fp32", (4, 4, 0, 8, 0)),
        ("precision=bf16", (4, 4, 0, 8, 2)),
        ("zero=1,precision=bf16", (2, 2, 4, 8, 0)),
        ("precision=fp16,zero=1", (2, 2, 4, 8, 0)),
        ("precision=bf16:states=bf16", (2, 2, 0, 4, 0)),
        ("zero=1,precision=bf16:states=bf16", (2, 2, 0, 4, 0)),
    ],
)
def test_the_estimate_has_the_bytes_of_each_parameter(line: str, expected: tuple[float, ...]) -> None:
    model = ModelFigures(parameters=1_000_000, trained=1_000_000, largest_unit=1)
    found = estimate(Workload(model), plan_of(line, 1))
    names = ("parameters", "gradients", "master copies", "optimizer", "weights in bf16")
    assert tuple(found.bytes_of(name) / 1e6 for name in names) == pytest.approx(expected)


class Untaught(PrecisionBinding):
    """Of a framework whose optimizers have not learnt to round."""

    def prepare(self, model: Any, precision: Precision) -> Any:
        raise AssertionError("the model is changed before the line is refused")

    def attach(self, model: Any, compute: DType, scaler: LossScaler | None) -> Callable[[], str]:
        raise AssertionError("it is refused before")


def test_a_framework_that_cannot_keep_its_state_in_16_bits_refuses_before_it_changes_the_model() -> None:
    plugins = SimpleNamespace(
        framework_of=lambda model: SimpleNamespace(name="numpy"), binding=lambda name, framework: Untaught()
    )
    context: Any = SimpleNamespace(plugins=plugins)
    plan = plan_of("precision=bf16:states=bf16")
    with pytest.raises(ConfigurationError, match="is not for models of numpy"):
        plan.prepare(object(), context)
