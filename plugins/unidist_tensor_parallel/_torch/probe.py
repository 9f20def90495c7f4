"""Tries attentions written in a model's own code, on one rank alone: does the cut one give this rank's heads?

Names do not tell whether a forward reshapes by the attribute that was found, nor in which order a fused projection has
its outputs. So a copy of the module is cut and run on random numbers beside the whole one: the input of its output
layer must be this rank's part of that of the whole one's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from unidist.errors import ConfigurationError
from unidist_tensor_parallel._torch.layers.heads import head_counts
from unidist_tensor_parallel._torch.layers.linear import LINEARS
from unidist_tensor_parallel._torch.layers.region import Region
from unidist_tensor_parallel.layout.cuts import Cut
from unidist_tensor_parallel.layout.roles import Role

_BATCH, _TOKENS = 2, 5


@dataclass(frozen=True)
class Attention:
    """An attention made of linear layers.

    Args:
        owner: path of the module that knows its number of heads, and reshapes by it.
        roles: of its layers, by path in the owner: projections, and the output layer.
        output: path of the output layer in the owner.
    """

    owner: str
    roles: tuple[tuple[str, Role], ...]
    output: str

    def paths(self) -> dict[str, Role]:
        """Return the roles by path in the model."""
        return {(f"{self.owner}.{name}" if self.owner else name): role for name, role in self.roles}


class AloneRegion(Region):
    """A region of one rank without the others: nothing is exchanged, and sums stay partial.

    Args:
        axis: has `rank` and `size`.
    """

    def __init__(self, axis: Any) -> None:
        self.axis = axis

    @override
    def begin_cut(self, layer: nn.Module, outputs: torch.Tensor) -> None:
        """See `Region.begin_cut`: nothing is drawn."""

    @override
    def end_cut(self) -> None:
        pass

    @override
    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return x

    @override
    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return x


def find_attentions(model: nn.Module, roles: Mapping[str, Role], *, whole: bool = False) -> list[Attention]:
    """Return the attentions among the roles that have one output layer beside their projections.

    Args:
        model: whole.
        roles: of its layers.
        whole: also those whose heads are not cut: projections that gather their outputs.
    """
    projecting = (Role.QKV, Role.HEADS, *((Role.COLUMN_GATHER,) if whole else ()))
    ending = (Role.ROW, *((Role.ROW_SPLIT,) if whole else ()))
    modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    groups: dict[tuple[str, str], dict[str, Role]] = {}
    widths: dict[tuple[str, str], int] = {}
    for path, role in roles.items():
        counts = head_counts(modules, path) if role in projecting else None
        if counts is not None and type(modules[path]) in LINEARS:
            owner, heads, kv_heads = counts
            key = (owner, path.rpartition(".")[0])
            outputs = modules[path].out_features
            fused = role is Role.QKV or (role is Role.COLUMN_GATHER and outputs > modules[path].in_features)
            width = heads * (outputs // (heads + 2 * kv_heads)) if fused else outputs
            groups.setdefault(key, {})[path] = role
            widths[key] = max(width, widths.get(key, 0))
    found = []
    for (owner, parent), projections in groups.items():
        rows = [
            path
            for path, role in roles.items()
            if role in ending
            and path.rpartition(".")[0] == parent
            and modules[path].in_features == widths[owner, parent]
        ]
        if len(rows) == 1:
            start = len(owner) + 1 if owner else 0
            inside = {path[start:]: role for path, role in {**projections, rows[0]: roles[rows[0]]}.items()}
            found.append(Attention(owner, tuple(inside.items()), rows[0][start:]))
    return found


def check_outputs(model: nn.Module, roles: Mapping[str, Role]) -> None:
    """Check that modules whose projections are cut have a row layer.

    Raises:
        ConfigurationError: a module has projections that are cut, and no row layer.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, role in roles.items():
        counts = head_counts(modules, path) if role in (Role.QKV, Role.HEADS) else None
        if counts is None:
            continue
        inside = f"{counts[0]}." if counts[0] else ""
        if not any(each is Role.ROW and other.startswith(inside) for other, each in roles.items()):
            raise ConfigurationError(
                f"tensor:plan: {path!r} is cut by heads ({role}), and no layer of {counts[0]!r} has the role row: give "
                f"it to the layer that takes the attention's output, or give {path!r} the role {Role.COLUMN_GATHER}"
            )


def trial(module: nn.Module, attention: Attention, axis: Any) -> bool | None:
    """Return whether the cut attention gives this rank's part of the whole one's; None if it cannot be run by itself.

    Args:
        module: the owner, whole; it is not changed.
        attention: what to try.
        axis: has `rank` and `size`.

    Raises:
        ConfigurationError: it cannot be cut at all.
    """
    from unidist_tensor_parallel._torch.cutter import Cutter  # which knows this module's caller

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        whole = copy.deepcopy(module).eval()
        first = next(iter(attention.roles))[0]
        width = int(whole.get_submodule(first).get_parameter("weight").shape[1])
        some = next(whole.parameters())
        x = torch.randn(_BATCH, _TOKENS, width, dtype=some.dtype, device=some.device)
        expected = _given(whole, attention.output, x)
        if expected is None:
            return None
        cutter = Cutter(whole, dict(attention.roles), {"": AloneRegion(axis)})
        cutter.cut()
        cut: Cut = whole.get_submodule(attention.output).unidist_cut  # type: ignore[assignment]  # set by `cut_row`
        found = _given(whole, attention.output, x)
        indices = torch.tensor(cut.indices(axis.rank), device=x.device)
        if found is None or found.shape != (part := expected.index_select(-1, indices)).shape:
            return False
        return bool(torch.allclose(found.double(), part.double(), rtol=1e-3, atol=1e-4))


def try_on_all_ranks(model: nn.Module, attention: Attention, axis: Any) -> bool | None:
    """Return the result of `trial` on all ranks together. Collective."""
    try:
        own = trial(model.get_submodule(attention.owner), attention, axis)
    except ConfigurationError:
        own = False
    code = {None: 1.0, True: 0.0, False: 2.0}[own]
    worst = float(axis.largest(torch.tensor([code], dtype=torch.float64))[0])
    return {0.0: True, 1.0: None, 2.0: False}[worst]


class _Seen(Exception):
    """Raised when the output layer is reached: the rest of the forward is not needed."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = value


def _given(module: nn.Module, output: str, x: torch.Tensor) -> torch.Tensor | None:
    """Return the input of a module's output layer; None if the module cannot be run on one activation."""

    def stop(_: nn.Module, args: tuple[Any, ...]) -> None:
        raise _Seen(args[0])

    handle = module.get_submodule(output).register_forward_pre_hook(stop)
    try:
        module(x)
    except _Seen as seen:
        return seen.value
    except Exception:  # whatever a forward raises that wants other arguments, or shapes
        return None
    finally:
        handle.remove()
    return None
