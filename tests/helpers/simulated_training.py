"""One training of two ranks, through the product, on the CPU or on simulated devices."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from simulated_device import Machine
from simulated_nccl import SimulatedNccl
from thread_ranks import run_ranks

import unidist.torch as ud
from unidist_torch import host_copies

WIDTH, DEPTH, SAMPLES, STEPS = 16, 4, 3, 4
_WAIT_SEC = 60.0


@contextmanager
def nccl(machine: Machine) -> Iterator[None]:
    """Let engine nccl find the simulated devices, and groups on them."""
    with ExitStack() as stack:
        for target, name, value in (
            (dist, "ProcessGroupNCCL", SimulatedNccl),
            (dist, "is_nccl_available", lambda: True),
            (torch.cuda.nccl, "version", lambda: (2, 30, 7)),
            (SimulatedNccl, "machine", machine),
            (SimulatedNccl, "groups", {}),
            (importlib.import_module("torch._dynamo"), "reset", mock.DEFAULT),  # it would import a compiler for GPUs
        ):
            stack.enter_context(mock.patch.object(target, name, value, create=value is not mock.DEFAULT))
        host_copies._copy_stream.cache_clear()
        stack.callback(host_copies._copy_stream.cache_clear)
        yield


class Block(torch.nn.Module):
    """Two layers beside a connection that skips them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def make_model(dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.nn.Module:
    """Return a model of some equal blocks."""
    # All threads share the random numbers, and the product sets them back after what it has tried.
    assert threading.current_thread() is threading.main_thread(), "another rank may draw random numbers meanwhile"
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(Block() for _ in range(DEPTH))).to(dtype)


def batches(rank: int, dtype: torch.dtype = torch.float64, passes: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the batches of a rank."""
    generator = torch.Generator().manual_seed(17 + rank)
    shape = (STEPS * passes, 2, SAMPLES, WIDTH)
    return [(x, y) for x, y in torch.randn(shape, generator=generator, dtype=dtype)]


def adam(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer that keeps state."""
    return torch.optim.AdamW(parameters, lr=0.05)


def train(
    strategy: str,
    device: str = "cpu",
    *,
    dtype: torch.dtype = torch.float64,
    passes: int = 1,
    body: Callable[[Any, Any, Any], None] | None = None,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = adam,
    after_step: Callable[[int, int], None] | None = None,
    make: Callable[[torch.dtype, int], torch.nn.Module] = make_model,
    data: Callable[[int, torch.dtype, int], list[tuple[torch.Tensor, torch.Tensor]]] | None = None,
) -> list[torch.Tensor]:
    """Return the parameters of rank 0 after some steps, on the host.

    Args:
        strategy: the strategy line.
        device: "cpu", or "cuda" in a simulation.
        dtype: of the parameters.
        passes: steps of the loop for an update.
        body: trains on a batch, instead of the usual loop.
        make_optimizer: over the parameters.
        after_step: is given the rank and the number of the step.
        make: returns the model; is given the type of its parameters, and a seed.
        data: batches of a rank; default: `batches`.
    """
    models = [make(dtype, rank) for rank in range(2)]

    def rank_main(rank: int) -> list[torch.Tensor]:
        place = torch.device("cpu") if device == "cpu" else ud.device()
        model = models[rank].to(place)
        own = (data or batches)(rank, dtype, passes)
        given = [(x.to(place), y.to(place)) for x, y in own]
        model, optimizer = ud.distribute(model, make_optimizer(model.parameters()), strategy)
        for number, (x, y) in enumerate(given):
            if after_step is not None:
                after_step(rank, number)
            if body is not None:
                body(model, optimizer, (x, y))
                continue
            loss = torch.nn.functional.mse_loss(model(x).to(y.dtype), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if after_step is not None:
            after_step(rank, len(given))
        state = model.state_dict()
        with torch._C.DisableTorchFunctionSubclass():  # parts of a divided model know that they are
            return [value.detach().cpu().clone().as_subclass(torch.Tensor) for value in state.values()]

    around = None
    if device != "cpu":
        around = lambda rank: SimulatedNccl.machine.computing()  # noqa: E731 - short
    with _tracing_by_turns(2):
        return run_ranks(2, rank_main, around=around)[0]


@contextmanager
def _tracing_by_turns(size: int) -> Iterator[None]:
    """Let `torch.fx` trace one rank's model after the other, while the others wait: it changes all modules."""
    tracer: Any = importlib.import_module("torch.fx").Tracer
    plain, lock, barrier = tracer.trace, threading.Lock(), threading.Barrier(size)

    def trace(self: Any, *args: Any, **kwargs: Any) -> Any:
        barrier.wait(_WAIT_SEC)
        try:
            with lock:
                return plain(self, *args, **kwargs)
        finally:
            barrier.wait(_WAIT_SEC)

    with mock.patch.object(tracer, "trace", trace):
        yield


def train_alone(
    *,
    dtype: torch.dtype = torch.float64,
    passes: int = 1,
    clip: float | None = None,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = adam,
) -> list[torch.Tensor]:
    """Return the parameters after the same training of one process, on the batches of both ranks together."""
    model = make_model(dtype)
    optimizer = make_optimizer(model.parameters())
    data = list(zip(*(batches(rank, dtype, passes) for rank in range(2)), strict=True))
    for step in range(STEPS):
        pairs = [pair for both in data[step * passes : (step + 1) * passes] for pair in both]
        x, y = (torch.cat(listed) for listed in zip(*pairs, strict=True))
        torch.nn.functional.mse_loss(model(x), y).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return [value.detach() for value in model.state_dict().values()]


def difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest difference; NaN counts as infinite."""
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        worst = max(worst, float((one.double() - other.double()).abs().nan_to_num(float("inf")).max()))
    return worst
