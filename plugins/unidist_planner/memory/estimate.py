"""Puts figures and strategies together: bytes on one rank, by category and place."""

from __future__ import annotations

from dataclasses import dataclass

from unidist.cost_model.figures import ActivationBytes, Workload
from unidist.cost_model.memory import CATEGORIES, HeldActivations, Holding, Place, RankMemory
from unidist.cost_model.memory_interface import EstimatesMemory
from unidist.strategy.interface import Plan

FLOAT32_BYTES = 4.0
HALF_BYTES = 2.0


@dataclass(frozen=True)
class EstimateLine:
    """One row of an estimate: so many bytes of a kind, somewhere."""

    name: str
    num_bytes: float
    place: Place = "device"


@dataclass(frozen=True)
class Estimate:
    """Peak memory of one rank. `unknown` names what the figures do not tell."""

    lines: tuple[EstimateLine, ...]
    unknown: tuple[str, ...] = ()

    def total(self, place: Place = "device") -> float:
        """Return all bytes in one place."""
        return sum(line.num_bytes for line in self.lines if line.place == place)

    def bytes_of(self, name: str) -> float:
        """Return the bytes of one category, wherever they are."""
        return sum(line.num_bytes for line in self.lines if line.name == name)


def plain_memory(workload: Workload) -> RankMemory:
    """Return what a rank holds without any strategy: everything."""
    own = workload.model.parameter_bytes or FLOAT32_BYTES
    if workload.precision in ("bf16", "fp16"):
        weights, state, master = HALF_BYTES, FLOAT32_BYTES, FLOAT32_BYTES
    else:
        weights = state = FLOAT32_BYTES if workload.precision == "fp32" else own
        master = 0.0
    return RankMemory(
        parameters=Holding(weights),
        gradients=Holding(weights),
        master=Holding(master),
        optimizer=Holding(state * workload.states_each),
        activations=HeldActivations(itemsize=max(1, round(weights))),
    )


def estimate(workload: Workload, plan: Plan) -> Estimate:
    """Return what one rank holds of a workload with the strategies of a plan. Pure.

    Args:
        workload: model, batch and optimizer.
        plan: checked; strategies without the capability `EstimatesMemory` change nothing.
    """
    return in_bytes(rank_memory(workload, plan), workload)


def rank_memory(workload: Workload, plan: Plan) -> RankMemory:
    """Return widths and shares of what one rank holds, see `estimate`."""
    memory = plain_memory(workload)
    for strategy in plan.strategies:
        if isinstance(strategy, EstimatesMemory):
            memory = strategy.estimate(memory, workload, plan)
    return memory


def in_bytes(memory: RankMemory, workload: Workload) -> Estimate:
    """Return the bytes that widths and shares of a workload come to."""
    return Estimate((*_model_lines(memory, workload), *_activation_lines(memory, workload)), _unknown(workload))


def _model_lines(memory: RankMemory, workload: Workload) -> list[EstimateLine]:
    model = workload.model
    lines = []
    for category in CATEGORIES:
        held = memory.holding(category)
        count = model.parameters if category == "parameters" else model.num_trained
        if held.bytes_each:
            lines.append(EstimateLine(_NAMES[category], count * held.bytes_each * held.share, held.place))
    for item in memory.working:
        lines.append(EstimateLine(item.name, item.num_elements * memory.holding(item.like).bytes_each))
    return lines


def _activation_lines(memory: RankMemory, workload: Workload) -> list[EstimateLine]:
    if workload.activations is None:
        return []
    held = memory.activations
    kept = workload.activations.bytes(held.itemsize)
    lines = [EstimateLine("activations", _on_device(held, kept) * held.share)]
    if held.policy == "offload":
        lines.append(EstimateLine("activations", kept.blocks * held.share, held.place))
    return lines


def _on_device(held: HeldActivations, kept: ActivationBytes) -> float:
    if held.policy == "recompute":
        return kept.block_inputs + kept.largest_block + kept.outside
    if held.policy == "offload":
        return kept.largest_block + kept.outside
    return kept.blocks + kept.outside


def _unknown(workload: Workload) -> tuple[str, ...]:
    unknown = []
    if workload.activations is None:
        unknown.append("activations")
    if workload.model.largest_unit is None:
        unknown.append("the largest unit that stage 3 gathers")
    return tuple(unknown)


_NAMES = {"parameters": "parameters", "gradients": "gradients", "master": "master copies", "optimizer": "optimizer"}
