"""Trainings of pipelines by two or more ranks, on the CPU or on simulated devices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from simulated_device import Machine, Stream
from simulated_nccl import SimulatedNccl
from simulated_training import STEPS, WIDTH, adam, make_model, nccl
from thread_ranks import run_ranks

import unidist.torch as ud
from unidist_pipeline._torch import runner
from unidist_pipeline._torch.tracing import fx

SAMPLES = 8


@contextmanager
def devices(order: Any, num_devices: int = 2, *, one_queue: bool = False) -> Iterator[Machine]:
    """Simulate devices on which pipelines can train.

    Args:
        order: see `Machine`.
        num_devices: number of ranks.
        one_queue: all streams of a device run in the order in which the host has queued, as with a single connection
            to it (CUDA_DEVICE_MAX_CONNECTIONS=1).
    """
    with ExitStack() as stack:
        if one_queue:
            stack.enter_context(_one_queue())
        machine = stack.enter_context(Machine(num_devices, order=order))
        stack.enter_context(nccl(machine))
        stack.enter_context(_followed_one_after_the_other())
        for target, name, value in (
            (runner, "StageRandom", _NoRandom),
            (torch.cuda, "get_rng_state", lambda device: torch.Generator().get_state()),
            (torch.cuda, "set_rng_state", lambda state, device: None),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield machine


class _NoRandom:
    """Stands for `StageRandom`: threads share the sequence of the CPU, and the models draw no numbers."""

    def __init__(self, rank: int, device: torch.device, *, trains: bool) -> None:
        pass

    def __call__(self) -> Any:
        return nullcontext()


@contextmanager
def _one_queue() -> Iterator[None]:
    plain = Stream.__init__
    queues: dict[int, Any] = {}

    def init(self: Stream, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        self.queue = queues.setdefault(self.index, self.queue)

    with mock.patch.object(Stream, "__init__", init):
        yield


@contextmanager
def _followed_one_after_the_other() -> Iterator[None]:
    """Let only one rank at a time follow a model: `torch.fx` changes classes meanwhile, which all threads share."""
    plain, lock = fx._Tracer.trace, threading.RLock()

    def trace(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lock:
            return plain(self, *args, **kwargs)

    with mock.patch.object(fx._Tracer, "trace", trace):
        yield


def batches(place: int = 0, dtype: torch.dtype = torch.float64) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the batches of a pipeline."""
    generator = torch.Generator().manual_seed(17 + place)
    return [(x, y) for x, y in torch.randn((STEPS, 2, SAMPLES, WIDTH), generator=generator, dtype=dtype)]


def train(
    strategy: str,
    *,
    size: int = 2,
    make: Callable[[int], torch.nn.Module] = lambda seed: make_model(seed=seed),
    data: Callable[[int, int], list[tuple[torch.Tensor, torch.Tensor]]] | None = None,
    after_step: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return the parameters after some steps, each from a rank that holds it, and the losses.

    Args:
        strategy: the strategy line.
        size: number of ranks.
        make: the model, from a number.
        data: the batches of a rank, for its number and its place among those with other data. Default: those of the
            place.
        after_step: is given the rank and the number of the step.
    """
    models = [make(rank) for rank in range(size)]

    def rank_main(rank: int) -> tuple[dict[str, torch.Tensor], list[float]]:
        device = ud.device()
        model = models[rank].to(device)
        step = ud.TrainStep(model, adam(model.parameters()), torch.nn.functional.mse_loss, strategy)
        place = ud.data_rank()
        given = batches(place) if data is None else data(rank, place)
        losses = []
        moved = [(x.to(device), y.to(device)) for x, y in given]
        for number, (x, y) in enumerate(moved):
            if after_step is not None:
                after_step(rank, number)
            losses.append(float(step(x, y)))
        if after_step is not None:
            after_step(rank, len(moved))
        return _parameters(model), losses

    results = run_ranks(size, rank_main, around=lambda rank: SimulatedNccl.machine.computing())
    assert all(losses == results[0][1] for _, losses in results), "the loss is equal on all ranks"
    return {name: each for held, _ in reversed(results) for name, each in held.items()}, results[0][1]


def train_alone(
    make: Callable[[int], torch.nn.Module] = lambda seed: make_model(seed=seed), num_pipelines: int = 1
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return the same of one process, on the batches of all pipelines together."""
    model = make(0)
    optimizer = adam(model.parameters())
    losses = []
    for pairs in zip(*(batches(place) for place in range(num_pipelines)), strict=True):
        x, y = (torch.cat(listed) for listed in zip(*pairs, strict=True))
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return _parameters(model), losses


def _parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = model.named_parameters(remove_duplicate=False)
    return {name: each.detach().cpu().clone() for name, each in found}


def error(found: tuple[dict[str, torch.Tensor], list[float]], expected: tuple[Any, list[float]]) -> float:
    """Return the largest difference of parameters and losses; NaN counts as infinite."""
    assert found[0].keys() == expected[0].keys()
    worst = max(
        abs(one - other) if one == one else float("inf") for one, other in zip(found[1], expected[1], strict=True)
    )
    for name, value in found[0].items():
        worst = max(worst, float((value - expected[0][name]).abs().nan_to_num(float("inf")).max()))
    return worst
