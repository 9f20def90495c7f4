"""Messages between ranks and data workers, by `unidist.control.Channel`: batches as raw arrays.

`messages` are these, `encoding` takes batches apart into arrays and puts them together again, and `memory` is what both
map when they run on one host. Nothing of a batch is ever unpickled. Imports the root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_data_service.transport.arrays import numpy_array
    from unidist_data_service.transport.encoding import ArrayInfo, BatchArray, flatten, layout, unflatten
    from unidist_data_service.transport.memory import MappedRegions, MemoryRegion, Regions, can_map, own_buffer

__all__ = [
    "ArrayInfo", "BatchArray", "MappedRegions", "MemoryRegion", "Regions", "can_map", "flatten", "layout",
    "numpy_array", "own_buffer", "unflatten",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "arrays": "numpy_array",
        "encoding": "ArrayInfo BatchArray flatten layout unflatten",
        "memory": "MappedRegions MemoryRegion Regions can_map own_buffer",
    },
)
