"""Guards that raise or prevent it when a cut model would compute something else than the whole one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from unidist.errors import UsageError
from unidist_tensor_parallel._torch.layers.random import CutRandom
from unidist_tensor_parallel._torch.layers.region import Region
from unidist_tensor_parallel._torch.layers.sequence import BlockRow
from unidist_torch.memory import refuse_transformed


def keep_off_fused_paths(model: nn.Module) -> None:
    """Keep torch's encoders from fused inference kernels, which read the parameters directly and bypass the layers."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def install_guards(model: nn.Module, region: Region, random: CutRandom) -> InputCheck:
    """Let the model close cut regions that an error has left open, and compare its first inputs over the ranks."""
    check = InputCheck(region, random)
    model.register_forward_pre_hook(check, with_kwargs=True)
    model.register_forward_hook(_End(random), always_call=True)
    return check


class _End:
    """Hook after the model has run: closes regions that are open."""

    def __init__(self, random: CutRandom) -> None:
        self._random = random

    def __call__(self, *args: Any) -> None:
        self._random.end()


def watch_rows(model: nn.Module, rows: Sequence[BlockRow]) -> None:
    """Let rows of blocks check, in their first pass, that nothing is computed between two blocks of a row.

    There each rank has some of the tokens, and nobody looks at what the model's own code does with them.
    """
    for row in rows:
        between = _Between(row)
        for path in row.paths[1:]:
            model.get_submodule(path).register_forward_pre_hook(between.entering(path), prepend=True)
        for path in row.paths[:-1]:
            model.get_submodule(path).register_forward_hook(between.left)


class _Between:
    """Hooks of a row's blocks: each takes what the last one has returned."""

    def __init__(self, row: BlockRow) -> None:
        self._last = row.paths[-1]
        self._before = dict(zip(row.paths[1:], row.paths, strict=False))
        self._output: tuple[int, torch.Size] | None = None
        self._checked = False

    def left(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._checked and isinstance(output, torch.Tensor) and not torch.compiler.is_compiling():
            self._output = output.data_ptr(), output.shape

    def entering(self, path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if self._checked or self._output is None or torch.compiler.is_compiling():
                return
            if not args or not isinstance(args[0], torch.Tensor) or (args[0].data_ptr(), args[0].shape) != self._output:
                raise UsageError(
                    f"tensor: sequence=true: the input of {path!r} is not the output of {self._before[path]!r}, the "
                    "block before it that is cut. Between them each rank has some of the tokens, and what is computed "
                    "there might need all. Move it into one of them, or leave sequence out"
                )
            self._checked = path == self._last

        return hook


class InputCheck:
    """Hook before the model runs: closes open regions, and at first checks that all ranks have the same inputs."""

    def __init__(self, region: Region, random: CutRandom) -> None:
        self._region = region
        self._random = random
        self._checked = False

    def renew(self) -> None:
        """Check the next inputs, too: other ranks compute with this one. Every rank of the axis calls it."""
        self._checked = False

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._random.end()
        refuse_transformed()
        if self._checked:
            return
        self._checked = True
        digest = hashlib.blake2b(digest_size=6)
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                digest.update(str((tuple(leaf.shape), leaf.dtype)).encode())
                digest.update(leaf.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        number = float(int.from_bytes(digest.digest(), "little"))  # 48 bits: exact in float64
        axis = self._region.axis
        largest = axis.largest(torch.tensor([number, -number], dtype=torch.float64))
        if float(largest[0]) != -float(largest[1]):
            raise UsageError(
                f"the {axis.size} ranks along the axis tensor compute one batch together, and got different inputs "
                f"(this is rank {axis.rank} of them). Give them the same: divide the data by ud.shard(loader), or by "
                "ud.data_rank() and ud.data_size(), and seed what draws them by ud.seed(n)"
            )
