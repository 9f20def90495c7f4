"""The calls from compiled programs by which parameters are synchronized: when something is due, and the exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from unidist.buffer import Buffer
from unidist.errors import UsageError
from unidist_arrays.memory import Array, buffer_of_array
from unidist_jax.compiled import HostOperation, ShapeDtype
from unidist_jax.optimizer import Cell, copy_array
from unidist_local_sgd.binding import TrainedState
from unidist_local_sgd.schedule import Due
from unidist_local_sgd.synchronization import Synchronizer

_FLAG = ShapeDtype((), np.dtype(bool))


class TreeSynchronizer(Synchronizer):
    """Synchronizes trees of arrays, which belong to the script."""

    due = Due((), ())

    def before_save(self) -> None:
        """See `ChecksBeforeSave.before_save`.

        Raises:
            UsageError: the ranks differ, and only the script has the trees.
        """
        if self.differs:
            raise UsageError(
                "local_sgd: the ranks' parameters differ in the middle of a window, and arrays of JAX do not change. "
                "Before save call synchronize(step), or params, opt_state = synchronize(optimizer, params, opt_state), "
                "of unidist_local_sgd.jax"
            )

    def make_equal(self) -> None:
        """End the window, with trees that were given to the `TreeState` before. Collective."""
        super().before_save()


class TreeState(TrainedState):
    """Leaves of the script's trees, as copies, while they are synchronized outside of a program.

    Attributes:
        arrays: of the parameters.
        slot_arrays: of the optimizer's state, by name.
    """

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self.slot_arrays: dict[str, Array] = {}

    @override
    def values(self) -> Sequence[Buffer]:
        return [buffer_of_array(each) for each in self.arrays]

    @override
    def store(self, values: Sequence[Buffer]) -> None:
        """Do nothing: `values` are the arrays' memory."""

    @override
    def slots(self) -> Mapping[str, Buffer]:
        return {name: buffer_of_array(each) for name, each in self.slot_arrays.items()}

    @override
    def store_slots(self, slots: Mapping[str, Buffer]) -> None:
        """Do nothing, likewise."""


class _Operation(HostOperation):
    can_be_batched: ClassVar[bool] = False

    def __init__(self, cell: Cell[TreeSynchronizer]) -> None:
        self._cell = cell

    @property
    @override
    def title(self) -> str:
        return "the synchronization of parameters by local_sgd"


class Advance(_Operation):
    """Notes an update. Two flags: the old parameters are the start of a window, and something is due."""

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        return [_FLAG, _FLAG]

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        synchronizer = self._cell.value
        needs_start, synchronizer.due = synchronizer.advance_counted()
        results[0][...] = needs_start
        results[1][...] = bool(synchronizer.due)


class KeepStart(_Operation):
    """Keeps parameters as the start of the first window."""

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        return [_FLAG]

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        self._cell.value.keep_start([buffer_of_array(np.ascontiguousarray(each)) for each in operands])
        results[0][...] = True


class Exchange(_Operation):
    """Exchanges and applies what is due; returns the parameters after that."""

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        return list(operands)

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        for operand, result in zip(operands, results, strict=True):
            copy_array(result, operand)
        synchronizer = self._cell.value
        synchronizer.run(synchronizer.due, [buffer_of_array(each) for each in results])


def copies_of(leaves: Sequence[Any]) -> list[Array]:
    """Return copies of arrays that can be written to."""
    return [np.array(leaf, order="C", copy=True) for leaf in leaves]
