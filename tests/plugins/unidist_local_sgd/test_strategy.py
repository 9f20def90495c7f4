"""The strategy line of local SGD: what is checked before any process starts."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from unidist.cost_model import ModelFigures, Workload
from unidist.errors import ConfigurationError
from unidist.runtime.plugin_manager import PluginManager
from unidist.strategy import Plan, build, check_plan, make_plan
from unidist_local_sgd import LocalSGD
from unidist_local_sgd.outer import OuterOptimizer
from unidist_planner.memory.estimate import plain_memory


def plan(line: str, size: int = 4) -> Plan:
    registry = PluginManager().load().strategies
    return make_plan(build(line, registry), size, registry)


def test_options_of_the_line() -> None:
    strategy, *others = plan("local_sgd=50:outer=nesterov:outer_lr=0.5:fragments=4:delay=2,clip_norm=1").strategies
    assert strategy == LocalSGD(50, outer="nesterov", outer_lr=0.5, fragments=4, delay=2)
    assert [item.name for item in others] == ["clip_norm"], "nobody else owns the gradients"
    assert not strategy.keeps_replicas


def test_outer_optimizers_have_the_defaults_of_the_papers() -> None:
    assert LocalSGD(5).outer_optimizer == OuterOptimizer("average", 1.0, 0.0)
    assert LocalSGD(5, outer="nesterov").outer_optimizer == OuterOptimizer("nesterov", 0.7, 0.9)
    assert LocalSGD(5, outer="sgd").outer_optimizer == OuterOptimizer("sgd", 1.0, 0.0)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("local_sgd", "needs a value"),
        ("local_sgd=0", "local_sgd=0: give at least 1 update"),
        ("local_sgd=4:after=-1", "after=-1: give 0 or more"),
        ("local_sgd=4:outer=adam", "average, momentum, nesterov, sgd"),
        ("local_sgd=4:outer=nesterov:outer_lr=0", "outer_lr=0.0: give a rate above 0"),
        ("local_sgd=4:outer_lr=0.5", "a mean has no rate"),
        ("local_sgd=4:outer=nesterov:outer_momentum=1", "outer_momentum=1.0: .* less than 1"),
        ("local_sgd=4:outer=sgd:outer_momentum=0.9", "outer_momentum=0.9 with outer=sgd"),
        ("local_sgd=4:fragments=5", "fragments=5: give 1 to 4"),
        ("local_sgd=4:delay=4", "delay=4: give 0 to 3"),
        ("local_sgd=4:mix=1", "mix=1: .* less than 1"),
        ("local_sgd=4,zero=1", "both own the gradient exchange"),
        ("local_sgd=4,data", "both own the gradient exchange"),
        ("local_sgd=4,pipeline=2", "local_sgd averages whole models, and 'pipeline' divides the model"),
        ("local_sgd=4,tensor=2", "'tensor' divides the model"),
    ],
)
def test_what_cannot_be_is_refused(line: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint) as caught:
        plan(line)
    assert "\n" not in str(caught.value)


def test_an_unknown_compressor_is_refused_by_the_launcher() -> None:
    plugins: Any = PluginManager().load()
    with pytest.raises(ConfigurationError, match="fp17"):
        LocalSGD(4, compression="fp17").check_plugins(plugins)


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("local_sgd=4", ["values that are synchronized"]),
        ("local_sgd=4:compression=fp16", ["values that are synchronized", "start of the window"]),
        ("local_sgd=4:outer=nesterov", ["values that are synchronized", "start of the window", "outer momentum"]),
    ],
)
def test_the_estimate_has_what_a_synchronization_needs(line: str, names: list[str]) -> None:
    run: Any = plan(line)
    workload = Workload(ModelFigures(1000), precision="bf16")
    found = run.strategies[0].estimate(plain_memory(workload), workload, run)
    assert [(each.name, each.num_elements) for each in found.working] == [(name, 1000) for name in names]


def test_elastic_jobs_may_have_it() -> None:
    check_plan(plan("local_sgd=4:outer=nesterov"))


def test_the_launcher_imports_no_framework() -> None:
    code = (
        "import sys; from unidist.runtime.plugin_manager import PluginManager; from unidist.strategy import build;"
        "build('local_sgd=4', PluginManager().load().strategies);"
        "assert not {'torch', 'tensorflow', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
