"""Measured costs of the parts of a PyTorch model: time of a forward and backward pass, or memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from unidist_pipeline._torch.backward import backward
from unidist_pipeline._torch.gradient_sums import GradientSums
from unidist_pipeline._torch.tracing.program import Program
from unidist_pipeline._torch.tracing.split import Costs, parameters_of_node
from unidist_pipeline._torch.tracing.values import changed, tensors_in

if TYPE_CHECKING:
    from unidist.runtime_api import RuntimeAPI

_REPETITIONS = 3
_COPIES = 4
"""Of a parameter: itself, its gradient, and two moments."""

Measure = Callable[[Callable[[], list[torch.Tensor]], list[torch.Tensor], list[torch.Tensor]], float]
"""Takes what runs a part forward and returns what it made, what it was made of, and the part's parameters."""


def costs_of_first(costs: Costs, context: RuntimeAPI) -> Costs:
    """Return a function that takes the costs of rank 0, which all ranks get. Calling it is collective.

    So that all cut at the same places: ranks of a tensor group may have parts of different sizes.
    """

    def told(graph: fx.Graph, starts: Sequence[int]) -> Sequence[float]:
        found = list(costs(graph, starts)) if context.topology.rank == 0 else None
        name = "costs of the parts of a model for a pipeline"
        everywhere: list[float] = context.broadcast_object(found, root=0, name=name)
        return everywhere

    return told


def measured_costs(model: torch.nn.Module, arguments: Mapping[str, Any], measure: Measure) -> Costs:
    """Return a function that measures costs.

    Args:
        model: whole; it is left as it was.
        arguments: of its forward, by name: a micro-batch.
        measure: `seconds`, or `held_bytes`.
    """

    def costs(graph: fx.Graph, starts: Sequence[int]) -> Sequence[float]:
        with _left_as_it_was(model):
            return _measured(model, graph, starts, arguments, measure)

    return costs


def seconds(run: Callable[[], list[torch.Tensor]], inputs: list[torch.Tensor], weights: list[torch.Tensor]) -> float:
    """Return the time of a forward and a backward pass, the shortest of several."""
    best = float("inf")
    for _ in range(_REPETITIONS):
        start = time.perf_counter()
        made = run()
        roots = [each for each in made if each.requires_grad]
        backward(roots, [torch.ones_like(each) for each in roots], inputs, weights, GradientSums())
        if made and made[0].is_cuda:
            torch.cuda.synchronize(made[0].device)
        best = min(best, time.perf_counter() - start)
    return best


def held_bytes(run: Callable[[], list[torch.Tensor]], inputs: list[torch.Tensor], weights: list[torch.Tensor]) -> float:
    """Return the bytes that a part keeps for the backward pass of a micro-batch, and for its parameters."""
    kept: dict[tuple[int, int], int] = {}
    own = {weight.untyped_storage().data_ptr() for weight in weights}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr(), storage.nbytes()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made = run()
    del made
    return float(sum(kept.values()) + _COPIES * sum(weight.nbytes for weight in weights))


def _measured(
    model: torch.nn.Module, graph: fx.Graph, starts: Sequence[int], arguments: Mapping[str, Any], measure: Measure
) -> list[float]:
    """Run the units one after another, each as if it were a stage."""
    program = Program(graph, starts[1:])
    received: Sequence[Any] = ()
    found = []
    for stage in program.stages:
        received = changed(_leaf, tuple(received))
        inputs = [each for each in tensors_in(received) if each.requires_grad]
        weights = [
            each
            for each in {
                id(each): each for node in stage.operations for each in parameters_of_node(model, node)
            }.values()
            if each.requires_grad
        ]
        made: list[Any] = []

        def run(number: int = stage.number, received: Sequence[Any] = received, made: list[Any] = made) -> Any:
            made[:] = [program.run(number, model, arguments, received)]
            return tensors_in(made)

        found.append(measure(run, inputs, weights))
        received = made[0]
    return found


def _leaf(value: Any) -> Any:
    """Return a value as a stage receives it."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


@contextmanager
def _left_as_it_was(model: torch.nn.Module) -> Iterator[None]:
    """Restore buffers and random numbers after the block."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng():
        yield
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
