"""The part of `unidist bench` that runs on the ranks: sides, which take turns, and the program that measures them.

`interface` is what each side implements: our communicator, named operations, gloo of torch.distributed, MPI by mpi4py.
Imports the pure modules of the root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_bench.measurement.interface import Call, Side
    from unidist_bench.measurement.order import Order

__all__ = [
    "Call", "Order", "Side",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "interface": "Call Side",
        "order": "Order",
    },
)
