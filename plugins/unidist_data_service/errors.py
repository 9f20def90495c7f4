"""Errors of datasets in data workers."""

from __future__ import annotations

from unidist.errors import UnidistError


class DataWorkerError(UnidistError, RuntimeError):
    """A dataset has raised in a data worker; the message has the worker's traceback."""
