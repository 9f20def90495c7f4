"""What divides a model or a batch, checkpoints, elastic jobs and loss scaling, on simulated CUDA devices.

The numbers are those of the CPU, whose tests compare them with one process, in any order that streams may run in. Each
wait is needed. What cannot run there:

- Backend `unidist` of torch.distributed moves tensors of the host alone: DDP over it gives the error that says so.
- Attention by CUDA's own kernels (`_is_cuda_flash`) needs them; the plain one runs.
- CUDA graphs: that one is captured is pretended, and refused.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="the simulated devices are PyTorch's")

from simulated_device import Machine  # noqa: E402
from simulated_models import attending, dense, mixing, same_batches, sequences, sgd  # noqa: E402
from simulated_nccl import Work  # noqa: E402
from simulated_training import adam, batches, difference, make_model, nccl, train, train_alone  # noqa: E402
from simulated_waits import without  # noqa: E402
from thread_ranks import run_ranks, start_next_runtime  # noqa: E402

import unidist.torch as ud  # noqa: E402 - after the check for torch
from unidist.errors import ConfigurationError, MismatchError, UsageError  # noqa: E402
from unidist_torch_backend.tensors import plain  # noqa: E402

pytestmark = pytest.mark.usefixtures("simulation")

LIMIT = 1e-12

PLAN = "plan=**.up=column+**.down=row"

DIVIDED: dict[str, dict[str, Any]] = {
    f"tensor=2:{PLAN}": {"make": dense, "data": same_batches},
    f"tensor=2:{PLAN}:sequence=true": {"make": dense, "data": sequences},
    f"tensor=2:{PLAN},clip_norm=0.1": {"make": dense, "data": same_batches},
    "context=2": {"make": attending, "data": sequences, "make_optimizer": sgd},
    "context=2:exchange=gather": {"make": attending, "data": sequences, "make_optimizer": sgd},
    "context=2:exchange=ulysses": {"make": attending, "data": sequences, "make_optimizer": sgd},
    "expert=2": {"make": mixing},
    "expert=2,zero=1": {"make": mixing},
}


@pytest.mark.parametrize("strategy", DIVIDED)
def test_a_divided_training_has_the_numbers_of_the_cpu(machine: Machine, strategy: str) -> None:
    expected = train(strategy, **DIVIDED[strategy])
    assert difference(train(strategy, "cuda", **DIVIDED[strategy]), expected) < LIMIT


WAITS: list[tuple[str, Any, str, str]] = [
    (f"tensor=2:{PLAN}", Work, "wait", "communicators.py:allreduced"),
    (f"tensor=2:{PLAN}:sequence=true", Work, "wait", "axis.py:gather"),
    (f"tensor=2:{PLAN}:sequence=true", Work, "wait", "axis.py:scatter_sum"),
    ("context=2", Work, "wait", "exchange.py:_around"),
    ("context=2", Work, "wait", "exchange.py:_ring_backward"),
    ("context=2:exchange=gather", Work, "wait", "axis.py:gather"),
    ("context=2:exchange=gather", Work, "wait", "axis.py:scatter_sum"),
    ("context=2:exchange=ulysses", Work, "wait", "axis.py:alltoall"),
    ("expert=2", Work, "wait", "axis.py:_moved"),
]


@pytest.mark.parametrize(("strategy", "owner", "method", "where"), WAITS)
def test_a_divided_training_without_one_of_its_waits_is_wrong(
    strategy: str, owner: Any, method: str, where: str
) -> None:
    expected = train(strategy, **DIVIDED[strategy])

    def is_wrong(order: Literal["early", "late"]) -> bool:
        left_out: list[str] = []
        with Machine(order=order) as machine, nccl(machine), without(owner, method, where, left_out):
            try:
                found = train(strategy, "cuda", **DIVIDED[strategy])
            except (MismatchError, ConfigurationError):  # noticed by the product, in a trial or by a comparison
                found = []
        assert left_out, "the product waits there no longer: change the list"
        return not found or difference(found, expected) > 1e-6

    assert is_wrong("late") or is_wrong("early")


# Loss scaling


def test_loss_scaling_has_the_numbers_of_the_cpu(machine: Machine) -> None:
    for strategy in ("data,precision=fp16", "zero=3,precision=fp16", "data,precision=bf16,clip_norm=0.1"):
        expected = train(strategy, dtype=torch.float32)
        assert difference(train(strategy, "cuda", dtype=torch.float32), expected) < 1e-6


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")
@pytest.mark.parametrize("overflows", [False, True])
def test_the_scaler_of_torch_steps_on_all_ranks_or_on_none(machine: Machine, overflows: bool) -> None:
    models = [make_model(torch.float32) for _ in range(2)]

    def main(rank: int) -> tuple[list[Any], float]:
        device = ud.device()
        model, optimizer = ud.distribute(models[rank].to(device), adam(models[rank].parameters()), "data")
        scaler = torch.amp.GradScaler("cuda", init_scale=64.0, growth_interval=2)
        for number, (x, y) in enumerate(batches(rank, torch.float32)):
            x, y = x.to(device), y.to(device)
            loss = torch.nn.functional.mse_loss(model(x), y)
            if overflows and number == 1 and rank == 1:
                loss = loss * torch.tensor(float("inf"), device=device)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [each.detach().cpu() for each in model.parameters()], scaler.get_scale()

    (found, scale), (other, _) = on_ranks(machine, main)
    assert difference(found, other) == 0.0
    if overflows:
        assert scale == 64.0  # halved, and doubled after two steps
    else:
        assert scale == 256.0
        assert difference(found, train_alone(dtype=torch.float32)) < 1e-5


# Checkpoints, and elastic jobs

RUNS = ["data", "data,precision=fp16", "zero=1", "zero=2", "zero=2:offload=host", "zero=3", "zero=3:offload=host"]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("strategy", RUNS)
def test_a_training_goes_on_from_its_checkpoint(
    machine: Machine, tmp_path: Path, strategy: str, asynchronous: bool
) -> None:
    dtype = torch.float32 if "precision" in strategy else torch.float64
    models = [make_model(dtype, seed=rank) for rank in range(2)]
    fresh = [make_model(dtype, seed=2 + rank) for rank in range(2)]

    def main(rank: int) -> list[Any]:
        device = ud.device()
        data = [(x.to(device), y.to(device)) for x, y in batches(rank, dtype)]
        model, optimizer = ud.distribute(models[rank].to(device), adam(models[rank].parameters()), strategy)
        train_on(model, optimizer, data[:2])
        saved = ud.save(tmp_path / "run", model, optimizer, asynchronous=asynchronous)
        train_on(model, optimizer, data[3:])  # meanwhile: does not count
        saved.wait()
        model, optimizer = ud.distribute(fresh[rank].to(device), adam(fresh[rank].parameters()), strategy)
        ud.load(tmp_path / "run", model, optimizer)
        train_on(model, optimizer, data[2:])
        return [each.detach().cpu().clone() for each in model.state_dict().values()]

    found = on_ranks(machine, main)[0]
    assert difference(found, train(strategy.removesuffix(":offload=host"), dtype=dtype)) < LIMIT


@pytest.mark.parametrize("strategy", RUNS)
def test_a_training_goes_on_in_the_next_generation(machine: Machine, strategy: str) -> None:
    dtype = torch.float32 if "precision" in strategy else torch.float64
    models = [make_model(dtype, seed=rank) for rank in range(2)]

    def main(rank: int) -> list[Any]:
        device = ud.device()
        data = [(x.to(device), y.to(device)) for x, y in batches(rank, dtype)]
        model, optimizer = ud.distribute(models[rank].to(device), adam(models[rank].parameters()), strategy)
        train_on(model, optimizer, data[:2])
        state = ud.elastic.TorchState(model, optimizer)
        state.commit()
        train_on(model, optimizer, data[3:])  # is lost
        torch.nn.functional.mse_loss(model(data[0][0]).to(dtype), data[0][1]).backward()  # and so is this half step
        optimizer._unidist.rebind(start_next_runtime())
        state.restore()
        state.sync()
        train_on(model, optimizer, data[2:])
        return [each.detach().cpu().clone() for each in model.state_dict().values()]

    elastic = mock.patch("unidist_torch.engines.engine.read_placement", return_value=SimpleNamespace(worker="elastic"))
    with elastic, mock.patch.dict(os.environ):
        found = on_ranks(machine, main)[0]
    assert difference(found, train(strategy.removesuffix(":offload=host"), dtype=dtype)) < LIMIT


# The backend of torch.distributed, and CUDA graphs


def test_the_backend_of_torch_refuses_tensors_of_a_device(machine: Machine) -> None:
    with (
        machine.computing(),
        pytest.raises(UsageError, match=r"allreduce by backend unidist: .* is on cuda:1. Use backend nccl"),
    ):
        plain(torch.ones(3, device="cuda:1"), "allreduce")


@pytest.mark.parametrize("call", ["backward", "step", "TrainStep", "named", "zero=3"])
def test_what_cannot_be_captured_in_a_cuda_graph_says_so(call: str) -> None:
    models = [make_model(seed=rank) for rank in range(2)]

    def main(rank: int) -> str:
        device = ud.device()
        model: Any = models[rank].to(device)
        x, y = (each.to(device) for each in batches(rank)[0])
        loss_of, optimizer = torch.nn.functional.mse_loss, adam(model.parameters())
        step: Any = ud.TrainStep(model, optimizer, loss_of) if call == "TrainStep" else None
        if call in ("backward", "step", "zero=3"):
            model, optimizer = ud.distribute(model, optimizer, "zero=3" if call == "zero=3" else "data")
        for _ in range(2):
            if step is not None:
                step(x, y)
            elif call != "named":
                train_on(model, optimizer, [(x, y)])
        loss: Any = loss_of(model(x), y) if call in ("backward", "step") else None
        if call == "step":
            loss.backward()
        barrier.wait()
        machine.is_capturing = True
        calls: dict[str, Callable[[], Any]] = {
            "backward": lambda: loss.backward(),
            "step": lambda: optimizer.step(),
            "TrainStep": lambda: step(x, y),
            "zero=3": lambda: model(x),
            "named": lambda: ud.allreduce(x, name="x"),
        }
        with pytest.raises(UsageError, match=f"rank {rank} is being captured in a CUDA graph, and cannot be") as found:
            calls[call]()
        barrier.wait()
        machine.is_capturing = False
        barrier.wait()
        if call == "step":
            optimizer.step()  # the exchange is under way
        return str(found.value)

    barrier = threading.Barrier(2)
    with Machine() as machine, nccl(machine):
        for text in on_ranks(machine, main):
            assert "torch.compile(model" in text


def on_ranks(machine: Machine, function: Callable[[int], Any]) -> list[Any]:
    return run_ranks(2, function, around=lambda rank: machine.computing())


def train_on(model: Any, optimizer: Any, data: list[tuple[Any, Any]]) -> None:
    for x, y in data:
        torch.nn.functional.mse_loss(model(x).to(y.dtype), y).backward()
        optimizer.step()
        optimizer.zero_grad()
