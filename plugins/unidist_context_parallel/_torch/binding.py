"""Context parallelism for PyTorch: divides what a model is called with. The model itself stays as it is."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from unidist.errors import ConfigurationError, UsageError
from unidist_context_parallel._torch import rules
from unidist_context_parallel._torch.divided.axis import ContextAxis, take_rows
from unidist_context_parallel._torch.divided.tensor import SequenceTensor
from unidist_context_parallel.binding import ContextBinding
from unidist_context_parallel.layout.sequence import zigzag
from unidist_torch.memory import memory_kind
from unidist_torch.models import ChangesInputs, PartOfInputs, leave_out

if TYPE_CHECKING:
    from unidist.runtime_api import RuntimeAPI
    from unidist_context_parallel.strategy import ContextParallel

_TOKENS = ("input_ids", "inputs_embeds", "decoder_input_ids", "pixel_values")
"""Arguments that are divided before others, if a model is called by keyword (Hugging Face's names)."""


class TorchContext(ContextBinding):
    """See `ContextBinding`."""

    @override
    def partition(self, strategy: ContextParallel, model: nn.Module, context: RuntimeAPI) -> nn.Module:
        assert rules.__all__, "importing them registers the rules"
        for name, module in model.named_modules():
            if module._compiled_call_impl is not None or "_orig_mod" in module._modules:
                what = type(model).__name__ + (f".{name}" if name else "")
                raise ConfigurationError(
                    f"context={strategy.size}: {what} is compiled, and torch.compile cannot trace a divided sequence. "
                    "Distribute the model without it"
                )
        axis = context.owned(ContextAxis)
        axis.prepare({memory_kind(parameter).partition(":")[0] for parameter in model.parameters()})
        axis = axis.using(strategy.exchange)
        _synchronize_generators(axis)
        dim = _sequence_dim(model) if strategy.dim is None else strategy.dim
        model.register_forward_pre_hook(DividedInputs(strategy, axis, dim), with_kwargs=True)
        leave_out(model, _without_hook, copies=False)
        return model


def _without_hook(state: dict[str, Any]) -> None:
    hooks = state["_forward_pre_hooks"]
    kept = [number for number, hook in hooks.items() if not isinstance(hook, DividedInputs)]
    for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
        state[name] = OrderedDict((number, state[name][number]) for number in kept if number in state[name])


class DividedInputs(ChangesInputs):
    """Hook before the model runs: divides the tokens. At the first call, ranks compare what they were given.

    Args:
        strategy: says which arguments.
        axis: the ranks.
        dim: of the sequence in them; None: 0 of floating-point tensors (tokens, batch, width), else 1.
    """

    def __init__(self, strategy: ContextParallel, axis: ContextAxis, dim: int | None) -> None:
        self._strategy = strategy
        self._axis = axis
        self._dim = dim
        self._checked = False

    @override
    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(isinstance(leaf, SequenceTensor) for leaf in tree_leaves((args, kwargs))):
            return None  # the model calls itself
        _check_runs_eagerly(self._strategy.size)
        if len(args) == 1 and isinstance(args[0], PartOfInputs):
            part = copy.copy(args[0])  # of a pipeline; its ranks compare what they are given
            part.arguments = self._divide_named(model, part.arguments)
            return (part,), kwargs
        if not self._checked:
            self._checked = True
            self._compare((args, kwargs))
        found = self._names(model, args, kwargs)
        positions = {each for each in found if isinstance(each, int)}
        args = tuple(self._divided(each) if number in positions else each for number, each in enumerate(args))
        return args, {name: self._divided(each) if name in found else each for name, each in kwargs.items()}

    def _divide_named(self, model: nn.Module, arguments: Mapping[str, Any]) -> dict[str, Any]:
        names = self._names(model, [], arguments)
        return {name: self._divided(value) if name in names else value for name, value in arguments.items()}

    def _names(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str | int]:
        if not self._strategy.names:
            return self._first(args, kwargs)
        order = list(inspect.signature(model.forward).parameters)
        found: list[str | int] = []
        for name in self._strategy.names:
            if name not in order and name not in kwargs:
                raise UsageError(
                    f"context:inputs={self._strategy.inputs}: the forward of {type(model).__name__} has no argument "
                    f"{name!r}; it has {', '.join(order) or 'none'}"
                )
            found.append(name if name in kwargs else order.index(name))
        return found

    def _first(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        for number, value in enumerate(args):
            if self._is_sequence(value):
                return [number]
        for name in (*_TOKENS, *kwargs):
            if self._is_sequence(kwargs.get(name)):
                return [name]
        return []

    def _is_sequence(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.ndim > self._dim_of(value)

    def _dim_of(self, value: torch.Tensor) -> int:
        if self._dim is None:
            return 0 if value.is_floating_point() and value.ndim == 3 else 1
        return self._dim

    def _divided(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        dim = self._dim_of(value)
        if value.ndim <= dim:
            raise UsageError(
                f"context={self._axis.size} divides dim {dim} of an input of shape {tuple(value.shape)}, which has "
                "none. Say which arguments have the sequence, context=N:inputs=NAME:dim=D"
            )
        layout = zigzag(value.shape[dim], self._axis.size)
        return SequenceTensor(take_rows(value, layout, dim, self._axis.rank), dim, layout, self._axis)

    def _compare(self, given: Any) -> None:
        digest = hashlib.blake2b(digest_size=6)
        for leaf in tree_leaves(given):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_meta:
                digest.update(str((tuple(leaf.shape), leaf.dtype)).encode())
                digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        number = float(int.from_bytes(digest.digest(), "little"))  # 48 bits: exact in float64
        largest = self._axis.largest(torch.tensor([number, -number], dtype=torch.float64))
        if float(largest[0]) != -float(largest[1]):
            raise UsageError(
                f"the {self._axis.size} ranks along the axis context compute one batch together, and got different "
                f"inputs (this is rank {self._axis.rank} of them). Give them the same: divide the data by "
                "ud.shard(loader), or by ud.data_rank() and ud.data_size(), and seed what draws them by ud.seed(n)"
            )


@torch.compiler.disable  # type: ignore[untyped-decorator]  # of torch
def _check_runs_eagerly(size: int) -> None:
    """Raise UsageError within torch.compile, whose later errors would not name the cause."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_globals.get("__name__") == _COMPILER:
            raise UsageError(
                f"context={size}: the model is called within torch.compile, which cannot trace a divided sequence. "
                "Call it without"
            )
        frame = frame.f_back


_COMPILER = "torch._dynamo.eval_frame"


def _sequence_dim(model: nn.Module) -> int | None:
    """Return 1; None if the model's attention wants (tokens, batch, width)."""
    firsts = {module.batch_first for module in model.modules() if isinstance(module, nn.MultiheadAttention)}
    return None if firsts == {False} else 1


def _synchronize_generators(axis: ContextAxis) -> None:
    """Give all ranks of the axis the generator states of the first: what is not divided, each computes."""
    state = torch.get_rng_state()
    axis.broadcast(state)
    torch.set_rng_state(state)
    if torch.cuda.is_available():
        state = torch.cuda.get_rng_state()
        axis.broadcast(state)
        torch.cuda.set_rng_state(state)
