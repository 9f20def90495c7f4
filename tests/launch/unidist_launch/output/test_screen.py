"""A screen whose reader does not read."""

from __future__ import annotations

import os
import select
import threading
from typing import Self

import pytest

from unidist_launch.output import screen as screens
from unidist_launch.output.lines import Folded, Stream
from unidist_launch.output.screen import Screen


class Pipes:
    """While entered, both streams of this process are pipes that are read on demand."""

    def __enter__(self) -> Self:
        self._saved = {stream: os.dup(stream) for stream in Stream}
        self._ends: dict[int, int] = {}
        for stream in Stream:
            self._ends[stream], end = os.pipe()
            os.dup2(end, stream)
            os.close(end)
        return self

    def read(self, stream: Stream, *, seconds: float = 0.0) -> bytes:
        """Return what has been written to a stream, after waiting for the first of it."""
        data = b""
        while select.select([self._ends[stream]], [], [], 0.0 if data else seconds)[0]:
            data += os.read(self._ends[stream], 1 << 20)
        return data

    def __exit__(self, *_: object) -> None:
        for stream, saved in self._saved.items():
            os.dup2(saved, stream)
            os.close(saved)
            os.close(self._ends[stream])


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screens, "_LOOK_SEC", 0.01)
    monkeypatch.setattr(screens, "_PATIENCE_SEC", 0.05)
    monkeypatch.setattr(screens, "_UNREAD_SEC", 0.05)


def print_lines(screen: Screen, numbers: range) -> None:
    for number in numbers:
        screen.line(Folded((0,), Stream.STDOUT, f"{number} {'x' * 1000}".encode()))
    screen.flush()


def test_the_other_stream_says_that_one_is_not_read() -> None:
    with Pipes() as pipes:
        screen = Screen(give_up=lambda: False)
        thread = threading.Thread(target=print_lines, args=(screen, range(150)), daemon=True)
        thread.start()
        told = pipes.read(Stream.STDERR, seconds=10)
        lines = b""
        while thread.is_alive():  # it writes on
            lines += pipes.read(Stream.STDOUT, seconds=0.01)
        lines += pipes.read(Stream.STDOUT)
        assert told.startswith(b"unidist: standard output has not been read for 0 seconds. Ranks that print more wait")
        assert [int(line.split()[1]) for line in lines.splitlines()] == list(range(150))


def test_lines_that_are_not_read_are_dropped_whole_and_counted() -> None:
    with Pipes() as pipes:
        screen = Screen(give_up=lambda: False, drop_unread=True)
        print_lines(screen, range(150))
        print_lines(screen, range(150, 170))
        first = pipes.read(Stream.STDOUT)
        print_lines(screen, range(170, 180))
        lines = (first + pipes.read(Stream.STDOUT)).splitlines()
        words = [line.split() for line in lines]
        (notice,) = (index for index, line in enumerate(lines) if line.startswith(b"unidist: "))
        before = [int(number) for _, number, _ in words[:notice]]
        assert before == list(range(len(before)))
        assert lines[notice] == b"unidist: %d lines were dropped, as standard output was not read" % (170 - len(before))
        assert [int(number) for _, number, _ in words[notice + 1 :]] == list(range(170, 180))
        assert {len(text) for _, _, text in words[:notice] + words[notice + 1 :]} == {1000}
        assert pipes.read(Stream.STDERR) == b""


def test_what_was_dropped_to_the_end_is_said_on_the_other_stream() -> None:
    with Pipes() as pipes:
        screen = Screen(give_up=lambda: False, drop_unread=True)
        print_lines(screen, range(150))
        screen.close()
        screen.close()
        told = pipes.read(Stream.STDERR).splitlines()
        assert len(told) == 1
        assert told[0].endswith(b" lines were dropped, as standard output was not read")
