"""Optimizer state of Keras in files that are mapped to memory: the system writes to disk what does not fit.

TensorFlow gives a variable other memory whenever it is assigned to. So what an update has made of a variable's state is
copied to memory of a file, just after the update, and becomes the value of the state from there; nothing else keeps
the ordinary memory then. Updates wait for each other, so that the state of one variable is in ordinary memory at once.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from unidist.buffer import Buffer, DType
from unidist_tensorflow.gradients.tensors import Since, host_node
from unidist_tensorflow.memory import Array, array_of_buffer, dtype_of
from unidist_tensorflow.optimizer.inner_step import belongings
from unidist_zero.sharding.state_files import StateFiles

NODE = "unidist_move_of_state_to_files_which_needs_jit_compile_False"


class FileMemories:
    """Gives out memory of files, and again what nobody uses any more.

    Args:
        files: where from.
    """

    def __init__(self, files: StateFiles) -> None:
        self._files = files
        self._idle: dict[int, list[mmap.mmap]] = {}  # by size

    def take(self, count: int, dtype: DType) -> Buffer:
        """Return `count` elements, at least one. They are the caller's until nobody refers to them."""
        nbytes = count * dtype.itemsize
        idle = self._idle.setdefault(nbytes, [])
        memory = idle.pop() if idle else self._new(nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return Buffer(address, count, dtype, _Loan(self._idle, memory))

    def forget(self) -> None:
        """Give back what nobody uses any more, and later what was given out so far: other sizes are wanted now."""
        self._idle.clear()

    def _new(self, nbytes: int) -> mmap.mmap:
        with self._files.new(nbytes) as (descriptor, _):
            return mmap.mmap(descriptor, nbytes)


class _Loan:
    """Gives a memory back when nobody refers to it any more, if its size is still wanted."""

    def __init__(self, idle: dict[int, list[mmap.mmap]], memory: mmap.mmap) -> None:
        self._idle = idle
        self._memory = memory

    def __del__(self) -> None:
        wanted = self._idle.get(len(self._memory))
        if wanted is not None:
            wanted.append(self._memory)


class StateInFiles:
    """Keeps an optimizer's state, and the shards that it updates, in files between two updates.

    Args:
        optimizer: of Keras, built for the shards; the one inside of a LossScaleOptimizer. Its `update_step` is wrapped.
        files: where to.
    """

    def __init__(self, optimizer: Any, files: StateFiles) -> None:
        self._optimizer = optimizer
        self._memories = FileMemories(files)
        self._plain = optimizer.update_step
        self._before: list[tf.Operation] = []
        optimizer.__dict__["update_step"] = self._update

    def resized(self) -> None:
        """The shards have other sizes from now on."""
        self._memories.forget()

    def move(self, variables: Sequence[Any]) -> None:
        """Let variables have their values in files: eager, or in a graph."""
        for variable in variables:
            dtype = dtype_of(variable)
            value = tf.convert_to_tensor(variable)
            if not value.shape.num_elements():
                continue
            spec = tf.TensorSpec(value.shape, value.dtype)

            def moved(array: Any, dtype: DType = dtype, spec: tf.TensorSpec = spec) -> list[Array]:
                given = np.asarray(array)
                copied = array_of_buffer(self._memories.take(given.size, dtype), tuple(spec.shape))
                copied[...] = given.reshape(copied.shape)
                return [copied]

            [new] = host_node(moved, [value], [spec], name=NODE)
            variable.assign(new)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def _update(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update as the optimizer's class does, and bring what belongs to the variable to files."""
        with tf.control_dependencies(self._earlier()):
            since = Since()
            self._plain(gradient, variable, learning_rate)
            with tf.control_dependencies(since.stateful()):
                self.move([each for each in belongings(self._optimizer, variable) if _is_slot(each, variable)])
            self._before = since.stateful()

    def _earlier(self) -> list[tf.Operation]:
        """Return what the update before this one has added to the graph that is being built."""
        if tf.executing_eagerly():
            return []
        graph = tf.compat.v1.get_default_graph()
        return [operation for operation in self._before if operation.graph is graph]


def _is_slot(kept: Any, variable: Any) -> bool:
    return tuple(kept.shape) == tuple(variable.shape)
