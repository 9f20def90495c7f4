"""Tensor parallelism for PyTorch: cuts a model."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from unidist.checkpoint.format.interface import STATE_ATTRIBUTE, placements_of
from unidist.errors import ConfigurationError
from unidist_tensor_parallel._torch.cutter import Cutter
from unidist_tensor_parallel._torch.describe import describe, parameter_count
from unidist_tensor_parallel._torch.guards import InputCheck, install_guards, keep_off_fused_paths, watch_rows
from unidist_tensor_parallel._torch.layers.axis import TensorAxis
from unidist_tensor_parallel._torch.layers.random import CutRandom
from unidist_tensor_parallel._torch.layers.rank_bound import RankBound
from unidist_tensor_parallel._torch.layers.region import Region
from unidist_tensor_parallel._torch.layers.sequence import BlockRow, find_rows, make_sequence_regions
from unidist_tensor_parallel._torch.probe import check_outputs, find_attentions, try_on_all_ranks
from unidist_tensor_parallel._torch.sequence_probe import RowProbe, needs_all_tokens
from unidist_tensor_parallel._torch.tracing import feeds_of, places_of
from unidist_tensor_parallel.binding import KeepsCuts, TensorBinding
from unidist_tensor_parallel.layout.cut_parameters import CutParameters
from unidist_tensor_parallel.layout.cuts import AXIS
from unidist_tensor_parallel.layout.roles import (
    Role,
    RoleAssignment,
    assign,
    automatic,
    check_pairs,
    check_roles,
    general,
    matches,
    report,
    spread,
)
from unidist_tensor_parallel.library_roles import TensorRolesSpec
from unidist_torch.memory import memory_kind
from unidist_torch.models import CutParameter, guard, leave_uncompiled, name_guard

if TYPE_CHECKING:
    from unidist.runtime_api import RuntimeAPI
    from unidist_tensor_parallel.strategy import TensorParallel


_CUT = "_unidist_tensor"


@dataclass(frozen=True)
class _CutModel(RankBound):
    """State of a divided model that later generations of an elastic job need.

    Args:
        axis: the ranks.
        random: of the model.
        roles: by path of the layer.
        rows: of blocks between whose layers activations are cut along the sequence.
        gathering: paths of modules in them whose own code needs all tokens, see `make_sequence_regions`.
        paths: of the parameters that are cut.
        check: of the model's inputs; None: it is never run as a whole.
    """

    axis: TensorAxis
    random: CutRandom
    roles: Mapping[str, Role]
    rows: Sequence[BlockRow]
    gathering: Sequence[str]
    paths: Collection[str]
    check: InputCheck | None = None


class TorchTensor(TensorBinding, KeepsCuts):
    """See `TensorBinding` and `KeepsCuts`."""

    def partition(self, strategy: TensorParallel, model: torch.nn.Module, context: RuntimeAPI) -> torch.nn.Module:
        """Cut a model in place; see `Strategy.partition`. Collective over the axis.

        Raises:
            ConfigurationError: nothing can be cut, a pattern matches nothing, or a layer cannot be cut as asked.
        """
        leave_uncompiled("unidist_tensor_parallel")
        kinds = {memory_kind(parameter).partition(":")[0] for parameter in model.parameters()}
        axis = TensorAxis(context, kinds)
        found = assignment(model, strategy.roles(), axis, context)
        cutting = {path: role for path, role in found.roles.items() if role not in (Role.REPLICATE, Role.SEQUENCE)}
        if not cutting:
            whys = (
                "; ".join(f"{path}: {why}" for path, why in list(found.reasons.items())[:8])
                or "it has no linear layers"
            )
            raise ConfigurationError(
                f"tensor={strategy.size}: no layer of {type(model).__name__} can be cut automatically ({whys}). Say "
                "which to cut, tensor=N:plan=PATTERN=ROLE+PATTERN=ROLE, or use data or pipeline instead"
            )
        others = [name for name in context.mesh.model_axes if name != AXIS]
        rows: list[BlockRow] = []
        probes: list[RowProbe] = []
        gathering: list[str] = []
        if strategy.sequence or Role.SEQUENCE in found.roles.values():
            if others:
                raise ConfigurationError(
                    f"tensor: sequence=true needs all blocks on every rank of its axis, and they are divided by "
                    f"{' and '.join(others)}. Leave sequence out, or the other strategy"
                )
            rows = find_rows(model, found.roles)
            probes = [RowProbe(row.paths, model, found.roles, tokens=2 * axis.size, dim=row.dim) for row in rows]
            gathering = _gathering(model, rows, found)
        total = parameter_count(model)
        sizes = {path: parameter.numel() for path, parameter in model.named_parameters()}
        cut = self._cut(model, axis, found.roles, rows, gathering)
        for probe in probes:
            probe.check()
            if probe.expected is None:
                found.notes.append(
                    f"{general(probe.paths[0])}: its tokens are cut untried, since the blocks cannot be run on one "
                    "activation alone"
                )
        cut.random.synchronize()
        self._guard(model, cut, context)
        if context.topology.rank == 0:
            num_cut = sum(count for path, count in sizes.items() if path in cut.paths)
            text = report(cutting, found.reasons, found.notes, cut=num_cut, total=total, size=axis.size)
            print(text, file=sys.stderr, flush=True)
        return model

    def _cut(
        self,
        model: torch.nn.Module,
        axis: TensorAxis,
        roles: Mapping[str, Role],
        rows: Sequence[BlockRow],
        gathering: Sequence[str],
    ) -> _CutModel:
        """Cut the layers by their roles. Exchanges nothing."""
        random = CutRandom(axis)
        regions: dict[str, Region] = {"": Region(axis, random)}
        if rows:
            regions |= make_sequence_regions(model, rows, roles, axis, random, gathering=gathering)
        cutter = Cutter(model, roles, regions)
        cutter.cut()
        cutter.check_shared()
        attached: Any = CutParameters(cutter.cuts, axis.rank, axis.size, placements_of(model))
        object.__setattr__(model, STATE_ATTRIBUTE, attached)
        return _CutModel(axis, random, roles, rows, gathering, frozenset(cutter.cuts))

    def _guard(self, model: torch.nn.Module, cut: _CutModel, context: RuntimeAPI) -> None:
        watch_rows(model, cut.rows)
        keep_off_fused_paths(model)
        if context.mesh.model_axes == (AXIS,):  # one that is divided along another axis too is never run as a whole
            cut = replace(cut, check=install_guards(model, Region(cut.axis, cut.random), cut.random))
        for path, parameter in model.named_parameters():
            if path in cut.paths:
                remedy = "let the layer keep its weight whole (role replicate in tensor=N:plan=PATTERN=ROLE)"
                name_guard(parameter, path, context.topology.rank, strategy=AXIS, remedy=remedy)
                guard(parameter, CutParameter)
        object.__setattr__(model, _CUT, cut)

    @override
    def division(self, model: torch.nn.Module) -> tuple[dict[str, Role], bool, list[str]]:
        cut: _CutModel = model.__dict__[_CUT]
        return dict(cut.roles), bool(cut.rows), list(cut.gathering)

    @override
    def rejoin(self, model: torch.nn.Module, context: RuntimeAPI, division: Any) -> torch.nn.Module:
        roles, has_rows, gathering = division
        kinds = {memory_kind(parameter).partition(":")[0] for parameter in model.parameters()}
        axis = TensorAxis(context, kinds)
        rows = find_rows(model, roles) if has_rows else []
        self._guard(model, self._cut(model, axis, roles, rows, gathering), context)
        return model

    @override
    def rebind(self, model: torch.nn.Module, context: RuntimeAPI) -> None:
        cut: _CutModel = model.__dict__[_CUT]
        cut.axis.rebind(context)
        cut.random.end()  # of a step that was broken off
        if cut.check is not None:
            cut.check.renew()


def _gathering(model: torch.nn.Module, rows: Sequence[BlockRow], found: RoleAssignment) -> list[str]:
    """Return the attentions of rows of blocks whose own code needs all tokens, with a note on each kind."""
    owners = []
    for attention in find_attentions(model, found.roles, whole=True):
        row = next((row for row in rows if any(_is_in(attention.owner, path) for path in row.paths)), None)
        if row is not None and needs_all_tokens(model, attention, dim=row.dim):
            owners.append(attention.owner)
            found.notes.append(
                f"{general(attention.owner)}: its forward reshapes by the number of tokens of its input: they are "
                "gathered before it and cut again afterwards"
            )
    return owners


def _is_in(path: str, owner: str) -> bool:
    return path == owner or path.startswith(f"{owner}.")


def _take_library_roles(model: torch.nn.Module, found: RoleAssignment, context: RuntimeAPI, size: int) -> bool:
    """Let roles that the model's library knows replace those that were found, but for the vocabulary."""
    taken = False
    linears = [path for path, module in model.named_modules() if type(module) is torch.nn.Linear]
    for spec in context.plugins.registry(TensorRolesSpec):
        for pattern, name in check_roles(spec.load()(model, size) or {"": str(Role.REPLICATE)}, spec.name).items():
            for path in linears:
                if matches(pattern, path) and found.roles.get(path) is not Role.VOCABULARY:
                    found.roles[path] = name
                    found.reasons.pop(path, None)
                    taken = True
    return taken


