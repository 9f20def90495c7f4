"""ZeRO takes as much of the machine's memory as its formulas say, for a model of 100 million parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from unidist.cost_model.figures import ModelFigures, Workload
from unidist.jobs.pool.pool import RankPool
from unidist.runtime.plugin_manager import PluginManager
from unidist_planner.memory.comparison import estimate_line

sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _zero_memory import LAYERS, bytes_per_parameter

pytestmark = [pytest.mark.parallel, pytest.mark.soak]

UNIT = 2 / LAYERS
"""Bytes for each of the model's parameters that one gathered unit takes, in 16 bits."""


MODULES = {"torch": "torch", "keras": "tensorflow"}
FORMULAS: dict[str, dict[str, Callable[[int], float]]] = {
    "torch": {
        "zero=1:shared=false": lambda size: 4 + 12 / size,
        "zero=1:shared=true": lambda size: 2 / size + 2 + 12 / size,
        "zero=2:bucket_mb=4:shared=false": lambda size: 2 + 14 / size,
        "zero=2:bucket_mb=4:shared=true": lambda size: 16 / size,
        "zero=3:shared=false": lambda size: 16 / size,
        "zero=3:bucket_mb=4:shared=true": lambda size: 16 / size,
    },
    "keras": {
        "zero=1": lambda size: 4 + 12 / size,
        "zero=2:bucket_mb=4": lambda size: 2 + 14 / size,
        "zero=3": lambda size: 16 / size,
    },
}
"""In mixed precision: 2 bytes of parameters, 2 of gradients, and 12 of master weights and Adam's two moments."""


def freed(framework: str, strategy: str, size: int) -> float:
    """Return the bytes of gradients that are freed after the update: the shards of stages 2 and 3 in PyTorch."""
    return 2 / size if framework == "torch" and not strategy.startswith("zero=1") else 0.0


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("framework", list(FORMULAS))
def test_ranks_hold_what_the_formulas_say(framework: str, size: int) -> None:
    if find_spec(MODULES[framework]) is None:
        pytest.skip(f"{MODULES[framework]} is not installed")
    formulas = {strategy: formula(size) for strategy, formula in FORMULAS[framework].items()}
    workload, registry = Workload(ModelFigures(10**9)), PluginManager().load().strategies
    for strategy, formula in formulas.items():
        line = f"{strategy},precision=bf16"
        estimated = estimate_line(workload, line, num_ranks=size, registry=registry).estimate.total()
        assert estimated == pytest.approx(formula * 1e9), f"what `unidist estimate` says of {line}"
    found = {}
    with RankPool(size) as pool:
        for strategy in formulas:
            [found[strategy], *others] = pool.run(bytes_per_parameter, (framework, f"{strategy},precision=bf16"))
            assert others == [found[strategy]] * (size - 1)
    print({strategy: tuple(round(value, 2) for value in values) for strategy, values in found.items()})
    for strategy, formula in formulas.items():
        between, forward = found[strategy]
        formula -= freed(framework, strategy, size)
        assert between == pytest.approx(formula, rel=0.1), f"{strategy}, between two updates: {found}"
        # The unit that computes, and the next one; a rank without units has all gathered, which `between` holds.
        assert formula * 0.9 < forward < (formula + 2 * UNIT) * 1.1, f"{strategy}, within a forward: {found}"
