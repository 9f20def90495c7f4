"""Guards that raise or prevent it when a cut model would compute something else than the whole one."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from unidist.errors import UsageError
from unidist_tensor_parallel._torch.layers.random import CutRandom
from unidist_tensor_parallel._torch.layers.region import Region


def keep_off_fused_paths(model: nn.Module) -> None:
    """Keep torch's encoders from fused inference kernels, which read the parameters directly and bypass the layers."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def install_guards(model: nn.Module, region: Region, random: CutRandom) -> None:
    """Let the model close cut regions that an error has left open, and compare its first inputs over the ranks."""
    model.register_forward_pre_hook(_Inputs(region, random), with_kwargs=True)
    model.register_forward_hook(lambda *_: random.end(), always_call=True)


class _Inputs:
    """Hook before the model runs: closes open regions, and at first checks that all ranks have the same inputs."""

    def __init__(self, region: Region, random: CutRandom) -> None:
        self._region = region
        self._random = random
        self._checked = False

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._random.end()
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
                "the rank and size of the axis data, and seed what draws them alike"
            )
