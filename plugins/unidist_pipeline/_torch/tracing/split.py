"""Chooses the stages of a PyTorch model: cut at named modules, or so that stages cost about the same.

Cuts are made before calls of modules. A module is looked into (its own modules become possible cuts) if it is a
Sequential or contains a split point, and otherwise only if the stages would be too unequal without.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from typing_extensions import override

from unidist.errors import ConfigurationError
from unidist_pipeline._torch.tracing.fx import Forward, may_look_into, trace
from unidist_pipeline._torch.tracing.program import SplitPoint, is_free, listed, point_at, positions, unit_starts
from unidist_pipeline.execution.balance import cut_evenly

_UNEQUAL = 1.5
"""A stage that costs so much more than the mean is taken apart, if that helps."""
_MOST_LOOKS = 24

Costs = Callable[[fx.Graph, Sequence[int]], Sequence[float]]
"""Takes the operations and the places where units begin, and returns what each unit costs."""


class CannotTrace(ConfigurationError):
    """The model cannot be traced by this tracer."""


class Tracer(ABC):
    """Finds the operations of a model."""

    @abstractmethod
    def graph(self, looked_into: Sequence[str]) -> fx.Graph:
        """Return the operations, with at least those of the model and of these modules one by one.

        Raises:
            Exception: of any kind: the model cannot be traced.
        """

    @abstractmethod
    def may_look_into(self, module: torch.nn.Module) -> bool:
        """Return whether the operations of a module's forward can be separated."""


class FxTracer(Tracer):
    """By `torch.fx`, see `trace`: modules that are not looked into run as they are.

    Args:
        model: whole.
        forward: of its class.
        arguments: see `trace`.
    """

    def __init__(self, model: torch.nn.Module, forward: Forward, arguments: Mapping[str, Any]) -> None:
        self._model = model
        self._forward = forward
        self._arguments = arguments

    @override
    def graph(self, looked_into: Sequence[str]) -> fx.Graph:
        return trace(self._model, self._forward, looked_into, self._arguments)

    @override
    def may_look_into(self, module: torch.nn.Module) -> bool:
        return may_look_into(module)


@dataclass(frozen=True)
class ModelCuts:
    """The cuts of a model.

    Args:
        points: beginnings of the stages but the first.
        looked_into: modules.
        obstacle: a module that would have made the stages more equal, and why it could not be looked into; "" if none.
    """

    points: Sequence[SplitPoint]
    looked_into: Sequence[str]
    obstacle: str = ""


def find_points(
    model: torch.nn.Module, tracer: Tracer, num_stages: int, names: Sequence[str] | None, costs: Costs
) -> ModelCuts:
    """Return the beginnings of the stages.

    Args:
        model: whole.
        tracer: of it.
        num_stages: stages to be made.
        names: of split points; None: they are chosen by cost.
        costs: of the units between which cuts are possible.

    Raises:
        CannotTrace: the tracer cannot trace the model, or not down to the split points.
        ConfigurationError: the model is too small, or does not have these split points.
    """
    containers = [
        path
        for path, module in model.named_modules()
        if path and type(module).forward is torch.nn.Sequential.forward and tracer.may_look_into(module)
    ]
    if names is None:
        return _choose(model, tracer, _reached(model, containers), num_stages, costs)
    if len(names) != num_stages - 1:
        raise ConfigurationError(
            f"pipeline: {num_stages} stages begin at {num_stages - 1} split points, besides the first stage, but "
            f"split names {len(names)}: {', '.join(names)}. (Schedules with several stages on each rank need more)"
        )
    above = sorted({parent for name in names for parent in _parents(name)} | set(_reached(model, containers)))
    for path in above:
        module = _module(model, path)
        if not tracer.may_look_into(module) and any(path in _parents(name) for name in names):
            raise ConfigurationError(
                f"pipeline: a split point lies inside of {path!r}, which cannot be looked into, because it has hooks "
                "or a forward of its own (activations=recompute gives it one). Name points outside of it"
            )
    looked_into = [path for path in above if tracer.may_look_into(_module(model, path))]
    for name in names:
        _module(model, name)
    graph = _traced(tracer, looked_into, model)
    points = [SplitPoint(name) for name in names]
    positions(list(graph.nodes), points)
    return ModelCuts(points, looked_into)


