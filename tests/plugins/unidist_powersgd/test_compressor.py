"""PowerSGD: what travels, what is lost and comes later, and that training goes on as well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from part_pools import PartPools

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator
from unidist.errors import ConfigurationError
from unidist.gradients.allreduce import AllReduceExchange
from unidist.gradients.buckets import ParameterInfo
from unidist.gradients.compression import build_compressor
from unidist.gradients.interface import NOTICE_BYTES
from unidist.gradients.options import ExchangeOptions
from unidist.runtime.plugin_manager import PluginManager
from unidist.testing import RecordingCommunicator, ThreadWorld
from unidist.testing.fixtures import RankPoolFactory
from unidist_powersgd.compressor import PowerSGD

Array = np.ndarray[Any, np.dtype[Any]]
MATRIX = ParameterInfo("matrix", (40, 5, 6), DType.FLOAT64)
VECTOR = ParameterInfo("vector", (40,), DType.FLOAT64)


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return torch_pools


class HostFramework:
    """All that the exchange asks of a framework for host memory."""

    def zero(self, buffer: Buffer) -> None:
        buffer.bytes()[:] = bytes(buffer.nbytes)


def exchange_over(
    communicator: Communicator, compressor: PowerSGD, parameters: Sequence[ParameterInfo] = (MATRIX, VECTOR)
) -> AllReduceExchange:
    framework: Any = HostFramework()
    return AllReduceExchange(
        parameters, framework=framework, host=communicator, options=ExchangeOptions(compressor=compressor)
    )


def array(exchange: AllReduceExchange, index: int) -> Array:
    buffer = exchange.buffer(index)
    return np.frombuffer(buffer.bytes(), buffer.dtype.value)


def exchange_once(exchange: AllReduceExchange, gradients: Sequence[Array]) -> list[Array]:
    for index, gradient in enumerate(gradients):
        array(exchange, index)[:] = gradient.reshape(-1)
        exchange.ready(index)
    exchange.finish(scale=None)
    return [array(exchange, index).copy() for index in range(len(gradients))]


def gradients_of(rank: int, seed: int = 0) -> list[Array]:
    rng = np.random.default_rng([seed, rank])
    return [rng.standard_normal(item.count) for item in (MATRIX, VECTOR)]


def test_it_is_found_by_its_name() -> None:
    registry = PluginManager().load().compressors
    assert build_compressor("powersgd/rank=3/warmup=0", registry) == PowerSGD(rank=3, warmup=0)
    assert registry.origin_of("powersgd") == "'powersgd' (unidist-train)"
    for line in ("powersgd/rank=0", "powersgd/warmup=-1"):
        with pytest.raises(ConfigurationError, match=line):
            build_compressor(line, registry)


def test_a_sum_of_low_rank_is_exact_after_two_rounds_and_vectors_always() -> None:
    def main(communicator: Communicator) -> list[float]:
        exchange = exchange_over(communicator, PowerSGD(rank=2, warmup=0))
        exchange.scale = 0.5
        rng = np.random.default_rng(1)  # the same column space on every rank
        left, vector = rng.standard_normal((40, 2)), rng.standard_normal(40)
        errors = []
        for _ in range(3):
            right = np.random.default_rng(2 + communicator.rank).standard_normal((2, 30))
            found = exchange_once(exchange, [left @ right, vector * communicator.rank])
            both = sum(np.random.default_rng(2 + rank).standard_normal((2, 30)) for rank in range(2))
            errors.append(float(np.abs(found[0] - (0.5 * left @ both).reshape(-1)).max()))
            np.testing.assert_allclose(found[1], vector * 0.5)
        return errors

    with ThreadWorld(2) as world:
        for errors in world.run(main):
            assert max(errors) < 1e-10


def test_what_is_left_out_comes_later() -> None:
    def main(communicator: Communicator) -> tuple[float, float, bytes]:
        exchange = exchange_over(communicator, PowerSGD(rank=2, warmup=0))
        exchange.scale = 0.5
        wanted = sum(gradients_of(rank)[0] for rank in range(2)) / 2
        total = np.zeros(MATRIX.count)
        errors = []
        for _ in range(100):
            total += exchange_once(exchange, gradients_of(communicator.rank))[0]
            errors.append(float(np.linalg.norm(total / (len(errors) + 1) - wanted) / np.linalg.norm(wanted)))
        return errors[0], errors[-1], total.tobytes()

    with ThreadWorld(2) as world:
        results = world.run(main)
    for first, last, total in results:
        assert first > 0.5
        assert last < 0.15
        assert total == results[0][2]


def test_few_bytes_travel_after_the_warmup() -> None:
    def main(communicator: Communicator) -> list[int]:
        recorder = RecordingCommunicator(communicator)
        exchange = exchange_over(recorder, PowerSGD(rank=1, warmup=2))
        sizes = []
        for seed in range(4):
            before = len(recorder.records)
            found = exchange_once(exchange, gradients_of(communicator.rank, seed))
            if seed < 2:
                np.testing.assert_allclose(found[0], sum(gradients_of(rank, seed)[0] for rank in range(2)))
            sizes.append(sum(record.nbytes for record in recorder.records[before:]))
        return sizes

    plain, compressed = (1200 + 40) * 8 + 2 + NOTICE_BYTES, (40 + 30 + 40) * 8 + 2 + NOTICE_BYTES
    with ThreadWorld(2) as world:
        assert world.run(main) == [[plain, plain, compressed, compressed]] * 2


def test_an_overflow_shows_and_leaves_nothing_behind() -> None:
    def main(communicator: Communicator) -> tuple[bool, bool, float]:
        exchange = exchange_over(communicator, PowerSGD(rank=2, warmup=0))
        exchange_once(exchange, gradients_of(communicator.rank))
        gradients = gradients_of(communicator.rank)
        if communicator.rank:
            gradients[0][7] = np.inf
        spoilt = exchange_once(exchange, gradients)[0]
        after = exchange_once(exchange, gradients_of(communicator.rank))[0]
        zeros = [np.zeros(item.count) for item in (MATRIX, VECTOR)]
        for _ in range(60):
            last = exchange_once(exchange, zeros)[0]
        return bool(np.isfinite(spoilt).all()), bool(np.isfinite(after).all()), float(np.abs(last).max())

    with ThreadWorld(2) as world:
        for spoilt, after, last in world.run(main):
            assert (spoilt, after) == (False, True)
            assert last < 1e-3  # what was left out has all been sent


def test_what_is_not_worth_it_travels_as_it_is() -> None:
    small = [ParameterInfo("a", (4, 4), DType.FLOAT32), ParameterInfo("b", (64, 64), DType.FLOAT16)]

    def main(communicator: Communicator) -> list[int]:
        recorder = RecordingCommunicator(communicator)
        exchange = exchange_over(recorder, PowerSGD(rank=2, warmup=0), small)
        exchange_once(exchange, [np.ones(16), np.ones(64 * 64)])
        return sorted(record.nbytes for record in recorder.records)

    with ThreadWorld(2) as world:
        assert world.run(main) == [[2 + NOTICE_BYTES, 16 * 4, 64 * 64 * 2]] * 2


def test_gradients_outside_of_host_memory_are_refused() -> None:
    bucket: Any = type("Bucket", (), {})()
    bucket.memory = Buffer(0, 0, DType.FLOAT32, None, "cuda:0")
    bucket.parameters = (ParameterInfo("weight", (3,), DType.FLOAT32, "cuda:0"),)
    with pytest.raises(ConfigurationError, match="'weight' is in cuda:0 memory"):
        PowerSGD().attach(bucket)


def final_loss(strategy: str | None) -> float:
    """Return the loss, over the data of both ranks, after training a small classifier."""
    import torch

    import unidist.torch as ud

    ud.init()
    try:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(512, 32, generator=generator)
        y = (x @ torch.randn(32, 10, generator=generator)).argmax(1)
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        model, optimizer = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), strategy)
        for step in range(150):
            rows = torch.arange(step * 32, (step + 1) * 32)[ud.rank() :: 2] % 512
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        return torch.nn.functional.cross_entropy(model(x), y).item()
    finally:
        ud.shutdown()


@pytest.mark.parallel
def test_training_comes_to_nearly_the_same_loss(rank_pool: RankPoolFactory) -> None:
    pytest.importorskip("torch", reason="the training is in PyTorch")
    plain = pool_losses(rank_pool, None)
    compressed = pool_losses(rank_pool, "data:compression=powersgd/rank=4/warmup=5")
    assert compressed[0] == compressed[1]
    assert compressed != plain
    assert plain[0] < 0.2
    assert compressed[0] < plain[0] + 0.1


def pool_losses(rank_pool: RankPoolFactory, strategy: str | None) -> list[float]:
    losses: list[float] = rank_pool(2).run(final_loss, (strategy,))
    return losses
