"""Batch normalisation over all ranks gives the numbers of one process on the concatenated batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from _training import runtime
from torch import nn

import unidist.torch as ud
from unidist.jobs.pool.pool import RankPool
from unidist.negotiation.process_sets import ProcessSet
from unidist.runtime import context
from unidist_torch.models.sync_batch_norm import SyncBatchNorm

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel
CHANNELS = 3
Result = dict[str, torch.Tensor]


def samples(
    rows: Sequence[int], steps: int, dtype: torch.dtype, tail: tuple[int, ...]
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return inputs and the gradients of their outputs, by step and rank."""
    generator = torch.Generator().manual_seed(4)

    def tensor(n: int) -> torch.Tensor:
        return (torch.randn(n, CHANNELS, *tail, generator=generator, dtype=torch.float64) * 3 + 100).to(dtype)

    return [[(tensor(n), tensor(n) - 100) for n in rows] for _ in range(steps)]


def run(norm: nn.Module, steps: list[tuple[torch.Tensor, torch.Tensor]], *, evaluate: bool = True) -> Result:
    """Return outputs, gradients and running statistics."""
    found: Result = {}
    for number, (x, gradient) in enumerate(steps):
        x = x.clone().requires_grad_()
        y = norm(x)
        y.backward(gradient)
        assert x.grad is not None
        found |= {f"output {number}": y.detach(), f"gradient {number}": x.grad}
    found |= {f"gradient of {name}": value.grad for name, value in norm.named_parameters() if value.grad is not None}
    found |= {name: value.clone() for name, value in norm.named_buffers()}
    if evaluate:
        norm.eval()
        found["evaluated"] = norm(steps[0][0]).detach()
    return found


def make(kind: type[nn.Module], options: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    norm = kind(CHANNELS, **options).to(dtype)
    with torch.no_grad():
        for index, parameter in enumerate(norm.parameters()):
            parameter.copy_(torch.arange(1, CHANNELS + 1) + index)
    return norm


def on_rank(
    rows: Sequence[int], options: dict[str, Any], dtype: torch.dtype, tail: tuple[int, ...], evaluate: bool
) -> Result:
    with runtime():
        steps = [ranks[ud.rank()] for ranks in samples(rows, 3, dtype, tail)]
        return run(make(SyncBatchNorm, options, dtype), steps, evaluate=evaluate)


def check(
    pool: Pool,
    rows: Sequence[int],
    options: dict[str, Any],
    *,
    dtype: torch.dtype = torch.float64,
    tail: tuple[int, ...] = (),
    tolerance: float = 1e-10,
    evaluate: bool = True,
) -> None:
    results = pool(len(rows)).run(on_rank, (rows, options, dtype, tail, evaluate))
    kind = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[len(tail)]
    whole: Any = [
        tuple(torch.cat(parts).double() for parts in zip(*ranks, strict=True))
        for ranks in samples(rows, 3, dtype, tail)
    ]
    wanted = run(make(kind, options, torch.float64), whole, evaluate=evaluate)
    for name, value in wanted.items():
        found = [result[name] for result in results]
        if name.startswith("gradient of"):
            joined = torch.stack(found).sum(0)
        elif name.startswith(("output", "gradient", "evaluated")):
            joined = torch.cat(found)
        else:
            assert all(torch.equal(each, found[0]) for each in found), f"{name} differs between ranks"
            joined = found[0]
        torch.testing.assert_close(
            joined.to(value.dtype), value, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "eps and momentum": {"eps": 0.1, "momentum": 0.5},
    "not affine": {"affine": False},
    "mean over all batches": {"momentum": None},
    "no running statistics": {"track_running_stats": False},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(pool: Pool, name: str) -> None:
    check(pool, (4, 4), OPTIONS[name], evaluate=name != "no running statistics")


@pytest.mark.parametrize("tail", [(), (5,), (2, 3), (2, 1, 3)])
def test_inputs_of_any_number_of_dims(pool: Pool, tail: tuple[int, ...]) -> None:
    check(pool, (2, 3), {}, tail=tail)


@pytest.mark.parametrize("rows", [(1, 5, 2), (3, 0, 2), (0, 0, 4), (1, 1, 1)])
def test_uneven_and_empty_batches(pool: Pool, rows: Sequence[int]) -> None:
    check(pool, rows, {}, tail=(4,))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.bfloat16, 0.05)])
def test_other_types(pool: Pool, dtype: torch.dtype, tolerance: float) -> None:
    check(pool, (3, 5), {}, dtype=dtype, tail=(4,), tolerance=tolerance)


def test_local_statistics_would_be_seen() -> None:
    (x, _), (other, _) = samples((4, 4), 1, torch.float64, ())[0]
    together = nn.BatchNorm1d(CHANNELS).double()(torch.cat([x, other]))[:4]
    assert not torch.allclose(nn.BatchNorm1d(CHANNELS).double()(x), together, atol=1e-2)


def test_evaluation_communicates_nothing(pool: Pool) -> None:
    def alone() -> bool:
        with runtime():
            norm = SyncBatchNorm(CHANNELS).eval()
            if ud.rank() == 0:  # would wait for the other rank otherwise
                norm(torch.randn(4, CHANNELS))
            return True

    assert pool(2).run(alone) == [True, True]


def test_one_process_without_a_runtime_is_local() -> None:
    x = torch.randn(4, CHANNELS)
    torch.testing.assert_close(SyncBatchNorm(CHANNELS)(x), nn.BatchNorm1d(CHANNELS)(x))


def test_too_few_dims_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 dims"):
        SyncBatchNorm(CHANNELS)(torch.zeros(CHANNELS))


def test_statistics_within_a_process_set(pool: Pool) -> None:
    def in_set() -> torch.Tensor:
        with runtime():
            members = context.current().process_sets.add(ProcessSet([0, 2]))
            norm = SyncBatchNorm(CHANNELS, process_set=members).double()
            norm(samples((2, 2, 2), 1, torch.float64, ())[0][ud.rank()][0])
            assert norm.running_mean is not None
            return norm.running_mean.clone()

    found = pool(3).run(in_set)
    parts = [x for x, _ in samples((2, 2, 2), 1, torch.float64, ())[0]]
    torch.testing.assert_close(found[0], torch.cat([parts[0], parts[2]]).mean(0) * 0.1)
    torch.testing.assert_close(found[1], parts[1].mean(0) * 0.1)
    assert torch.equal(found[0], found[2])


def test_a_whole_model_is_converted_and_trains_as_in_one_process(pool: Pool) -> None:
    def network() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)).double()

    def train(model: nn.Module, optimizer: Any, rank: int, size: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(6)
        for _ in range(4):
            x = torch.randn(6, 1, 6, 6, generator=generator, dtype=torch.float64)
            optimizer.zero_grad()
            model(x[rank * 6 // size : (rank + 1) * 6 // size]).square().mean().backward()
            optimizer.step()
        return [value.detach().clone() for value in model.state_dict().values()]

    def on_rank() -> list[torch.Tensor]:
        with runtime():
            model = SyncBatchNorm.convert(network())
            assert isinstance(model[1], SyncBatchNorm)  # type: ignore[index]
            model, optimizer = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
            return train(model, optimizer, ud.rank(), ud.size())

    alone = network()
    wanted = train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), 0, 1)
    for result in pool(2).run(on_rank):
        for found, value in zip(result, wanted, strict=True):
            torch.testing.assert_close(found, value, rtol=1e-10, atol=1e-10)