def assignment(
    model: torch.nn.Module, patterns: Mapping[str, Role] | None, axis: TensorAxis, context: RuntimeAPI
) -> RoleAssignment:
    """Return the roles of a model's layers: by patterns, by its library, or found automatically. Collective.

    Raises:
        ConfigurationError: a pattern matches nothing, or the roles do not go together.
    """
    if patterns is None:
        found = automatic(describe(model), axis.size)
        if _take_library_roles(model, found, context, axis.size):
            check_pairs(found.roles, feeds_of(model))
        found.roles.update(spread(found.roles, places_of(model)))
    else:
        layers = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
        found = RoleAssignment(spread(assign(patterns, layers), places_of(model)), {})
        check_pairs(found.roles, feeds_of(model))
        check_outputs(model, found.roles)
    outcomes: dict[object, bool | None] = {}
    for attention in find_attentions(model, found.roles):
        owner = model.get_submodule(attention.owner)
        key = (type(owner), attention.roles, tuple((name, each.shape) for name, each in owner.named_parameters()))
        if key not in outcomes:
            outcomes[key] = try_on_all_ranks(model, attention, axis)
        if outcomes[key] is False and patterns is not None:
            raise ConfigurationError(
                f"tensor: the attention {attention.owner!r} gives other numbers when "
                f"{', '.join(attention.paths())} are cut by heads: its forward reshapes by something else "
                "than its count of heads, or orders a fused "
                f"projection otherwise than queries, keys, values. Give its projections the role {Role.COLUMN_GATHER} "
                f"and its output layer {Role.ROW_SPLIT}"
            )
        if outcomes[key] is False:
            for path, role in attention.paths().items():
                found.roles[path] = Role.ROW_SPLIT if role is Role.ROW else Role.COLUMN_GATHER
            found.notes.append(
                f"{general(attention.owner)}: its heads cannot be cut, since its forward reshapes by something else "
                "than its count of heads: each rank computes the whole attention between its cut layers"
            )
        elif outcomes[key] is None:
            found.notes.append(
                f"{general(attention.owner)}: taken for an attention by its names; it cannot be tried by itself"
            )
    return found
