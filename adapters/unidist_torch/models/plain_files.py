"""Files of models of which this rank holds a part: plain ones are refused, as they would have that part alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, MutableMapping, Sequence
from typing import Any, NoReturn, Self
from weakref import WeakKeyDictionary

import torch
from torch.utils.hooks import RemovableHandle

from unidist.errors import UsageError
from unidist_torch.models.guarded_parameter import unsaved


class _InNoFile:
    """Is in what has a part of a model: copies share it, and pickling it is an error.

    Args:
        axes: that divide the model.
        arguments: of `ud.save`, which writes the whole.
        parts: names of the parameters of a module that are parts; None: all tensors in it are, as the model lacks
            layers.
    """

    def __init__(self, axes: Sequence[str], arguments: str, parts: Collection[str] | None = None) -> None:
        self._text = (
            f"the model is divided over the ranks ({' and '.join(axes)}), and torch.save or safetensors, also of a "
            f"state_dict(), would write this rank's part alone: use ud.save(path, {arguments}), which writes the whole"
        )
        if arguments == "model":
            self._text += "; ud.save_pretrained(model, folder) does so in safetensors files"
        self._parts = parts

    def __call__(self, module: torch.nn.Module, state: Any, prefix: str, local_metadata: Any) -> None:
        """Mark what `module.state_dict()` returns, and each tensor in it, since scripts copy those into other dicts."""
        names = state if self._parts is None else [prefix + name for name in self._parts]
        for name in [name for name in names if name.startswith(prefix)]:
            if isinstance(state.get(name), torch.Tensor):
                state[name] = unsaved(state[name], self._text)
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
        held = [name for name, parameter in module._parameters.items() if id(parameter) in parts]
        lacks = lacks_layers and module is model
        if lacks or held:
            hook = _InNoFile(axes, "model", None if lacks else held)
            _joining[module] = module.register_state_dict_post_hook(hook)


def in_no_file(state: dict[str, Any], axes: Sequence[str]) -> dict[str, Any]:
    """Return the state of an optimizer that has this rank's part of a model; `torch.save` of it raises."""
    marked = OrderedDict(state)
    marked._unidist_part = _InNoFile(axes, "model, optimizer")  # type: ignore[attr-defined]  # as above
    return marked
