"""ZeRO: each rank keeps a share of the optimizer state, of the gradients, of the parameters.

`plugin.py` registers the strategy of `strategy.py`. What lies where is in `_partition.py`, how gradients come there in
`exchange.py`, how new parameters get to all in `gather.py`: none of them knows a framework. `_torch*.py` and
`_tensorflow*.py` bind them.
"""

from __future__ import annotations

from unidist_zero.deferring import deferred, init_with
from unidist_zero.sharding.gathering import gathered

__all__ = ["deferred", "gathered", "init_with"]
