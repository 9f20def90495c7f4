"""Rows of a Parquet dataset, divided among ranks by row groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import numpy as np
import pyarrow.parquet

from unidist.errors import ConfigurationError

Columns = dict[str, "np.ndarray[Any, Any]"]


@dataclass(frozen=True)
class RowGroup:
    """A row group of a file: the smallest part of Parquet that is read alone."""

    file: str
    number: int
    num_rows: int


def list_row_groups(path: str) -> list[RowGroup]:
    """Return the row groups of all Parquet files in a folder, the same on every rank."""
    fs, root = fsspec.core.url_to_fs(path)
    found = []
    for file in sorted(fs.glob(f"{root.rstrip('/')}/*.parquet")):
        with fs.open(file, "rb") as opened:
            metadata = pyarrow.parquet.ParquetFile(opened).metadata
            found += [
                RowGroup(file, number, metadata.row_group(number).num_rows)
                for number in range(metadata.num_row_groups)
                if metadata.row_group(number).num_rows
            ]
    return found


def divide(groups: Sequence[RowGroup], num_ranks: int) -> list[list[RowGroup]]:
    """Return the row groups of each rank: each group goes to the rank that has the fewest rows so far.

    Raises:
        ConfigurationError: there are fewer groups than ranks.
    """
    if len(groups) < num_ranks:
        raise ConfigurationError(
            f"{num_ranks} ranks, but the data has {len(groups)} row groups, and each rank needs one: give fewer ranks, "
            "more rows, or a larger partitions_per_process."
        )
    parts: list[list[RowGroup]] = [[] for _ in range(num_ranks)]
    sizes = [0] * num_ranks
    for group in sorted(groups, key=lambda group: -group.num_rows):
        rank = sizes.index(min(sizes))
        parts[rank].append(group)
        sizes[rank] += group.num_rows
    return parts


class RankRows:
    """The rows of one rank, of which every rank makes the same number of batches.

    Args:
        path: of the dataset.
        rank: of this process.
        num_ranks: number of ranks.
        columns: to read.
        keep: they are read once, and stay in memory.
    """

    def __init__(self, path: str, *, rank: int, num_ranks: int, columns: Sequence[str], keep: bool = False) -> None:
        parts = divide(list_row_groups(path), num_ranks)
        self._groups = parts[rank]
        self._fs, _ = fsspec.core.url_to_fs(path)
        self._columns = list(columns)
        self._most_rows = max(sum(group.num_rows for group in part) for part in parts)
        self._keep = keep
        self._kept: Columns | None = None

    def num_batches(self, batch_size: int) -> int:
        """Return how many batches an epoch has, on every rank."""
        return -(-self._most_rows // batch_size)

    def batches(
        self, batch_size: int, *, shuffle_seed: int | None, num_batches: int | None = None
    ) -> Iterator[Columns]:
        """Return the batches of an epoch.

        A rank that has fewer rows than another begins again with its first ones, as PyTorch's DistributedSampler does.
        The last batch may be short.

        Args:
            batch_size: number of rows.
            shuffle_seed: of the order of the rows, within this rank; None: as they are in the files.
            num_batches: so many full ones instead, of the first rows in that order.
        """
        rows = self._kept or self._read()
        if self._keep:
            self._kept = rows
        num_rows = len(next(iter(rows.values())))
        order = np.arange(num_rows)
        if shuffle_seed is not None:
            np.random.default_rng(shuffle_seed).shuffle(order)
        order = np.resize(order, num_batches * batch_size if num_batches else self._most_rows)
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            yield {name: values[chosen] for name, values in rows.items()}

    def _read(self) -> Columns:
        tables = []
        for group in self._groups:
            with self._fs.open(group.file, "rb") as file:
                tables.append(pyarrow.parquet.ParquetFile(file).read_row_group(group.number, columns=self._columns))
        table = pyarrow.concat_tables(tables)
        return {name: _array(table.column(name)) for name in self._columns}


def _array(column: Any) -> np.ndarray[Any, Any]:
    """Return a column as an array with a row for each of its; lists become a second dim."""
    if pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type):
        return np.stack([np.asarray(row) for row in column.to_pylist()])
    return np.asarray(column.to_numpy())
