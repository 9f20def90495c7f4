"""What can be wrong with a checkpoint or a disk: each a clear error on every rank; the earlier one stays whole."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_states import SHAPES, everything, load_into, numbers, piece, read_all, save_from, save_whole

from unidist.buffer import Buffer
from unidist.checkpoint import saving
from unidist.checkpoint.agreement import DiskError
from unidist.checkpoint.format import directory, index
from unidist.checkpoint.format.interface import MemoryState
from unidist.checkpoint.format.reader import Checkpoint
from unidist.checkpoint.save_request import SaveOptions
from unidist.checkpoint.saving import Saver
from unidist.communicator import Communicator
from unidist.errors import CheckpointError, UsageError
from unidist.testing.threads import ThreadWorld

SHARD = "shard-00000-of-00001.safetensors"


def error_of_loading(path: Path, *, size: int = 2) -> str:
    """Return the error that every rank has."""
    _, raised, _ = load_into(size, path, lambda rank, ranks: {"model": MemoryState(everything(rank, ranks))})
    assert all(isinstance(error, CheckpointError) for error in raised), raised
    return str(raised[0])


def check_all(path: Path) -> None:
    """Read every piece, and compare it with its checksums."""
    with Checkpoint(path) as checkpoint:
        for _, tensor, stored in checkpoint.index.pieces():
            checkpoint.check(tensor, stored)


class TestDamage:
    def test_every_flipped_bit_of_a_shard_is_found(self, tmp_path: Path) -> None:
        save_whole(tmp_path / "c")
        path = tmp_path / "c" / SHARD
        content = path.read_bytes()
        header = 8 + int.from_bytes(content[:8], "little")
        check_all(tmp_path / "c")
        for position in range(header, len(content), 7):
            path.write_bytes(content[:position] + bytes([content[position] ^ 16]) + content[position + 1 :])
            with pytest.raises(CheckpointError, match="do not fit their checksum"):
                check_all(tmp_path / "c")

    def test_a_flipped_bit_is_reported_with_file_tensor_and_what_to_do(self, tmp_path: Path) -> None:
        save_whole(tmp_path / "c")
        path = tmp_path / "c" / SHARD
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
        message = error_of_loading(tmp_path / "c")
        assert SHARD in message
        assert "tensor '" in message
        assert "Copy the checkpoint again, or load an earlier one" in message

    @pytest.mark.parametrize("keep", [0, 5, 200, -1])
    def test_a_truncated_shard_is_refused(self, tmp_path: Path, keep: int) -> None:
        save_whole(tmp_path / "c")
        path = tmp_path / "c" / SHARD
        path.write_bytes(path.read_bytes()[:keep])
        assert "is damaged" in error_of_loading(tmp_path / "c")

    def test_a_missing_shard_is_named(self, tmp_path: Path) -> None:
        save_whole(tmp_path / "c")
        (tmp_path / "c" / SHARD).unlink()
        assert f"{SHARD} cannot be opened: No such file" in error_of_loading(tmp_path / "c")

    def test_a_shard_of_another_checkpoint_is_refused(self, tmp_path: Path) -> None:
        save_whole(tmp_path / "c")
        save_from(1, tmp_path / "d", lambda rank, size: {"model": MemoryState([piece("x", numbers("x", (3,)))])})
        shutil.copy(tmp_path / "d" / SHARD, tmp_path / "c" / SHARD)
        assert "of another checkpoint" in error_of_loading(tmp_path / "c")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda text: text[: len(text) // 2], "is damaged: it cannot be read"),
            (lambda text: text.replace('"table"', '"tablf"', 1), "its checksum does not fit its content"),
            (lambda text: text.replace('"version":1', '"version":2'), "has format version 2, and this unidist reads"),
            (lambda text: "{}", "cannot be read"),
            (lambda text: '{"checksum": 0, "index": {}}', "is no index of a unidist checkpoint"),
        ],
    )
    def test_a_damaged_index_is_refused(self, tmp_path: Path, change: Callable[[str], str], message: str) -> None:
        save_whole(tmp_path / "c")
        path = tmp_path / "c" / index.NAME
        path.write_text(change(path.read_text()))
        assert message in error_of_loading(tmp_path / "c")

    def test_only_what_is_needed_is_read(self, tmp_path: Path) -> None:
        """Damage elsewhere does not matter: a rank reads its part alone."""
        size = index.CHUNK_BYTES  # one byte per element: two chunks
        array = np.zeros(2 * size, "uint8")
        save_from(1, tmp_path / "c", lambda rank, ranks: {"model": MemoryState([piece("x", array)])})
        path = tmp_path / "c" / SHARD
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
        with Checkpoint(tmp_path / "c") as checkpoint:
            section = checkpoint.section("model")
            low = piece("x", array).part.range_within(5, size)
            section.read("x", low, Buffer.of(np.ones(low.count, "uint8")))
            high = low.range_within(0, 10)
            section.read("x", high, Buffer.of(np.ones(10, "uint8")))
            whole = piece("x", array).part
            with pytest.raises(CheckpointError, match=f"bytes {size} to {2 * size} of 'model/x'"):
                section.read("x", whole, Buffer.of(np.ones(whole.count, "uint8")))


class TestPlaces:
    def test_where_there_is_none_the_error_says_so(self, tmp_path: Path) -> None:
        assert "there is no checkpoint at" in error_of_loading(tmp_path / "nowhere")
        (tmp_path / "file").write_text("x")
        assert "is a file; a checkpoint is a folder" in error_of_loading(tmp_path / "file")
        (tmp_path / "folder").mkdir()
        assert "a folder without a checkpoint" in error_of_loading(tmp_path / "folder")

    def test_one_that_is_being_written_is_not_loaded(self, tmp_path: Path) -> None:
        directory.begin(tmp_path / "c")
        assert "one is being written, or writing it was interrupted" in error_of_loading(tmp_path / "c")
        directory.begin(directory.step_folder(tmp_path / "run", 3))
        assert "one is being written, or writing it was interrupted" in error_of_loading(tmp_path / "run")
        save_whole(tmp_path / "half")
        (tmp_path / "half" / index.NAME).unlink()
        assert "is not complete: it has shards and no index.json" in error_of_loading(tmp_path / "half")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_missing_permissions_are_named(self, tmp_path: Path) -> None:
        save_whole(tmp_path / "c")
        (tmp_path / "c" / SHARD).chmod(0)
        assert "Permission denied" in error_of_loading(tmp_path / "c")
        (tmp_path / "c").chmod(0)
        assert "may not be read" in error_of_loading(tmp_path / "c")
        (tmp_path / "c").chmod(0o755)

    def test_permissions_that_the_system_refuses_are_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save_whole(tmp_path / "c")
        real = os.open

        def refusing(path: Any, *args: Any, **kwargs: Any) -> int:
            if str(path).endswith(".safetensors"):
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *args, **kwargs)

        monkeypatch.setattr(os, "open", refusing)
        message = error_of_loading(tmp_path / "c")
        assert "cannot be opened: Permission denied. Ask its owner" in message

    def test_something_else_at_the_path_is_not_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "precious").mkdir()
        (tmp_path / "precious" / "data").write_text("x")
        raised = save_from(2, tmp_path / "precious", lambda rank, size: {"model": MemoryState([])})
        assert isinstance(raised[0], UsageError)
        assert "is no checkpoint, so it is not replaced" in str(raised[1])
        assert (tmp_path / "precious" / "data").read_text() == "x"

    @pytest.mark.parametrize("moment", ["before the second rename", "with both there"])
    def test_a_save_that_was_killed_while_it_replaced_leaves_one_to_load(self, tmp_path: Path, moment: str) -> None:
        path = tmp_path / "c"
        save_whole(path)
        if moment == "before the second rename":
            path.rename(directory.replaced(path))
        else:
            shutil.copytree(path, directory.replaced(path))
        assert directory.find(path) in (path, directory.replaced(path))
        _, raised, _ = load_into(1, path, lambda rank, size: {"model": MemoryState(everything(rank, size))})
        assert raised == [None]
        save_whole(path)
        assert [child.name for child in tmp_path.iterdir()] == ["c"]


class FullDisk:
    """A disk that is full for one of the ranks, from the n-th shard on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.full = False
        real = saving.write

        def write(folder: Path, shard: str, pieces: Any) -> Any:
            if self.full and shard.startswith(name):
                (folder / shard).write_bytes(b"half")
                raise OSError(28, "No space left on device", str(folder / shard))
            return real(folder, shard, pieces)

        monkeypatch.setattr(saving, "write", write)


