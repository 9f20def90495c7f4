"""Memory of tensors in files."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import unidist.torch as ud
from unidist.errors import ConfigurationError
from unidist.settings.environment import set_variables
from unidist.testing.fixtures import RankPoolFactory
from unidist_zero import gathered
from unidist_zero._torch.parameters.offload import (
    FileStateMemory,
    HostStateMemory,
    StateInFiles,
    make_state_memory,
)


def test_tensors_in_files_leave_nothing_behind(tmp_path: Path) -> None:
    files = FileStateMemory(str(tmp_path))
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    moved = files.moved(image)
    assert torch.equal(moved, image)
    assert moved.stride() == image.stride()
    assert f"{tmp_path}/unidist-" in Path("/proc/self/maps").read_text()
    assert files.moved(moved) is moved
    assert not files.holds(moved.clone())
    assert files.zeros_like(image, torch.float64).dtype is torch.float64
    assert not list(tmp_path.iterdir()), "a file has no name any more once it is mapped"
    assert files.moved(torch.zeros(0)).shape == (0,)


def test_state_of_an_optimizer_begins_its_life_in_a_file(tmp_path: Path) -> None:
    files = FileStateMemory(str(tmp_path))
    parameter = torch.nn.Parameter(torch.ones(5))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones(5)
    with StateInFiles(files, [parameter]):
        optimizer.step()
        assert not files.holds(torch.zeros_like(parameter.grad)), "nobody's state"
    state = optimizer.state[parameter]
    assert files.holds(state["exp_avg"])
    assert files.holds(state["exp_avg_sq"])
    assert state["exp_avg"].eq(0.1).all()


def test_folders_that_will_not_do_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"zero:offload=.*missing: no file for 1 bytes .*: No such file"):
        FileStateMemory(str(tmp_path / "missing"))
    files = FileStateMemory(str(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(ConfigurationError, match=r"8192 bytes of optimizer state .*: File too large"):
            files.zeros_like(torch.zeros(2048))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_host_memory_keeps_shape_and_memory_order() -> None:
    memory = make_state_memory("host")
    assert isinstance(memory, HostStateMemory)
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    made = memory.zeros_like(image, torch.float64)
    assert (made.shape, made.stride(), made.dtype) == (image.shape, image.stride(), torch.float64)
    assert not made.any()
    assert not memory.is_away(image)
    assert memory.is_away(torch.empty(1, device="meta"))
    with pytest.raises(ConfigurationError, match="nothing to offload"):
        memory.check([image])
    memory.check([image, torch.empty(1, device="meta")])


def train_on(device: str, strategy: str) -> list[torch.Tensor]:
    """Train a little on each rank's half of batches; returns the parameters in host memory."""
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(4))).double().to(device)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer = ud.distribute(model, optimizer, strategy)
    for number in range(4):
        inputs = torch.randn(2 * ud.size(), 6, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(inputs[2 * ud.rank() : 2 * ud.rank() + 2].to(device)).square().mean().backward()
        optimizer.step()
    if "offload" in strategy:
        segments = optimizer._unidist._inner._segments()
        assert all(segment.leaf.device.type == "cpu" for segment in segments)
        assert all(
            value.device.type == "cpu"
            for segment in segments
            for value in optimizer._unidist._inner._inner.state(segment).values()
        )
    with gathered(model):
        return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.gpu
@pytest.mark.parallel
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_on_a_device_steps_on_the_host(rank_pool: RankPoolFactory, tmp_path: Path, stage: int) -> None:
    def on_rank() -> list[float]:
        with set_variables({"UNIDIST_ENGINE": "gloo"}):
            ud.init()
            try:
                expected = train_on("cpu", "zero=1")
                errors = []
                for offload in ("host", str(tmp_path)):
                    found = train_on("cuda", f"zero={stage}:offload={offload}")
                    errors += [float((one - other).abs().max()) for one, other in zip(found, expected, strict=True)]
                return errors
            finally:
                ud.shutdown()

    for errors in rank_pool(2).run(on_rank):
        assert max(errors) < 1e-9
