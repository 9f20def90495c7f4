"""The operations of a model, assigned to stages, and the values that pass between stages."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from unidist.errors import ConfigurationError


class Free:
    """Marks operations that every stage computes for itself, in addition to those that `is_free` knows."""


def is_free(node: fx.Node) -> bool:
    """Return whether every stage computes it for itself: all ranks have the inputs, and the parameters they use."""
    return node.op in ("placeholder", "get_attr") or isinstance(node.target, Free)


@dataclass(frozen=True)
class SplitPoint:
    """The beginning of a stage.

    Args:
        path: of the module.
        call: which call of it, from 0, if the model runs it several times.
    """

    path: str
    call: int = 0

    def __str__(self) -> str:
        return self.path if not self.call else f"{self.path} (call {self.call + 1})"


@dataclass
class StageProgram:
    """The operations of one stage.

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
        starts: positions of the operations at which stages begin, in order, besides the first stage.
    """

    def __init__(self, graph: fx.Graph, starts: Sequence[int]) -> None:
        nodes = list(graph.nodes)
        self._output = next(node for node in nodes if node.op == "output")
        stage_of = _stages_of(nodes, starts)
        self.stages = [StageProgram(number) for number in range(len(starts) + 1)]
        for node in nodes:
            if not is_free(node):
                self.stages[stage_of[node]].operations.append(node)
        for stage in self.stages:  # what is free goes where it is used
            used = {each for node in stage.operations for each in node.all_input_nodes if is_free(each)}
            for node in reversed(nodes):
                if node in used:
                    used.update(node.all_input_nodes)
            stage.operations[:0] = [node for node in nodes if node in used]
        for node in nodes:
            if is_free(node):
                continue
            last = max((stage_of[user] for user in node.users), default=stage_of[node])
            for number in range(stage_of[node], last):
                self.stages[number].passed.append(node)
                self.stages[number + 1].received.append(node)
        self._forget = [_last_uses(stage) for stage in self.stages]

    @classmethod
    def cut_at(cls, graph: fx.Graph, points: Sequence[SplitPoint]) -> Program:
        """Return the stages that begin at these points, besides the first one.

        Raises:
            ConfigurationError: the model does not reach a split point, or not in this order.
        """
        return cls(graph, positions(list(graph.nodes), points))

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
    """Return the position of each split point among the operations.

    Raises:
        ConfigurationError: one is not among them, or they are in another order.
    """
    found = []
    for point in points:
        places = _beginnings(nodes, point.path)
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
    if found and all(is_free(node) for node in nodes[: found[0]]):
        raise ConfigurationError(
            f"pipeline: the model runs nothing before {str(points[0])!r}, so the first stage would be empty. Name the "
            "points at which the second and the later stages begin"
        )
    return found


def listed(nodes: Sequence[fx.Node], most: int = 40) -> str:
    """Return the modules that are run, for messages."""
    around = [list(calls_around(node)) for node in nodes if not is_free(node)]
    names = list(dict.fromkeys(paths[-1] for paths in around if paths))
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") or "no modules"


def unit_of(node: fx.Node, looked_into: Collection[str]) -> tuple[str, str] | None:
    """Return the outermost module around an operation that is not looked into: its path, and a key of the call.

    None: the operation is in the forward of modules that are looked into.
    """
    return next(((path, key) for path, key in calls_around(node).items() if path not in looked_into), None)


def unit_starts(nodes: Sequence[fx.Node], looked_into: Collection[str]) -> list[int]:
    """Return the positions at which calls of such modules begin."""
    found, before = [], None
    for place, node in enumerate(nodes):
        if is_free(node):
            continue
        unit = unit_of(node, looked_into)
        if unit is not None and unit != before:
            found.append(place)
        before = unit
    return found


def point_at(nodes: Sequence[fx.Node], place: int, looked_into: Collection[str]) -> SplitPoint:
    """Return the split point of a position that `unit_starts` has found."""
    unit = unit_of(nodes[place], looked_into)
    assert unit is not None
    return SplitPoint(unit[0], _beginnings(nodes, unit[0]).index(place))


def calls_around(node: fx.Node) -> dict[str, str]:
    """Return the modules in whose forward an operation is, outermost first: paths, with a key of each call."""
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    found = {str(entry[0]): str(key) for key, entry in stack.items() if entry[0]}
    if node.op == "call_module":
        found.setdefault(str(node.target), node.name)
    return found


def _beginnings(nodes: Sequence[fx.Node], path: str) -> list[int]:
    """Return the positions at which calls of a module begin."""
    found, before = [], None
    for place, node in enumerate(nodes):
        if is_free(node):
            continue
        call = calls_around(node).get(path)
        if call is not None and call != before:
            found.append(place)
        before = call
    return found


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
    args, kwargs = _filled(node.args, values), _filled(node.kwargs, values)
    if node.op == "output":
        return args[0]
    if node.op == "call_module":
        return model.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _filled(argument: Any, values: Mapping[fx.Node, Any]) -> Any:
    """Return an argument with values in the place of operations, in plain lists and dicts: fx has immutable ones."""
    if isinstance(argument, fx.Node):
        return values[argument]
    if isinstance(argument, dict):
        return {key: _filled(item, values) for key, item in argument.items()}
    if isinstance(argument, list):
        return [_filled(item, values) for item in argument]
    if isinstance(argument, tuple):
        items = [_filled(item, values) for item in argument]
        return type(argument)(*items) if hasattr(argument, "_fields") else type(argument)(items)
    return fx.node.map_arg(argument, values.__getitem__)  # slices, ranges