@pytest.mark.parametrize("asynchronous", [False, True])
class TestFullDisk:
    def test_the_earlier_checkpoint_stays_whole_and_every_rank_has_the_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
    ) -> None:
        disk = FullDisk(monkeypatch, "shard-00001")
        path = tmp_path / "c"
        save_whole(path, size=2)
        disk.full = True
        new = {"model": MemoryState([piece("x", numbers("x", (9,))), piece("y", numbers("x", (9,)))])}
        for error in save_from(2, path, lambda rank, size: new, asynchronous=asynchronous):
            assert isinstance(error, CheckpointError)
            assert "cannot be saved on rank 1: No space left on device" in str(error)
        assert [child.name for child in tmp_path.iterdir()] == ["c"]
        assert read_all(path).keys() == SHAPES.keys()

    def test_training_goes_on_with_a_warning_where_that_was_asked_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asynchronous: bool
    ) -> None:
        disk = FullDisk(monkeypatch, "shard-00000")

        def main(communicator: Communicator) -> tuple[bool, bool]:
            saver = Saver(communicator, {})
            states = {"model": MemoryState(everything(0, 1))}
            options = SaveOptions(tmp_path / "c", asynchronous=asynchronous, on_error="warn")
            communicator.barrier().wait()
            disk.full = True
            failed = saver.save(options, lambda: states, {})
            failed.wait()
            communicator.barrier().wait()
            disk.full = False
            communicator.barrier().wait()
            again = saver.save(options, lambda: states, {})
            again.wait()
            saver.close()
            return isinstance(failed.error, DiskError), again.error is None

        with ThreadWorld(2) as world:
            assert world.run(main) == [(True, True)] * 2
        assert caplog.text.count("Training goes on without this checkpoint") == 1
        assert read_all(tmp_path / "c").keys() == SHAPES.keys()


