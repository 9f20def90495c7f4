"""The operations of a model, given to stages, and what passes between them."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from unidist.errors import ConfigurationError

_FREE = ("placeholder", "get_attr")
"""Operations that every stage does for itself: all ranks have the inputs, and parameters are where they are used."""


@dataclass(frozen=True)
class SplitPoint:
    """Where a stage begins.

    Args:
        path: of the module.
        call: which call of it, from 0, where the model runs it several times.
    """

    path: str
    call: int = 0

    def __str__(self) -> str:
        return self.path if not self.call else f"{self.path} (call {self.call + 1})"


@dataclass
class StageProgram:
    """What one stage does.

    Args:
        number: of the stage.
        operations: in order.
        received: the values that come from the stage before, in the order of the message.
        passed: those that go to the next stage.
    """

    number: int
    operations: list[fx.Node] = field(default_factory=list)
    received: list[fx.Node] = field(default_factory=list)
    passed: list[fx.Node] = field(default_factory=list)

    def attributes(self) -> set[str]:
        """Return the paths of modules, parameters and buffers that the stage uses."""
        return {str(node.target) for node in self.operations if node.op in ("call_module", "get_attr")}


class Program:
    """A model's operations in stages.

    Args:
        graph: of the whole model.
        points: where stages begin, in order; one less than there are stages.

    Raises:
        ConfigurationError: the model does not come to a split point, or not in this order.
    """

    def __init__(self, graph: fx.Graph, points: Sequence[SplitPoint]) -> None:
        nodes = list(graph.nodes)
        self._output = next(node for node in nodes if node.op == "output")
        starts = positions(nodes, points)
        stage_of = _stages_of(nodes, starts)
        self.stages = [StageProgram(number) for number in range(len(points) + 1)]
        for node in nodes:
            if node.op not in _FREE:
                self.stages[stage_of[node]].operations.append(node)
        for stage in self.stages:  # what is free goes where it is used
            used = {each for node in stage.operations for each in node.all_input_nodes if each.op in _FREE}
            stage.operations[:0] = [node for node in nodes if node in used]
        for node in nodes:
            if node.op in _FREE:
                continue
            last = max((stage_of[user] for user in node.users), default=stage_of[node])
            for number in range(stage_of[node], last):
                self.stages[number].passed.append(node)
                self.stages[number + 1].received.append(node)
        self._forget = [_last_uses(stage) for stage in self.stages]

    def run(self, number: int, model: torch.nn.Module, arguments: Mapping[str, Any], received: Sequence[Any]) -> Any:
        """Run one stage; returns the values that it passes on, or, the last one, the model's outputs.

        Args:
            number: of the stage.
            model: has the modules and parameters of the stage.
            arguments: of the model, by name.
            received: as `run` of the stage before returned them.
        """
        stage = self.stages[number]
        values: dict[fx.Node, Any] = dict(zip(stage.received, received, strict=True))
        for node, forgotten in zip(stage.operations, self._forget[number], strict=True):
            values[node] = _run(node, model, arguments, values)
            for each in forgotten:
                del values[each]
        if self._output in values:
            return values[self._output]
        return tuple(values[node] for node in stage.passed)


def positions(nodes: Sequence[fx.Node], points: Sequence[SplitPoint]) -> list[int]:
    """Return the place of each split point among the operations.

    Raises:
        ConfigurationError: one is not among them, or they are in another order.
    """
    found = []
    for point in points:
        places = [place for place, _ in enumerate(nodes) if _begins(nodes, place, point.path)]
        if len(places) <= point.call:
            raise ConfigurationError(
                f"pipeline: a stage shall begin at {str(point)!r}, but the model does not run it. It runs, in this "
                f"order: {listed(nodes)}"
            )
        found.append(places[point.call])
    for earlier, later, first, second in zip(found, found[1:], points, points[1:], strict=False):
        if earlier >= later:
            raise ConfigurationError(
                f"pipeline: the model runs {str(second)!r} before {str(first)!r}, or they are the same; name split "
                "points in the order in which the model runs them"
            )
    if found and not any(node.op not in _FREE for node in nodes[: found[0]]):
        raise ConfigurationError(
            f"pipeline: the model runs nothing before {str(points[0])!r}, so the first stage would be empty. Name the "
            "points at which the second and the later stages begin"
        )
    return found


def listed(nodes: Sequence[fx.Node], most: int = 40) -> str:
    """Return the modules that are run, for messages."""
    names = [str(node.target) for node in nodes if node.op == "call_module"]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") or "no modules"


def _begins(nodes: Sequence[fx.Node], place: int, path: str) -> bool:
    """Say whether the model begins to run a module at a place."""
    if path not in _inside(nodes[place]):
        return False
    if str(nodes[place].target) == path and nodes[place].op == "call_module":
        return True
    return place == 0 or path not in _inside(nodes[place - 1])


def _inside(node: fx.Node) -> Collection[str]:
    """Return the paths of the modules in whose forward an operation is."""
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    return {entry[0] for entry in stack.values()} | ({str(node.target)} if node.op == "call_module" else set())


def _stages_of(nodes: Sequence[fx.Node], starts: Sequence[int]) -> dict[fx.Node, int]:
    stage_of, current = {}, 0
    for place, node in enumerate(nodes):
        while current < len(starts) and place >= starts[current]:
            current += 1
        stage_of[node] = current
    return stage_of


def _last_uses(stage: StageProgram) -> list[list[fx.Node]]:
    """Return for each operation the values that the stage does not need afterwards."""
    kept = set(stage.passed)
    last: dict[fx.Node, int] = dict.fromkeys(stage.received, -1)
    for place, node in enumerate(stage.operations):
        last[node] = place
        for each in node.all_input_nodes:
            last[each] = place
    forgotten: list[list[fx.Node]] = [[] for _ in stage.operations]
    for node, place in last.items():
        if place >= 0 and node not in kept and node.op != "output":
            forgotten[place].append(node)
    return forgotten


def _run(node: fx.Node, model: torch.nn.Module, arguments: Mapping[str, Any], values: Mapping[fx.Node, Any]) -> Any:
    if node.op == "placeholder":
        return arguments[str(node.target)]
    if node.op == "get_attr":
        return operator.attrgetter(str(node.target))(model)
    args = fx.node.map_arg(node.args, values.__getitem__)
    kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
    if node.op == "output":
        return args[0]
    if node.op == "call_module":
        return model.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)
