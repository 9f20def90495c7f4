"""The sample compressor: chosen by name in every place where a compression can be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from part_pools import PartPools

from unidist.buffer import Buffer, DType
from unidist.gradients.allreduce import AllReduceExchange
from unidist.gradients.buckets import ParameterInfo
from unidist.gradients.compression import build_compressor
from unidist.gradients.interface import NOTICE_BYTES
from unidist.gradients.options import ExchangeOptions
from unidist.runtime.plugin_manager import PluginManager
from unidist.testing import RecordingCommunicator, ThreadCommunicator, ThreadWorld
from unidist.testing.fixtures import RankPoolFactory

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return torch_pools


class HostMemory:
    """The little of a framework that an exchange of host memory needs."""

    def zero(self, buffer: Buffer) -> None:
        buffer.bytes()[:] = bytes(buffer.nbytes)


def test_it_is_known_as_a_third_partys_with_its_options(manager: PluginManager) -> None:
    from unidist_sample.signs import Signs

    assert build_compressor("sample-signs/gain=2", manager.compressors) == Signs(gain=2.0)
    assert manager.compressors.origin_of("sample-signs") == "'sample' (unidist-sample-plugin)"


def test_signs_travel_with_one_magnitude(manager: PluginManager) -> None:
    compressor = build_compressor("sample-signs", manager.compressors)

    def main(communicator: ThreadCommunicator) -> tuple[list[int], list[float]]:
        recorder = RecordingCommunicator(communicator)
        framework: Any = HostMemory()
        exchange = AllReduceExchange(
            [ParameterInfo("a", (16,), DType.FLOAT32)],
            framework=framework,
            host=recorder,
            options=ExchangeOptions(compressor=compressor),
        )
        exchange.scale = 0.5
        values = np.frombuffer(exchange.buffer(0).bytes(), np.float32)
        values[:] = [1, -2] * 8 if communicator.rank else [-3, -4] * 8
        exchange.ready(0)
        exchange.finish()
        return [record.nbytes for record in recorder.records], values[:2].tolist()

    # The mean magnitude of 1.5 and 3.5, halved as the scale says, times the sums of the signs.
    with ThreadWorld(2) as world:
        assert world.run(main) == [([16, 4, 1 + NOTICE_BYTES], [0.0, -2.5])] * 2


def test_a_wrong_option_is_refused_before_anything_starts(manager: PluginManager) -> None:
    command = [sys.executable, "-m", "unidist_launch", "launch", "-np", "2"]
    for line, message in (
        ("sample-signs/gian=2", "Did you mean 'gain'"),
        ("sample-sings", "Did you mean 'sample-signs'"),
    ):
        done = subprocess.run(
            [*command, "--strategy", f"data:compression={line}", "true"],
            cwd=ROOT, capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert message in done.stderr.replace("\n", " ")


def descend(strategy: str | None, compression: str | None) -> list[float]:
    """Return weights after a few steps towards a target."""
    import torch

    import unidist.torch as ud

    ud.init()
    try:
        weight = torch.nn.Parameter(torch.zeros(64))
        target = torch.linspace(-1, 1, 64)
        optimizer: Any = torch.optim.SGD([weight], lr=0.3)
        if strategy is not None:
            _, optimizer = ud.distribute(torch.nn.ParameterDict({"weight": weight}), optimizer, strategy)
        else:
            optimizer = ud.DistributedOptimizer(optimizer, compression=compression or "none")
        for _ in range(150):
            optimizer.zero_grad()
            ((weight - target).square().sum() * (1 + ud.rank())).backward()
            optimizer.step()
        values: list[float] = weight.detach().tolist()
        return values
    finally:
        ud.shutdown()


@pytest.mark.parallel
def test_it_trains_by_strategy_line_and_by_argument(manager: PluginManager, rank_pool: RankPoolFactory) -> None:
    by_line = rank_pool(2).run(descend, ("data:compression=sample-signs/gain=0.1", None))
    by_argument = rank_pool(2).run(descend, (None, "sample-signs/gain=0.1"))
    assert by_line == by_argument
    assert by_line[0] == by_line[1]
    np.testing.assert_allclose(by_line[0], np.linspace(-1, 1, 64), atol=0.2)
    assert by_line[0] != rank_pool(2).run(descend, (None, None))[0]
