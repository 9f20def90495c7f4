"""`unidist checkpoint`, mostly without new processes; conversions that need a framework are tested with its adapter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from checkpoint_states import SHAPES, WAYS, numbers, piece, save_from, save_whole
from click.testing import CliRunner, Result

from unidist.checkpoint.format.index import NAME
from unidist.checkpoint.format.interface import MemoryState
from unidist.errors import CheckpointError, ConfigurationError
from unidist_launch.commands.checkpoint import checkpoint


def run(*arguments: object) -> Result:
    return CliRunner().invoke(checkpoint, [str(each) for each in arguments], standalone_mode=False)


def error_of(*arguments: object) -> str:
    found = run(*arguments).exception
    assert isinstance(found, ConfigurationError | CheckpointError), found
    return str(found)


def test_show_lists_tensors_sizes_and_pieces(tmp_path: Path) -> None:
    save_from(2, tmp_path / "c", lambda rank, size: {"model": MemoryState(WAYS["flat"](rank, size), {"epoch": 3})})
    done = run("show", tmp_path / "c")
    assert done.exception is None
    row = next(line for line in done.stdout.splitlines() if "table" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["model", "table", "float32", "6 x 5", "120 B", "2"]
    assert "world_size: 2" in done.stdout
    assert "5 tensors, 248 B; 2 shards" in done.stdout
    described = json.loads(run("show", tmp_path / "c", "--json").stdout)
    assert described["values"] == {"model": {"epoch": 3}}
    assert {each["name"]: each["shape"] for each in described["tensors"]} == {
        name: list(shape) for name, shape in SHAPES.items()
    }


def test_show_takes_the_latest_of_a_series_and_one_section(tmp_path: Path) -> None:
    for step in (1, 2):
        save_whole(tmp_path / "run", step=step)
    assert "step-00000002" in run("show", tmp_path / "run").stdout
    assert "choices: model" in error_of("show", tmp_path / "run", "--section", "optimizer")
    assert "there is no checkpoint at" in error_of("show", tmp_path / "nowhere")


@pytest.mark.parametrize("verb", ["show", "verify"])
@pytest.mark.parametrize("path", [".", "..", "/"])
def test_folders_without_a_name_of_their_own_are_looked_into_and_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, path: str
) -> None:
    (tmp_path / "outside" / "within").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "outside" / "within")
    assert f"{path} is a folder without a checkpoint" in error_of(verb, Path(path))
    if path != "/":
        save_whole(Path(path).resolve() / ".." / f".{Path(path).resolve().name}.replaced")
        assert run(verb, Path(path)).exception is None


def test_show_and_help_import_no_framework_and_no_numpy(tmp_path: Path) -> None:
    save_whole(tmp_path / "c")
    probe = (
        "import sys\nfrom unidist_launch.cli import main\n"
        "for line in (['--help'], ['convert', '--help'], ['show', sys.argv[1]]):\n"
        "    try:\n        main(['checkpoint', *line])\n"
        "    except SystemExit as exc:\n        assert not exc.code, exc.code\n"
        "print('loaded:', *({'numpy', 'torch', 'tensorflow', 'keras'} & sys.modules.keys()))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-P", "-c", probe, str(tmp_path / "c")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "table" in done.stdout
    assert done.stdout.rpartition("loaded:")[2].split() == []


def test_verify_tells_whole_from_damaged(tmp_path: Path) -> None:
    for step in (1, 2):
        save_whole(tmp_path / "run", step=step)
    done = run("verify", tmp_path / "run", "--all")
    assert done.return_value == 0
    assert sum(line.startswith("whole ") for line in done.stdout.splitlines()) == 2
    shard = next((tmp_path / "run" / "step-00000001").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    done = run("verify", tmp_path / "run", "--all")
    assert done.return_value == 1
    assert sum(line.startswith("damaged ") for line in done.stdout.splitlines()) == 1
    assert shard.name in done.stdout
    assert run("verify", tmp_path / "run").return_value == 0  # the latest one
    shard.unlink()
    done = run("verify", tmp_path / "run" / "step-00000001")
    assert done.return_value == 1
    assert done.stdout.count("cannot be opened") == 1
    (tmp_path / "run" / "step-00000001" / NAME).write_text("{")
    assert run("verify", tmp_path / "run" / "step-00000001").return_value == 1


def test_convert_writes_one_safetensors_file(tmp_path: Path) -> None:
    save_from(3, tmp_path / "c", lambda rank, size: {"model": MemoryState(WAYS["flat"](rank, size))})
    done = run("convert", tmp_path / "c", tmp_path / "all.safetensors")
    assert done.exception is None, done.exception
    found = safetensors.numpy.load_file(tmp_path / "all.safetensors")
    assert found.keys() == SHAPES.keys()
    for name, shape in SHAPES.items():
        np.testing.assert_array_equal(found[name], numbers(name, shape))


def test_convert_renames_and_turns(tmp_path: Path) -> None:
    array = numbers("x", (2, 3, 4))
    save_from(1, tmp_path / "c", lambda rank, size: {"model": MemoryState([piece("x", array), piece("y", array)])})
    mapping = tmp_path / "map.json"
    mapping.write_text(
        json.dumps({"new": {"from": "x", "box": [[0, 2], [1, 3], [0, 4]], "permute": [2, 0, 1], "shape": [4, 4]}})
    )
    assert run("convert", tmp_path / "c", tmp_path / "o.safetensors", "--mapping", mapping).exception is None
    found = safetensors.numpy.load_file(tmp_path / "o.safetensors")
    assert found.keys() == {"new", "y"}
    np.testing.assert_array_equal(found["new"], array[:, 1:3].transpose(2, 0, 1).reshape(4, 4))


def test_convert_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    save_whole(tmp_path / "c")
    message = error_of("convert", tmp_path / "c", tmp_path / "x.txt")
    assert "'x.txt' has no suffix of a known format; choices:" in message
    assert ".safetensors" in message
    (tmp_path / "x.safetensors").write_text("precious")
    assert "is there already" in error_of("convert", tmp_path / "c", tmp_path / "x.safetensors")
    assert "has no section 'other' (it has: model)" in error_of(
        "convert", tmp_path / "c", tmp_path / "y.safetensors", "--section", "other"
    )
    (tmp_path / "map.yaml").write_text("x: {from: y, turn: 3}")
    message = error_of("convert", tmp_path / "c", tmp_path / "y.safetensors", "--mapping", tmp_path / "map.yaml")
    assert "the mapping says for 'x'" in message
    (tmp_path / "map.yaml").write_text("x: {from: table, permute: [0, 0]}")
    message = error_of("convert", tmp_path / "c", tmp_path / "y.safetensors", "--mapping", tmp_path / "map.yaml")
    assert "permute [0, 0] does not order the dims of 'table'" in message
    assert "cannot be read" in error_of("convert", tmp_path / "c", tmp_path / "y.pt", "--mapping", tmp_path / "none")


@pytest.mark.parametrize(("box", "message"), [([[0, 9], [0, 5]], "does not lie within"), ([[0, 2]], "does not lie")])
def test_a_mapping_that_does_not_fit_is_refused(tmp_path: Path, box: list[list[int]], message: str) -> None:
    save_whole(tmp_path / "c")
    (tmp_path / "map.json").write_text(json.dumps({"x": {"from": "table", "box": box}}))
    assert message in error_of(
        "convert", tmp_path / "c", tmp_path / "o.safetensors", "--mapping", tmp_path / "map.json"
    )
