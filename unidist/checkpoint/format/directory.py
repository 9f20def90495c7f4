"""The folders of checkpoints: written under another name and then renamed, so that visible checkpoints are complete.

A checkpoint at `PATH` is written to `.NAME.writing` beside it; when all is on the disk, index last, one rename puts it
in its place. One that is there already is first renamed to `.NAME.replaced`: if the process is killed between the two
renames, that one is found instead. A *series* is a folder of checkpoints `step-N`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection
from pathlib import Path

from unidist.checkpoint.format import index, readers
from unidist.checkpoint.format.shard import advice, sync
from unidist.errors import CheckpointError, UsageError

_STEP = re.compile(r"step-(\d+)")


def step_folder(series: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return series / f"step-{step:08d}"


def writing(path: Path) -> Path:
    """Return the folder in which the checkpoint at `path` is written."""
    return _beside(path, "writing")


def replaced(path: Path) -> Path:
    """Return where the earlier checkpoint at `path` is while another one takes its place."""
    return _beside(path, "replaced")


def _beside(path: Path, purpose: str) -> Path:
    named = path if path.name not in ("", "..") else path.resolve()  # "." and ".." have a name of their own only then
    return named.parent / f".{named.name}.{purpose}"


def is_complete(path: Path) -> bool:
    """Return whether this folder itself contains a complete checkpoint."""
    return (path / index.NAME).is_file()


def begin(path: Path) -> Path:
    """Make the folder for writing a checkpoint that shall come to `path`, without what an earlier attempt left.

    Raises:
        UsageError: there is something at `path` that is no checkpoint.
        OSError: the disk refuses.
    """
    if path.exists() and not is_complete(path):
        hint = (
            "Give another path, or `step=` for one of a series of checkpoints in it."
            if path.is_dir()
            else "Give another."
        )
        raise UsageError(f"{path} is there already and is no checkpoint, so it is not replaced. {hint}")
    path.parent.mkdir(parents=True, exist_ok=True)
    _finish_replacing(path)
    folder = writing(path)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    return folder


def commit(path: Path) -> None:
    """Rename a complete checkpoint, including its index, into place. Until then the earlier one can be found."""
    folder, earlier = writing(path), replaced(path)
    sync(folder)
    if path.exists():
        if earlier.exists():
            shutil.rmtree(earlier)
        path.rename(earlier)
    folder.rename(path)
    sync(path.parent)
    if earlier.exists():
        shutil.rmtree(earlier, ignore_errors=True)


def abandon(path: Path) -> None:
    """Remove files that were written for `path` and are not part of a complete checkpoint."""
    shutil.rmtree(writing(path), ignore_errors=True)


def steps(series: Path) -> list[tuple[int, Path]]:
    """Return the complete checkpoints of a series, the oldest first; `(step, folder)`."""
    if not series.is_dir():
        return []
    found: dict[int, Path] = {}
    for child in series.iterdir():
        name = child.name.removeprefix(".").removesuffix(".replaced")
        match = _STEP.fullmatch(name)
        if match is not None and is_complete(child) and (child.name == name or int(match[1]) not in found):
            found[int(match[1])] = child
    return sorted(found.items())


def prune(series: Path, keep: int, last: int) -> None:
    """Remove the oldest complete checkpoints of a series until `keep` are left of those up to step `last`.

    That one was saved just now. Where training has gone back, there are checkpoints of later steps: they stay. Readers
    of the series get what is removed.
    """
    for _, folder in [(step, folder) for step, folder in steps(series) if step <= last][:-keep]:
        readers.hand_over(series, folder)
        # Without its name first: a process that is killed here leaves no half of a checkpoint under it.
        doomed = writing(folder)
        if doomed.exists():
            shutil.rmtree(doomed)
        folder.rename(doomed)
        shutil.rmtree(doomed)


def sweep(series: Path, *, kept: Collection[Path] = ()) -> None:
    """Remove what killed processes have left in the folder of a series.

    Args:
        series: the folder.
        kept: checkpoints of it that are being written.
    """
    spared = {writing(path) for path in kept}
    for folder in series.glob(".step-*.writing"):
        if folder not in spared:
            shutil.rmtree(folder)


def find(path: Path) -> Path:
    """Return the folder of the checkpoint at `path`, or of the latest one if it is a series.

    Raises:
        CheckpointError: there is none, or it is being written; says which.
    """
    try:
        if is_complete(path):
            return path
        if is_complete(replaced(path)):
            return replaced(path)
        series = steps(path)
        if series:
            return series[-1][1]
        raise CheckpointError(_nothing_at(path))
    except PermissionError as exc:
        raise CheckpointError(
            f"the checkpoint {path} may not be read: {exc.strerror} ({exc.filename}). {advice(exc)}"
        ) from exc


def _nothing_at(path: Path) -> str:
    unfinished = writing(path).exists() or (path.is_dir() and any(path.glob(".step-*.writing")))
    if unfinished:
        return (
            f"there is no complete checkpoint at {path}: one is being written, or writing it was interrupted. "
            "Wait for it, or load another one."
        )
    if not path.exists():
        return f"there is no checkpoint at {path}. Give the path that was given to save()."
    if not path.is_dir():
        return f"{path} is a file; a checkpoint is a folder. Give the path that was given to save()."
    if any(path.glob("*.safetensors")):
        return (
            f"the checkpoint {path} is not complete: it has shards and no {index.NAME}. It is being written or copied, "
            "or was interrupted; wait for it, or load another one."
        )
    return f"{path} is a folder without a checkpoint: it has no {index.NAME}. Give the path that was given to save()."


def _finish_replacing(path: Path) -> None:
    """Bring back the earlier checkpoint, where a process was killed between the two renames."""
    earlier = replaced(path)
    if not earlier.exists():
        return
    if path.exists():
        shutil.rmtree(earlier)
    else:
        earlier.rename(path)
