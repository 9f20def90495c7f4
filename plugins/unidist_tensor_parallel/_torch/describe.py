"""Describes the layers of a model that might be cut, for `layout.roles.automatic`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from unidist_tensor_parallel._torch.layers.heads import head_counts
from unidist_tensor_parallel._torch.layers.linear import LINEARS
from unidist_tensor_parallel._torch.layers.vocabulary import why_whole
from unidist_tensor_parallel._torch.tracing import feeds_of
from unidist_tensor_parallel.layout.roles import CuttableLayer, LayerKind, Role

_FUSED = {"qkv", "qkv_proj", "c_attn", "wqkv", "in_proj", "to_qkv", "attn_qkv", "query_key_value"}
_SEPARATE = [
    {f"{letter}{suffix}" for suffix in ("", "_proj", "_lin", "_linear")} | {f"w{letter}", f"to_{letter}", word}
    for letter, word in (("q", "query"), ("k", "key"), ("v", "value"))
]
_OUTPUT = {
    "o", "wo", "o_proj", "out", "out_proj", "out_lin", "output", "proj", "project", "c_proj", "to_out", "dense",
}  # fmt: skip


def describe(model: nn.Module) -> list[CuttableLayer]:
    """Return the layers of a model, in its order; one that has several paths, once."""
    modules = dict(model.named_modules())
    feeds = feeds_of(model)
    attention = _attention_roles(modules)
    return [
        layer
        for path, module in modules.items()
        if not isinstance(modules.get(path.rpartition(".")[0]), nn.MultiheadAttention)  # its own output layer
        for layer in _described(path, module, feeds, attention)
    ]


def _described(
    path: str, module: nn.Module, feeds: dict[str, tuple[str, ...]], attention: dict[str, tuple[Role, int]]
) -> Iterator[CuttableLayer]:
    if isinstance(module, nn.MultiheadAttention):
        why = "" if type(module) is nn.MultiheadAttention else f"{_subclass(module)} of torch.nn.MultiheadAttention"
        yield CuttableLayer(
            path, LayerKind.ATTENTION, module.embed_dim, module.embed_dim, units=module.num_heads, whole_because=why
        )
    elif isinstance(module, nn.Linear):
        role, units = attention.get(path, (None, 0))
        why = "" if type(module) in LINEARS else f"{_subclass(module)} of torch.nn.Linear"
        yield CuttableLayer(
            path,
            LayerKind.LINEAR,
            module.in_features,
            module.out_features,
            feeds.get(path),
            id(module.weight),
            role,
            units,
            why,
        )
    elif isinstance(module, nn.Embedding):
        why = why_whole(module)
        if not why and type(module) is not nn.Embedding:
            why = f"{_subclass(module)} of torch.nn.Embedding"
        yield CuttableLayer(
            path,
            LayerKind.EMBEDDING,
            module.num_embeddings,
            module.embedding_dim,
            weight=id(module.weight),
            whole_because=why,
        )


def _subclass(module: nn.Module) -> str:
    return f"what {type(module).__name__} computes is not known: it is a subclass"


def _attention_roles(modules: dict[str, nn.Module]) -> dict[str, tuple[Role, int]]:
    """Return roles and number of heads of linear layers that a module combines to an attention in its own code.

    Recognized by names, and by a count of heads in the module; each parent has projections and one output layer.
    """
    found: dict[str, tuple[Role, int]] = {}
    for parent, module in modules.items():
        linears = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
        fused = [name for name in linears if name.lower() in _FUSED]
        separate = [[name for name in linears if name.lower() in names] for names in _SEPARATE]
        outputs = [name for name in linears if name.lower() in _OUTPUT]
        counts = head_counts(modules, f"{parent}.x" if parent else "x")
        if counts is None or len(outputs) != 1:
            continue
        _, heads, kv_heads = counts
        if len(fused) == 1 and not any(separate):
            width, rest = divmod(linears[fused[0]].out_features, heads + 2 * kv_heads)
            roles = {fused[0]: Role.QKV}
        elif not fused and all(len(names) == 1 for names in separate):
            (query,), (key,), (value,) = separate
            width, rest = divmod(linears[query].out_features, heads)
            if {linears[key].out_features, linears[value].out_features} != {kv_heads * width}:
                continue
            roles = dict.fromkeys((query, key, value), Role.HEADS)
        else:
            continue
        if rest or linears[outputs[0]].in_features != heads * width:
            continue
        prefix = f"{parent}." if parent else ""
        for name, role in (roles | {outputs[0]: Role.ROW}).items():
            found[prefix + name] = (role, kv_heads)
    return found


def parameter_count(model: torch.nn.Module) -> int:
    """Return the number of elements of a model's parameters, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())
