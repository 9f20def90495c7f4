"""Random numbers for divided tensors: each rank draws others, and torch's generator stays the same on all ranks.

Plain tensors are computed by every rank, so numbers for them must be equal: the ranks begin with the generator state of
the first (`binding`). For a divided tensor each rank draws a number from it, the same on all, which seeds a generator
with this rank's place. So there is no second state to be saved: recomputing a part of the model (which restores torch's
generator) and loading a checkpoint give the same numbers again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from unidist_context_parallel._torch.divided.tensor import SequenceTensor, name_of, refuse, whole
from unidist_context_parallel._torch.rules.registration import divided, parameters_of, rule, wrap_all

_STEP = 0x9E3779B97F4A7C15
"""Between the seeds of two ranks: odd, and far from small numbers (the golden ratio of 2**64)."""


def draw_seed(rank: int) -> int:
    """Return a seed for this rank's numbers, and advance torch's generator by the same amount on all ranks."""
    number = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
    return (number + _STEP * rank) % 2**63


@contextmanager
def own_numbers(device: torch.device, rank: int) -> Iterator[None]:
    """Within the block, random numbers on a device are this rank's own."""
    seed = draw_seed(rank)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
    else:
        generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


@rule("dropout", "dropout_", "alpha_dropout", "feature_alpha_dropout", "native_dropout", "rrelu", "rrelu_", "bernoulli",
      "bernoulli_", "uniform_", "normal_", "exponential_", "random_", "geometric_", "cauchy_", "log_normal_",
      "rand_like", "randn_like", "randint_like", "poisson", "feature_dropout")  # fmt: skip
def _drawn(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = name_of(func)
    tensor = divided(args[0] if args else kwargs.get("input"))
    if tensor is None or kwargs.get("generator") is not None:
        refuse(func, "draws from a generator of its own, or for a whole tensor by a divided one")
    rest = {key: whole(value) for key, value in kwargs.items() if key != "input"}
    if name in ("dropout", "alpha_dropout", "feature_alpha_dropout", "rrelu", "native_dropout"):
        position = {"dropout": 2, "rrelu": 3}.get(name, 2)
        training = rest.get(
            "training", rest.get("train", args[position] if len(args) > position else name == "dropout")
        )
        if not training:
            return wrap_all(func(tensor.local, *args[1:], **rest), tensor, tensor.dim_divided - tensor.local.ndim)
    with own_numbers(tensor.local.device, tensor.axis.rank):
        result = func(tensor.local, *args[1:], **rest)
    if name.endswith("_") or rest.get("inplace"):
        return tensor
    return wrap_all(result, tensor, tensor.dim_divided - tensor.local.ndim)


@rule("dropout1d", "dropout2d", "dropout3d")
def _channels(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, p, training, inplace = parameters_of(
        "input p training inplace", {"p": 0.5, "training": True, "inplace": False}, args, kwargs
    )
    if not training:
        return func(tensor, p, False, inplace) if not isinstance(tensor, SequenceTensor) else tensor
    if tensor.dim_divided > tensor.local.ndim - 1 - int(name_of(func)[-2]):
        # One decision for a channel of all tokens: drawn alike on every rank, from the common generator.
        return tensor.like(func(tensor.local, p, True, inplace))
    with own_numbers(tensor.local.device, tensor.axis.rank):
        return tensor.like(func(tensor.local, p, True, inplace))


@rule("multinomial")
def _multinomial(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = divided(args[0])
    if tensor is None or kwargs.get("generator") is not None or tensor.dim_divided == tensor.local.ndim - 1:
        return func(*map(whole, args), **kwargs)
    with own_numbers(tensor.local.device, tensor.axis.rank):
        return tensor.like(func(tensor.local, *args[1:], **kwargs))
