"""What ranks print, with the rank before each line."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from unidist.jobs.pool import RankPool, run
from unidist.jobs.pool._output import RankPipe, is_notebook, show_rest


def pipe() -> tuple[RankPipe, int]:
    read_end, write_end = os.pipe()
    return RankPipe("[3] ", os.fdopen(read_end, "rb"), is_error=False), write_end


def test_lines_are_shown_when_they_end(capsys: pytest.CaptureFixture[str]) -> None:
    shown, end = pipe()
    os.write(end, "caf\u00e9 1\nno end".encode())
    assert shown.show()
    assert capsys.readouterr().out == "[3] caf\u00e9 1\n"
    os.write(end, b" yet\n\r 10%\r 20%\r")
    shown.show()
    assert capsys.readouterr().out == "[3] no end yet\n[3]  10%\r"
    os.write(end, b"\nwindows\r\nlast")
    os.close(end)
    show_rest([shown])
    assert capsys.readouterr().out == "[3]  20%\n[3] windows\n[3] last\n"


def test_a_character_that_comes_in_two_parts_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    shown, end = pipe()
    first, second = "\u00e9".encode()[:1], "\u00e9\n".encode()[1:]
    os.write(end, first)
    shown.show()
    os.write(end, second)
    os.close(end)
    show_rest([shown])
    assert capsys.readouterr().out == "[3] \u00e9\n"


def test_one_long_line_takes_no_longer_than_many_short_ones(capsys: pytest.CaptureFixture[str]) -> None:
    [length] = run(lambda: print("x" * 2_000_000) or 1, num_proc=1, labels=True)  # type: ignore[func-returns-value]
    assert length == 1
    assert len(capsys.readouterr().out) == 2_000_000 + len("[0] \n")


def test_ranks_say_who_they_are_on_both_streams_and_until_their_end(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        import atexit

        atexit.register(print, "z" * 100_000)  # more than a pipe holds
        print("out", os.environ["RANK"])
        print("err", file=sys.stderr)

    run(work, num_proc=2, labels=True)
    out, err = capsys.readouterr()
    assert sorted(line[:9] for line in out.splitlines()) == ["[0] out 0", "[0] zzzzz", "[1] out 1", "[1] zzzzz"]
    assert sorted(err.splitlines()) == ["[0] err", "[1] err"]


def test_lines_appear_while_a_call_runs(tmp_path: Path) -> None:
    def work(mark: Path) -> bool:
        print("begun")
        deadline = time.monotonic() + 60
        while not mark.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return mark.exists()

    class Reader:
        def write(self, text: str) -> None:
            (tmp_path / "seen").touch()

        def flush(self) -> None:
            pass

    with RankPool(1, labels=True) as pool:
        before, sys.stdout = sys.stdout, Reader()  # type: ignore[assignment]
        try:
            assert pool.run(work, (tmp_path / "seen",)) == [True]
        finally:
            sys.stdout = before


def test_a_process_without_a_notebook_leaves_the_output_alone(capfd: pytest.CaptureFixture[str]) -> None:
    assert not is_notebook()
    run(lambda: print("plain"), num_proc=1)
    assert capfd.readouterr().out == "plain\n"
