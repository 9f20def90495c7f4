"""Row groups are divided among ranks: each row once, and equally many batches everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unidist.errors import ConfigurationError
from unidist_spark.row_groups import RankRows, divide, list_row_groups

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed; `make test-integrations` has it")
pytest.importorskip("pyarrow.parquet")


def _write(folder: Path, sizes: list[int], *, rows_per_group: int = 100) -> None:
    start = 0
    for number, size in enumerate(sizes):
        numbers = np.arange(start, start + size)
        table = pa.table({"number": numbers, "pair": [[float(n), n + 0.5] for n in numbers]})
        pa.parquet.write_table(table, folder / f"part-{number}.parquet", row_group_size=rows_per_group)
        start += size


def _epoch(folder: Path, rank: int, num_ranks: int, **options: Any) -> list[Any]:
    rows = RankRows(str(folder), rank=rank, num_ranks=num_ranks, columns=["number", "pair"])
    found = list(rows.batches(4, **{"shuffle_seed": None, **options}))
    assert len(found) == rows.num_batches(4)
    return found


def test_each_row_belongs_to_one_rank_and_lists_are_rows_of_an_array(tmp_path: Path) -> None:
    _write(tmp_path, [6, 2, 8], rows_per_group=2)
    parts = [_epoch(tmp_path, rank, 2) for rank in range(2)]
    numbers = np.concatenate([batch["number"] for part in parts for batch in part])
    assert sorted(numbers) == list(range(16))
    batch = parts[0][0]
    assert batch["pair"].shape == (4, 2)
    assert (batch["pair"][:, 1] == batch["number"] + 0.5).all()


def test_a_rank_with_fewer_rows_begins_again(tmp_path: Path) -> None:
    _write(tmp_path, [7, 4])
    long, short = _epoch(tmp_path, 0, 2), _epoch(tmp_path, 1, 2)
    assert [len(batch["number"]) for batch in long] == [len(batch["number"]) for batch in short] == [4, 3]
    assert list(short[1]["number"]) == [7, 8, 9]


def test_each_epoch_has_its_own_order_and_the_same_rows(tmp_path: Path) -> None:
    _write(tmp_path, [8])
    first, second = (_epoch(tmp_path, 0, 1, shuffle_seed=seed)[0]["number"] for seed in (1, 2))
    assert list(first) != list(second)
    whole = np.concatenate([batch["number"] for batch in _epoch(tmp_path, 0, 1, shuffle_seed=1)])
    assert sorted(whole) == list(range(8))


def test_a_number_of_batches_takes_the_first_rows_or_begins_again(tmp_path: Path) -> None:
    _write(tmp_path, [6])
    rows = RankRows(str(tmp_path), rank=0, num_ranks=1, columns=["number"])
    found = {count: [list(batch["number"]) for batch in rows.batches(4, shuffle_seed=None, num_batches=count)]
             for count in (1, 2)}  # fmt: skip
    assert found == {1: [[0, 1, 2, 3]], 2: [[0, 1, 2, 3], [4, 5, 0, 1]]}


def test_rows_that_are_kept_are_read_once(tmp_path: Path) -> None:
    _write(tmp_path, [6])
    kept, read = (RankRows(str(tmp_path), rank=0, num_ranks=1, columns=["number"], keep=keep) for keep in (True, False))
    first = [list(batch["number"]) for batch in kept.batches(4, shuffle_seed=None)]
    (tmp_path / "part-0.parquet").unlink()
    assert [list(batch["number"]) for batch in kept.batches(4, shuffle_seed=None)] == first
    with pytest.raises(FileNotFoundError):
        next(read.batches(4, shuffle_seed=None))


def test_fewer_row_groups_than_ranks_are_an_error(tmp_path: Path) -> None:
    _write(tmp_path, [5])
    with pytest.raises(ConfigurationError, match="2 ranks, but the data has 1 row groups"):
        divide(list_row_groups(str(tmp_path)), 2)
