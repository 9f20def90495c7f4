"""Checkpoints as files of PyTorch's, and its distributed checkpoints as ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result

import unidist.torch as ud
from unidist.errors import ConfigurationError
from unidist_launch.commands.checkpoint import checkpoint


@pytest.fixture(autouse=True)
def _runtime() -> Iterator[None]:
    ud.init()
    yield
    ud.shutdown()


def convert(*arguments: object) -> Result:
    done = CliRunner().invoke(checkpoint, ["convert", *map(str, arguments)], standalone_mode=False)
    assert done.exception is None, done.exception
    return done


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2).bfloat16())


def assert_equal(one: torch.nn.Module, other: torch.nn.Module) -> None:
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_a_state_dict_loads_with_torch_alone(tmp_path: Path) -> None:
    saved, loaded = model(), model()
    ud.save(tmp_path / "c", saved)
    convert(tmp_path / "c", tmp_path / "model.pt")
    loaded.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert_equal(saved, loaded)


def test_a_distributed_checkpoint_loads_with_torch_alone(tmp_path: Path) -> None:
    saved, loaded = model(), model()
    ud.save(tmp_path / "c", saved)
    convert(tmp_path / "c", tmp_path / "model.dcp")
    state = {"model": loaded.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "model.dcp", no_dist=True)
    loaded.load_state_dict(state["model"])
    assert_equal(saved, loaded)


def test_a_distributed_checkpoint_of_torch_becomes_one_of_ours(tmp_path: Path) -> None:
    saved, loaded = model(), model()
    dcp.save({"model": saved.state_dict(), "epoch": 3}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    convert(tmp_path / "theirs", tmp_path / "ours")
    ud.load(tmp_path / "ours", loaded)
    assert_equal(saved, loaded)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / ".metadata").write_bytes(b"x")
    done = CliRunner().invoke(
        checkpoint, ["convert", str(tmp_path / "broken"), str(tmp_path / "o")], standalone_mode=False
    )
    assert "cannot be read as a distributed checkpoint of PyTorch" in str(done.exception)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    ud.save(tmp_path / "c", model())
    output = tmp_path / "nowhere" / "model.pt"
    done = CliRunner().invoke(checkpoint, ["convert", str(tmp_path / "c"), str(output)], standalone_mode=False)
    assert isinstance(done.exception, ConfigurationError)
    assert f"there is no folder {output.parent}" in str(done.exception)


def test_whoever_may_read_the_index_may_read_the_shards(tmp_path: Path) -> None:
    ud.save(tmp_path / "c", model())
    (shard,) = (tmp_path / "c").glob("shard-*")
    assert shard.stat().st_mode == (tmp_path / "c" / "index.json").stat().st_mode
