"""The operations of a model's forward pass, counted one by one; also on the `meta` device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from unidist.cost_model.work import CountedBlock, CountedPass
from unidist.errors import ConfigurationError
from unidist_torch.framework.saved_activations import is_block


def count(model: torch.nn.Module, inputs: Sequence[Any]) -> CountedPass:
    """Run the model forward once and count the operations of its matrix products and convolutions.

    Blocks are those of `saved_activations.measure`; if there are fewer than two, the members of the longest list of
    modules; if there is no list, the model's children. Those without parameters do not count.

    Args:
        model: as it would be trained; on the `meta` device nothing is computed.
        inputs: arguments of its `forward`.

    Raises:
        ConfigurationError: it has no modules, or takes no tensor.
    """
    samples = next((leaf.shape[0] for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)
    if not samples:
        raise ConfigurationError("the inputs have no samples: the first dim of the first tensor is that of the samples")
    paths = _blocks(model)
    passed = dict.fromkeys(paths, 0.0)

    def noting(path: str) -> Any:
        def note(_: torch.nn.Module, args: Any, output: Any) -> None:
            made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
            passed[path] = float(sum(leaf.numel() for leaf in made))

        return note

    hooks = [model.get_submodule(path).register_forward_hook(noting(path)) for path in paths]
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), counter:
            model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    counts = counter.get_flop_counts()
    root = type(model).__name__
    blocks = [CountedBlock(path, float(sum(counts.get(f"{root}.{path}", {}).values())), passed[path]) for path in paths]
    widths = {
        size
        for path in paths
        for each in model.get_submodule(path).parameters()
        if each.dim() == 2
        for size in each.shape
    }
    heads = {each.num_heads for each in model.modules() if isinstance(each, torch.nn.MultiheadAttention)}
    return CountedPass(
        samples,
        blocks,
        outside=float(counter.get_total_flops()) - sum(block.flops for block in blocks),
        widths=sorted(widths) or [1],
        heads=heads.pop() if len(heads) == 1 else None,
    )


def _blocks(model: torch.nn.Module) -> list[str]:
    found = [path for path, module in model.named_modules() if is_block(path, module)]
    if len(found) < 2:
        lists = [
            [
                f"{path}.{name}".lstrip(".")
                for name, each in module.named_children()
                if any(True for _ in each.parameters())
            ]
            for path, module in model.named_modules()
            if isinstance(module, torch.nn.Sequential | torch.nn.ModuleList)
        ]
        found = max(lists, key=len, default=[]) or [
            name for name, each in model.named_children() if any(True for _ in each.parameters())
        ]
    if not found:
        raise ConfigurationError(f"{type(model).__name__} has no modules with parameters, so there are no blocks in it")
    return found
