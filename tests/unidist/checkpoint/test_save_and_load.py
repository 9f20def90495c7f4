"""What any number of ranks saved, cut up in any way, any other number loads, cut up in another way."""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from checkpoint_states import (
    SHAPES,
    WAYS,
    cut,
    load_into,
    numbers,
    piece,
    read_all,
    save_from,
    save_whole,
)

from unidist.buffer import Buffer, DType
from unidist.checkpoint.format import index
from unidist.checkpoint.format.index import Index
from unidist.checkpoint.format.interface import MemoryState
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.pieces import Piece, TensorInfo
from unidist.checkpoint.save_request import SaveOptions
from unidist.checkpoint.saving import Saver, _Finish
from unidist.checkpoint.snapshot import SnapshotMemory
from unidist.communicator import Communicator
from unidist.errors import CheckpointError, UsageError
from unidist.testing.threads import ThreadWorld


@pytest.mark.parametrize(
    ("way", "size", "other_way", "other_size"),
    [
        ("whole", 1, "flat", 3),
        ("whole", 4, "columns", 2),
        ("flat", 4, "whole", 2),
        ("flat", 2, "flat", 4),
        ("flat", 3, "both", 4),
        ("columns", 2, "flat", 3),
        ("columns", 4, "columns", 3),
        ("both", 4, "columns", 1),
        ("both", 4, "flat", 2),
        ("both", 2, "both", 6),
    ],
)
def test_what_was_saved_in_one_way_loads_in_another(
    tmp_path: Path, way: str, size: int, other_way: str, other_size: int
) -> None:
    path = tmp_path / "checkpoint"
    raised = save_from(size, path, lambda rank, ranks: {"model": MemoryState(WAYS[way](rank, ranks))})
    assert raised == [None] * size
    for name, shape in SHAPES.items():
        np.testing.assert_array_equal(read_all(path)[name], numbers(name, shape))

    def empty(rank: int, ranks: int) -> dict[str, MemoryState]:
        return {
            "model": MemoryState(
                [
                    Piece(each.tensor, each.part, Buffer.allocate(each.part.count, each.tensor.dtype))
                    for each in WAYS[other_way](rank, ranks)
                ]
            )
        }

    states, raised, _ = load_into(other_size, path, empty)
    assert raised == [None] * other_size
    for state in states:
        for each in state["model"].pieces():
            expected = cut(numbers(each.tensor.name, each.tensor.shape), each.part)
            assert bytes(each.memory.bytes()) == expected.tobytes(), each.tensor


def test_a_piece_that_several_ranks_hold_is_written_once_and_all_write_about_as_much(tmp_path: Path) -> None:
    def states(rank: int, size: int) -> dict[str, MemoryState]:
        return {"model": MemoryState([piece(f"w{each}", numbers("w", (1000 + each,))) for each in range(12)])}

    save_from(3, tmp_path / "c", states)
    sizes = [nbytes for _, nbytes in Index.read(tmp_path / "c").shards]
    assert len(sizes) == 3
    total = sum(4 * (1000 + each) for each in range(12))
    assert total < sum(sizes) < total + 5000
    assert max(sizes) < 1.1 * min(sizes)


def test_a_shard_is_a_safetensors_file_that_others_can_read(tmp_path: Path) -> None:
    save_whole(tmp_path / "c")
    found = safetensors.numpy.load_file(tmp_path / "c" / "shard-00000-of-00001.safetensors")
    for name, shape in SHAPES.items():
        np.testing.assert_array_equal(found[f"model/{name}"], numbers(name, shape))


@pytest.mark.parametrize("dtype", list(DType))
def test_every_type_survives(tmp_path: Path, dtype: DType) -> None:
    kind = np.dtype(ml_dtypes.bfloat16) if dtype is DType.BFLOAT16 else np.dtype(str(dtype))
    array = np.arange(6).astype(kind).reshape(2, 3)
    if dtype.is_complex:
        array = array * (1 + 2j)
    memory = Buffer.of(np.array(array).view(np.uint8).reshape(-1)).cast(dtype)
    held = [Piece.whole("x", (2, 3), memory)]
    save_from(1, tmp_path / "c", lambda rank, size: {"model": MemoryState(held)})
    back = Buffer.allocate(6, dtype)
    _, raised, _ = load_into(
        1, tmp_path / "c", lambda rank, size: {"model": MemoryState([Piece.whole("x", (2, 3), back)])}
    )
    assert raised == [None]
    assert bytes(back.bytes()) == array.tobytes()


def test_floating_point_numbers_are_converted_where_types_differ_and_others_are_not(tmp_path: Path) -> None:
    array = numbers("x", (5,), "float64") / 3
    save_from(1, tmp_path / "c", lambda rank, size: {"model": MemoryState([piece("x", array)])})
    narrow = np.zeros(5, "float16")
    held = Piece(TensorInfo("x", (5,), DType.FLOAT16), Part.whole((5,)), Buffer.of(narrow))
    _, raised, _ = load_into(1, tmp_path / "c", lambda rank, size: {"model": MemoryState([held])})
    assert raised == [None]
    np.testing.assert_array_equal(narrow, array.astype("float16"))
    whole = Piece(TensorInfo("x", (5,), DType.INT64), Part.whole((5,)), Buffer.allocate(5, DType.INT64))
    _, (error,), _ = load_into(1, tmp_path / "c", lambda rank, size: {"model": MemoryState([whole])})
    assert isinstance(error, CheckpointError)
    assert "'x' float64[5] was saved, and it is int64 here" in str(error)


