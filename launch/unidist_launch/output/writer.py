"""Writes the output of ranks: into files byte for byte, and onto the screen line by line, folded."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

from unidist.errors import ConfigurationError
from unidist.launcher import Job
from unidist_launch.output.lines import Folder, LineSplitter, Stream
from unidist_launch.output.screen import Screen
from unidist_launch.output.tracebacks import HeldTracebacks

_TAIL_LINES = 200
_FIRST_STATUS_SEC = 1.0
_STATUS_SEC = 0.25
_PROMPT_SEC = 0.2
_FRAMES_SEC = 5.0


class Output:
    """Takes the bytes of every rank and stream and brings them to the screen and to files.

    A progress bar (text ended by carriage returns) is the live line on a terminal. Elsewhere its frames
    come out every few seconds and at its end, all of them.

    A traceback waits until `blame` or `show_end` says whether it matters; see `HeldTracebacks`. Files get all at once.

    Args:
        num_ranks: number of ranks.
        output_dir: folder for `rank.R/stdout` and `rank.R/stderr`; None writes none.
        quiet: show standard output of rank 0 only (standard error of all), and no status.
        shows_stdout: show standard output at all; listeners and files get it anyway.
        timestamps: see `Screen`.
        give_up: see `Screen`.
        append: add to the files that are there, as another launcher has begun them.
        full_tracebacks: show tracebacks of all ranks, at once, with all of their frames.
        drop_unread: see `Screen`.

    Raises:
        ConfigurationError: the files cannot be made.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        output_dir: Path | None,
        quiet: bool,
        shows_stdout: bool = True,
        timestamps: bool = False,
        give_up: Callable[[], bool],
        append: bool = False,
        full_tracebacks: bool = False,
        drop_unread: bool = False,
    ) -> None:
        self._num_ranks = num_ranks
        self._quiet = quiet
        self._shows_stdout = shows_stdout
        self._held = None if full_tracebacks else HeldTracebacks()
        self._blamed: int | None = None
        self._screen = Screen(timestamps=timestamps, give_up=give_up, drop_unread=drop_unread)
        self._folder = Folder(num_ranks)
        self._splitters = {(rank, stream): LineSplitter() for rank in range(num_ranks) for stream in Stream}
        self._tails: list[deque[bytes]] = [deque(maxlen=_TAIL_LINES) for _ in range(num_ranks)]
        self._started = self._status_at = time.monotonic()
        self._num_lines = self._lines_before = 0
        self._last_partial: tuple[int, Stream] | None = None
        self._partial: set[tuple[int, Stream]] = set()  # whose last line may be incomplete
        self._close_hidden(range(num_ranks))
        self._files = {} if output_dir is None else _open_files(output_dir, range(num_ranks), "ab" if append else "wb")
        self._output_dir = output_dir
        self._listeners: list[Callable[[int, Stream, list[bytes]], None]] = []
        self.failures = self._screen.failures
        """Our own streams that can no longer be written to, and why."""

    @classmethod
    def of_job(cls, job: Job, *, give_up: Callable[[], bool], num_ranks: int = 0, append: bool = False) -> Self:
        """Return the output of a job, with what it says about showing and keeping it.

        Args:
            job: whose ranks print.
            give_up: see `Screen`.
            num_ranks: that may print; default: as many as the job has.
            append: add to the files that are there.

        Raises:
            ConfigurationError: the files cannot be made.
        """
        return cls(
            num_ranks or job.num_proc,
            output_dir=job.output_dir,
            quiet=job.quiet,
            shows_stdout=job.shows_stdout,
            timestamps=job.timestamps,
            full_tracebacks=job.full_tracebacks,
            drop_unread=job.drops_unread_output,
            give_up=give_up,
            append=append,
        )

    def make_room(self, num_ranks: int) -> None:
        """Take the output of so many ranks from now on, if that is more than before.

        Raises:
            ConfigurationError: their files cannot be made.
        """
        new = range(self._num_ranks, num_ranks)
        if not new:
            return
        if self._output_dir is not None:
            self._files |= _open_files(self._output_dir, new, "ab")
        self._folder.make_room(num_ranks)
        self._splitters |= {(rank, stream): LineSplitter() for rank in new for stream in Stream}
        self._tails += [deque(maxlen=_TAIL_LINES) for _ in new]
        self._close_hidden(new)
        self._num_ranks = num_ranks

    def feed(self, rank: int, stream: Stream, data: bytes) -> None:
        """Take what a rank printed; empty bytes: nothing more will come on this stream."""
        now = time.monotonic()
        splitter = self._splitters[rank, stream]
        if data:
            self._write_file(rank, stream, data)
            self._take(rank, stream, splitter.feed(data, now), now)
            self._last_partial = (rank, stream)
            if splitter.partial:
                self._partial.add((rank, stream))
        else:
            self._take(rank, stream, splitter.finish(), now)
            self._folder.close(rank, stream)

    def listen(self, listener: Callable[[int, Stream, list[bytes]], None]) -> None:
        """Call this with all whole lines of the ranks from now on, by rank and stream. Be quick."""
        self._listeners.append(listener)

    def message(self, text: str) -> None:
        """Write a message of the launcher now; lines that wait to be folded go on waiting."""
        self._screen.message(text)
        self._screen.flush()

    def show(self, *, running: int, state: Callable[[], str] | None = None) -> None:
        """Write the lines whose time has come and refresh the live line. Called in every turn of the loop.

        Args:
            running: number of ranks that run.
            state: returns what the live line says of the job instead of that number; "" to leave it.
        """
        now = time.monotonic()
        if self._held is not None:
            for rank in self._held.due(now):
                self.show_end(rank)
        self._emit(flush=False)
        self._screen.flush()
        if self._screen.is_live:
            if now - self._status_at >= _STATUS_SEC:
                self._screen.live(self._live_text(now, running, state))
                self._status_at = now
        else:
            self._release_frames(now)

    def deadline(self) -> float | None:
        """Return when `show` has something to do again; None when only new output can give it that."""
        held = None if self._held is None else self._held.deadline()
        return min((at for at in (self._folder.deadline(), held) if at is not None), default=None)

    def stderr_tail(self, rank: int) -> tuple[str, ...]:
        """Return the last lines of a rank's standard error, an incomplete one included."""
        partial = self._splitters[rank, Stream.STDERR].partial
        lines = [*self._tails[rank], *([partial] if partial else [])]
        return tuple(line.decode(errors="replace").rstrip() for line in lines)

    def blame(self, rank: int) -> None:
        """Show how this rank ended, and not the tracebacks of others from now on: theirs follow from it."""
        self._blamed = rank
        self.show_end(rank)
        if self._held is not None:
            self._held.hold_on()

    def show_end(self, rank: int) -> None:
        """Show the traceback with which a rank has ended."""
        if self._held is not None:
            self._show(rank, Stream.STDERR, self._held.release(rank), time.monotonic())

    def drop_end(self, rank: int) -> None:
        """Do not show the traceback with which a rank has ended: it is the consequence of another's failure."""
        if self._held is not None:
            self._held.drop(rank)

    def finish(self) -> None:
        """Write all that is left, incomplete lines included; if a rank is blamed, no tracebacks but its own."""
        now = time.monotonic()
        for (rank, stream), splitter in self._splitters.items():
            self._take(rank, stream, splitter.finish(), now)
        for rank in () if self._held is None else self._held.ranks:
            if self._blamed in (None, rank):
                self.show_end(rank)
            else:
                self.drop_end(rank)
        self._emit(flush=True)
        self._screen.live("")
        self._screen.flush()
        self._screen.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()
        for file in self._files.values():
            file.close()

    def _take(self, rank: int, stream: Stream, lines: list[bytes], now: float) -> None:
        if lines:
            for listener in self._listeners:
                listener(rank, stream, lines)
        if stream is Stream.STDERR:
            self._tails[rank].extend(line.rpartition(b"\r")[2] for line in lines)
            if self._held is not None:
                lines = self._held.take(rank, lines, now)
        self._show(rank, stream, lines, now)

    def _show(self, rank: int, stream: Stream, lines: list[bytes], now: float) -> None:
        if self._is_shown(rank, stream):
            self._num_lines += len(lines)
            self._folder.add(rank, stream, lines, now)

    def _is_shown(self, rank: int, stream: Stream) -> bool:
        return stream is Stream.STDERR or (self._shows_stdout and (rank == 0 or not self._quiet))

    def _close_hidden(self, ranks: range) -> None:
        """Let lines of other ranks be folded without waiting for those that are not shown."""
        for rank in ranks:
            if not self._is_shown(rank, Stream.STDOUT):
                self._folder.close(rank, Stream.STDOUT)

    def _emit(self, *, flush: bool) -> None:
        for folded in self._folder.ready(time.monotonic(), flush=flush):
            self._screen.line(folded)

    def _release_frames(self, now: float) -> None:
        for rank, stream in sorted(self._partial):
            splitter = self._splitters[rank, stream]
            if not splitter.partial:
                self._partial.discard((rank, stream))
            elif splitter.partial_since + _FRAMES_SEC < now:
                self._take(rank, stream, splitter.take_frames(), now)
                splitter.partial_since = now

    def _live_text(self, now: float, running: int, state: Callable[[], str] | None) -> str:
        """Return the progress bar or prompt that some rank shows just now, else the state of the job."""
        if self._last_partial is not None and self._is_shown(*self._last_partial):
            splitter = self._splitters[self._last_partial]
            frames = [frame for frame in splitter.partial.split(b"\r") if frame.strip()]
            if frames and (b"\r" in splitter.partial or now - splitter.partial_since > _PROMPT_SEC):
                return f"[{self._last_partial[0]}] {frames[-1].decode(errors='replace')}"
        if self._quiet or now - self._started < _FIRST_STATUS_SEC:
            return ""
        elapsed = int(now - self._started)
        rate = (self._num_lines - self._lines_before) / max(_STATUS_SEC, now - self._status_at)
        self._lines_before = self._num_lines
        clock = f"{elapsed // 3600}:{elapsed // 60 % 60:02}:{elapsed % 60:02}"
        said = (state is not None and state()) or f"{running} of {self._num_ranks} ranks running"
        return f"unidist  {clock}  {said}  {rate:.0f} lines/s"

    def _write_file(self, rank: int, stream: Stream, data: bytes) -> None:
        file = self._files.get((rank, stream))
        if file is None:
            return
        try:
            file.write(data)
        except OSError as exc:
            file.close()
            del self._files[rank, stream]
            self.message(f"unidist: cannot write {file.name}: {exc}; the rest of it is on the screen only")


def _open_files(folder: Path, ranks: range, mode: str) -> dict[tuple[int, Stream], FileIO]:
    digits = len(str(ranks[-1]))
    files: dict[tuple[int, Stream], FileIO] = {}
    try:
        for rank in ranks:
            place = folder / f"rank.{rank:0{digits}d}"
            place.mkdir(parents=True, exist_ok=True)
            for stream in Stream:
                path = place / stream.name.lower()
                files[rank, stream] = FileIO(path, mode)
    except OSError as exc:
        for file in files.values():
            file.close()
        raise ConfigurationError(f"--output-dir {str(folder)!r} cannot be used: {exc}") from exc
    return files
