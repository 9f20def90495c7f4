"""Sequence parallelism: between the cut layers of a row of blocks each rank has some of the tokens.

Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198), section 4.2.2: the first block's input is cut along the
sequence, column layers gather it, row layers scatter their sums, and the last block's output is whole again.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from unidist.errors import ConfigurationError, UnidistError
from unidist_tensor_parallel._torch.layers.axis import TensorAxis
from unidist_tensor_parallel._torch.layers.random import CutRandom
from unidist_tensor_parallel._torch.layers.region import Region, SequenceRegion
from unidist_tensor_parallel.layout.roles import Role

_SAYS = "tensor: sequence=true: the tokens"

_CUTS = (
    Role.COLUMN,
    Role.COLUMN_GATHER,
    Role.QKV,
    Role.HEADS,
    Role.ROW,
    Role.ROW_SPLIT,
    Role.ATTENTION,
)


@dataclass(frozen=True)
class BlockRow:
    """Blocks of one list, whose activations are cut.

    Args:
        paths: of the blocks, in their order.
        dim: of the sequence in activations, from the end.
    """

    paths: Sequence[str]
    dim: int


def find_rows(model: nn.Module, roles: Mapping[str, Role]) -> list[BlockRow]:
    """Return a model's blocks: those with the role `sequence`, else those of every list that has cut layers.

    Args:
        model: whole.
        roles: of layers.

    Raises:
        ConfigurationError: there are no such blocks, or they take more than one activation.
    """
    modules = dict(model.named_modules())  # a block that is used in several places is one block
    chosen = [path for path, role in roles.items() if role is Role.SEQUENCE and path in modules]
    if not chosen:
        cut = [path for path, role in roles.items() if role in _CUTS]
        words = [path for path, role in roles.items() if role is Role.VOCABULARY]
        chosen = list(dict.fromkeys(block for path in cut if (block := _block_of(path, modules, words))))
    if not chosen:
        raise ConfigurationError(
            "tensor: sequence=true needs blocks one after the other in a list (nn.Sequential, nn.ModuleList) with cut "
            "layers in them, and the model has none. Name them: plan=PATTERN=sequence, or leave sequence out"
        )
    rows = _rows(chosen)
    _refuse_repeated(rows, modules, model)
    return [BlockRow(blocks, _sequence_dim(blocks, modules)) for blocks in rows]


def _refuse_repeated(rows: Sequence[Sequence[str]], modules: Mapping[str, nn.Module], model: nn.Module) -> None:
    """Raise ConfigurationError for rows of several blocks of which one is used again: where do they begin and end?"""
    repeated = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    for blocks in rows:
        again = [path for path in blocks if repeated[id(modules[path])] > 1]
        if again and len(blocks) > 1:
            raise ConfigurationError(
                f"tensor: sequence=true cuts activations from the first block of a list to the last, and {again[0]!r} "
                f"is used in several places, beside other blocks ({', '.join(blocks[:4])}). Leave sequence out"
            )


def make_sequence_regions(
    model: nn.Module,
    rows: Sequence[BlockRow],
    roles: Mapping[str, Role],
    axis: TensorAxis,
    random: CutRandom,
    *,
    gathering: Collection[str],
) -> dict[str, Region]:
    """Return the regions of rows of blocks, by path of each block, and let activations be cut there.

    Args:
        model: whole.
        rows: of its blocks.
        roles: of layers.
        axis: the ranks.
        random: of the model.
        gathering: paths of modules in the blocks whose own code needs all tokens: they are gathered before the module
            runs and cut again afterwards, and its layers are cut as without sequence parallelism.

    Raises:
        ConfigurationError: something in the blocks might mix tokens where each rank has some.
    """
    modules = dict(model.named_modules())
    found: dict[str, Region] = {}
    for row in rows:
        region = SequenceRegion(axis, random, row.dim)
        first, last = modules[row.paths[0]], modules[row.paths[-1]]
        first.register_forward_pre_hook(_begin(region, row.paths[0]), with_kwargs=True)
        for path in row.paths:
            found[path] = region
        for path in gathering:
            if any(path == block or path.startswith(f"{block}.") for block in row.paths):
                found[path] = Region(axis, random)
                modules[path].register_forward_pre_hook(_gather_before(region, path), with_kwargs=True)
                modules[path].register_forward_hook(_cut_after(region))
        for path in row.paths:
            _check_whole(path, modules[path], roles, gathering)
            _sum_gradients(path, modules[path], roles, region, gathering)
        last.register_forward_hook(_finish(region, row.paths[-1]))
    model.register_forward_hook(_explain(rows), always_call=True)
    return found


def _is_inside(path: str, owners: Collection[str]) -> bool:
    return any(path == owner or path.startswith(f"{owner}.") for owner in owners)


def _block_of(path: str, modules: Mapping[str, nn.Module], words: Iterable[str]) -> str:
    """Return the block that a layer is in: the outermost list member that repeats there, else the outermost one.

    "" if there is none. One with a vocabulary in it (`words`) does not take and return activations.
    """
    parts = path.split(".")
    found = []
    for end in range(1, len(parts)):
        owner, block = modules.get(".".join(parts[: end - 1])), modules.get(".".join(parts[:end]))
        if any(word.startswith(".".join(parts[:end]) + ".") for word in words):
            continue
        if isinstance(owner, nn.Sequential | nn.ModuleList) and block is not None and any(block.children()):
            repeats = sum(type(each) is type(block) for each in owner) > 1
            found.append((not repeats, end))
    return ".".join(parts[: min(found)[1]]) if found else ""


def _rows(blocks: Iterable[str]) -> list[list[str]]:
    """Return blocks by the list that they are in."""
    rows: dict[str, list[str]] = {}
    for path in blocks:
        rows.setdefault(path.rpartition(".")[0], []).append(path)
    return list(rows.values())


def _sequence_dim(blocks: list[str], modules: Mapping[str, nn.Module]) -> int:
    firsts = set()
    for path in blocks:
        for module in modules[path].modules():
            if isinstance(module, nn.TransformerDecoderLayer):
                raise ConfigurationError(
                    f"tensor: sequence=true does not cut {path!r}: a decoder's blocks take a second activation, the "
                    "encoder's output, which stays whole. Leave sequence out"
                )
            if isinstance(module, nn.MultiheadAttention):
                firsts.add(bool(module.batch_first))
    if firsts == {True, False}:
        raise ConfigurationError("tensor: sequence=true needs attentions that are all batch_first, or none of them")
    return -3 if firsts == {False} else -2


def _check_whole(path: str, block: nn.Module, roles: Mapping[str, Role], gathering: Collection[str]) -> None:
    """Check that modules that may mix tokens come after a layer that gathers them."""
    for name, module in block.named_modules():
        full = f"{path}.{name}" if name else path
        if isinstance(module, nn.Linear | nn.MultiheadAttention) and not (
            full in roles or roles.get(full.rpartition(".")[0]) is Role.ATTENTION or _is_inside(full, gathering)
        ):
            raise ConfigurationError(
                f"tensor: sequence=true cuts the tokens of {path!r} over the ranks, and {full!r} is not cut: what "
                "follows it (attention) might need all tokens, and would have some. Give it a role, or replicate if "
                "each token is computed by itself there"
            )


def _sum_gradients(
    path: str, block: nn.Module, roles: Mapping[str, Role], region: SequenceRegion, gathering: Collection[str]
) -> None:
    """Sum the gradients of parameters that are used on some of the tokens over the ranks."""
    for name, module in block.named_modules():
        full = f"{path}.{name}" if name else path
        if _is_inside(full, gathering):
            continue  # every rank computes the same there
        if roles.get(full) in _CUTS or roles.get(full.rpartition(".")[0]) is Role.ATTENTION:
            continue  # their parameters are cut, and they gather tokens themselves
        own = [each for each, parameter in module.named_parameters(recurse=False) if parameter is not None]
        if own:
            module.forward = _Summing(module, own, region)


class _Summing:
    """Forward of a module with gradients of its direct parameters summed over the ranks, if tokens are cut."""

    def __init__(self, module: nn.Module, names: list[str], region: SequenceRegion) -> None:
        self._module = module
        self._names = names
        self._region = region
        self._forward = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        x = next((each for each in args if isinstance(each, torch.Tensor)), None)
        if x is not None and self._region.has_all_tokens(x):
            return self._forward(*args, **kwargs)
        parameters = {name: self._region.whole_parameter(getattr(module, name)) for name in self._names}
        module.forward = self._forward
        try:
            return functional_call(module, parameters, args, kwargs)
        finally:
            module.forward = self


def _begin(region: SequenceRegion, path: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args or not isinstance(args[0], torch.Tensor):
            raise ConfigurationError(
                f"tensor: sequence=true cuts the first positional argument of {path!r}, which is no tensor here. Pass "
                "the activation first, or leave sequence out"
            )
        return (region.cut_tokens(args[0], training=module.training), *args[1:]), kwargs

    return hook


def _gather_before(region: SequenceRegion, path: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args or not isinstance(args[0], torch.Tensor):
            raise ConfigurationError(
                f"tensor: sequence=true gathers the first positional argument of {path!r}, which is no tensor here. "
                "Pass the activation first, or leave sequence out"
            )
        return (region.gather_tokens(args[0]), *args[1:]), kwargs

    return hook


def _cut_after(region: SequenceRegion) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        region.random.end()
        if isinstance(output, tuple):  # an attention may return its weights too
            return (region.cut_tokens(output[0], training=module.training), *output[1:])
        return region.cut_tokens(output, training=module.training)

    return hook


def _explain(rows: Sequence[BlockRow]) -> Any:
    """Return a hook that adds to torch's error about sizes that tokens are cut, and where."""
    listed = "; ".join(f"{row.paths[0]!r} to {row.paths[-1]!r}" for row in rows)

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        error = sys.exc_info()[1]  # of the forward that has just failed
        if isinstance(error, RuntimeError) and not isinstance(error, UnidistError) and _SAYS not in str(error):
            text = (
                f"{error}. {_SAYS} of activations from {listed} are cut over the ranks, so the model's own code sees "
                "some of them there: a skip from outside of the blocks, a product of two branches or a table of "
                "positions has all. Move it into a layer that is cut, or leave sequence out."
            )
            error.args = (text,)

    return hook


def _finish(region: SequenceRegion, path: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not isinstance(output, torch.Tensor):
            raise ConfigurationError(
                f"tensor: sequence=true gathers the output of {path!r}, which is a {type(output).__name__} here. "
                "Return the activation alone, or leave sequence out"
            )
        return region.gather_tokens(output)

    return hook
