"""What a simulator is asked for, a line of JSON each, on its standard input."""

from __future__ import annotations

from unidist.control.codec import Message

__all__ = ["EndWorker", "Exchange", "StartHost", "Stats"]


class StartHost(Message):
    """Start the agent of a host, with this order."""

    order: str


class EndWorker(Message):
    """Kill a worker."""

    worker: int


class Exchange(Message):
    """Have the ranks of a job of fixed size exchange addresses."""


class Stats(Message):
    """Answer, in JSON, with what the workers have noted, processor time and memory."""
