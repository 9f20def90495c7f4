"""Saves checkpoints: every rank writes its shard, rank 0 the index, and the complete checkpoint is renamed into place.

Ranks exchange which pieces they hold, then whether they have written them. The latter uses a separate communicator and,
for asynchronous saves, a background thread. An error on one rank is raised on all: no rank waits for one that gave up.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unidist.checkpoint.agreement import DiskError, agree
from unidist.checkpoint.format import directory, index
from unidist.checkpoint.format.interface import KeepsState
from unidist.checkpoint.format.pieces import Piece
from unidist.checkpoint.format.shard import sync
from unidist.checkpoint.format.writing import (
    RankInventory,
    WrittenShard,
    assign,
    check_inventories,
    make_index,
    merge_values,
    write,
)
from unidist.checkpoint.save_request import SaveHandle, SaveOptions
from unidist.checkpoint.snapshot import SnapshotMemory
from unidist.communicator import Communicator
from unidist.errors import UnidistError, UsageError

_log = logging.getLogger("unidist")

_REFUSED = "Make room, see to the permissions, or save elsewhere; an earlier checkpoint at this place is still whole"

States = Callable[[], Mapping[str, KeepsState]]
"""Makes the sections of a checkpoint, on this rank. It may raise."""


class Saver:
    """Saves checkpoints for one runtime, one after another.

    Args:
        communicator: over all ranks, used by nothing else; a background thread uses it during asynchronous saves.
        facts: about the job, for the index.
        unfinished: the checkpoints that this process is saving; savers that may save into one folder share the set.
    """

    def __init__(
        self, communicator: Communicator, facts: Mapping[str, Any], *, unfinished: set[Path] | None = None
    ) -> None:
        self.communicator = communicator
        self._unfinished = set() if unfinished is None else unfinished
        self._facts = dict(facts)
        self._memory = SnapshotMemory()
        self._pending: SaveHandle | None = None
        self._thread: threading.Thread | None = None

    def save(self, options: SaveOptions, states: States, facts: Mapping[str, Any]) -> SaveHandle:
        """Save a checkpoint, after any earlier save is complete. Collective, with the same options on every rank.

        Args:
            options: equal on every rank.
            states: what to save.
            facts: what else the index shall say.

        Raises:
            CheckpointError: it cannot be saved; or the earlier asynchronous save failed and that was not reported yet.
            UsageError: the options or the state are at fault, or ranks ask for different things.
        """
        handle = SaveHandle(options.target)
        handle.on_error = options.on_error
        previous = self._join()
        what = f"the checkpoint {options.target} cannot be saved"
        self._unfinished.add(options.target)
        try:
            own, inventories = self._take_inventory(options, states, previous, what)
        except DiskError as exc:
            self._unfinished.discard(options.target)
            self._note(handle, exc)
            return handle
        except BaseException:
            self._unfinished.discard(options.target)
            raise
        error: Exception | None = None
        if options.asynchronous:
            try:
                own = self._memory.take(own)
            except Exception as exc:  # that there is no memory, above all: the others must hear of it
                error = exc
        finish = _Finish(
            self.communicator, options, own, inventories, {**self._facts, **facts}, what, error, self._unfinished
        )
        if not options.asynchronous:
            try:
                finish.run()
            except DiskError as exc:
                self._note(handle, exc)
                return handle
            handle.end()
            return handle
        self._pending = handle

        def main() -> None:
            try:
                finish.run()
            except Exception as exc:  # raised where the script waits for it
                if isinstance(exc, DiskError) and options.on_error == "warn":
                    self._warn(exc)
                handle.end(exc)
            else:
                handle.end()

        self._thread = threading.Thread(target=main, name="unidist-checkpoint", daemon=True)
        self._thread.start()
        return handle

    def wait(self) -> None:
        """Wait until nothing is being saved; errors stay with their handles."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Wait for the pending save, and log its error if that was not reported yet."""
        error = self._join()
        self._memory.close()
        if error is not None:
            _log.error("an asynchronous save failed: %s", error)

    def _join(self) -> Exception | None:
        """Wait for the earlier save; return its error if that was not reported yet."""
        self.wait()
        handle, self._pending = self._pending, None
        return None if handle is None else handle.take_error()

    def _take_inventory(
        self, options: SaveOptions, states: States, previous: Exception | None, what: str
    ) -> tuple[list[tuple[str, Piece]], list[RankInventory]]:
        """Exchange inventories and make the folder; return the pieces that this rank writes, and all inventories."""
        pieces: list[tuple[str, Piece]] = []
        inventory: RankInventory | None = None
        error = previous
        if error is None:
            try:
                made = states()
                values = {name: plain(state.values(), name) for name, state in made.items()}
                for name, state in made.items():
                    held = [piece for piece in state.pieces() if piece.part.count or not piece.tensor.count]
                    pieces += [(name, piece) for piece in held]
                inventory = RankInventory(tuple((name, piece.tensor, piece.part) for name, piece in pieces), values)
                if self.communicator.rank == 0:
                    directory.begin(options.target)
                    self._sweep(options)
            except Exception as exc:  # of whatever kind: the others must hear of it
                error = exc
        try:
            gathered = agree(self.communicator, (options, inventory), error, what, if_disk=_REFUSED)
            for rank, (theirs, _) in enumerate(gathered):
                if theirs != gathered[0][0]:
                    raise UsageError(
                        f"the ranks ask for different saves: {gathered[0][0]} on rank 0, {theirs} on rank {rank}"
                    )
            inventories: list[RankInventory] = [each for _, each in gathered]
            check_inventories(inventories)
            merge_values([each.values for each in inventories])
        except UnidistError:
            if self.communicator.rank == 0:
                directory.abandon(options.target)
            raise
        return [pieces[position] for position in assign(inventories)[self.communicator.rank]], inventories

    def _sweep(self, options: SaveOptions) -> None:
        """Remove from the series what processes that were killed have left there of other checkpoints."""
        if options.step is not None:
            try:
                directory.sweep(options.path, kept=self._unfinished)
            except OSError as exc:  # it may be another user's, and costs room only
                _log.warning("interrupted checkpoints in %s cannot be removed: %s", options.path, exc)

    def _note(self, handle: SaveHandle, error: DiskError) -> None:
        """Raise, or warn and go on, as the script has asked."""
        handle.end(error)
        if handle.on_error == "raise":
            handle.take_error()
            raise error
        self._warn(error)

    def _warn(self, error: DiskError) -> None:
        if self.communicator.rank == 0:
            _log.warning("%s. Training goes on without this checkpoint (on_error='warn').", error)


