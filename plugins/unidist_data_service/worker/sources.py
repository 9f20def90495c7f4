"""Sources of a data worker's batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from typing_extensions import override

from unidist.errors import UsageError
from unidist_data_service.shards import DataShard


class IndexedSource(ABC):
    """Makes a batch from the numbers of its samples. Any worker can make any batch, and all make the same one."""

    @abstractmethod
    def fetch(self, indices: Any, seed: int) -> Any:
        """Return a batch.

        Args:
            indices: of the samples, as the rank's sampler gives them.
            seed: of what is random in it.
        """


class StreamSource(ABC):
    """Makes batches one after the other. Each worker reads a part of the data."""

    @abstractmethod
    def epoch(self, shard: DataShard) -> Iterator[Any]:
        """Return an iterator over the batches of the next epoch of a part."""

    def spec(self, shard: DataShard) -> Any:
        """Return the types and shapes of a batch, for JSON; None where nobody needs them."""
        return None


class FunctionSource(StreamSource):
    """A stream that a function of the script makes.

    Args:
        function: is given a `DataShard`, and returns an iterable over batches. It is called once, and its result is
            iterated over in each epoch; a generator is made again for each.
    """

    def __init__(self, function: Callable[[DataShard], Iterable[Any]]) -> None:
        self._function = function
        self._made: dict[DataShard, Iterable[Any]] = {}

    @override
    def epoch(self, shard: DataShard) -> Iterator[Any]:
        data = self.data(shard)
        batches = iter(data)
        if batches is data:
            self.forget(shard)
        return batches

    def data(self, shard: DataShard) -> Iterable[Any]:
        """Return what the function returns for a part."""
        if shard not in self._made:
            data = self._function(shard)
            if not isinstance(data, Iterable):
                raise UsageError(
                    f"the function of ud.data_service() has returned a {type(data).__name__}; return an iterable over "
                    "batches: a DataLoader, a tf.data.Dataset, or a generator"
                )
            self._made[shard] = data
        return self._made[shard]

    def forget(self, shard: DataShard) -> None:
        """Let the function be called again for a part: what it has returned can be read once."""
        del self._made[shard]


def check_indices(indices: Any) -> Any:
    """Return the indices of a batch, for JSON.

    Raises:
        UsageError: they are no numbers.
    """
    if isinstance(indices, Sequence) and not isinstance(indices, str):
        return [check_indices(each) for each in indices]
    try:
        return int(indices)
    except (TypeError, ValueError) as exc:
        raise UsageError(
            f"a sampler gives {indices!r}; data workers fetch samples by whole numbers. Use another sampler"
        ) from exc
