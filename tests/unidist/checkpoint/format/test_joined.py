"""Several optimizers of a checkpoint are read as one, and each of several finds its parameters in one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from unidist.buffer import Buffer, DType
from unidist.checkpoint.convert import to_checkpoint
from unidist.checkpoint.format.interface import MemoryState
from unidist.checkpoint.format.joined import JoinedSection
from unidist.checkpoint.format.optimizer_record import OptimizerRecord
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.pieces import Piece
from unidist.checkpoint.format.reader import Checkpoint
from unidist.checkpoint.format.slots import TORCH, OptimizerNaming
from unidist.checkpoint.loading import sources_of
from unidist.errors import CheckpointError


def test_a_section_is_looked_for_by_its_name_and_then_in_what_has_all_of_it() -> None:
    several = ["model", "optimizer.adamw", "optimizer.muon", "update.muon"]
    assert sources_of("optimizer", several) == ("optimizer.adamw", "optimizer.muon")
    assert sources_of("optimizer.muon", several) == ("optimizer.muon",)
    assert sources_of("optimizer.other", several) == ("optimizer.other",)  # which is an error that lists them
    assert sources_of("optimizer.muon", ["model", "optimizer"]) == ("optimizer",)
    assert sources_of("optimizer", ["model", "optimizer"]) == ("optimizer",)
    assert sources_of("model", several) == ("model",)
    assert sources_of("model.a", ["model"]) == ("model.a",)


def saved(kind: str, family: str, path: str, value: float, rate: float) -> MemoryState:
    memory = Buffer.allocate(2, DType.FLOAT64)
    np.frombuffer(memory.bytes(), np.float64)[:] = value
    record = OptimizerRecord(OptimizerNaming(TORCH, (kind, "Optimizer")), {"0": {"lr": rate}}, {path: "0"})
    record.add_family(path, record.naming.of_family(family))
    record.scalars[path] = {"step": value}
    return MemoryState([Piece.whole(f"{path}#slot", (2,), memory)], record.values())


def test_a_joined_section_has_the_parameters_groups_and_families_of_all(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    sections = {
        "optimizer.adamw": saved("AdamW", "adam", "bias", 3.0, 0.1),
        "optimizer.muon": saved("Muon", "muon", "weight", 5.0, 0.2),
        "optimizer.twin": saved("Muon", "muon", "weight", 5.0, 0.2),
    }
    to_checkpoint(folder, sections, {})
    with Checkpoint(folder) as opened:
        found = {name: opened.section(name) for name in sections}
        two = {name: section for name, section in found.items() if name != "optimizer.twin"}
        joined = JoinedSection(two, what="both", report=pytest.fail)
        assert set(joined.tensors) == {"bias#slot", "weight#slot"}
        target = Buffer.allocate(2, DType.FLOAT64)
        joined.read("weight#slot", Part.whole((2,)), target)
        assert np.frombuffer(target.bytes(), np.float64).tolist() == [5.0, 5.0]
        record = OptimizerRecord.of(joined.values)
        assert (record.learning_rate("bias"), record.learning_rate("weight"), record.steps) == (0.1, 0.2, 5)
        families = [record.naming_of(path).family for path in ("bias", "weight")]
        assert [None if family is None else family.name for family in families] == ["adam", "muon"]
        with pytest.raises(CheckpointError, match=r"both does not fit: it has what is not wanted \(2\)"):
            joined.match([])
        with pytest.raises(CheckpointError, match=r"have parameters in common \('weight'\)"):
            JoinedSection(found, what="all", report=pytest.fail)
