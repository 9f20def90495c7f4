"""Programs over all ranks, whose exchanges XLA runs itself: the engine `xla`, for devices that only XLA reaches.

`processes` joins the processes of the job by `jax.distributed`, `program` has `spmd`, which makes a program over all
ranks of a function, `sums` the sums over the ranks. What another operation is in such a program it says itself, see
`HostOperation.lowered`.

May import `compiled` and the modules at the root of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_jax.spmd.processes import AXIS, is_chosen, way_to_another_engine
    from unidist_jax.spmd.program import is_within, spmd
    from unidist_jax.spmd.sums import summed

__all__ = ["AXIS", "is_chosen", "is_within", "spmd", "summed", "way_to_another_engine"]

__getattr__ = lazy_names(
    __name__,
    {
        "processes": "AXIS is_chosen way_to_another_engine",
        "program": "is_within spmd",
        "sums": "summed",
    },
)
