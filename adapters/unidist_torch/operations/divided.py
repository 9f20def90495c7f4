"""Models of which this rank holds a part: their values cannot be copied from rank to rank, nor be in plain files."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, MutableMapping, Sequence
from typing import Any, NoReturn, Self
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.utils.hooks import RemovableHandle

from unidist.errors import UsageError

divided_modules: WeakSet[torch.nn.Module] = WeakSet()
"""All modules of these models."""


def refuse_parts(caller: str, tensors: Iterable[torch.Tensor]) -> None:
    """Raise UsageError if one of the tensors has the memory of a parameter of a divided model.

    Args:
        caller: the function that would copy them.
        tensors: parameters, or values of a state_dict.
    """
    if not divided_modules:
        return
    held = {parameter.data_ptr() for module in divided_modules for parameter in module.parameters(recurse=False)} - {0}
    if any(tensor.data_ptr() in held for tensor in tensors):
        raise UsageError(
            f"{caller} would copy one rank's part of a divided model over another part. After distribute() and "
            "TrainStep all ranks have the values of rank 0 already: leave the call out, or make it before"
        )


class _InNoFile:
    """Is in what has a part of a model: copies share it, and pickling it is an error.

    Args:
        axes: that divide the model.
        arguments: of `ud.save`, which writes the whole.
    """

    def __init__(self, axes: Sequence[str], arguments: str) -> None:
        self._text = (
            f"the model is divided over the ranks ({' and '.join(axes)}), and torch.save, also of a state_dict(), "
            f"would write this rank's part alone: use ud.save(path, {arguments}), which writes the whole"
        )

    def __call__(self, module: torch.nn.Module, state: Any, prefix: str, local_metadata: Any) -> None:
        """Join what `module.state_dict()` returns."""
        if isinstance(state, OrderedDict):  # else it is a caller's own dict
            state._unidist_part = self  # type: ignore[attr-defined]  # it takes attributes, as torch's own _metadata

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(self._text)


_joining: MutableMapping[torch.nn.Module, RemovableHandle] = WeakKeyDictionary()


def refuse_files(model: torch.nn.Module, parts: Collection[int], axes: Sequence[str], *, lacks_layers: bool) -> None:
    """Let `torch.save` of a divided model, and of its `state_dict()`, raise; of layers that are whole it does not.

    Args:
        model: this rank's part of it, or again all of it.
        parts: identities of parameters that are elsewhere too, with other values.
        axes: that divide the model.
        lacks_layers: other ranks have layers that this one has not.
    """
    for module in model.modules():
        if (handle := _joining.pop(module, None)) is not None:
            handle.remove()
        held = module.parameters(recurse=False)
        if (lacks_layers and module is model) or any(id(parameter) in parts for parameter in held):
            _joining[module] = module.register_state_dict_post_hook(_InNoFile(axes, "model"))


def in_no_file(state: dict[str, Any], axes: Sequence[str]) -> dict[str, Any]:
    """Return the state of an optimizer that has this rank's part of a model; `torch.save` of it raises."""
    marked = OrderedDict(state)
    marked._unidist_part = _InNoFile(axes, "model, optimizer")  # type: ignore[attr-defined]  # as above
    return marked
