"""Data for the status page, and requests of its buttons to the launcher. Used by the page's threads."""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import Any

from typing_extensions import override

from unidist_status.board import SharedStatus
from unidist_status.server import Refused, StatusSource

_MAX_WAITING = 64


class BoardSource(StatusSource):
    """Answers from the status that the launcher keeps.

    Args:
        shared: what the launcher writes.
    """

    def __init__(self, shared: SharedStatus) -> None:
        self._shared = shared

    @override
    def status(self) -> dict[str, Any]:
        with self._shared.lock:
            return self._shared.model.as_fields(now=time.monotonic())

    @override
    def log_of(self, name: str) -> list[str]:
        with self._shared.lock:
            lines = self._shared.model.lines_of(name)
        if lines is None:
            raise Refused(HTTPStatus.NOT_FOUND, f"there is no rank {name!r} now")
        return lines

    @override
    def ask(self, action: str, name: str, client: str) -> dict[str, Any]:
        """The launcher does it in the next turn of its loop."""
        with self._shared.lock:
            model = self._shared.model
            number = model.find(name)
            if number is None:
                raise Refused(HTTPStatus.NOT_FOUND, f"there is no rank {name!r} now")
            if action == "stacks" and not model.shows_stacks(number):
                raise Refused(HTTPStatus.CONFLICT, f"{name!r} does not train yet; it cannot show its stacks")
            if len(self._shared.asked) >= _MAX_WAITING:
                raise Refused(HTTPStatus.TOO_MANY_REQUESTS, "much has been asked for already; try again")
            self._shared.asked.append((action, number, client))
            return {"action": action, "worker": number, "rank": model.rank_of(number)}
