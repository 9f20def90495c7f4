"""Every collective from send and recv alone: naive, ring, tree and butterfly all-reduce, and the rest.

An engine that can only send and receive subclasses `PointToPointCommunicator` and is complete.
`AlgorithmCommunicator` puts one of the all-reduce `ALGORITHMS` in front of any engine
(`--allreduce-algorithm`). The arithmetic is C where it was built (`native/`), else numpy's. Imports the root only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.algorithms._checks import check_count, check_order, check_same_type, checked_counts
    from unidist.algorithms._messages import cut, even_counts
    from unidist.algorithms._reduce import CompiledKernel, check_reduction, compiled_kernel, reduce_into, scale_in_place
    from unidist.algorithms.adasum import adasum_allreduce
    from unidist.algorithms.allreduce import ALGORITHMS, Algorithm
    from unidist.algorithms.memory import copy_memory
    from unidist.algorithms.point_to_point import PointToPointCommunicator
    from unidist.algorithms.selected import AlgorithmCommunicator

__all__ = [
    "ALGORITHMS", "Algorithm", "AlgorithmCommunicator", "CompiledKernel", "PointToPointCommunicator",
    "adasum_allreduce", "check_count", "check_order", "check_reduction", "check_same_type", "checked_counts",
    "compiled_kernel", "copy_memory", "cut", "even_counts", "reduce_into", "scale_in_place",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "_checks": "check_count check_order check_same_type checked_counts",
        "_messages": "cut even_counts",
        "_reduce": "CompiledKernel check_reduction compiled_kernel reduce_into scale_in_place",
        "adasum": "adasum_allreduce",
        "allreduce": "ALGORITHMS Algorithm",
        "memory": "copy_memory",
        "point_to_point": "PointToPointCommunicator",
        "selected": "AlgorithmCommunicator",
    },
)
