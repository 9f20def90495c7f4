"""Messages between the launcher's pod of an elastic job and the others."""

from __future__ import annotations

from unidist.control.codec import Message

__all__ = ["AgentEnded", "JobEnded", "PodHere", "RunAgent"]


class PodHere(Message):
    """A pod has come, and has room for so many ranks."""

    name: str
    slots: int


class AgentEnded(Message):
    """The agent of a pod has ended; the pod is still there."""

    name: str
    text: str


class RunAgent(Message):
    """To a pod: run an agent with this order. The answer is `AgentEnded`."""

    order: str


class JobEnded(Message):
    """To a pod: the job has ended."""