def test_values_of_all_ranks_are_merged(tmp_path: Path) -> None:
    def states(rank: int, size: int) -> dict[str, MemoryState]:
        return {"optimizer": MemoryState([], {"kind": "adam", "steps": {f"p{rank}": {"step": rank + 0.5}}})}

    assert save_from(2, tmp_path / "c", states) == [None, None]
    states_, _, _ = load_into(1, tmp_path / "c", lambda rank, size: {"optimizer": MemoryState([])})
    loaded = states_[0]["optimizer"]
    assert isinstance(loaded, MemoryState)
    assert loaded.loaded == {"kind": "adam", "steps": {"p0": {"step": 0.5}, "p1": {"step": 1.5}}}


def test_values_that_differ_are_an_error_on_every_rank(tmp_path: Path) -> None:
    raised = save_from(2, tmp_path / "c", lambda rank, size: {"model": MemoryState([], {"group": {"lr": rank}})})
    for error in raised:
        assert isinstance(error, CheckpointError)
        assert "group.lr is 0 on an earlier rank and 1 on rank 1" in str(error)
    assert not list(tmp_path.iterdir())


def test_an_asynchronous_save_has_the_numbers_of_the_call(tmp_path: Path) -> None:
    def main(communicator: Communicator) -> None:
        saver = Saver(communicator, {})
        memory = np.arange(1000, dtype="float32")
        held = [
            Piece.whole("x", (1000,), Buffer.of(memory)),
            piece("flags", np.ones(3, "bool")),
            piece("wide", np.ones(3, "float64")),
        ]
        handle = saver.save(SaveOptions(tmp_path / "c", asynchronous=True), lambda: {"model": MemoryState(held)}, {})
        memory[:] = -1  # training goes on
        handle.wait(timedelta(seconds=20))
        assert handle.done()
        saver.close()

    with ThreadWorld(2) as world:
        world.run(main)
    np.testing.assert_array_equal(read_all(tmp_path / "c")["x"], np.arange(1000, dtype="float32"))


def test_the_memory_of_a_snapshot_is_used_again_if_it_is_large_enough() -> None:
    def take(count: int, fill: float) -> tuple[list[bytes], list[int]]:
        held = [("m", piece("x", np.full(count, fill, "float32"))), ("m", piece("y", np.full(3, fill, "float64")))]
        taken = memory.take(held)
        assert all(each.memory.address % each.memory.dtype.itemsize == 0 for _, each in taken)
        assert [bytes(each.memory.bytes()) for _, each in taken] == [
            bytes(each.memory.bytes()) for _, each in held[::-1]
        ]
        return [bytes(each.memory.bytes()) for _, each in taken], [each.memory.address for _, each in taken]

    memory = SnapshotMemory()
    _, first = take(1000, 1)
    _, again = take(900, 2)
    assert first == again
    take(100_000, 3)
    memory.close()


def test_ranks_that_ask_for_different_saves_are_told_so(tmp_path: Path) -> None:
    def main(communicator: Communicator) -> str:
        saver = Saver(communicator, {})
        with pytest.raises(UsageError) as caught:
            saver.save(SaveOptions(tmp_path / "c", step=communicator.rank), dict, {})
        return str(caught.value)

    with ThreadWorld(2) as world:
        for message in world.run(main):
            assert "the ranks ask for different saves" in message


def test_pieces_that_do_not_cover_a_tensor_are_an_error_on_every_rank(tmp_path: Path) -> None:
    array = numbers("x", (10,))

    def states(rank: int, size: int) -> dict[str, MemoryState]:
        return {"model": MemoryState([piece("x", array, Part.flat((10,), 5 * rank, 4 + 5 * rank))])}

    for error in save_from(2, tmp_path / "c", states):
        assert "8 elements together instead of 10" in str(error)
    assert not list(tmp_path.iterdir())


def test_values_that_are_not_plain_are_named(tmp_path: Path) -> None:
    raised = save_from(2, tmp_path / "c", lambda rank, size: {"extra": MemoryState([], {"x": {1, 2}} if rank else {})})
    assert isinstance(raised[1], UsageError)
    assert "section 'extra' has values that are not plain" in str(raised[1])
    assert isinstance(raised[0], CheckpointError)
    assert "on rank 1: section 'extra'" in str(raised[0])


