"""Gathers updated shards into the variables of a Keras model on every rank: a node for each bucket, no further copy.

The gathered memory becomes that of the variables. So it differs each time; mostly it is what the bucket before has
freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from unidist.buffer import HOST
from unidist.timeline import Recorder
from unidist_tensorflow.gradients.tensors import AddedOperations, HostFunction, host_node
from unidist_tensorflow.memory import Array, array_of_buffer
from unidist_zero._keras.fragments.buffers import TensorBuffers
from unidist_zero._keras.shards import VariableShard
from unidist_zero.sharding.all_gather import ShardGather
from unidist_zero.sharding.partition import Partition
from unidist_zero.sharding.reduce_scatter import ReduceScatterExchange

NODE = "unidist_gathering_of_variables_which_needs_jit_compile_False"


class VariableGather:
    """Gathers the shards of one optimizer.

    Args:
        exchange: of the gradients.
        partition: of its buckets, with the places of the model's variables.
        shards: of this rank.
        recorder: takes one event per bucket.
    """

    def __init__(
        self, exchange: ReduceScatterExchange, partition: Partition, shards: Sequence[VariableShard], recorder: Recorder
    ) -> None:
        self._exchange = exchange
        self._partition = partition
        self._shards = shards
        self._recorder = recorder
        self._tensor_buffers = TensorBuffers(exchange.shard_groups[HOST].communicator)
        self._host_functions: list[HostFunction] = []

    def run(self, variables: Sequence[Any]) -> None:
        """Assign the values of the shards to the model's variables, by place. Collective; eager, or in a graph."""
        before: list[tf.Operation] = []
        for number, cut in enumerate(self._partition.buckets):
            shards = [shard for shard in self._shards if shard.segment.bucket == number]
            of_bucket = [variables[slot.parameter] for slot in cut.slots]
            specs = [tf.TensorSpec(variable.shape, variable.dtype) for variable in of_bucket]
            values = [tf.convert_to_tensor(shard.variable) for shard in shards]
            added = AddedOperations()
            with tf.control_dependencies(before):
                function = partial(self._gathered, number, shards, specs)
                gathered = host_node(function, values, specs, name=NODE, keeper=self._host_functions)
            before = added.stateful()
            for variable, value in zip(of_bucket, gathered, strict=True):
                variable.assign(value)

    def _gathered(
        self, number: int, shards: Sequence[VariableShard], specs: Sequence[tf.TensorSpec], *values: Any
    ) -> list[Array]:
        partition = self._partition
        cut = partition.buckets[number]
        memory = self._tensor_buffers.acquire(cut.count, cut.dtype)
        for shard, value in zip(shards, values, strict=True):
            array_of_buffer(memory.slice(shard.segment.offset, shard.segment.count))[:] = np.asarray(value).reshape(-1)
        gather = ShardGather(partition, {number: memory}, self._exchange.shard_groups, self._recorder)
        gather.post(number)
        gather.wait()
        return [
            array_of_buffer(memory.slice(slot.offset, slot.count), tuple(spec.shape))
            for slot, spec in zip(cut.slots, specs, strict=True)
        ]
