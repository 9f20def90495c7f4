"""Keras optimizer state in files mapped to memory: the system writes to disk what does not fit.

TensorFlow gives a variable other memory whenever it is assigned to. So right after an update of a variable's state the
result is copied to memory of a file, which becomes the state's value; nothing refers to the ordinary memory then.
Updates wait for each other, so that the state of only one variable is in ordinary memory at a time.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from unidist.buffer import Buffer, DType
from unidist.jobs import SpillFolder
from unidist_keras.slots import variable_and_slots
from unidist_tensorflow.gradients.tensors import AddedOperations, host_node
from unidist_tensorflow.memory import Array, array_of_buffer, dtype_of

NODE = "unidist_move_of_state_to_files_which_needs_jit_compile_False"


class FileBuffers:
    """Memory of files, reused once nobody refers to it.

    Args:
        files: creates the files.
    """

    def __init__(self, files: SpillFolder) -> None:
        self._files = files
        self._idle: dict[int, list[mmap.mmap]] = {}  # by size

    def acquire(self, count: int, dtype: DType) -> Buffer:
        """Return `count` elements, at least one. They belong to the caller until nobody refers to them."""
        nbytes = count * dtype.itemsize
        idle = self._idle.setdefault(nbytes, [])
        memory = idle.pop() if idle else self._new(nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return Buffer(address, count, dtype, _Lease(self._idle, memory))

    def forget(self) -> None:
        """Drop idle buffers, and later those in use: other sizes are needed from now on."""
        self._idle.clear()

    def _new(self, nbytes: int) -> mmap.mmap:
        with self._files.file(nbytes) as (descriptor, _):
            return mmap.mmap(descriptor, nbytes)


class _Lease:
    """Returns a buffer to the pool when nobody refers to it any more, if its size is still needed."""

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
        files: creates the files.
    """

    def __init__(self, optimizer: Any, files: SpillFolder) -> None:
        self._optimizer = optimizer
        self._file_buffers = FileBuffers(files)
        self._plain = optimizer.update_step
        self._before: list[tf.Operation] = []
        optimizer.__dict__["update_step"] = self._update

    def resized(self) -> None:
        """The shards have other sizes from now on."""
        self._file_buffers.forget()

    def move(self, variables: Sequence[Any]) -> None:
        """Move the values of variables to files: eager, or in a graph."""
        for variable in variables:
            dtype = dtype_of(variable)
            value = tf.convert_to_tensor(variable)
            if not value.shape.num_elements():
                continue
            spec = tf.TensorSpec(value.shape, value.dtype)

            def moved(array: Any, dtype: DType = dtype, spec: tf.TensorSpec = spec) -> list[Array]:
                given = np.asarray(array)
                copied = array_of_buffer(self._file_buffers.acquire(given.size, dtype), tuple(spec.shape))
                copied[...] = given.reshape(copied.shape)
                return [copied]

            [new] = host_node(moved, [value], [spec], name=NODE)
            variable.assign(new)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def _update(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update as the optimizer's class does, and move the variable's state to files."""
        with tf.control_dependencies(self._earlier()):
            added = AddedOperations()
            self._plain(gradient, variable, learning_rate)
            with tf.control_dependencies(added.stateful()):
                self.move([each for each in variable_and_slots(self._optimizer, variable) if _is_slot(each, variable)])
            self._before = added.stateful()

    def _earlier(self) -> list[tf.Operation]:
        """Return the operations that the update before this one added to the graph that is being built."""
        if tf.executing_eagerly():
            return []
        graph = tf.compat.v1.get_default_graph()
        return [operation for operation in self._before if operation.graph is graph]


def _is_slot(kept: Any, variable: Any) -> bool:
    return tuple(kept.shape) == tuple(variable.shape)
