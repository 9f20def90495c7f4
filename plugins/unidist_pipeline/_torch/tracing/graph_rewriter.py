"""Rewrites the result of `torch.export` so that a program can run it on the model itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from unidist.errors import ConfigurationError
from unidist_pipeline._torch.tracing.structures import ArgumentTensor, Assembly, Constant
from unidist_pipeline._torch.tracing.values import tensors_in

INSIDE = "model"
"""What the model is called in the module that is exported."""


class GraphRewriter:
    """Makes operations that look parameters and buffers up in the model.

    Args:
        program: from `torch.export`, of a module that has the model as `INSIDE` and takes a list of tensors.
        arguments: of the model, by name; their tensors are this list.
        structure: of the model's outputs, with a `ValueIndex` in the place of each value that the module returns.
    """

    def __init__(self, program: Any, arguments: Mapping[str, Any], structure: Any) -> None:
        self._program = program
        self._structure = structure
        self._places = [(name, place) for name, value in arguments.items() for place in range(len(tensors_in(value)))]
        self._graph = fx.Graph()
        self._values: dict[fx.Node, fx.Node] = {}

    def rewrite(self) -> tuple[fx.Graph, frozenset[str]]:
        """Return the operations, and the paths of the buffers that they change."""
        signature = self._program.graph_signature
        changes = set()
        kinds = {each.arg.name: each for each in signature.input_specs}
        places = iter(self._places)
        for node in self._program.graph.nodes:
            if node.op == "placeholder":
                self._values[node] = self._input(kinds[node.name], places)
            elif node.op == "get_attr":
                self._values[node] = self._constant(getattr(self._program.graph_module, str(node.target)))
            elif node.op == "output":
                self._return(node)
            else:
                made = self._graph.node_copy(node, self._values.__getitem__)
                made.meta = {"nn_module_stack": _stack(node)}
                written = _written(made)
                if written is not None and written.op == "get_attr":
                    changes.add(str(written.target))
                    made = written  # a stage that uses the buffer afterwards uses its own, not a message
                self._values[node] = made
        return self._graph, frozenset(changes)

    def _input(self, found: Any, places: Iterator[tuple[str, int]]) -> fx.Node:
        from torch.export.graph_signature import InputKind

        path = None if found.target is None else str(found.target).removeprefix(f"{INSIDE}.")
        match found.kind:
            case InputKind.PARAMETER | InputKind.BUFFER:
                return self._graph.create_node("get_attr", str(path))
            case InputKind.USER_INPUT:
                name, place = next(places)
                return self._graph.call_function(ArgumentTensor(place), (self._graph.placeholder(name),))
            case InputKind.CONSTANT_TENSOR:
                value = self._program.constants[found.target]
                if isinstance(value, torch.nn.Parameter) or value.requires_grad:
                    raise ConfigurationError(
                        f"the model uses a tensor that is trained, {path!r}, but is no parameter of a module there; "
                        "keep it as an attribute of a module"
                    )
                return self._constant(value)
        raise ConfigurationError(f"the model uses {path or found.arg}, of a kind that cannot be divided: {found.kind}")

    def _constant(self, value: Any) -> fx.Node:
        return self._graph.call_function(Constant(value))

    def _return(self, node: fx.Node) -> None:
        parts: Any = fx.node.map_arg(node.args[0], self._values.__getitem__)
        self._graph.output(self._graph.call_function(Assembly(self._structure), tuple(parts)))


def _stack(node: fx.Node) -> dict[str, tuple[str, Any]]:
    """Return the modules that an operation is in, by keys that differ for each call, outermost first."""
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    found = {}
    for key, (path, kind) in stack.items():
        if str(path).startswith(f"{INSIDE}."):
            found[key] = (str(path).removeprefix(f"{INSIDE}."), kind)
    return found


def _written(node: fx.Node) -> fx.Node | None:
    """Return the argument that an operation changes and returns."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.args:
        return None
    first = node.target._schema.arguments[0].alias_info
    writes = first is not None and first.is_write and node.target.__name__.partition(".")[0].endswith("_")
    return node.args[0] if writes and isinstance(node.args[0], fx.Node) else None
