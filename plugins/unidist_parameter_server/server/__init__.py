"""Server processes, which keep parameters for workers of any host, and step. No framework is imported.

`python -m unidist_parameter_server.server` is one. A store is cut into segments, one for each server. `segment` is the
state of one, with its locks; `serving` answers workers; `replication` keeps a copy on another server, and decides which
goes on with a segment if one of the two is lost. Imports `wire`, `store` and `optimizers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_parameter_server.server.segment import StoreSegment
    from unidist_parameter_server.server.serving import ParameterServerProcess

__all__ = [
    "ParameterServerProcess", "StoreSegment",
]  # fmt: skip

__getattr__ = lazy_names(__name__, {"segment": "StoreSegment", "serving": "ParameterServerProcess"})
