"""The part of `unidist bench` that runs on the ranks: sides, which take turns, and the program that measures them.

`interface` is what each side implements: our communicator, named operations, gloo of torch.distributed, MPI by mpi4py.
Imports the root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_bench.measurement.interface import MeasuredCall, Side
    from unidist_bench.measurement.order import MeasurementOrder

__all__ = [
    "MeasuredCall", "MeasurementOrder", "Side",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "interface": "MeasuredCall Side",
        "order": "MeasurementOrder",
    },
)
