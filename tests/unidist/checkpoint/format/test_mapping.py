"""Tensors under other names, cut, turned and reshaped: as numpy would do it, in whatever parts they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_states import convert, cut, load_into, numbers, piece, save_from
from hypothesis import given, settings
from hypothesis import strategies as st

from unidist.buffer import Buffer
from unidist.checkpoint.format.interface import MemoryState
from unidist.checkpoint.format.mapping import NameMapping, mapped_section
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.reader import Checkpoint
from unidist.errors import CheckpointError, ConfigurationError

SHAPE = (3, 4, 5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one tensor in flat pieces, with a slot, of two ranks."""
    path = tmp_path_factory.mktemp("mapping") / "c"
    array = numbers("cube", SHAPE)

    def states(rank: int, size: int) -> dict[str, Any]:
        part = Part.flat(SHAPE, 30 * rank, 30 * rank + 30)
        held = [piece("cube", array, part), piece("cube#first_moment", array + 1, part)]
        return {"model": MemoryState(held, {"group_of": {"cube": "0"}, "scalars": {"cube": {"step": 1.0}}})}

    assert save_from(2, path, states) == [None, None]
    return path


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_part_of_what_is_mapped_is_what_numpy_makes_of_it(saved: Path, data: st.DataObject) -> None:
    box = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in SHAPE]
    permute = list(data.draw(st.permutations(range(3))))
    expected = numbers("cube", SHAPE)[tuple(slice(*dim) for dim in box)].transpose(permute)
    mapping = NameMapping({"x": {"from": "cube", "box": box, "permute": permute, "shape": [expected.size]}})
    start, stop = sorted(data.draw(st.tuples(st.integers(0, expected.size), st.integers(0, expected.size))))
    part = Part.flat((expected.size,), start, stop)
    target = np.zeros(part.count, "float64")
    with Checkpoint(saved, convert=convert) as checkpoint:
        mapped_section(checkpoint, "model", mapping, convert).read("x", part, Buffer.of(target))
    np.testing.assert_array_equal(target, cut(expected.reshape(-1), part))


def test_slots_and_values_follow_their_parameter(saved: Path) -> None:
    mapping = NameMapping({"x": {"from": "cube", "permute": [2, 1, 0]}})
    with Checkpoint(saved) as checkpoint:
        section = mapped_section(checkpoint, "model", mapping)
        assert {name: info.shape for name, info in section.tensors.items()} == {
            "x": (5, 4, 3),
            "x#first_moment": (5, 4, 3),
        }
        assert section.values == {"group_of": {"x": "0"}, "scalars": {"x": {"step": 1.0}}}
        target = np.zeros((5, 4, 3), "float32")
        section.read("x#first_moment", Part.whole(target.shape), Buffer.of(target))
    np.testing.assert_array_equal(target, numbers("cube", SHAPE).transpose(2, 1, 0) + 1)


def test_one_tensor_may_be_cut_into_several(saved: Path) -> None:
    sources = {name: {"from": "cube", "box": [[row, row + 1], [0, 4], [0, 5]]} for row, name in enumerate("abc")}
    with Checkpoint(saved) as checkpoint:
        section = mapped_section(checkpoint, "model", NameMapping(sources))
        assert set(section.values["group_of"]) == {"a", "b", "c"}
        target = np.zeros((1, 4, 5), "float32")
        section.read("c", Part.whole(target.shape), Buffer.of(target))
    np.testing.assert_array_equal(target[0], numbers("cube", SHAPE)[2])


def test_what_a_mapping_leaves_over_is_missed(saved: Path) -> None:
    held = MemoryState([piece("y", numbers("y", SHAPE))])
    for path in ("cube", "none"):
        _, (error,), _ = load_into(1, saved, lambda rank, size: {"model": held}, mapping=NameMapping({"x": path}))
        assert isinstance(error, CheckpointError)
        assert "it lacks (1): 'y' float32[3, 4, 5]" in str(error)


@pytest.mark.parametrize("value", [3, {"box": []}, {"from": "a", "turn": 1}, {"from": "a", "permute": "x"}])
def test_entries_that_say_nothing_are_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="the mapping says for 'x'"):
        NameMapping({"x": value})


def test_a_file_may_be_yaml_or_json(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("x: {from: y, permute: [1, 0]}")
    (tmp_path / "a.json").write_text('{"x": {"from": "y", "permute": [1, 0]}}')
    assert NameMapping.of(tmp_path / "a.yaml").sources == NameMapping.of(str(tmp_path / "a.json")).sources
    (tmp_path / "b.yaml").write_text("- 1")
    with pytest.raises(ConfigurationError, match="has no names"):
        NameMapping.of(tmp_path / "b.yaml")
    (tmp_path / "c.yaml").write_text("a: [")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        NameMapping.of(tmp_path / "c.yaml")
