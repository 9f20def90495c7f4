"""Keys of the job's shared values (`unidist.control.job_values`) by which ranks find data workers."""

from __future__ import annotations

KEY_FILE_VARIABLE = "UNIDIST_DATA_KEY_FILE"
"""File into which data worker 0 writes the key by which others join the job."""
COUNT_KEY = "data_service/count"
"""Number of data workers that the launcher has started, as text."""


def worker_key(number: int) -> str:
    """Return the key of a data worker's address, which is JSON: [host, port]; set by the worker."""
    return f"data_service/worker/{number}"


def lost_key(number: int) -> str:
    """Return the key of the reason why a data worker has ended; set by the launcher."""
    return f"data_service/lost/{number}"
