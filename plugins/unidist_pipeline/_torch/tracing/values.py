"""Values of PyTorch models as messages: nested structures separated into tensors and the rest."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Sequence
from typing import Any

import torch

from unidist.errors import UsageError
from unidist_pipeline.execution.messages import Form, Message, TensorForm
from unidist_torch.memory import dtype_of, memory_kind

PLAIN = (bool, int, float, complex, str, bytes, slice, range, torch.dtype, torch.device, enum.Enum, type(None))
"""What is sent as it is."""


class _Place(enum.Enum):
    """Marks the place of a tensor in a structure without its tensors."""

    TENSOR = "tensor"


def changed(change: Callable[[Any], Any], value: Any) -> Any:
    """Return a structure of tuples, lists and dicts with a function applied to every leaf; `value` stays."""
    if isinstance(value, dict):
        made = copy.copy(value)  # of whatever class: a model's output with attributes
        for key, item in value.items():
            made[key] = changed(change, item)
        return made
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        items = [changed(change, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return change(value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a structure, in order."""
    found: list[torch.Tensor] = []
    changed(lambda item: found.append(item) if isinstance(item, torch.Tensor) else None, value)
    return found


def message_of(value: Any, what: str) -> tuple[Message, list[torch.Tensor]]:
    """Return a value as a message, and its tensors with a gradient, as they are recorded by autograd.

    Args:
        value: tensors and plain values, nested.
        what: names the value in errors.

    Raises:
        UsageError: it contains something that cannot be sent.
    """
    found: list[torch.Tensor] = []

    def take(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if item.layout is not torch.strided:
                raise UsageError(f"{what} contains a tensor of layout {item.layout}; only dense ones can be sent")
            found.append(item)
            return _Place.TENSOR
        if isinstance(item, PLAIN):
            return tuple(item) if isinstance(item, torch.Size) else item
        raise UsageError(
            f"{what} is or contains {type(item).__module__}.{type(item).__qualname__}, which cannot be sent to another "
            "rank; pass tensors, numbers and strings on, in tuples, lists and dicts, or keep it within one stage"
        )

    structure = changed(take, value)
    forms = tuple(_form(tensor, needs_gradient=tensor.requires_grad) for tensor in found)
    sent = [tensor.detach().contiguous() for tensor in found]
    return Message(Form(forms, structure), sent), [tensor for tensor in found if tensor.requires_grad]


def value_of(form: Form, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the value that a message was made of, with these tensors."""
    rest = iter(tensors)
    return changed(lambda item: next(rest) if item is _Place.TENSOR else item, form.structure)


def gradient_message(gradients: Sequence[torch.Tensor | None]) -> Message:
    """Return gradients as a message, see `Stage.backward`."""
    found = [each.detach().contiguous() for each in gradients if each is not None]
    return Message(Form(tuple(map(_form, found)), tuple(each is not None for each in gradients)), found)


def gradients_of(message: Message) -> list[torch.Tensor | None]:
    """Return the gradients of a message; None in the place of each missing one."""
    rest = iter(message.tensors)
    return [next(rest) if there else None for there in message.form.structure]


def _form(tensor: torch.Tensor, *, needs_gradient: bool = False) -> TensorForm:
    return TensorForm(tuple(tensor.shape), dtype_of(tensor), needs_gradient, memory_kind(tensor).partition(":")[0])
