"""PyTorch's half of tensor parallelism: cuts a model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from unidist.checkpoint.state import CARRIED, placements_of
from unidist.errors import ConfigurationError
from unidist_tensor_parallel._places import CutParameters
from unidist_tensor_parallel._plan import Assignment, Role, assign, automatic, report
from unidist_tensor_parallel._torch_axis import TensorAxis
from unidist_tensor_parallel._torch_cutting import Cutter
from unidist_tensor_parallel._torch_describe import describe, parameter_count
from unidist_tensor_parallel._torch_guards import install_guards
from unidist_tensor_parallel._torch_random import CutRandom
from unidist_tensor_parallel._torch_region import Region
from unidist_tensor_parallel._torch_sequence import make_sequence_regions
from unidist_torch.memory import memory_kind

if TYPE_CHECKING:
    from unidist.context import Context
    from unidist_tensor_parallel.strategy import Tensor

_log = logging.getLogger("unidist")


def partition(strategy: Tensor, model: torch.nn.Module, context: Context) -> torch.nn.Module:
    """Cut a model in place; see `Strategy.partition`. Collective over the axis.

    Raises:
        ConfigurationError: nothing can be cut, a pattern matches nothing, or a layer cannot be cut as asked.
    """
    found = assignment(model, strategy.roles(), strategy.size)
    cutting = {path: role for path, role in found.roles.items() if role not in (Role.REPLICATE, Role.SEQUENCE)}
    if not cutting:
        whys = "; ".join(f"{path}: {why}" for path, why in list(found.reasons.items())[:8]) or "it has no linear layers"
        raise ConfigurationError(
            f"tensor={strategy.size}: no layer of {type(model).__name__} can be cut automatically ({whys}). Say which "
            "to cut, tensor=N:plan=PATTERN=ROLE+PATTERN=ROLE, or use data or pipeline instead"
        )
    kinds = {memory_kind(parameter).partition(":")[0] for parameter in model.parameters()}
    axis = TensorAxis(context, kinds)
    random = CutRandom(axis)
    regions: dict[str, Region] = {"": Region(axis, random)}
    if strategy.sequence or Role.SEQUENCE in found.roles.values():
        regions |= make_sequence_regions(model, found.roles, axis, random)
    total = parameter_count(model)
    sizes = {path: parameter.numel() for path, parameter in model.named_parameters()}
    cutter = Cutter(model, found.roles, regions)
    cutter.cut()
    cutter.check_shared()
    random.agree()
    install_guards(model, cutter.cuts, regions, random)
    carried: Any = CutParameters(cutter.cuts, axis.rank, axis.size, placements_of(model))
    object.__setattr__(model, CARRIED, carried)
    if context.topology.rank == 0:
        cut = sum(count for path, count in sizes.items() if path in cutter.cuts)
        _log.warning("%s", report(cutting, found.reasons, cut=cut, total=total, size=axis.size))
    return model


def assignment(model: torch.nn.Module, plan: Mapping[str, Role] | None, size: int) -> Assignment:
    """Return the roles of a model's layers, as a plan says or found automatically."""
    if plan is None:
        return automatic(describe(model), size)
    layers = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    return Assignment(assign(plan, layers), {})
