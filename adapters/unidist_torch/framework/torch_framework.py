"""PyTorch behind the core's framework interface."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from unidist.algorithms import reduce_into
from unidist.buffer import HOST, Buffer, DType
from unidist.communicator import ReduceOp
from unidist.cost_model.memory_interface import SizesModels
from unidist.cost_model.step_interface import CountsOperations
from unidist.errors import UsageError
from unidist.framework import Framework

if TYPE_CHECKING:
    import torch

    from unidist.cost_model.figures import MeasuredActivations, ParameterFigures
    from unidist.cost_model.work import CountedPass


class TorchFramework(Framework, SizesModels, CountsOperations):
    """PyTorch for the core. torch is imported when a tensor is first handled."""

    name = "torch"

    @override
    def is_tensor(self, value: object) -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and isinstance(value, torch.Tensor)

    @override
    def is_model(self, value: object) -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and isinstance(value, torch.nn.Module)

    @override
    def buffer(self, tensor: torch.Tensor) -> Buffer:
        from unidist_torch.memory import buffer_of

        return buffer_of(tensor)

    @override
    def store(self, tensor: torch.Tensor, buffer: Buffer) -> None:
        from unidist_torch.memory import tensor_of

        tensor.detach().copy_(tensor_of(buffer, tensor.shape))

    @override
    def tensor(self, buffer: Buffer, shape: Sequence[int]) -> torch.Tensor:
        from unidist_torch.memory import tensor_of

        return tensor_of(buffer, shape)

    @override
    def allocate(self, count: int, dtype: DType, memory: str) -> Buffer:
        import torch

        from unidist_torch.memory import TORCH_DTYPES, buffer_of

        device = "cpu" if memory == HOST else memory
        return buffer_of(torch.zeros(count, dtype=TORCH_DTYPES[dtype], device=device))

    @override
    def zero(self, buffer: Buffer) -> None:
        if buffer.memory == HOST:
            ctypes.memset(buffer.address, 0, buffer.nbytes)
            return
        from unidist_torch.memory import tensor_of

        tensor_of(buffer).zero_()

    @override
    def multiply(self, buffer: Buffer, factor: float) -> None:
        from unidist_torch.memory import tensor_of

        tensor_of(buffer).mul_(factor)

    @override
    def add(self, source: Buffer, target: Buffer) -> None:
        if target.memory == HOST:
            reduce_into(target, source, ReduceOp.SUM)
            return
        from unidist_torch.memory import tensor_of

        tensor_of(target).add_(tensor_of(source))

    @override
    def convert(self, source: Buffer, target: Buffer) -> None:
        from unidist_torch.memory import tensor_of

        tensor_of(target).copy_(tensor_of(source))

    @override
    def norm(self, buffer: Buffer, order: float) -> float:
        from unidist_torch.framework.arithmetic import norm

        return norm(buffer, order)

    @override
    def norms(self, buffers: Sequence[Buffer], order: float) -> list[float]:
        from unidist_torch.framework.arithmetic import norms

        return norms(buffers, order)

    @override
    def clamp(self, buffer: Buffer, limit: float) -> None:
        from unidist_torch.framework.arithmetic import clamp

        clamp(buffer, limit)

    @override
    def dtype(self, tensor: torch.Tensor) -> DType:
        from unidist_torch.memory import dtype_of

        return dtype_of(tensor)

    @override
    def parameters(self, model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
        return dict(model.named_parameters())

    @override
    def model_state(self, model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}

    @override
    def without_memory(self) -> AbstractContextManager[Any]:
        import torch

        return torch.device("meta")

    @override
    def parameter_figures(self, model: torch.nn.Module) -> Mapping[str, ParameterFigures]:
        from torch.nn.parameter import is_lazy

        from unidist.cost_model.figures import ParameterFigures

        found = {}
        for path, parameter in model.named_parameters():
            if is_lazy(parameter):
                raise UsageError(f"parameter {path!r} has no shape yet: run the lazy model once, then return it")
            found[path] = ParameterFigures(parameter.numel(), parameter.element_size(), parameter.requires_grad)
        return found

    @override
    def activations(self, model: torch.nn.Module, inputs: Sequence[Any]) -> MeasuredActivations:
        from unidist_torch.framework.saved_activations import measure

        return measure(model, inputs)

    @override
    def count(self, model: torch.nn.Module, inputs: Sequence[Any]) -> CountedPass:
        from unidist_torch.framework.flop_count import count

        return count(model, inputs)
