"""Where a PyTorch model is cut: at the modules that are named, or so that stages cost about the same.

Cuts are made before calls of modules. A module is looked into (its own modules become places to cut at) where it is a
Sequential or contains a split point, and otherwise only if the stages would be too unequal without.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from unidist.errors import ConfigurationError
from unidist_pipeline._balance import cut_evenly
from unidist_pipeline._torch_program import Program, SplitPoint, listed, positions
from unidist_pipeline._torch_trace import Forward, may_look_into, trace

_UNEQUAL = 1.5
"""A stage that costs so much more than the mean is taken apart, if that helps."""
_MOST_LOOKS = 24

Trace = Callable[[Sequence[str]], fx.Graph]
Costs = Callable[[fx.Graph, Sequence[int]], Sequence[float]]
"""Takes the operations and the places where units begin, and returns what each unit costs."""


def find_points(
    model: torch.nn.Module,
    forward: Forward,
    constants: dict[str, Any],
    num_stages: int,
    names: Sequence[str] | None,
    costs: Costs,
) -> tuple[list[SplitPoint], list[str]]:
    """Return where the stages but the first begin, and the modules that are looked into.

    Args:
        model: whole.
        forward: of its class.
        constants: see `trace`.
        num_stages: stages to be made.
        names: of split points; None: they are chosen by cost.
        costs: of the units between which is chosen.

    Raises:
        ConfigurationError: the model cannot be followed, is too small, or has not these split points.
    """

    def follow(looked_into: Sequence[str]) -> fx.Graph:
        return trace(model, forward, looked_into, constants)

    containers = [
        path
        for path, module in model.named_modules()
        if path and type(module).forward is torch.nn.Sequential.forward and may_look_into(module)
    ]
    if names is None:
        return _choose(model, follow, _reached(model, containers), num_stages, costs)
    if len(names) != num_stages - 1:
        raise ConfigurationError(
            f"pipeline: {num_stages} stages begin at {num_stages - 1} split points, besides the first stage, but "
            f"split names {len(names)}: {', '.join(names)}. (Schedules with several stages on each rank need more)"
        )
    above = sorted({parent for name in names for parent in _parents(name)} | set(_reached(model, containers)))
    for path in above:
        module = _module(model, path)
        if not may_look_into(module) and any(path in _parents(name) for name in names):
            raise ConfigurationError(
                f"pipeline: a split point lies inside of {path!r}, which cannot be looked into, because it has hooks "
                "or a forward of its own (activations=recompute gives it one). Name points outside of it"
            )
    looked_into = [path for path in above if may_look_into(_module(model, path))]
    for name in names:
        _module(model, name)
    graph = _followed(follow, looked_into, model)
    points = [SplitPoint(name) for name in names]
    positions(list(graph.nodes), points)
    return points, looked_into


def _choose(
    model: torch.nn.Module, follow: Trace, looked_into: list[str], num_stages: int, costs: Costs
) -> tuple[list[SplitPoint], list[str]]:
    """Cut so that the stages cost about the same, looking into modules as far as that is needed."""
    best: tuple[float, list[SplitPoint], list[str]] | None = None
    graph = _followed(follow, looked_into, model)
    closed: set[str] = set()
    for _ in range(_MOST_LOOKS):
        nodes = list(graph.nodes)
        starts = [place for place, node in enumerate(nodes) if node.op == "call_module"]
        prices = list(costs(graph, starts)) if starts else []
        mean = sum(prices) / num_stages
        if len(starts) >= num_stages:
            cuts = cut_evenly(prices, num_stages, [_crossing(nodes, place) for place in starts])
            borders = [0, *cuts, len(prices)]
            largest = max(sum(prices[first:last]) for first, last in itertools.pairwise(borders))
            if best is None or largest < best[0] * (1 - 1e-9):
                best = (largest, [_point(nodes, starts[cut]) for cut in cuts], list(looked_into))
            if largest <= _UNEQUAL * mean:
                break
        deeper = _look_deeper(model, follow, graph, looked_into, prices, starts, closed)
        if deeper is None:
            break
        graph, looked_into = deeper
    if best is None:
        raise ConfigurationError(
            f"pipeline: the model has too few parts for {num_stages} stages: {listed(list(graph.nodes))}. Use fewer "
            "stages, a schedule with fewer stages on each rank, or a model with more modules"
        )
    return best[1], best[2]


def _look_deeper(
    model: torch.nn.Module,
    follow: Trace,
    graph: fx.Graph,
    looked_into: list[str],
    prices: Sequence[float],
    starts: Sequence[int],
    closed: set[str],
) -> tuple[fx.Graph, list[str]] | None:
    """Look into the most expensive module that can be taken apart; returns None if there is none."""
    nodes = list(graph.nodes)
    order = sorted(zip(prices, starts, strict=True), key=lambda pair: -pair[0])
    for _, place in order:
        path = str(nodes[place].target)
        module = model.get_submodule(path)
        if path in closed or not any(True for _ in module.children()) or not may_look_into(module):
            continue
        containers = [
            f"{path}.{name}"
            for name, each in module.named_modules()
            if name and type(each).forward is torch.nn.Sequential.forward and may_look_into(each)
        ]
        tried = [*looked_into, path, *_reached(model, containers, inside=path)]
        try:
            return follow(tried), tried
        except Exception:  # whatever the module does that cannot be followed: it stays one operation
            closed.add(path)
    return None


def _followed(follow: Trace, looked_into: Sequence[str], model: torch.nn.Module) -> fx.Graph:
    try:
        return follow(looked_into)
    except Exception as error:
        where = ", ".join([type(model).__name__, *(path for path in looked_into if path)])
        raise ConfigurationError(
            f"pipeline cannot follow what {type(model).__name__} does: {type(error).__name__}: "
            f"{str(error).strip().partition(chr(10))[0]}. It follows the forward of the model and of the modules that "
            f"it looks into ({where}); there, values must not decide what is computed. Move such code into a module "
            "of its own, which runs as it is, or make the model a Sequential"
        ) from error


def parameter_costs(model: torch.nn.Module) -> Costs:
    """Return the costs by numbers of parameters; one that is shared counts where it is used first."""

    def costs(graph: fx.Graph, starts: Sequence[int]) -> Sequence[float]:
        found, seen = [0.0] * len(starts), set()
        unit = -1
        for place, node in enumerate(graph.nodes):
            if unit + 1 < len(starts) and place >= starts[unit + 1]:
                unit += 1
            for parameter in parameters_of_node(model, node):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    found[max(unit, 0)] += parameter.numel()
        return found

    return costs


def parameters_of_node(model: torch.nn.Module, node: fx.Node) -> list[torch.Tensor]:
    """Return the parameters that an operation uses."""
    if node.op == "call_module":
        return list(model.get_submodule(str(node.target)).parameters())
    if node.op == "get_attr":
        parent, _, name = str(node.target).rpartition(".")
        found = model.get_submodule(parent)._parameters.get(name)
        return [] if found is None else [found]
    return []


def program_of(
    model: torch.nn.Module,
    forward: Forward,
    constants: dict[str, Any],
    points: Sequence[SplitPoint],
    looked_into: Sequence[str],
) -> Program:
    """Return the model in stages."""
    graph = _followed(lambda paths: trace(model, forward, paths, constants), looked_into, model)
    return Program(graph, points)


def _crossing(nodes: Sequence[fx.Node], place: int) -> float:
    """Return how many values pass if a stage begins at a place."""
    behind = set(nodes[place:])
    free = ("placeholder", "get_attr")
    return float(sum(1 for node in nodes[:place] if node.op not in free and any(user in behind for user in node.users)))


def _point(nodes: Sequence[fx.Node], place: int) -> SplitPoint:
    path = str(nodes[place].target)
    earlier = sum(1 for node in nodes[:place] if node.op == "call_module" and str(node.target) == path)
    return SplitPoint(path, earlier)


def _reached(model: torch.nn.Module, containers: Sequence[str], inside: str = "") -> list[str]:
    """Return those containers that are run by a module which is looked into, or by another one of them."""
    found: list[str] = []
    for path in containers:
        parents = [
            each for each in _parents(path) if each != inside and each.startswith(f"{inside}." if inside else "")
        ]
        if all(each in found or _only_lists(_module(model, each)) for each in parents):
            found.append(path)
    return found


def _only_lists(module: torch.nn.Module) -> bool:
    """Say whether a module is never run itself."""
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
