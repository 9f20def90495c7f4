"""Expert parallelism for PyTorch: divides a model."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import nn
from typing_extensions import override

from unidist.checkpoint.format import STATE_ATTRIBUTE, placements_of
from unidist.errors import ConfigurationError
from unidist.mesh import REPLICA_AXES, SAMPLE_AXES, SHARD_REPLICA_AXES
from unidist_expert_parallel._torch.layers.axis import ExpertAxis
from unidist_expert_parallel._torch.layers.experts import ExpertList
from unidist_expert_parallel._torch.layers.mixture import MixtureOfExperts
from unidist_expert_parallel._torch.library import (
    LOOKED_FOR,
    WholeBalanceLoss,
    divide_stacked,
    has_balance_loss,
    is_stacked,
)
from unidist_expert_parallel.binding import ExpertBinding
from unidist_expert_parallel.layout.owners import check_division
from unidist_expert_parallel.layout.placements import ExpertParameters
from unidist_torch.memory import memory_kind
from unidist_torch.models import CutParameter, guard, name_guard

if TYPE_CHECKING:
    from unidist.runtime_api import RuntimeAPI
    from unidist_expert_parallel.strategy import ExpertParallel


class TorchExperts(ExpertBinding):
    """See `ExpertBinding`."""

    @override
    def partition(self, strategy: ExpertParallel, model: nn.Module, context: RuntimeAPI) -> nn.Module:
        ours, stacked = _found(model)
        if not ours and not stacked:
            raise ConfigurationError(_nothing_found(strategy.size, model))
        num_experts: dict[str, int] = {path: layer.num_experts for path, layer in ours.items()}
        num_experts |= {path: int(module.num_experts) for path, module in stacked.items()}
        check_division(num_experts, strategy.size)
        _check_plan(ours, strategy, context)
        kinds = {memory_kind(parameter).partition(":")[0] for parameter in model.parameters()}
        axis = ExpertAxis(context, kinds)
        places = _placements(model, ours, stacked, axis)
        for layer in {id(each): each for each in ours.values()}.values():
            layer.divide(axis)
        for module in {id(each): each for each in stacked.values()}.values():
            divide_stacked(module, axis)
        for path, parameter in model.named_parameters():
            if places.gradient_axis(path) == SHARD_REPLICA_AXES:
                name_guard(parameter, path, context.topology.rank, strategy=strategy.name)
                guard(parameter, CutParameter)
        if stacked and has_balance_loss(model):
            model.register_forward_hook(WholeBalanceLoss(axis), with_kwargs=True)
        attached: Any = places
        object.__setattr__(model, STATE_ATTRIBUTE, attached)
        if context.topology.rank == 0:
            counts = " or ".join(str(count) for count in sorted(set(num_experts.values())))
            text = f"{len(num_experts)} layers of {counts} experts, of which each rank holds one in {axis.size}"
            print(f"unidist: expert={axis.size}: {text}", file=sys.stderr, flush=True)
        return model

    @override
    def output_obstacle(self, model: nn.Module) -> str:
        limited = next((path for path, each in _found(model)[0].items() if each.capacity_factor is not None), None)
        if limited is not None:
            return f"which tokens {limited!r} drops depends on the tokens of all ranks"
        if has_balance_loss(model):
            return "its balance loss is that of the tokens of all ranks"
        return ""


def _found(model: nn.Module) -> tuple[dict[str, MixtureOfExperts], dict[str, Any]]:
    """Return our layers, and modules of other libraries that hold stacked experts, by all their paths."""
    ours, stacked = {}, {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, MixtureOfExperts):
            ours[path] = module
        elif is_stacked(module):
            stacked[path] = module
    inner = tuple(f"{path}." for path in ours)
    return ours, {path: each for path, each in stacked.items() if not path.startswith(inner)}


def _nothing_found(size: int, model: nn.Module) -> str:
    lists = [
        path for path, each in model.named_modules() if isinstance(each, nn.ModuleList) and path.endswith("experts")
    ]
    text = (
        f"expert={size}: no experts found in {type(model).__name__}. Looked for "
        f"unidist_expert_parallel.torch.MixtureOfExperts, and for {LOOKED_FOR}."
    )
    if lists:
        return (
            f"{text} The list {lists[0]!r} is run by a forward that cannot be followed: give its modules to "
            "MixtureOfExperts(experts=...)"
        )
    return f"{text} Use data or tensor instead"


def _check_plan(ours: dict[str, MixtureOfExperts], strategy: ExpertParallel, context: RuntimeAPI) -> None:
    """Raise ConfigurationError if a layer does something that another strategy of the run makes wrong."""
    divides_sequence = context.axis_size(REPLICA_AXES) != context.axis_size(SAMPLE_AXES)
    for path, layer in ours.items():
        if strategy.stages_see_no_model and layer.has_losses:
            raise ConfigurationError(
                f"expert: {path!r} has a balance_coefficient or a z_coefficient, and the loss of a pipeline sees the "
                "last stage alone. Set both to 0, or use another strategy than pipeline"
            )
        if divides_sequence and layer.capacity_factor is not None:
            raise ConfigurationError(
                f"expert: {path!r} has a capacity_factor, which drops the last tokens of a batch, and another strategy "
                "divides the sequence out of order. Set it to None"
            )


def _placements(
    model: nn.Module, ours: dict[str, MixtureOfExperts], stacked: dict[str, Any], axis: ExpertAxis
) -> ExpertParameters:
    rows: list[str] = []
    lists: dict[str, int] = {}
    for path, layer in ours.items():
        prefix = f"{path}.experts" if path else "experts"
        if isinstance(layer.experts, ExpertList):
            lists[prefix] = layer.num_experts
        else:
            rows += [f"{prefix}.{name}" for name, _ in layer.experts.named_parameters()]
    for path, module in stacked.items():
        rows += [f"{path}.{name}" if path else name for name, _ in module.named_parameters()]
    return ExpertParameters(rows, lists, axis.rank, axis.size, placements_of(model))
