"""The durable tier of an elastic state: checkpoints on a disk, from which a job that has lost all its ranks can start.

A state in memory, and copies on peers, survive the loss of a rank or a host; a checkpoint survives the job. All ranks
save the same commit: rank 0 requests it, and the agreement of the commit tells the others. The state is copied at once
and written in the background (`unidist.checkpoint`). A job with any number of ranks and any strategy can start from it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from unidist.checkpoint.agreement import agree
from unidist.checkpoint.format import directory
from unidist.checkpoint.format.interface import KeepsState
from unidist.checkpoint.format.reader import Checkpoint
from unidist.checkpoint.job import make_saver
from unidist.checkpoint.loading import LoadOptions, load
from unidist.checkpoint.save_request import SaveHandle, SaveOptions
from unidist.checkpoint.saving import Saver
from unidist.checkpoint.update_state import UpdateState
from unidist.elastic.durable.commit_agreement import CommitRequests, agree_at_commit
from unidist.elastic.durable.parts import DurableParts
from unidist.elastic.durable.schedule import CheckpointSchedule
from unidist.errors import CheckpointError, PeerLostError, StateLostError, UnidistError
from unidist.launcher import DurableOptions
from unidist.runtime import context

if TYPE_CHECKING:
    from unidist.runtime.context import Context

_log = logging.getLogger("unidist.elastic")

_NUM_LOOKS = 5
_LOOK_SEC = 0.1


class Checkpointed(Protocol):
    """A state that can be saved in checkpoints."""

    num_commits: int

    def durable_parts(self) -> DurableParts:
        """Return the contents of a checkpoint. Called for each checkpoint; may raise."""

    def sync(self) -> None:
        """Give every rank the state of rank 0. Collective; see `unidist.elastic.state.State.sync`."""

    def save(self) -> None:
        """Keep the present state in memory, see `unidist.elastic.state.State.save`."""

    def make_equal(self) -> None:
        """Make what differs between ranks equal. Collective; see `unidist.elastic.state.State.make_equal`."""


@dataclass
class _Writing:
    """A checkpoint that is being written."""

    saver: Saver
    handle: SaveHandle
    commit: int
    began: float


class Durable:
    """Makes the checkpoints of one state, and loads them. Every rank calls the same methods in the same order.

    Args:
        options: where and how often; equal on every rank.
    """

    def __init__(self, options: DurableOptions) -> None:
        self.options = options
        self._schedule = CheckpointSchedule(options.interval)
        self._writing: _Writing | None = None
        self._last_commit = 0
        self._is_wanted = self._is_agreed = False

    # The beginning of a generation

    def begin(self, state: Checkpointed, progress: int, *, needs_sync: bool) -> None:
        """Make the ranks equal, with their present state or, if they have none, the latest checkpoint. Collective.

        Args:
            state: the state.
            progress: commits that the state of rank 0 includes; 0: it is that of the script's beginning.
            needs_sync: not all ranks have the same state.

        Raises:
            StateLostError: a share of the state was lost with its ranks, and no checkpoint exists.
            CheckpointError: the latest checkpoint cannot be loaded into this state.
        """
        if self._writing is not None:
            self._conclude(self._writing)  # its context has waited for it
        try:
            if needs_sync:
                state.sync()
        except StateLostError as exc:
            if not self._load(state, str(exc)):
                exc.add_note(f"There is no checkpoint in {self.options.folder} yet, from which to go on.")
                raise
        else:
            if progress > 0 or not self._load(state, ""):
                state.num_commits = progress
        self._schedule.begin(time.monotonic())

    def _load(self, state: Checkpointed, reason: str) -> bool:
        """Load the latest checkpoint that is whole; return whether there was one. Collective.

        Raises:
            CheckpointError: there are some, and none can be loaded; says why the latest one cannot.
        """
        runtime = context.current()
        communicator = runtime.owned(_saver).communicator
        is_first = communicator.rank == 0
        parts, series = DurableParts({}), list[Path]()
        error: Exception | None = None
        try:
            parts = state.durable_parts()
            if is_first:
                self.options.try_folder()
                directory.sweep(self.options.folder)
                series = [path for _, path in reversed(directory.steps(self.options.folder))]
        except Exception as exc:  # of any kind: the other ranks must be told
            error = exc
        what = f"the folder {self.options.folder} cannot have this job's checkpoints"
        choose = "Choose a folder that can be written, and that all ranks share."
        found: list[Path] = agree(communicator, series, error, what, if_disk=choose)[0]
        if not found:
            return False

        def make(checkpoint: Checkpoint) -> dict[str, KeepsState]:
            saved = checkpoint.index.sections
            return {
                name: section
                for name, section in parts.sections.items()
                if name in saved or not isinstance(section, UpdateState)
            }

        convert = None if parts.framework is None else parts.framework.convert
        report = _log.warning if is_first else _log.debug
        latest: CheckpointError | None = None
        for folder in found:
            try:
                loaded = load(communicator, LoadOptions(folder), make, convert=convert, report=report)
                break
            except CheckpointError as exc:  # on all ranks
                if is_first:
                    _log.warning("%s", exc)
                latest = latest or exc
        else:
            assert latest is not None, "there is a checkpoint"
            latest.add_note(
                "An elastic job begins from the latest checkpoint in its folder that is whole, and none is; to start "
                "from the beginning, give another folder."
            )
            raise latest
        state.num_commits = self._last_commit = int(loaded.index.facts["step"])
        state.save()
        if is_first:
            _log.info("begins from commit %d in %s", state.num_commits, folder)
            _tell(runtime, "checkpoint_loaded", commit=state.num_commits, path=str(folder), reason=reason)
        return True

    # Commits

    @property
    def is_wanted(self) -> bool:
        """Return whether this rank wants a checkpoint of the commit that is being made."""
        return self._is_wanted

    def step(self) -> None:
        """A step has ended with a commit; the ranks are about to agree on what follows."""
        now = time.monotonic()
        self._schedule.step(now)
        if self._writing is not None and self._writing.handle.done():
            self._conclude(self._writing)
        is_first = context.current().topology.rank == 0
        self._is_wanted = is_first and self._writing is None and self._schedule.is_due(now)

    def agreed(self, state: Checkpointed, requests: CommitRequests) -> None:
        """Note the agreement of the ranks; if all of them leave, make a checkpoint of the present state."""
        self._is_wanted, self._is_agreed = False, requests.checkpoint
        if not (requests.change and requests.leaving):
            return
        for _ in range(_NUM_LOOKS):  # the signal that one rank has got may be on its way to the others
            if not requests.staying:
                break
            time.sleep(_LOOK_SEC)
            requests = agree_at_commit(context.current())
        if not requests.staying:
            self._is_agreed = False
            self._save(state, asynchronous=False)

    def save_if_agreed(self, state: Checkpointed) -> None:
        """Begin a checkpoint of the commit that was just made, if the ranks have agreed on it."""
        if self._is_agreed:
            self._is_agreed = False
            self._save(state, asynchronous=True)

    # The end

    def finish(self, state: Checkpointed) -> None:
        """Make a checkpoint at the end of training, unless the last one has the same state. Collective."""
        if self._writing is not None:
            self._conclude(self._writing)
        communicator = context.current().owned(_saver).communicator
        is_behind = agree(communicator, self._last_commit < state.num_commits, None, "")[0]
        if is_behind:
            self._save(state, asynchronous=False)

    def abandon(self, reason: str) -> None:
        """Abandon a checkpoint that is being written, which cannot be completed because a rank was lost."""
        self._is_wanted = self._is_agreed = False
        if self._writing is not None:
            self._writing.saver.communicator.abort(reason)
            self._conclude(self._writing)

    def _save(self, state: Checkpointed, *, asynchronous: bool) -> None:
        runtime = context.current()
        saver = runtime.owned(_saver)
        if self._writing is not None:
            self._conclude(self._writing)
        options = SaveOptions(self.options.folder, state.num_commits, self.options.keep, asynchronous)
        began = time.monotonic()
        state.make_equal()
        facts: dict[str, Any] = {}

        def make() -> Mapping[str, KeepsState]:  # called before the facts are read
            parts = state.durable_parts()
            facts["framework"] = "none" if parts.framework is None else parts.framework.name
            return parts.sections

        try:
            handle = saver.save(options, make, facts)
        except PeerLostError:
            raise
        except UnidistError as exc:  # on every rank; training is worth more than its checkpoint
            self._failed(runtime.topology.rank, exc)
            return
        self._writing = _Writing(saver, handle, state.num_commits, began)
        self._schedule.saved(began, time.monotonic())
        if not asynchronous:
            self._conclude(self._writing)

    def _conclude(self, writing: _Writing) -> None:
        """Wait until a checkpoint is complete, or is known to have failed, and tell of it."""
        self._writing = None
        writing.saver.wait()
        error = writing.handle.error
        writing.handle.take_error()  # it is dealt with here
        runtime = context.current()
        if isinstance(error, PeerLostError):
            _log.info("the checkpoint %s is not complete: %s", writing.handle.path, error)
        elif error is not None:
            self._failed(runtime.topology.rank, error)
        else:
            held_up, slower = self._schedule.written()
            self._last_commit = writing.commit
            if runtime.topology.rank == 0:
                fields = {
                    "commit": writing.commit,
                    "path": str(writing.handle.path),
                    "write_sec": time.monotonic() - writing.began,
                    "held_up_sec": held_up,
                    "slower_sec": slower,
                    "interval_sec": self._schedule.interval_sec,
                }
                _tell(runtime, "checkpoint", **fields)

    def _failed(self, rank: int, error: Exception) -> None:
        self._schedule.failed(time.monotonic())
        if rank == 0:
            _log.warning("%s. Training goes on without this checkpoint.", error)


def _saver(runtime: Context) -> Saver:
    """Return the saver of these checkpoints; the script's own `save` has another, so neither waits for the other."""
    return make_saver(runtime)


def _tell(runtime: Context, event: str, **fields: Any) -> None:
    """Have an event put into the job's log, if it has one."""
    if runtime.membership is not None:
        runtime.membership.link.happened(event, fields)