def _choose(model: torch.nn.Module, tracer: Tracer, looked_into: list[str], num_stages: int, costs: Costs) -> ModelCuts:
    """Cut so that the stages cost about the same, looking into modules as far as necessary."""
    best: tuple[float, list[SplitPoint], list[str]] | None = None
    graph = _traced(tracer, looked_into, model)
    closed: dict[str, str] = {}
    mean = 0.0
    for _ in range(_MOST_LOOKS):
        nodes = list(graph.nodes)
        starts = unit_starts(nodes, looked_into)
        prices = list(costs(graph, starts)) if starts else []
        mean = sum(prices) / num_stages
        if len(starts) >= num_stages:
            cuts = cut_evenly(prices, num_stages, [_crossing(nodes, place) for place in starts])
            borders = [0, *cuts, len(prices)]
            largest = max(sum(prices[first:last]) for first, last in itertools.pairwise(borders))
            if best is None or largest < best[0] * (1 - 1e-9):
                best = (largest, [point_at(nodes, starts[cut], looked_into) for cut in cuts], list(looked_into))
            if largest <= _UNEQUAL * mean:
                break
        deeper = _look_deeper(model, tracer, graph, looked_into, prices, starts, closed)
        if deeper is None:
            break
        graph, looked_into = deeper
    obstacle = next(iter(closed.values()), "")
    if best is None:
        message = (
            f"pipeline: the model has too few parts for {num_stages} stages: {listed(list(graph.nodes))}. Use fewer "
            "stages, a schedule with fewer stages on each rank, or a model with more modules"
        )
        raise CannotTrace(f"{message}. Not looked into: {obstacle}") if obstacle else ConfigurationError(message)
    return ModelCuts(best[1], best[2], obstacle if best[0] > _UNEQUAL * mean else "")


def _look_deeper(
    model: torch.nn.Module,
    tracer: Tracer,
    graph: fx.Graph,
    looked_into: list[str],
    prices: Sequence[float],
    starts: Sequence[int],
    closed: dict[str, str],
) -> tuple[fx.Graph, list[str]] | None:
    """Look into the most expensive module that can be opened; returns None if there is none.

    Modules that cannot be traced are added to `closed`, with the reason.
    """
    nodes = list(graph.nodes)
    order = sorted(zip(prices, starts, strict=True), key=lambda pair: -pair[0])
    for _, place in order:
        path = point_at(nodes, place, looked_into).path
        module = model.get_submodule(path)
        if path in closed or not any(True for _ in module.children()) or not tracer.may_look_into(module):
            continue
        containers = [
            f"{path}.{name}"
            for name, each in module.named_modules()
            if name and type(each).forward is torch.nn.Sequential.forward and tracer.may_look_into(each)
        ]
        tried = [*looked_into, path, *_reached(model, containers, inside=path)]
        try:
            return tracer.graph(tried), tried
        except Exception as error:  # whatever the module does that cannot be followed: it stays one operation
            closed[path] = f"{path} ({brief(error)})"
    return None


def brief(error: Exception) -> str:
    """Return the message of an error, in one line."""
    first = str(error).strip().partition("\n")[0]
    return first if isinstance(error, ConfigurationError) else f"{type(error).__name__}: {first}"


def _traced(tracer: Tracer, looked_into: Sequence[str], model: torch.nn.Module) -> fx.Graph:
    try:
        return tracer.graph(looked_into)
    except Exception as error:
        where = ", ".join([type(model).__name__, *(path for path in looked_into if path)])
        raise CannotTrace(f"{brief(error)} (looking into {where})") from error


def parameter_costs(model: torch.nn.Module) -> Costs:
    """Return costs by numbers of parameters; a shared one counts at its first use."""

    def costs(graph: fx.Graph, starts: Sequence[int]) -> Sequence[float]:
        found, seen = [0.0] * len(starts), set()
        unit = -1
        for place, node in enumerate(graph.nodes):
            if unit + 1 < len(starts) and place >= starts[unit + 1]:
                unit += 1
            for parameter in _parameters_used(model, node):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    found[max(unit, 0)] += parameter.numel()
        return found

    return costs


def _parameters_used(model: torch.nn.Module, node: fx.Node) -> list[torch.Tensor]:
    if is_free(node):
        return []
    return [
        each
        for used in (node, *node.all_input_nodes)
        if used is node or is_free(used)
        for each in parameters_of_node(model, used)
    ]


def parameters_of_node(model: torch.nn.Module, node: fx.Node) -> list[torch.Tensor]:
    """Return the parameters that an operation uses."""
    if node.op == "call_module":
        return list(model.get_submodule(str(node.target)).parameters())
    if node.op == "get_attr":
        parent, _, name = str(node.target).rpartition(".")
        found = model.get_submodule(parent)._parameters.get(name)
        return [] if found is None else [found]
    return []


def _crossing(nodes: Sequence[fx.Node], place: int) -> float:
    """Return the number of values that pass if a stage begins at a position."""
    behind = set(nodes[place:])
    return float(sum(1 for node in nodes[:place] if not is_free(node) and any(user in behind for user in node.users)))


def _reached(model: torch.nn.Module, containers: Sequence[str], inside: str = "") -> list[str]:
    """Return those containers that are run by a module that is looked into, or by another one of them."""
    found: list[str] = []
    for path in containers:
        parents = [
            each for each in _parents(path) if each != inside and each.startswith(f"{inside}." if inside else "")
        ]
        if all(each in found or _only_lists(_module(model, each)) for each in parents):
            found.append(path)
    return found


def _only_lists(module: torch.nn.Module) -> bool:
    """Return whether a module is never run itself."""
    return isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict)


def _parents(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _module(model: torch.nn.Module, path: str) -> torch.nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        names = [name for name, _ in model.named_modules() if name]
        shown = ", ".join(names[:40]) + (f" and {len(names) - 40} more" if len(names) > 40 else "")
        raise ConfigurationError(f"pipeline:split names {path!r}, but the model has: {shown}") from None
