"""Parameters and activations of transformers, against the figures of papers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unidist.builtin.data import DataParallel
from unidist.builtin.identity import Identity
from unidist.cost_model.figures import Workload
from unidist.cost_model.memory import HeldActivations, RankMemory
from unidist.cost_model.memory_interface import EstimatesMemory
from unidist.errors import ConfigurationError
from unidist.registry import Registry
from unidist.strategy import StrategySpec
from unidist.strategy.interface import Plan
from unidist.strategy.plan import make_plan
from unidist_planner.memory.estimate import estimate, plain_memory
from unidist_planner.memory.transformer import Transformer

GPT2 = Transformer(layers=12, hidden=768, vocabulary=50257, sequence=1024)
GPT3 = Transformer(layers=96, hidden=12288, vocabulary=51200, sequence=2048, heads=96)


class Holds(Identity, EstimatesMemory):
    """Changes what is kept of the forward pass."""

    held = HeldActivations()

    def estimate(self, memory: RankMemory, workload: Workload, plan: Plan) -> RankMemory:
        return replace(memory, activations=replace(self.held, itemsize=memory.activations.itemsize))


def held(activations: HeldActivations) -> Holds:
    strategy = Holds()
    object.__setattr__(strategy, "held", activations)
    return strategy


def test_the_parameters_of_gpt2_are_counted_exactly() -> None:
    assert GPT2.figures().parameters == 124_439_808  # as the published checkpoint has


def test_the_parameters_of_gpt3() -> None:
    assert GPT3.figures().parameters / 1e9 == pytest.approx(174.6, abs=0.05)


@pytest.mark.parametrize("model", [GPT2, GPT3, replace(GPT2, batch=8, heads=6)])
def test_a_layer_keeps_what_the_paper_says(model: Transformer) -> None:
    s, b, h, a = model.sequence, model.batch, model.hidden, model.num_heads
    kept = model.bytes(2)
    assert kept.largest_block == s * b * h * 34 + 5 * a * s * s * b
    assert kept.blocks == model.layers * kept.largest_block
    assert kept.block_inputs == model.layers * 2 * s * b * h
    assert kept.outside == 4 * s * b * h + 4 * s * b * model.vocabulary + s * b * h


def test_the_attention_of_gpt3_keeps_about_70_percent() -> None:
    """Section 5 of the paper: for GPT-3 the part that fused attention saves is 70 % of a layer's."""
    fused = replace(GPT3, attention="fused").bytes(2)
    assert 1 - fused.blocks / GPT3.bytes(2).blocks == pytest.approx(0.70, abs=0.01)


def test_32_bit_doubles_all_but_masks_and_logits() -> None:
    half, full = GPT2.bytes(2), GPT2.bytes(4)
    assert full.block_inputs == 2 * half.block_inputs
    assert half.blocks < full.blocks < 2 * half.blocks


@pytest.mark.parametrize("policy", ["keep", "recompute", "offload"])
def test_activations_by_policy(policy: str) -> None:
    workload = Workload(GPT2.figures(), precision="bf16", activations=GPT2)
    registry: Registry[StrategySpec] = Registry("strategy")
    plan = make_plan([held(HeldActivations(policy=policy)), DataParallel()], 1, registry)  # type: ignore[arg-type]
    found = estimate(workload, plan)
    kept = GPT2.bytes(2)
    on_device = {
        "keep": kept.blocks + kept.outside,
        "recompute": kept.block_inputs + kept.largest_block + kept.outside,
        "offload": kept.largest_block + kept.outside,
    }[policy]
    model = GPT2.figures().parameters * 16
    assert found.total() == model + on_device
    assert found.total("host") == (kept.blocks if policy == "offload" else 0)
    assert found.unknown == ()


def test_the_width_of_activations_follows_the_precision() -> None:
    workload = Workload(GPT2.figures(), activations=GPT2)
    assert plain_memory(workload).activations.itemsize == 4
    assert plain_memory(replace(workload, precision="bf16")).activations.itemsize == 2


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"layers": 0}, "layers=0: give at least 1"),
        ({"heads": 7}, "heads=7 does not divide hidden=768"),
        ({"attention": "flash"}, "unknown attention 'flash'"),
        ({"dropout": "bits"}, "unknown dropout 'bits'"),
    ],
)
def test_impossible_sizes_are_errors(sizes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        replace(GPT2, **sizes)  # type: ignore[arg-type]
