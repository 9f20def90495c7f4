"""Folders of safetensors files at any strategy; with plain modules, which no library writes itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from unidist.testing.fixtures import RankPoolFactory

pytestmark = pytest.mark.parallel


def network() -> Any:
    import torch

    torch.manual_seed(0)
    tied = torch.nn.Linear(6, 6)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 6), tied, tied, torch.nn.BatchNorm1d(6)
    )


def round_trip(folder: str, line: str, mode: str) -> Any:
    """Save a model that is distributed so, or load one; returns all weights, or the text of an error."""
    import torch

    import unidist.torch as ud
    from unidist.errors import UnidistError
    from unidist_torch.checkpoint import whole_state

    ud.init()
    try:
        model = network()
        if mode == "load":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
        model, _ = ud.distribute(model, torch.optim.AdamW(model.parameters()), line)
        if mode == "save":
            ud.save_pretrained(model, folder)
        else:
            ud.load_pretrained(model, folder)
        found = whole_state(model)
        return None if found is None else {name: value.clone() for name, value in found.items()}
    except UnidistError as exc:
        return str(exc)
    finally:
        ud.shutdown()


def split(folder: Path) -> None:
    """Write the tensors of a folder into two files with an index, one of them in bfloat16."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[:3], names[3:])):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        save_file(
            {name: tensors[name].to(torch.bfloat16 if name == "0.bias" else None) for name in part}, folder / file
        )
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("line", ["data", "zero=2", "zero=3", "zero=3:shared=false", "tensor=2:plan=0=column+2=row"])
def test_what_ranks_save_others_load(line: str, rank_pool: RankPoolFactory, tmp_path: Path) -> None:
    import torch

    expected = dict(network().state_dict())
    pool = rank_pool(2, env={"OMP_NUM_THREADS": "1"})
    saved = pool.run(round_trip, (str(tmp_path), line, "save"))
    assert saved[1] is None
    assert saved[0].keys() == expected.keys() - {"4.weight", "4.bias"}
    assert all(torch.equal(value, expected[name]) for name, value in saved[0].items())
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    split(tmp_path)
    loaded = pool.run(round_trip, (str(tmp_path), line, "load"))
    assert isinstance(loaded[0], dict), loaded
    for name, value in loaded[0].items():
        rounded = expected[name].bfloat16().float() if name == "0.bias" else expected[name]
        assert torch.equal(value, rounded), name


def test_a_rank_reads_its_part_only(rank_pool: RankPoolFactory, tmp_path: Path) -> None:
    pool = rank_pool(2, env={"OMP_NUM_THREADS": "1"})
    pool.run(round_trip, (str(tmp_path), "data", "save"))
    counts = pool.run(count_bytes, (str(tmp_path),))
    whole = (tmp_path / "model.safetensors").stat().st_size
    assert all(count < 0.75 * whole for count in counts), (counts, whole)


def count_bytes(folder: str) -> int:
    from unittest import mock

    from unidist.checkpoint.format.shard import Shard

    counted, plain = [], Shard.read

    def read(self: Any, offset: int, target: memoryview) -> None:
        if self.__dict__.get("entries"):
            counted.append(len(target))
        plain(self, offset, target)

    with mock.patch.object(Shard, "read", read):
        assert round_trip(folder, "zero=3:shared=false", "load") != ""
    return sum(counted)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "neither model.safetensors nor model.safetensors.index.json .*Give a folder that save_pretrained"),
        ({"model.safetensors": b"x" * 64}, "is damaged or truncated"),
        ({"model.safetensors.index.json": b"[]"}, "cannot be read as an index of safetensors files"),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": "gone.safetensors"}}'},
            "gone.safetensors cannot be op",
        ),
    ],
)
def test_a_folder_that_cannot_be_read_is_one_line_on_every_rank(
    content: dict[str, bytes] | None, text: str, rank_pool: RankPoolFactory, tmp_path: Path
) -> None:
    for name, data in (content or {}).items():
        (tmp_path / name).write_bytes(data)
    for found in rank_pool(2, env={"OMP_NUM_THREADS": "1"}).run(round_trip, (str(tmp_path), "data", "load")):
        assert isinstance(found, str), found
        assert re.search(text, found), found
        assert "\n" not in found
