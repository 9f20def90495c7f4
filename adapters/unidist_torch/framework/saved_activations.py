"""The bytes that a forward pass saves for its backward pass, counted tensor by tensor; also on the `meta` device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from unidist.cost_model.figures import ActivationBytes, MeasuredActivations, unit_of

OUTSIDE = ""
"""The path under which tensors outside of all blocks are counted."""


def measure(model: torch.nn.Module, inputs: Sequence[Any]) -> MeasuredActivations:
    """Run the model forward once, and return what autograd saves of it; parameters and buffers do not count.

    A block is a module whose path ends with its first number (`blocks.3`) and that consists of others. What the loss
    keeps is not seen.

    Args:
        model: as it would be trained.
        inputs: arguments of its `forward`.
    """
    counter = _Counter(model)
    hooks: list[Any] = []
    for path, module in model.named_modules():
        if is_block(path, module):
            hooks.append(module.register_forward_pre_hook(counter.entering(path), with_kwargs=True))
            hooks.append(module.register_forward_hook(counter.leave, always_call=True))
    try:
        with torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda packed: packed):
            result = model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    del result
    blocks = [size for path, size in counter.kept.items() if path != OUTSIDE]
    kept = ActivationBytes(
        blocks=sum(blocks),
        block_inputs=sum(counter.inputs.values()),
        largest_block=max(blocks, default=0),
        outside=counter.kept.get(OUTSIDE, 0),
    )
    widths = [parameter.element_size() for parameter in model.parameters()]
    return MeasuredActivations(kept, itemsize=max(set(widths), key=widths.count) if widths else 4)


def is_block(path: str, module: torch.nn.Module) -> bool:
    """Return whether a module is a block, see `measure`."""
    return bool(path) and unit_of(f"{path}/") == path and path[-1].isdigit() and any(True for _ in module.children())


class _Counter:
    """Counts each piece of memory once, for the block that saves it first."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.kept: dict[str, int] = {}
        self.inputs: dict[str, int] = {}
        self._inside = [OUTSIDE]
        # Tensors without memory have no addresses, but storages; while they are listed here none is reused.
        self._seen: dict[int, torch.UntypedStorage] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            self._is_new(tensor)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that autograd saves; the hook that packs it."""
        if self._is_new(tensor):
            path = self._inside[-1]
            self.kept[path] = self.kept.get(path, 0) + tensor.untyped_storage().nbytes()
        return tensor.detach()

    def entering(self, path: str) -> Any:
        """Return the hook that begins a block."""

        def enter(_: torch.nn.Module, args: Any, kwargs: Any) -> None:
            self._inside.append(path)
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self.inputs[path] = self.inputs.get(path, 0) + sum(tensor.nbytes for tensor in given)

        return enter

    def leave(self, *_: Any) -> None:
        """End a block."""
        self._inside.pop()

    def _is_new(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        if storage._cdata in self._seen:
            return False
        self._seen[storage._cdata] = storage
        return True
