"""Values of PyTorch models: nested structures, their forms, and messages made of them."""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree  # the registry of classes that hold values; it has no public name yet

from unidist.errors import UsageError
from unidist_pipeline.execution.messages import Form, Message, TensorForm
from unidist_torch.memory import dtype_of, memory_kind

PLAIN = (bool, int, float, complex, str, bytes, slice, range, torch.dtype, torch.device, enum.Enum, type(None))
"""What is sent as it is."""


class _Place(enum.Enum):
    """Marks the place of a tensor in a structure without its tensors."""

    TENSOR = "tensor"


def parts_of(value: Any) -> list[tuple[str, Any]] | None:
    """Return what a structure is made of, with keys, positions or names of fields; None: it is a leaf.

    Structures are tuples, lists and dicts (also of subclasses, named tuples among them), dataclasses, and instances of
    classes that are registered with torch's pytrees.
    """
    if isinstance(value, (torch.Tensor, torch.Size, type, *PLAIN)):
        return None
    if type(value) not in (tuple, list, dict):
        found, _ = _flat(value)
        if found is not None:
            return _numbered(found)
    if isinstance(value, dict):
        return [(repr(key), item) for key, item in value.items()]
    if isinstance(value, tuple | list):
        return _numbered(value)
    if dataclasses.is_dataclass(type(value)):
        names = [each.name for each in dataclasses.fields(value)]
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return None


def changed(change: Callable[[Any], Any], value: Any) -> Any:
    """Return a structure (see `parts_of`) of the same classes with a function applied to every leaf; `value` stays."""
    parts = parts_of(value)
    return change(value) if parts is None else _remade(value, [(key, changed(change, item)) for key, item in parts])


def _remade(value: Any, parts: Sequence[tuple[str, Any]]) -> Any:
    """Return a structure of the class of `value` with other parts, in the order of `parts_of`."""
    kind: Any = type(value)
    items = [item for _, item in parts]
    if kind in (tuple, list):
        return kind(items)
    if kind is dict:
        return dict(zip(value, items, strict=True))
    _, spec = _flat(value)
    if spec is not None:
        return pytree.tree_unflatten(items, spec)
    if isinstance(value, tuple | list):
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    made: Any = copy.copy(value)  # with its attributes
    if isinstance(value, dict):
        fields = {each.name for each in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
        for (key, before), item in zip(value.items(), items, strict=True):
            made[key] = item
            if key in fields and getattr(made, key) is before:  # an attribute that does not follow the item
                object.__setattr__(made, key, item)
        return made
    for name, item in parts:
        object.__setattr__(made, name, item)  # of frozen ones too
    return made


def _numbered(items: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(str(place), item) for place, item in enumerate(items)]


def _flat(value: Any) -> tuple[list[Any] | None, Any]:
    """Return the parts of a structure that is registered with torch's pytrees, and how to put them together again."""
    found, spec = pytree.tree_flatten(value, is_leaf=lambda each: each is not value)
    return (None, None) if len(found) == 1 and found[0] is value else (found, spec)


def form_of(value: Any, leaf: Callable[[Any], Hashable]) -> Hashable:
    """Return the form of a structure: equal forms are of the same classes, keys and names, with equal leaves.

    Args:
        value: any.
        leaf: returns what stands for a leaf.
    """
    parts = parts_of(value)
    if parts is None:
        return leaf(value)
    return _name(type(value)), tuple((key, form_of(item, leaf)) for key, item in parts)


def constant(value: Any, what: str) -> Hashable:
    """Return what stands for a leaf that is no tensor: equal for values that no model can tell apart.

    Args:
        value: the leaf.
        what: names it in the error.

    Raises:
        UsageError: it might change without that being noticed.
    """
    if isinstance(value, PLAIN):
        return _name(type(value)), value.name if isinstance(value, enum.Enum) else repr(value)
    if isinstance(value, set | frozenset):
        return _name(type(value)), tuple(sorted(str(constant(each, what)) for each in value))
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return _Function(value)
    raise UsageError(
        f"{what} is or contains {_name(type(value))}. What a pipeline computes depends on the values of arguments that "
        "are no tensors, and it cannot tell whether this one has changed since the model was traced. Pass tensors, "
        "numbers, strings and functions, in tuples, lists, dicts and dataclasses"
    )


class _Function:
    """A function or class, equal to itself only, and the same text on every rank."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Function) and other._value is self._value

    def __hash__(self) -> int:
        return hash(id(self._value))

    def __repr__(self) -> str:
        return _name(self._value)


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


class _Wrapped:
    """The place of a tensor of a class that wraps another one, which is sent (`__tensor_flatten__`)."""

    def __init__(self, kind: Any, name: str, meta: Any) -> None:
        self._parts = kind, name, meta

    def around(self, tensor: torch.Tensor) -> Any:
        """Return the wrapper of a tensor."""
        kind, name, meta = self._parts
        return kind.__tensor_unflatten__({name: tensor}, meta, None, None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Wrapped) and other._parts == self._parts

    def __hash__(self) -> int:
        return hash(self._parts[:2])


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
            place: Any = _Place.TENSOR
            if hasattr(item, "__tensor_flatten__"):
                wrapper: Any = item
                (name,), meta = wrapper.__tensor_flatten__()
                place, item = _Wrapped(type(wrapper), name, meta), getattr(wrapper, name)
            if item.layout is not torch.strided:
                raise UsageError(f"{what} contains a tensor of layout {item.layout}; only dense ones can be sent")
            found.append(item)
            return place
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

    def put(item: Any) -> Any:
        if isinstance(item, _Wrapped):
            return item.around(next(rest))
        return next(rest) if item is _Place.TENSOR else item

    return changed(put, form.structure)


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
