"""Cutting output into lines, and folding what several ranks print."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unidist_launch.output.lines import Folded, Folder, LineSplitter, Stream, rank_label

OUT, ERR = Stream.STDOUT, Stream.STDERR


@given(st.lists(st.binary(max_size=8)))
def test_cutting_loses_nothing_wherever_the_reads_end(chunks: list[bytes]) -> None:
    splitter = LineSplitter()
    lines = [line for chunk in chunks for line in splitter.feed(chunk, 0.0)]
    text = b"".join(chunks)
    assert b"".join(line + b"\n" for line in lines) + splitter.partial == text
    assert all(b"\n" not in line for line in lines)
    assert splitter.finish() == ([text.rpartition(b"\n")[2]] if text.rpartition(b"\n")[2] else [])


def test_a_very_long_line_comes_in_pieces() -> None:
    splitter = LineSplitter(max_bytes=10)
    pieces = [piece for _ in range(7) for piece in splitter.feed(b"12345", 0.0)]
    assert b"".join(pieces) + splitter.partial == b"12345" * 7
    assert len(pieces) == 2


def test_finished_frames_of_a_progress_bar_can_be_taken_before_the_line_ends() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"10%\r20%\r30", 0.0) == []
    assert splitter.take_frames() == [b"10%\r20%"]
    assert splitter.take_frames() == []
    assert splitter.feed(b"%\n", 0.0) == [b"30%"]


def test_the_age_of_an_incomplete_line_counts_from_its_first_byte() -> None:
    splitter = LineSplitter()
    splitter.feed(b"a\nb", 1.0)
    splitter.feed(b"c", 2.0)
    assert splitter.partial_since == 1.0


def test_a_line_that_all_ranks_print_comes_out_once_and_at_once() -> None:
    folder = Folder(3)
    for rank in range(3):
        folder.add(rank, OUT, [b"same"], 0.0)
    assert list(folder.ready(0.0)) == [Folded((0, 1, 2), OUT, b"same")]


def test_a_line_of_one_rank_waits_for_the_window_only() -> None:
    folder = Folder(2, window=0.05)
    folder.add(0, OUT, [b"mine"], 1.0)
    assert list(folder.ready(1.04)) == []
    assert folder.deadline() == 1.05
    assert list(folder.ready(1.05)) == [Folded((0,), OUT, b"mine")]
    assert folder.deadline() is None


def test_nobody_waits_for_a_rank_that_has_closed_its_stream() -> None:
    folder = Folder(2)
    folder.close(1, OUT)
    folder.add(0, OUT, [b"mine"], 0.0)
    assert list(folder.ready(0.0)) == [Folded((0,), OUT, b"mine")]


def test_the_same_text_on_different_streams_is_not_folded() -> None:
    folder = Folder(2)
    folder.add(0, OUT, [b"x"], 0.0)
    folder.add(1, ERR, [b"x"], 0.0)
    assert [item.ranks for item in folder.ready(0.0, flush=True)] == [(0,), (1,)]


def test_an_extra_line_of_one_rank_does_not_spoil_the_folding_of_the_rest() -> None:
    folder = Folder(2, window=0.05)
    folder.add(1, OUT, [b"both"], 0.0)
    folder.add(0, OUT, [b"only rank 0", b"both"], 0.0)
    assert list(folder.ready(1.0)) == [Folded((0,), OUT, b"only rank 0"), Folded((0, 1), OUT, b"both")]


def test_lines_in_opposite_order_end_the_search_for_a_better_one() -> None:
    folder = Folder(2)
    folder.add(0, OUT, [b"a", b"b"], 0.0)
    folder.add(1, OUT, [b"b", b"a"], 0.0)
    assert sum(len(item.ranks) for item in folder.ready(9.0)) == 4


def test_a_flood_does_not_wait() -> None:
    folder = Folder(2, max_pending=10)
    folder.add(0, OUT, [b"%d" % i for i in range(100)], 0.0)
    assert len(list(folder.ready(0.0))) == 90


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([OUT, ERR]), st.sampled_from([b"a", b"b", b"c"]))))
def test_every_rank_keeps_all_its_lines_in_order(printed: list[tuple[int, Stream, bytes]]) -> None:
    folder = Folder(4, window=2.5)
    expected, found = defaultdict(list), defaultdict(list)
    out = []
    for now, (rank, stream, line) in enumerate(printed):
        folder.add(rank, stream, [line], float(now))
        expected[rank].append((stream, line))
        out += list(folder.ready(float(now)))
    for item in [*out, *folder.ready(0.0, flush=True)]:
        for rank in item.ranks:
            found[rank].append((item.stream, item.line))
    assert found == expected


@pytest.mark.parametrize(("ranks", "label"), [((0,), "0"), ((0, 1, 2, 3), "0-3"), ((0, 2, 3, 5), "0,2-3,5")])
def test_ranks_are_named_in_short(ranks: tuple[int, ...], label: str) -> None:
    assert rank_label(ranks) == label