class _Finish:
    """The second half of a save: write, agree, rename into place. Runs on the caller's thread or in the background."""

    def __init__(
        self,
        communicator: Communicator,
        options: SaveOptions,
        pieces: Sequence[tuple[str, Piece]],
        inventories: Sequence[RankInventory],
        facts: Mapping[str, Any],
        what: str,
        error: Exception | None,
        unfinished: set[Path],
    ) -> None:
        self._unfinished = unfinished
        self._communicator = communicator
        self._options = options
        self._pieces = pieces
        self._inventories = inventories
        self._facts = facts
        self._what = what
        self._error = error

    def run(self) -> None:
        """Raise an error of any rank on every rank, after all written files were removed."""
        communicator = self._communicator
        path = self._options.target
        try:
            written: WrittenShard | None = None
            error = self._error
            if error is None:
                try:
                    name = f"shard-{communicator.rank:05d}-of-{communicator.size:05d}.safetensors"
                    written = write(_visible(directory.writing(path)), name, self._pieces)
                except Exception as exc:  # of whatever kind: the others must hear of it
                    error = exc
            gathered: list[WrittenShard] = agree(communicator, written, error, self._what, if_disk=_REFUSED)
            error = None
            if communicator.rank == 0:
                try:
                    self._complete(gathered)
                except Exception as exc:
                    error = exc
            agree(communicator, None, error, self._what, if_disk=_REFUSED)
        except UnidistError:
            if communicator.rank == 0:
                directory.abandon(path)
            raise
        finally:
            self._unfinished.discard(path)
            self._pieces = ()  # a snapshot is large

    def _complete(self, written: Sequence[WrittenShard]) -> None:
        path = self._options.target
        folder = directory.writing(path)
        facts = {
            **self._facts,
            "step": self._options.step,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        text = make_index(self._inventories, written, facts).to_json()
        (folder / index.NAME).write_text(text, encoding="utf-8")
        sync(folder / index.NAME)
        directory.commit(path)
        if self._options.keep is not None and self._options.step is not None:
            try:
                directory.prune(self._options.path, self._options.keep, self._options.step)
            except OSError as exc:  # the new one is complete
                _log.warning("old checkpoints in %s cannot be removed: %s", self._options.path, exc)


def plain(values: Mapping[str, Any], section: str) -> dict[str, Any]:
    """Return values as JSON gives them back: tuples are lists.

    Raises:
        UsageError: there is something that JSON does not have.
    """
    try:
        found: dict[str, Any] = json.loads(json.dumps(values))
    except (TypeError, ValueError) as exc:
        raise UsageError(
            f"section {section!r} has values that are not plain: {exc}. Numbers, texts, booleans, None, lists, and "
            "dicts with texts for keys can be saved; and tensors."
        ) from exc
    return found


def _visible(folder: Path) -> Path:
    if not folder.is_dir():
        raise FileNotFoundError(
            2, "rank 0 has made this folder, but it is not seen here: all ranks need one file system", str(folder)
        )
    return folder
