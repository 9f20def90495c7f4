"""Messages between two stages, and their forms, which both sides know in advance.

A receiver must know how much memory a message needs. So the first message of a kind, for inputs of a certain form, is
preceded by a description (`Form`); both sides keep it, and every later message of that kind must have the same form.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from unidist.buffer import HOST, DType
from unidist.errors import UsageError
from unidist.negotiation import seal, unseal
from unidist_pipeline.schedules.facts import ACTIVATION_AT, Fact

_PURPOSE = "the form of a pipeline's messages"


@dataclass(frozen=True)
class TensorForm:
    """One tensor of a message.

    Args:
        shape: its shape.
        dtype: element type.
        needs_gradient: of an activation: a gradient comes back for it.
        memory: the kind of memory at the sender, without a device's number ("host", "cuda").
    """

    shape: tuple[int, ...]
    dtype: DType
    needs_gradient: bool = False
    memory: str = HOST

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}{'' if self.memory == HOST else f' on {self.memory}'}"


@dataclass(frozen=True)
class Form:
    """Describes a message.

    Args:
        tensors: in the order in which they are sent.
        structure: how the values that a stage passes on are built from the tensors and other data: plain data that can
            be pickled and compared; everything but tensors is in here. Private to the stage.
    """

    tensors: tuple[TensorForm, ...]
    structure: Any = None

    def __str__(self) -> str:
        listed = ", ".join(map(str, self.tensors)) or "no tensors"
        return f"({listed})" if self.structure is None else f"({listed}) as {self.structure!r}"


@dataclass(frozen=True)
class Message:
    """All that a stage passes on for one micro-batch: to the next stage or, gradients, to the one before.

    Args:
        form: describes it.
        tensors: of the framework, one for each of `form.tensors`; contiguous, not recorded by autograd. The sender does
            not change them afterwards.
    """

    form: Form
    tensors: Sequence[Any]


class StageFormError(UsageError):
    """A stage passes on something else than before for inputs of the same form: fix the model."""


class KnownForms:
    """The forms known so far, by kind of message and by the form of the micro-batch's inputs."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, Hashable], Form] = {}

    def find(self, fact: Fact, key: Hashable) -> Form | None:
        """Return the form of messages that bring this fact for inputs of the form `key`; None before the first."""
        return self._known.get((fact[0], fact[1], key))

    def learn(self, fact: Fact, key: Hashable, form: Form) -> None:
        """Record the form of the first one."""
        self._known[fact[0], fact[1], key] = form

    def check(self, fact: Fact, key: Hashable, found: Form) -> None:
        """Raise StageFormError if a message to be sent has another form than the first one had."""
        expected = self.find(fact, key)
        if expected is None or expected == found:
            return
        word, number, microbatch = fact
        if word == ACTIVATION_AT:
            what, stage = "returned", number - 1
        else:
            what, stage = "gave gradients", number + 1
        raise StageFormError(
            f"stage {stage} of the pipeline {what} of another form for micro-batch {microbatch} than before for "
            f"inputs of the same shapes. Expected: {expected}. Found: {found}. What passes between stages must depend "
            "on the shapes of the inputs only; keep what does not within one stage"
        )


def pack(form: Form) -> bytearray:
    """Return a form as bytes."""
    return seal(form, _PURPOSE)


def unpack(data: bytearray) -> Form:
    """Return the form of these bytes, which come from a rank of the same job."""
    form = unseal(data, _PURPOSE)
    assert isinstance(form, Form)
    return form
