"""Numbers of heads in attentions written in a model's own code from linear layers.

Such a module reshapes by a number of heads that it keeps in an attribute; the attribute becomes this rank's number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from unidist.errors import ConfigurationError
from unidist_tensor_parallel.layout.cuts import Cut, Heads

HEADS = ("heads", "num_heads", "n_head", "n_heads", "nhead", "num_attention_heads")
KV_HEADS = ("kv_heads", "num_kv_heads", "n_kv_head", "n_kv_heads", "num_key_value_heads")
WIDTHS = ("inner_dim", "all_head_size")
"""Attributes that say the width of all heads together; a name such as `width` or `embed_dim` may mean the residual."""

MAX_LEVELS = 2
"""So far above a projection the attribute is looked for: `attn.heads` of `attn.q`, and of `attn.in.q`."""


@dataclass
class _Attention:
    """A module that reshapes by heads.

    Args:
        module: it.
        heads: the division.
        names: of attributes, with their values on each rank.
    """

    module: Any
    heads: Heads
    names: dict[str, list[int]] = field(default_factory=dict)


class HeadCounts:
    """The attentions of a model that are cut through their linear layers.

    Args:
        modules: of the model, by path.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._modules = modules
        self._found: dict[str, _Attention] = {}

    def fused(self, path: str, layer: torch.nn.Linear, size: int) -> Heads:
        """Return the heads of a fused projection to queries, keys and values.

        Raises:
            ConfigurationError: no number of heads is found, or it does not fit; says what to do.
        """
        owner, heads, kv_heads = self._counts(path)
        units = heads + 2 * kv_heads
        if layer.out_features % units:
            raise ConfigurationError(
                f"tensor: the {layer.out_features} outputs of {path!r} are no whole number for each of {heads} + 2 * "
                f"{kv_heads} heads ({owner or 'the model'}). If it is no projection to queries, keys and values, "
                "give it the role column_gather"
            )
        return self._attention(owner, Heads(heads, kv_heads, layer.out_features // units, size, what=owner)).heads

    def single(self, path: str, layer: torch.nn.Linear, size: int) -> Heads:
        """Return the heads of a projection to queries, keys or values.

        Raises:
            ConfigurationError: as `fused`.
        """
        owner, heads, kv_heads = self._counts(path)
        if owner in self._found:
            return self._found[owner].heads
        # Queries come first, or keys and values have as many heads.
        if layer.out_features % heads:
            raise ConfigurationError(
                f"tensor: the {layer.out_features} outputs of {path!r} do not divide into {heads} heads "
                f"({owner or 'the model'}). Give it the role column_gather, or leave it whole (replicate)"
            )
        return self._attention(owner, Heads(heads, kv_heads, layer.out_features // heads, size, what=owner)).heads

    def inputs(self, path: str, inputs: int) -> Cut | None:
        """Return the cut of a row layer's inputs if they are the outputs of an attention; otherwise None."""
        for owner in _owners(path):
            found = self._found.get(owner)
            if found is not None and inputs == found.heads.heads * found.heads.width:
                return found.heads.queries(1)
        return None

    def apply(self, rank: int) -> None:
        """Let all attentions reshape by the heads of a rank."""
        for found in self._found.values():
            for name, values in found.names.items():
                setattr(found.module, name, values[rank])

    def _attention(self, owner: str, heads: Heads) -> _Attention:
        if owner not in self._found:
            module = self._modules[owner]
            ranks = range(heads.size)
            query, kv = [heads.local_heads(rank) for rank in ranks], [heads.local_kv_heads(rank) for rank in ranks]
            names = dict.fromkeys(_having(module, HEADS), query) | dict.fromkeys(_having(module, KV_HEADS), kv)
            whole = heads.heads * heads.width
            for name in WIDTHS:
                if getattr(module, name, None) == whole:
                    names[name] = [count * heads.width for count in query]
            self._found[owner] = _Attention(module, heads, names)
        return self._found[owner]

    def _counts(self, path: str) -> tuple[str, int, int]:
        found = head_counts(self._modules, path)
        if found is None:
            raise ConfigurationError(
                f"tensor: {path!r} is to be cut by heads, but none of {', '.join(map(repr, _owners(path)))} has an "
                f"attribute that says how many ({', '.join(HEADS)}), by which its forward reshapes. Add one, or give "
                "the projections the role column_gather and the output layer row_split, which leave the attention whole"
            )
        return found


def head_counts(modules: Mapping[str, torch.nn.Module], path: str) -> tuple[str, int, int] | None:
    """Return path, query heads and key-value heads of the module of a projection, if it has such attributes."""
    for owner in _owners(path):
        names = _having(modules[owner], HEADS)
        if names:
            heads = int(getattr(modules[owner], names[0]))
            shared = _having(modules[owner], KV_HEADS)
            return owner, heads, int(getattr(modules[owner], shared[0])) if shared else heads
    return None


def projection_cut(heads: Heads, layer: torch.nn.Linear) -> Cut:
    """Return the cut of a projection to queries, or to keys or values where these have fewer heads.

    Raises:
        ConfigurationError: its outputs are neither.
    """
    for total, cut in ((heads.heads, heads.queries), (heads.kv_heads, heads.keys)):
        if layer.out_features == total * heads.width:
            return cut(0)
    raise ConfigurationError(
        f"tensor: a projection of {heads.what!r} has {layer.out_features} outputs; expected {heads.heads} or "
        f"{heads.kv_heads} heads of {heads.width}. Give its projections the role column_gather"
    )


def _owners(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:-level]) for level in range(1, min(MAX_LEVELS, len(parts)) + 1)]


def _having(module: torch.nn.Module, names: tuple[str, ...]) -> list[str]:
    values = {name: getattr(module, name, None) for name in names}
    return [name for name, value in values.items() if isinstance(value, int) and not isinstance(value, bool)]
