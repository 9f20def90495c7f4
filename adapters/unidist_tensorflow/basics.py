"""The part of the basic API that needs TensorFlow: the topology as operations, and the accelerators it can use."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from unidist.buffer import Buffer
from unidist.errors import NotInitializedError
from unidist.runtime import context
from unidist.settings import device_index
from unidist.topology import Topology
from unidist.training.seeding import seed_python
from unidist_tensorflow.memory import DTYPES, Array, array_of_buffer, buffer_of
from unidist_tensorflow.xla import check_not_for_xla

_log = logging.getLogger("unidist")

NOT_INITIALIZED, UNKNOWN_SET = -1, -2
"""What `process_set_included_op` says where it cannot answer; Horovod's numbers."""


def buffer(tensor: tf.Tensor) -> Buffer:
    """Return the memory of an eager tensor as a buffer for a communicator, without a copy; it may be read only."""
    return buffer_of(tensor)


def empty(shape: int | Sequence[int], dtype: tf.DType = tf.float32) -> Array:
    """Return a zeroed array in engine memory, which collectives move without a copy.

    A numpy array, because tensors cannot be written to. It stays valid after `shutdown()`.
    """
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    kind = DTYPES[tf.as_dtype(dtype)]
    return array_of_buffer(context.current().world.allocate(math.prod(dims) * kind.itemsize).cast(kind), dims)


def seed(number: int) -> None:
    """Seed the random numbers of Python, numpy, TensorFlow and Keras. Every rank passes the same number.

    Ranks with different samples get different numbers, for dropout and augmentation say. Ranks that hold parts of one
    model get equal ones, because they prepare the same samples; `tensor` and `pipeline` see to it that what each of
    them computes alone differs. The weights are rank 0's anyway. One process gets those of
    `keras.utils.set_random_seed(number)`.

    Args:
        number: from 0, below 2**32; the same on every rank.

    Raises:
        UsageError: a number out of range.
    """
    own = seed_python(number, context.current())
    tf.random.set_seed(own)  # Keras takes the seeds of its layers from Python's numbers


def choose_device(topology: Topology) -> None:
    """Let this process use the GPU of its local rank alone, and of its memory as much as it needs.

    TensorFlow else takes nearly all memory of all GPUs that it sees. What the script has chosen itself stays. A single
    process of a host keeps its GPUs.

    Args:
        topology: this rank's place.

    Raises:
        ConfigurationError: there are GPUs, but fewer than ranks on this host.
    """
    installed, visible = tf.config.list_physical_devices("GPU"), tf.config.get_visible_devices("GPU")
    if topology.local_size == 1 or not visible or len(visible) < len(installed):
        return
    index = device_index(topology, visible=len(visible))
    assert index is not None
    try:
        tf.config.set_visible_devices(visible[index], "GPU")
        tf.config.experimental.set_memory_growth(visible[index], True)
    except RuntimeError as exc:
        _log.warning(
            "rank %d: TensorFlow was used before init(), so this process holds memory of all %d GPUs of its host. "
            "Call init() first (%s)",
            topology.rank,
            len(visible),
            exc,
        )


def device() -> str:
    """Return the device of this rank for `tf.device`: "/GPU:0", or "/CPU:0" where it sees no GPU.

    `init` lets each rank see the GPU of its local rank alone, if TensorFlow was not used before; a rank that sees more
    uses "/GPU:" and its local rank. Does not initialize TensorFlow's devices, so that their options may still be set.

    Raises:
        ConfigurationError: there are GPUs, but fewer than ranks on this host.
    """
    index = device_index(context.current().topology, visible=len(tf.config.get_visible_devices("GPU")))
    return "/CPU:0" if index is None else f"/GPU:{index}"


def rank_op(name: str | None = None) -> tf.Tensor:
    """Return the rank of the process that runs the graph, an int32 scalar."""
    return _when_run(lambda: context.current().topology.rank, name or "HorovodRank")


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return the local rank of the process that runs the graph, an int32 scalar."""
    return _when_run(lambda: context.current().topology.local_rank, name or "HorovodLocalRank")


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return the number of ranks on the host that runs the graph, an int32 scalar."""
    return _when_run(lambda: context.current().topology.local_size, name or "HorovodLocalSize")


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return the number of ranks of a process set when the graph is run, an int32 scalar."""

    def size() -> int:
        process_set = context.current().process_sets.find(process_set_id)
        if process_set is None:
            raise ValueError(f"there is no process set {process_set_id}")
        return len(process_set.ranks)

    return _when_run(size, name or "HorovodSize")


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return 1 if the process that runs the graph is in a process set, else 0, an int32 scalar.

    -1 means that the process has not called `init()`, -2 that the set does not exist.
    """

    def included() -> int:
        try:
            runtime = context.current()
        except NotInitializedError:
            return NOT_INITIALIZED
        process_set = runtime.process_sets.find(process_set_id)
        return UNKNOWN_SET if process_set is None else int(runtime.topology.rank in process_set.ranks)

    return _when_run(included, name or "HorovodProcessSetIncluded")


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Return whether TensorFlow sees a GPU.

    Args:
        ext_base_name: for Horovod's sake: "tensorflow" is the only choice.
        verbose: print the answer.
    """
    if ext_base_name != "tensorflow":
        raise ValueError(f"gpu_available({ext_base_name!r}): this is TensorFlow's; choices: tensorflow")
    found = bool(tf.config.list_physical_devices("GPU"))
    if verbose:
        print(f"TensorFlow sees {'a' if found else 'no'} GPU")
    return found


def nccl_built() -> int:
    """Return 0: no engine moves TensorFlow's tensors over NCCL."""
    return 0


def cuda_built() -> bool:
    """Return whether TensorFlow was built for CUDA."""
    return bool(tf.test.is_built_with_cuda())


def rocm_built() -> bool:
    """Return whether TensorFlow was built for ROCm."""
    return bool(tf.test.is_built_with_rocm())


def _when_run(value: Callable[[], int], name: str) -> tf.Tensor:
    """Return a number that is looked up each time the graph is run; it does not wait for other ranks."""
    if tf.executing_eagerly():
        return tf.constant(value(), tf.int32)
    check_not_for_xla(name)
    found = tf.numpy_function(lambda: np.int32(value()), [], tf.int32, name=name)
    found.set_shape([])
    return found
