"""The common part of Horovod's bindings: starting, stopping and process sets, by Horovod's Python side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from typing_extensions import override

from unidist.communicator import ReduceOp
from unidist.horovod_imports import real_horovod
from unidist_horovod.bindings.interface import HorovodBinding, OperationFailed

with real_horovod():
    from horovod.common.process_sets import ProcessSet


class CommonBinding(HorovodBinding):
    """A binding by one of Horovod's modules `mpi_ops`.

    Attributes:
        mpi_ops: the module.
    """

    mpi_ops: ClassVar[Any]

    @override
    def start(self) -> None:
        self.mpi_ops.init()

    @override
    def stop(self) -> None:
        if self.is_running():
            self.mpi_ops._basics.shutdown()

    @override
    def is_running(self) -> bool:
        return bool(self.mpi_ops.is_initialized())

    @override
    def place(self) -> tuple[int, int]:
        return self.mpi_ops.rank(), self.mpi_ops.size()

    @override
    def process_sets(self) -> dict[tuple[int, ...], int]:
        try:
            found = self.mpi_ops._basics._get_process_set_ids_and_ranks()
        except (ValueError, RuntimeError) as exc:
            raise OperationFailed(str(exc)) from None
        return {tuple(ranks): number for number, ranks in found.items()}

    @override
    def add_process_set(self, ranks: Sequence[int]) -> int:
        try:
            made: int = self.mpi_ops.add_process_set(ProcessSet(list(ranks))).process_set_id
        except ValueError as exc:
            raise OperationFailed(str(exc)) from None
        return made


def reductions(mpi_ops: Any) -> dict[ReduceOp, Any]:
    """Return Horovod's names for reductions."""
    return {
        ReduceOp.SUM: mpi_ops.Sum,
        ReduceOp.PRODUCT: mpi_ops.Product,
        ReduceOp.MIN: mpi_ops.Min,
        ReduceOp.MAX: mpi_ops.Max,
    }
