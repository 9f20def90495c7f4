from __future__ import annotations

import pytest

from unidist.errors import ConfigurationError
from unidist_bench.sizes import Sizes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("8", 8), ("4K", 4096), ("4k", 4096), ("1KiB", 1024), ("64M", 64 << 20), ("0.5G", 1 << 29), ("100MB", 10**8)],
)
def test_sizes_are_read_as_nccl_tests_reads_them_and_with_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "K", "-1", "8X", "1.5", "4 KI", "1e3"])
def test_what_is_no_size_is_none(text: str) -> None:
    assert parse_bytes(text) is None


def test_sizes_grow_by_the_factor_up_to_the_largest() -> None:
    assert Sizes(8, 100).counts(4, 1) == [2, 4, 8, 16]
    assert Sizes(4, 20, 1.5).counts(1, 1) == [4, 6, 9, 13, 19]
    assert Sizes(1, 5, 1.1).counts(1, 1) == [1, 2, 3, 4, 5]  # each size is larger than the one before


def test_sizes_grow_by_a_step() -> None:
    assert Sizes(8, 32, step=8).counts(4, 1) == [2, 4, 6, 8]


def test_counts_divide_over_the_pieces_and_come_once() -> None:
    assert Sizes(8, 128).counts(4, 4) == [4, 8, 16, 32]  # 8 bytes are less than an element for each rank
    assert Sizes(100, 100).counts(4, 3) == [24]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 8), "--min-bytes 0"),
        ((16, 8), "--min-bytes 16 is above --max-bytes 8"),
        ((8, 16, 1.0), "--factor 1"),
        ((8, 16, float("nan")), "--factor nan"),
        ((8, 16, 2.0, 0), "--step-bytes 0"),
        ((8, 1 << 30, 2.0, 8), "more than 1000 sizes"),
    ],
)
def test_ranges_without_an_end_or_a_beginning_are_refused(arguments: tuple[int, int], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        Sizes(*arguments)
