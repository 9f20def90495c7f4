"""Horovod's rendezvous server on this host: where its ranks leave their addresses for each other."""

from __future__ import annotations

import threading

from unidist.horovod_imports import real_horovod
from unidist.topology import Topology

with real_horovod():
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer


class AddressServer:
    """Serves on a free port of the loopback interface (Horovod's own starter listens on all), on a thread.

    Args:
        topology: of the job, which is on one host.
        hostname: the name that all ranks give Horovod for this host.
    """

    def __init__(self, topology: Topology, hostname: str) -> None:
        self._server = RendezvousHTTPServer(("127.0.0.1", 0), RendezvousHandler, 0)
        size = topology.world_size
        self._server.init([SlotInfo(hostname, rank, rank, 0, size, size, 1) for rank in range(size)])
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="unidist-horovod-addresses", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving; returns when the thread has ended. Idempotent."""
        self._server.shutdown()
        self._thread.join(timeout=10)
        self._server.server_close()
