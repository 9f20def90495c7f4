"""ZeRO takes as much of the machine's memory as its formulas say, for a model of 100 million parameters."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from unidist.estimating.comparison import estimate_line
from unidist.estimating.figures import ModelFigures, Workload
from unidist.plugins import PluginManager
from unidist.runner import RankPool

pytest.importorskip("torch", reason="the training is in PyTorch")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _torch_zero_memory import LAYERS, bytes_per_parameter

pytestmark = [pytest.mark.parallel, pytest.mark.soak]

UNIT = 2 / LAYERS
"""Bytes for each of the model's parameters that one gathered unit takes, in 16 bits."""


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_hold_what_the_formulas_say(size: int) -> None:
    # In mixed precision: 2 bytes of parameters, 2 of gradients, and 12 of master weights and Adam's two moments.
    formulas = {
        "zero=1:shared=false": 4 + 12 / size,
        "zero=1:shared=true": 2 / size + 2 + 12 / size,
        "zero=2:bucket_mb=4:shared=false": 2 + 14 / size,
        "zero=2:bucket_mb=4:shared=true": 16 / size,
        "zero=3:shared=false": 16 / size,
        "zero=3:bucket_mb=4:shared=true": 16 / size,
    }
    workload, registry = Workload(ModelFigures(10**9)), PluginManager().load().strategies
    for strategy, formula in formulas.items():
        line = f"{strategy},precision=bf16"
        estimated = estimate_line(workload, line, num_ranks=size, registry=registry).estimate.total()
        assert estimated == pytest.approx(formula * 1e9), f"what `unidist estimate` says of {line}"
    found = {}
    with RankPool(size) as pool:
        for strategy in formulas:
            [found[strategy], *others] = pool.run(bytes_per_parameter, (f"{strategy},precision=bf16",))
            assert others == [found[strategy]] * (size - 1)
    print({strategy: tuple(round(value, 2) for value in values) for strategy, values in found.items()})
    for strategy, formula in formulas.items():
        between, forward = found[strategy]
        assert between == pytest.approx(formula, rel=0.1), f"{strategy}, between two updates: {found}"
        # The unit that computes, and the next one; a rank without units has all gathered, which `between` holds.
        assert formula * 0.9 < forward < (formula + 2 * UNIT) * 1.1, f"{strategy}, within a forward: {found}"