class TestSeries:
    def test_the_latest_complete_checkpoint_is_loaded_and_the_oldest_are_removed(self, tmp_path: Path) -> None:
        for step in (5, 10, 20, 30):
            save_whole(tmp_path / "run", step=step, keep=2)
        assert sorted(child.name for child in (tmp_path / "run").iterdir()) == ["step-00000020", "step-00000030"]
        (tmp_path / "run" / "step-00000030" / index.NAME).unlink()  # as of one that was not completed
        with ThreadWorld(1) as world:
            found = world.run(lambda communicator: _loaded_step(communicator, tmp_path / "run"))
        assert found == [20]

    def test_training_that_has_gone_back_loses_neither_what_it_saves_nor_later_steps(self, tmp_path: Path) -> None:
        for step in (10, 20, 30, 15):
            save_whole(tmp_path / "run", step=step, keep=1)
        assert sorted(child.name for child in (tmp_path / "run").iterdir()) == ["step-00000015", "step-00000030"]
        save_whole(tmp_path / "run", step=40, keep=1)
        assert [child.name for child in (tmp_path / "run").iterdir()] == ["step-00000040"]

    def test_a_step_that_is_saved_again_replaces_the_earlier_one(self, tmp_path: Path) -> None:
        save_whole(tmp_path / "run", step=1)
        again = np.zeros((2, 2), "float32")
        save_from(1, tmp_path / "run", lambda rank, size: {"model": MemoryState([piece("x", again)])}, step=1)
        assert read_all(tmp_path / "run" / "step-00000001").keys() == {"x"}
        assert [child.name for child in (tmp_path / "run").iterdir()] == ["step-00000001"]


def _loaded_step(communicator: Communicator, path: Path) -> int:
    from unidist.checkpoint.loading import LoadOptions, load

    done = load(communicator, LoadOptions(path), lambda checkpoint: {}, convert=None, report=print)
    step: int = done.index.facts["step"]
    return step


def test_the_index_is_plain_json_that_says_what_is_where(tmp_path: Path) -> None:
    save_whole(tmp_path / "c")
    content = json.loads((tmp_path / "c" / "index.json").read_text())["index"]
    table = content["sections"]["model"]["tensors"]["table"]
    assert (table["shape"], table["dtype"]) == ([6, 5], "float32")
    assert table["pieces"][0]["key"] == "model/table"
    assert content["facts"]["framework"] == "none"


class TestStages:
    """Ranks that hold different tensors, as the stages of a pipeline do."""

    NAMES = ("a", "b", "c", "d")

    def stage(self, rank: int, size: int, *, zeros: bool = False) -> dict[str, MemoryState]:
        own = [name for number, name in enumerate(self.NAMES) if number * size // len(self.NAMES) == rank]
        arrays = {name: numbers(name * (1 + self.NAMES.index(name)), (3,)) for name in own}
        held = [piece(name, np.zeros_like(array) if zeros else array) for name, array in arrays.items()]
        return {"model": MemoryState(held)}

    @pytest.mark.parametrize(("size", "other_size"), [(2, 4), (4, 2), (2, 1)])
    def test_what_other_ranks_hold_is_missed_by_none(self, tmp_path: Path, size: int, other_size: int) -> None:
        assert save_from(size, tmp_path / "c", self.stage) == [None] * size
        states, raised, warnings = load_into(
            other_size, tmp_path / "c", lambda rank, ranks: self.stage(rank, ranks, zeros=True)
        )
        assert raised == [None] * other_size
        assert warnings == [[]] * other_size
        for rank, state in enumerate(states):
            expected = self.stage(rank, other_size)["model"].pieces()
            for found, wanted in zip(state["model"].pieces(), expected, strict=True):
                assert bytes(found.memory.bytes()) == bytes(wanted.memory.bytes())

    def test_what_no_rank_holds_is_missed(self, tmp_path: Path) -> None:
        save_from(2, tmp_path / "c", self.stage)

        def fewer(rank: int, size: int) -> dict[str, MemoryState]:
            held = [each for each in self.stage(rank, size)["model"].pieces() if each.tensor.name != "c"]
            return {"model": MemoryState(held)}

        _, raised, _ = load_into(2, tmp_path / "c", fewer)
        for error in raised:
            assert "it has what is not wanted (1): 'c' float32[3]" in str(error)


def test_a_rank_without_memory_for_a_snapshot_is_reported_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, lock, calls = SnapshotMemory.take, threading.Lock(), []

    def scarce(self: SnapshotMemory, pieces: Any) -> Any:
        with lock:
            calls.append(1)
            if len(calls) == 1:
                raise MemoryError("no memory")
        return real(self, pieces)

    monkeypatch.setattr(SnapshotMemory, "take", scarce)
    raised = save_from(
        2, tmp_path / "c", lambda rank, size: {"model": MemoryState(WAYS["flat"](rank, size))}, asynchronous=True
    )
    for error in raised:
        assert isinstance(error, CheckpointError)
        assert "MemoryError: no memory" in str(error)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_cannot_be_completed_is_reported_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("the disk refuses")

    monkeypatch.setattr(_Finish, "_complete", refuse)  # which rank 0 does alone
    raised = save_from(2, tmp_path / "c", lambda rank, size: {"model": MemoryState(WAYS["flat"](rank, size))})
    assert len(raised) == 2
    for error in raised:
        assert isinstance(error, CheckpointError)
        assert "the disk refuses" in str(error)
    assert not list(tmp_path.iterdir())
