"""Brings updated shards into the variables of a Keras model on every rank: one node, and no copy but the gathering.

What is gathered becomes the memory of the variables. So it is new memory each time; what TensorFlow has let go of is
used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from unidist.buffer import Buffer
from unidist.timeline import Recorder
from unidist_tensorflow.memory import Array, array_of_buffer
from unidist_tensorflow.training_tensors import host_node
from unidist_zero._tensorflow_memories import Memories
from unidist_zero._tensorflow_shards import Shard
from unidist_zero.exchange import ReduceScatterExchange
from unidist_zero.gather import ShardGather

NODE = "unidist_gathering_of_variables_which_needs_jit_compile_False"


class VariableGather:
    """Gathers the shards of one optimizer.

    Args:
        exchange: whose partition the shards are of.
        shards: of this rank.
        recorder: takes one event per bucket.
    """

    def __init__(self, exchange: ReduceScatterExchange, shards: Sequence[Shard], recorder: Recorder) -> None:
        self._exchange = exchange
        self._shards = shards
        self._recorder = recorder
        self._memories = [Memories(partial(exchange.allocate, cut.count, cut)) for cut in exchange.partition.buckets]

    def run(self, variables: Sequence[Any]) -> None:
        """Assign to the model's variables, by place, what the shards are now. Collective; eager, or in a graph."""
        places = self._exchange.partition.places()

        def gathered(*values: Any) -> list[Array]:
            buckets = self._gathered([np.asarray(value) for value in values])
            arrays = []
            for place, variable in enumerate(variables):
                number, slot = places[place]
                arrays.append(array_of_buffer(buckets[number].slice(slot.offset, slot.count), tuple(variable.shape)))
            return arrays

        specs = [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables]
        values = [tf.convert_to_tensor(shard.variable) for shard in self._shards]
        for variable, value in zip(variables, host_node(gathered, values, specs, name=NODE), strict=True):
            variable.assign(value)

    def _gathered(self, values: Sequence[Array]) -> list[Buffer]:
        buckets = [memories.take() for memories in self._memories]
        for shard, value in zip(self._shards, values, strict=True):
            target = array_of_buffer(buckets[shard.run.bucket].slice(shard.run.offset, shard.run.count))
            target[:] = value.reshape(-1)
        partition, lanes = self._exchange.partition, self._exchange.lanes
        ShardGather(partition, buckets, lanes, self._recorder).all()
        return buckets