def test_an_asynchronous_error_that_nobody_asked_for_is_raised_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(monkeypatch, "shard-00000")

    def main(communicator: Communicator) -> None:
        saver = Saver(communicator, {})
        states = {"model": MemoryState(everything(0, 1))}
        communicator.barrier().wait()
        disk.full = True
        handle = saver.save(SaveOptions(tmp_path / "c", asynchronous=True), lambda: states, {})
        if communicator.rank == 0:  # has heard of it; the others have not, and yet all must raise it
            with pytest.raises(CheckpointError):
                handle.wait()
        with pytest.raises(CheckpointError, match="No space left on device"):
            saver.save(SaveOptions(tmp_path / "c"), lambda: states, {})
        communicator.barrier().wait()
        disk.full = False
        communicator.barrier().wait()
        saver.save(SaveOptions(tmp_path / "c"), lambda: states, {}).wait()
        saver.close()

    with ThreadWorld(2) as world:
        world.run(main)
    assert json.loads((tmp_path / "c" / index.NAME).read_text())["index"]["sections"]["model"]["tensors"]


def test_what_the_file_system_itself_refuses_is_an_error_of_the_disk(tmp_path: Path) -> None:
    """The limit of a process stands for a disk that fills up in the middle of a shard."""
    path = tmp_path / "c"
    save_whole(path)
    large = {"model": MemoryState([piece("x", np.zeros(1 << 20, "uint8"))])}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, hard))
    try:
        (error,) = save_from(1, path, lambda rank, size: large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(error, DiskError)
    assert "cannot be saved: File too large" in str(error)
    assert [child.name for child in tmp_path.iterdir()] == ["c"]
    assert read_all(path).keys() == SHAPES.keys()
