"""The values that the processes of a job share, as its launcher serves and uses them."""

from __future__ import annotations

from datetime import timedelta

from unidist.control.key_values import KeyValues, KeyValueService, WithKeyValues
from unidist.control.server import ControlServer
from unidist.control.service import Service

__all__ = ["LauncherValues"]

_LOOPBACK = "127.0.0.1"
_TIMEOUT = timedelta(seconds=10)


class LauncherValues:
    """The values that the processes of a job share; see `service` and `beside`.

    Attributes:
        service: serves them.
    """

    def __init__(self) -> None:
        self.service = KeyValueService()
        self._server: ControlServer | None = None
        self._secret = b""

    def beside(self, service: Service) -> Service:
        """Return what serves another service as well, on the same port."""
        return WithKeyValues(service, self.service)

    def served_by(self, server: ControlServer, secret: bytes) -> None:
        """Note the server, and its secret."""
        self._server, self._secret = server, secret

    def keep_end(self, name: str, reason: str) -> None:
        """Keep, for those who wait for values of a process beside the ranks, that it has ended."""
        if self._server is not None:
            self._server.call(lambda: self.service.note_end(name, reason))

    def connect(self) -> KeyValues:
        """Connect to the values, as any process of the job does."""
        assert self._server is not None
        address = (_LOOPBACK, self._server.port)
        return KeyValues(address, self._secret, rank=None, name="the launcher", served_by="it", timeout=_TIMEOUT)
