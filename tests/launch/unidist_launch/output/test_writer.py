"""What the ranks print, on the way to the screen and to files."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_lines import rank_lines

from unidist_launch.output.lines import Stream
from unidist_launch.output.writer import Output


@pytest.mark.parametrize("quiet", [False, True])
def test_there_is_room_for_more_ranks_than_at_first(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], quiet: bool
) -> None:
    with Output(1, output_dir=tmp_path, quiet=quiet, give_up=lambda: True) as output:
        output.feed(0, Stream.STDOUT, b"first\n")
        output.make_room(3)
        output.make_room(2)
        output.feed(2, Stream.STDOUT, b"third\n")
        output.feed(2, Stream.STDERR, b"error\n")
        assert output.stderr_tail(1) == ()
        assert output.stderr_tail(2) == ("error",)
    out, err = capfd.readouterr()
    assert out.splitlines() == (["[0] first"] if quiet else ["[0] first", "[2] third"])
    assert err.splitlines() == ["[2!] error"]
    assert (tmp_path / "rank.2" / "stdout").read_text() == "third\n"


def test_standard_output_that_is_not_shown_reaches_listeners_and_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    heard = []
    with Output(2, output_dir=tmp_path, quiet=True, shows_stdout=False, give_up=lambda: True) as output:
        output.listen(lambda rank, stream, lines: heard.append((rank, stream, lines)))
        output.feed(0, Stream.STDOUT, b"for the command\n")
        output.feed(1, Stream.STDERR, b"error\n")
        output.feed(0, Stream.STDERR, b"error\n")
    out, err = capfd.readouterr()
    assert out == ""
    assert rank_lines(err) == {0: ["error"], 1: ["error"]}
    assert heard[0] == (0, Stream.STDOUT, [b"for the command"])
    assert (tmp_path / "rank.0" / "stdout").read_text() == "for the command\n"


def test_a_progress_bar_in_a_file_is_its_last_frame(capfd: pytest.CaptureFixture[str]) -> None:
    with Output(1, output_dir=None, quiet=False, give_up=lambda: True) as output:
        output.feed(0, Stream.STDERR, b"10%\r50%\r100%\n")
        output.feed(0, Stream.STDERR, b"\r 99%\r     \r\n")
        output.feed(0, Stream.STDOUT, b"\r\n")
    out, err = capfd.readouterr()
    assert err == "[0!] 100%\n[0!]  99%\n"
    assert out == "[0] \n"
