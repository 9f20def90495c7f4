"""Keys of the job's directory (`unidist.control.job_values`) by which servers and workers find each other."""

from __future__ import annotations


def server_key(number: int) -> str:
    """Return the key of a server's address, which is JSON: [host, port]."""
    return f"parameter_server/{number}"


def claim_key(segment: str) -> str:
    """Return the key of the number of the server that goes on with a segment when another one is lost."""
    return f"parameter_server/claim/{segment}"
