"""The work of a data worker for TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from unidist.errors import UsageError
from unidist_data_service.shards import DataShard
from unidist_data_service.worker import FunctionSource
from unidist_tensorflow.training import read_to_its_end


class DatasetSource(FunctionSource):
    """A stream whose types and shapes are known before a batch was made.

    Args:
        function: returns a tf.data.Dataset, or other iterable, over batches; see `FunctionSource`.
    """

    @override
    def epoch(self, shard: DataShard) -> Iterator[Any]:
        """Return an iterator over the batches of the next epoch of a part."""
        return read_to_its_end(super().epoch(shard))

    @override
    def spec(self, shard: DataShard) -> Any:
        """Return a tree like a batch, with [dtype, shape] in place of arrays."""
        data = self.data(shard)
        spec = getattr(data, "element_spec", None)
        if spec is not None:
            return _tree(spec, "the batch")
        first = next(iter(data), None)
        if first is None:
            raise UsageError("a data worker's part of the data has no batch, so that its types are not known")
        if iter(data) is data:
            self.forget(shard)
        return _tree(tf.nest.map_structure(_spec_of_array, first), "the batch")


def _spec_of_array(item: Any) -> Any:
    array = np.asarray(item)
    return tf.TensorSpec((None, *array.shape[1:]) if array.shape else (), array.dtype)


def _tree(spec: Any, where: str) -> Any:
    if isinstance(spec, tf.TensorSpec):
        if spec.dtype == tf.string:
            raise UsageError(f"{where} is text, which a data worker cannot send: make it numbers, by a map")
        shape = None if spec.shape.rank is None else spec.shape.as_list()
        return ["array", [spec.dtype.name, shape]]
    if isinstance(spec, dict):
        return ["dict", [[name, _tree(each, f"{where}[{name!r}]")] for name, each in spec.items()]]
    if type(spec) in (list, tuple):
        kind = "list" if isinstance(spec, list) else "tuple"
        return [kind, [_tree(each, f"{where}[{index}]") for index, each in enumerate(spec)]]
    raise UsageError(f"{where} is a {type(spec).__name__}, which a data worker cannot send: make it dense, by a map")
