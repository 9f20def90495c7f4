"""Stage 3 in TensorFlow: gathers the fragments of one unit's variables, and reduces the gradients to fragments.

Each direction is one node. Both run in program order, which is the same on every rank. A whole tensor is engine memory
that nobody writes to any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from unidist.buffer import DType
from unidist.communicator import Communicator
from unidist.gradients.buckets import Slot
from unidist.waits import calling
from unidist_tensorflow.gradients import HostFunction, differentiable_once, host_node
from unidist_tensorflow.memory import NUMPY_DTYPES, Array, array_of_buffer, empty_array
from unidist_tensorflow.optimizer import RowCheck
from unidist_zero._keras.fragments.buffers import TensorBuffers
from unidist_zero._keras.fragments.variables import Fragment
from unidist_zero.sharding.gather_check import GatherCheck
from unidist_zero.sharding.partition import Partition

_GATHER = "unidist_gathering_of_variables_which_needs_jit_compile_False"
_SCATTER = "unidist_reduction_of_gradients_which_needs_jit_compile_False"


class UnitMovement:
    """Gathers and reduces one unit.

    Args:
        fragments: of all variables, by their numbers in the partition.
        numbers: of the unit's variables; all variables of their buckets belong to the unit.
        reduce_dtypes: for each dtype of the variables, the type in which gradients are added up.
        check_rows: refuses sparse gradients, whose rows are added up here; None: nobody does.
    """

    _partition: Partition
    _communicator: Communicator
    _tensor_buffers: TensorBuffers

    def __init__(
        self,
        fragments: Sequence[Fragment],
        numbers: Sequence[int],
        reduce_dtypes: dict[DType, DType],
        check_rows: RowCheck | None,
    ) -> None:
        self.check_rows = check_rows
        self.fragments = [fragments[number] for number in numbers]
        self._numbers = numbers
        self._reduce_dtypes = reduce_dtypes
        self._host_functions: list[HostFunction] = []

    def connect(
        self,
        partition: Partition,
        communicator: Communicator,
        buffers: TensorBuffers,
        *,
        number: int,
        names: Sequence[str],
    ) -> None:
        """Exchange between these ranks from now on.

        Args:
            partition: of all variables of the model.
            communicator: over the shard group, for this and other units of the model.
            buffers: for all units of the model.
            number: of the unit.
            names: of all units.
        """
        moves = [f"{move} {name}" for name in names for move in ("values of", "gradients of")]
        self._gather_check = GatherCheck(communicator, 2 * number, moves)
        self._scatter_check = GatherCheck(communicator, 2 * number + 1, moves)
        places = partition.places()
        self._partition = partition
        self._communicator = communicator
        self._tensor_buffers = buffers
        self._places: list[tuple[int, Slot]] = [places[number] for number in self._numbers]
        self._buckets = sorted({number for number, _ in self._places})

    def whole(self, storages: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the unit's variables as whole tensors, which have gradients with respect to the fragments. Collective.

        Args:
            storages: values of the fragments' storages, in the order of `fragments`.
        """
        specs = [tf.TensorSpec(each.variable.shape, NUMPY_DTYPES[each.dtype]) for each in self.fragments]

        def is_sparse(number: int) -> None:
            if self.check_rows is not None:
                self.check_rows(self.fragments[number].variable)

        @differentiable_once("parameters under zero=3", is_sparse)
        def gather(*values: tf.Tensor) -> tuple[Any, Any]:
            outputs = host_node(self._gather, values, specs, name=_GATHER, keeper=self._host_functions)

            def gradient(*whole: tf.Tensor) -> list[tf.Tensor]:
                kinds = [tf.TensorSpec(each.source.shape, each.source.dtype) for each in self.fragments]
                return host_node(self._scatter, whole, kinds, name=_SCATTER, keeper=self._host_functions)

            return outputs, gradient

        found: list[tf.Tensor] = gather(*storages)
        return found

    def gather_now(self) -> list[tf.Tensor]:
        """Return the whole tensors in eager mode, without gradients. Collective."""
        return self.whole([tf.convert_to_tensor(each.source) for each in self.fragments])

    @calling("a pass through the model")
    def _gather(self, *values: Any) -> list[Array]:
        cuts = self._partition.buckets
        memory = {
            number: self._tensor_buffers.acquire(cuts[number].count, cuts[number].dtype) for number in self._buckets
        }
        for fragment, value in zip(self.fragments, values, strict=True):
            if fragment.piece is not None:
                own = memory[fragment.piece.bucket].slice(fragment.piece.offset, fragment.piece.count)
                array_of_buffer(own)[:] = np.asarray(value).reshape(-1)
        rank = self._communicator.rank
        works = []
        self._gather_check.post()
        for number in self._buckets:
            cut = self._partition.buckets[number]
            own = memory[number].slice(cut.begin(rank), cut.counts[rank])
            works.append(self._communicator.allgather(own, memory[number], counts=cut.counts))
        self._gather_check.verify()
        for work in works:
            work.wait()
        arrays = []
        for fragment, (number, slot) in zip(self.fragments, self._places, strict=True):
            part = memory[number].slice(slot.offset, slot.count)
            arrays.append(array_of_buffer(part, tuple(fragment.variable.shape)))
        return arrays

    def _scatter(self, *gradients: Any) -> list[Array]:
        memory = {}
        for number in self._buckets:
            cut = self._partition.buckets[number]
            memory[number] = self._tensor_buffers.acquire(cut.count, self._reduce_dtypes[cut.dtype])
        for (number, slot), gradient in zip(self._places, gradients, strict=True):
            array_of_buffer(memory[number].slice(slot.offset, slot.count))[:] = np.asarray(gradient).reshape(-1)
        rank = self._communicator.rank
        works = []
        self._scatter_check.post()
        for number in self._buckets:
            cut = self._partition.buckets[number]
            for offset, count in cut.gaps:
                array_of_buffer(memory[number].slice(offset, count))[:] = 0
            own = memory[number].slice(cut.begin(rank), cut.counts[rank])
            works.append(self._communicator.reducescatter(memory[number], own, counts=cut.counts))
        self._scatter_check.verify()
        for work in works:
            work.wait()
        arrays = []
        for fragment in self.fragments:
            piece, storage = fragment.piece, fragment.storage
            array = empty_array(tuple(storage.shape), np.dtype(tf.as_dtype(storage.dtype).as_numpy_dtype))
            if piece is not None:
                array.reshape(-1)[:] = array_of_buffer(memory[piece.bucket].slice(piece.offset, piece.count))
            arrays.append(array)
        return arrays
