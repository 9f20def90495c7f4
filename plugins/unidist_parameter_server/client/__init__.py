"""A worker's store whose parameters are on servers.

`link` is the connection to one segment, and turns to its replica if the server is lost. `store` is the `Store` over all
of them, made by `meeting`. Imports `wire` and `store`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_parameter_server.client.link import SegmentLink, ServerAddresses
    from unidist_parameter_server.client.meeting import Servers, connect_store, make_remote_store
    from unidist_parameter_server.client.store import RemoteStore

__all__ = [
    "RemoteStore", "SegmentLink", "ServerAddresses", "Servers", "connect_store", "make_remote_store",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "link": "SegmentLink ServerAddresses",
        "meeting": "Servers connect_store make_remote_store",
        "store": "RemoteStore",
    },
)
