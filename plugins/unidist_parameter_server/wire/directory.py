"""Entries of servers and workers in the job's directory (`unidist.control.job_values`). Pure."""

from __future__ import annotations

import json

from unidist.errors import ConfigurationError

SERVER_ROLE = "ps"
"""Of the servers, among the processes beside the ranks."""


def server_key(number: int) -> str:
    """Return the key of a server's address."""
    return f"parameter_server/{number}"


def claim_key(segment: str) -> str:
    """Return the key of the number of the server that goes on with a segment when another one is lost."""
    return f"parameter_server/claim/{segment}"


def address_value(host: str, port: int) -> bytes:
    """Return the value for where a server listens."""
    return json.dumps({"host": host, "port": port}).encode()


def failure_value(text: str) -> bytes:
    """Return the value for a server that cannot be there, and why."""
    return json.dumps({"failure": text}).encode()


def address_from(value: bytes) -> tuple[str, int]:
    """Return host and port of a server.

    Raises:
        ConfigurationError: it has told why it cannot be there.
    """
    found = json.loads(value)
    if "failure" in found:
        raise ConfigurationError(str(found["failure"]))
    return str(found["host"]), int(found["port"])
