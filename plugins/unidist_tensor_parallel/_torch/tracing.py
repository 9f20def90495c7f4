"""Finds the users of a model's linear layers by symbolic tracing (torch.fx), part by part if the whole fails."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F  # noqa: N812 - everybody's name for it

ELSEWHERE = ""
"""Whatever is not a linear layer."""

_MODULES = (
    nn.Identity, nn.Dropout, nn.AlphaDropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU,
    nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid,
    nn.LogSigmoid,
)  # fmt: skip
_FUNCTIONS: set[Any] = {
    F.dropout, F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.celu, F.gelu, F.silu, F.mish, F.tanh, F.sigmoid,
    F.softplus, F.hardtanh, F.hardswish, F.hardsigmoid, F.logsigmoid, torch.relu, torch.tanh, torch.sigmoid,
    torch.square, torch.sin, torch.cos, torch.abs, torch.exp, torch.mul, torch.add, torch.sub, torch.pow, operator.mul,
    operator.add, operator.sub, operator.neg, operator.pow,
}  # fmt: skip
_METHODS = {
    "relu", "relu_", "tanh", "sigmoid", "square", "abs", "exp", "mul", "mul_", "add", "sub", "pow", "neg", "contiguous",
    "float", "double", "half", "bfloat16", "clone", "detach", "clamp",
}  # fmt: skip

_NAMED = (
    (("fc1",), "fc2"), (("c_fc",), "c_proj"), (("up_proj", "gate_proj"), "down_proj"), (("up_proj",), "down_proj"),
    (("up", "gate"), "down"), (("up",), "down"), (("w1", "w3"), "w2"), (("w1",), "w2"), (("linear1",), "linear2"),
    (("lin1",), "lin2"), (("dense_h_to_4h",), "dense_4h_to_h"), (("wi_0", "wi_1"), "wo"), (("wi",), "wo"),
)  # fmt: skip
"""Names by which models call the layers of a feed-forward net; looked for where tracing fails."""


def feeds_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return, for each linear layer that could be traced, the users of its outputs after element-wise operations alone.

    Paths of linear layers, and `ELSEWHERE`. A layer that has several paths has the users of all of them, under its
    first path. The model is not run, and not changed.
    """
    found: dict[str, tuple[str, ...]] = {}
    _follow(model, "", found)
    first = {path: places[0] for places in places_of(model) for path in places}
    users: dict[str, set[str]] = {}
    for path, targets in found.items():
        users.setdefault(first[path], set()).update(first.get(each, each) for each in targets)
    return {path: tuple(sorted(targets)) for path, targets in users.items()}


def places_of(model: nn.Module) -> list[list[str]]:
    """Return the paths of each module of a model: a model may use one in several places."""
    found: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        found.setdefault(id(module), []).append(path)
    return list(found.values())


def _follow(module: nn.Module, path: str, found: dict[str, tuple[str, ...]]) -> None:
    if not any(isinstance(each, nn.Linear) for each in module.modules()) or isinstance(module, nn.MultiheadAttention):
        return
    if type(module) in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        found[_join(path, "linear1")] = (_join(path, "linear2"),)
        found[_join(path, "linear2")] = (ELSEWHERE,)
        return
    # A trace stops at torch's own layers that consist of others (an encoder): these are looked into one by one.
    opaque = [each for each in module.modules() if _is_torch(each) and not isinstance(each, nn.Sequential)]
    if not any(any(isinstance(inner, nn.Linear) for inner in each.children()) for each in opaque):
        traced = None if _is_list(module) else _traced(module)
        if traced is not None:
            found.update(_feeds(module, path, traced))
            return
    by_name = _by_name(module, path)
    found.update(by_name)
    for name, child in module.named_children():
        if _join(path, name) not in by_name:
            _follow(child, _join(path, name), found)


def _traced(module: nn.Module) -> fx.Graph | None:
    try:
        return fx.Tracer().trace(module)
    except Exception:  # whatever a forward raises on values that are not there
        return None


def _feeds(module: nn.Module, path: str, graph: fx.Graph) -> dict[str, tuple[str, ...]]:
    modules = dict(module.named_modules())
    origins: dict[fx.Node, frozenset[str]] = {}
    feeds: dict[str, set[str]] = {}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        from_all = frozenset().union(*(origins[each] for each in inputs)) if inputs else frozenset({ELSEWHERE})
        target = modules.get(str(node.target)) if node.op == "call_module" else None
        if _is_elementwise(node, target):
            origins[node] = from_all
            if ELSEWHERE in from_all:
                _mark(from_all, ELSEWHERE, feeds)
            continue
        is_linear = isinstance(target, nn.Linear)
        _mark(from_all, str(node.target) if is_linear and ELSEWHERE not in from_all else ELSEWHERE, feeds)
        origins[node] = frozenset({str(node.target) if is_linear else ELSEWHERE})
        if is_linear:
            feeds.setdefault(str(node.target), set())
    found: dict[str, tuple[str, ...]] = {}
    for name, targets in feeds.items():
        found[_join(path, name)] = tuple(sorted(_join(path, each) if each else each for each in targets))
    return found


def _mark(sources: frozenset[str], target: str, feeds: dict[str, set[str]]) -> None:
    for each in sources - {ELSEWHERE}:
        feeds.setdefault(each, set()).add(target)


def _is_elementwise(node: fx.Node, target: nn.Module | None) -> bool:
    if node.op == "call_module":
        return isinstance(target, _MODULES)
    if node.op == "call_function":
        return node.target in _FUNCTIONS
    return node.op == "call_method" and node.target in _METHODS


def _by_name(module: nn.Module, path: str) -> dict[str, tuple[str, ...]]:
    children: dict[str, Any] = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
    for before, last in _NAMED:
        if last in children and all(name in children for name in before):
            if {children[name].out_features for name in before} != {children[last].in_features}:
                continue
            found: dict[str, tuple[str, ...]] = {_join(path, name): (_join(path, last),) for name in before}
            return found | {_join(path, last): (ELSEWHERE,)}
    return {}


def _is_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn")


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
