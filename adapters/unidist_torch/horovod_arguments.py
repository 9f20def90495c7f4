"""The arguments of Horovod's DistributedOptimizer: checked as Horovod does, with its exceptions, and translated."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from unidist.context import Context
from unidist.exchange_options import ExchangeOptions
from unidist.mesh import DATA_AXIS
from unidist.process_sets import ProcessSet, global_process_set
from unidist_torch.gradient_compression import CompressionLike, compressor_of
from unidist_torch.operations import Average, Op

NamedParameters = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | None
Groups = int | Sequence[Sequence[torch.Tensor]] | None


def exchange_options(
    context: Context,
    optimizer: torch.optim.Optimizer,
    *,
    compression: CompressionLike,
    op: Op,
    gradient_predivide_factor: float,
    num_groups: int,
    groups: Groups,
    sparse_as_dense: bool,
    process_set: ProcessSet,
) -> ExchangeOptions:
    """Return the options for Horovod's arguments, of which it checks those that it is given.

    Raises:
        ValueError: arguments that Horovod refuses.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError(
            f"gradient_predivide_factor={gradient_predivide_factor} with op={Op(op).name}: it splits an average; "
            "use op=Average, or leave it out"
        )
    if not gradient_predivide_factor > 0:
        raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor}: give a factor above 0")
    if num_groups != 0:
        warnings.warn("num_groups is deprecated, as in Horovod; use groups", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set!r} is not registered; pass it to init(process_sets=[...]) or add_process_set")
    is_global = process_set is global_process_set or process_set.process_set_id == 0
    if not is_global and context.axis_size(DATA_AXIS) != context.topology.world_size:
        raise ValueError(f"{process_set!r} and {context.plan.mesh}: a process set needs all ranks on the data axis")
    return ExchangeOptions(
        compressor=compressor_of(compression, context.plugins.compressors),
        predivide_factor=float(gradient_predivide_factor),
        process_set=None if is_global else process_set,
        groups=_groups(optimizer, groups),
        sparse_as_dense=sparse_as_dense,
    )


def check_passes(backward_passes_per_step: int) -> None:
    """Raise ValueError unless there is at least one backward pass per step."""
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step}: it must be > 0")


def names_of(optimizer: torch.optim.Optimizer, named_parameters: NamedParameters) -> dict[str, torch.Tensor] | None:
    """Return the parameters by name, or None where the script gave no names.

    Raises:
        ValueError: not pairs of name and parameter, a name twice, or a parameter of the optimizer without a name.
    """
    if named_parameters is None:
        return None
    pairs: list[Any] = list(named_parameters.items() if isinstance(named_parameters, Mapping) else named_parameters)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually model.named_parameters()"
        )
    seen: set[str] = set()
    duplicates = sorted({name for name, _ in pairs if name in seen or seen.add(name)})  # type: ignore[func-returns-value]  # adds, and is false
    if duplicates:
        raise ValueError(f"parameter names in named_parameters must be unique; found twice: {', '.join(duplicates)}")
    named = {id(parameter) for _, parameter in pairs}
    unnamed = [
        f"{position} of shape {tuple(parameter.shape)}"
        for position, parameter in enumerate(_parameters(optimizer))
        if id(parameter) not in named
    ]
    if unnamed:
        raise ValueError(
            f"named_parameters does not name every parameter of the optimizer; missing: {'; '.join(unnamed)}. Pass the "
            "names of all of its parameters, or none"
        )
    return dict(pairs)


def _groups(optimizer: torch.optim.Optimizer, groups: Groups) -> int | tuple[tuple[int, ...], ...] | None:
    if groups is None:
        return None
    if isinstance(groups, int):
        if groups <= 0:
            raise ValueError(f"groups={groups}: give a positive number of groups, or a list of lists of torch.Tensor")
        return groups
    if not isinstance(groups, Sequence):
        raise ValueError(f"groups should be a positive integer or a list of lists of torch.Tensor, not {type(groups)}")
    positions = {id(parameter): position for position, parameter in enumerate(_parameters(optimizer))}
    used: set[int] = set()
    for group in groups:
        for parameter in group:
            if not isinstance(parameter, torch.Tensor):
                raise ValueError(f"groups must consist of torch.Tensor, not {type(parameter).__name__}")
            if id(parameter) in used:
                raise ValueError("a parameter can only appear once in groups")
            used.add(id(parameter))
    # As in Horovod, what is not the optimizer's is left out.
    return tuple(tuple(positions[id(item)] for item in group if id(item) in positions) for group in groups)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
