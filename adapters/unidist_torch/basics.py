"""The part of the basic API that needs PyTorch: tensors in engine memory, and the accelerators it was built for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed

from unidist.buffer import Buffer
from unidist.runtime import context
from unidist.settings import device_index
from unidist.training.seeding import seed_python
from unidist_torch.memory import DTYPES, buffer_of, tensor_of


def buffer(tensor: torch.Tensor) -> Buffer:
    """Return the memory of a dense tensor as a buffer for a communicator, without a copy."""
    return buffer_of(tensor)


def empty(shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a zeroed CPU tensor in engine memory, which collectives move without a copy.

    It stays valid after `shutdown()`, as an ordinary tensor.
    """
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    kind = DTYPES[dtype]
    memory = context.current().world.allocate(math.prod(dims) * kind.itemsize)
    return tensor_of(memory.cast(kind), dims)


def seed(number: int) -> None:
    """Seed the random numbers of Python, numpy and PyTorch, on the CPU and on GPUs. Every rank passes the same number.

    Ranks with different samples get different numbers, for dropout and augmentation say. Ranks that hold parts of one
    model get equal ones, because they prepare the same samples; `tensor` and `pipeline` see to it that what each of
    them computes alone differs. The weights are rank 0's anyway. One process gets those of `torch.manual_seed(number)`.

    Args:
        number: from 0, below 2**32; the same on every rank.

    Raises:
        UsageError: a number out of range.
    """
    torch.manual_seed(seed_python(number, context.current()))


def device() -> torch.device:
    """Return the device of this rank: `cuda:` and its local rank, or `cpu` where this rank sees no GPU.

    A rank that is shown its own GPU only, by CUDA_VISIBLE_DEVICES, uses that: `cuda:0`. The GPU is the current one of
    this thread afterwards, so that what says only "cuda" means it, too.

    Raises:
        ConfigurationError: there are GPUs, but fewer than ranks on this host.
    """
    visible = torch.cuda.device_count()  # also of ROCm
    index = device_index(context.current().topology, visible=visible)
    if index is None:
        return torch.device("cpu")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def nccl_built() -> int:
    """Return the version of NCCL that PyTorch was built with, as NCCL counts it (21903 is 2.19.3); 0 without it."""
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major * 10000 + minor * 100 + patch)


def cuda_built() -> bool:
    """Return whether PyTorch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether PyTorch was built for ROCm."""
    return torch.version.hip is not None
