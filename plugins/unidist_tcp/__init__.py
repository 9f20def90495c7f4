"""The engine `tcp`: collectives over TCP between any hosts, in C, for host memory; no framework is needed.

`plugin` registers it. `handshake` is the proof of the job's secret, which is pure; `connecting` carries it out between
all ranks; `communicator` is one group of ranks. The data path is C (`native/`): `plan` says what a collective sends,
`transport` moves it, `group` connects the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_tcp.engine import TcpEngine

__all__ = [
    "TcpEngine",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "engine": "TcpEngine",
    },
)
