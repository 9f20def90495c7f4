"""Memory of tensors in files."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from unidist.errors import ConfigurationError
from unidist_zero._torch_offload import FileMemory, StateInFiles


def test_tensors_in_files_leave_nothing_behind(tmp_path: Path) -> None:
    files = FileMemory(str(tmp_path))
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
    files = FileMemory(str(tmp_path))
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
    with pytest.raises(ConfigurationError, match="no folder that can be written to"):
        FileMemory(str(tmp_path / "missing"))
    files = FileMemory(str(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(ConfigurationError, match=r"8192 bytes of optimizer state could not be had: File too large"):
            files.zeros_like(torch.zeros(2048))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
