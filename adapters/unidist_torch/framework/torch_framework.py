"""The binding of unidist's framework interface to PyTorch."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from unidist.algorithms import reduce_into
from unidist.buffer import HOST, Buffer, DType
from unidist.communicator import ReduceOp
from unidist.cost_model.figures import MeasuredActivations, ParameterFigures
from unidist.cost_model.memory_interface import SizesModels
from unidist.cost_model.step_interface import CountsOperations
from unidist.errors import UsageError
from unidist.framework import Framework

if TYPE_CHECKING:
    import torch

    from unidist.cost_model.work import CountedPass


class TorchFramework(Framework, SizesModels, CountsOperations):
    """See `unidist.framework.Framework`. torch is imported when a tensor is first handled."""

    name = "torch"

    def is_tensor(self, value: object) -> bool:
        """See `Framework.is_tensor`."""
        torch = sys.modules.get("torch")
        return torch is not None and isinstance(value, torch.Tensor)

    def is_model(self, value: object) -> bool:
        """See `Framework.is_model`."""
        torch = sys.modules.get("torch")
        return torch is not None and isinstance(value, torch.nn.Module)

    def buffer(self, tensor: torch.Tensor) -> Buffer:
        """See `Framework.buffer`."""
        from unidist_torch.memory import buffer_of

        return buffer_of(tensor)

    def tensor(self, buffer: Buffer, shape: Sequence[int]) -> torch.Tensor:
        """See `Framework.tensor`."""
        from unidist_torch.memory import tensor_of

        return tensor_of(buffer, shape)

    def allocate(self, count: int, dtype: DType, memory: str) -> Buffer:
        """See `Framework.allocate`."""
        import torch

        from unidist_torch.memory import TORCH_DTYPES, buffer_of

        device = "cpu" if memory == HOST else memory
        return buffer_of(torch.zeros(count, dtype=TORCH_DTYPES[dtype], device=device))

    def zero(self, buffer: Buffer) -> None:
        """See `Framework.zero`."""
        if buffer.memory == HOST:
            ctypes.memset(buffer.address, 0, buffer.nbytes)
            return
        from unidist_torch.memory import tensor_of

        tensor_of(buffer).zero_()

    def multiply(self, buffer: Buffer, factor: float) -> None:
        """See `Framework.multiply`."""
        from unidist_torch.memory import tensor_of

        tensor_of(buffer).mul_(factor)

    def add(self, source: Buffer, target: Buffer) -> None:
        """See `Framework.add`."""
        reduce_into(target, source, ReduceOp.SUM)

    def convert(self, source: Buffer, target: Buffer) -> None:
        """See `Framework.convert`."""
        from unidist_torch.memory import tensor_of

        tensor_of(target).copy_(tensor_of(source))

    def norm(self, buffer: Buffer, order: float) -> float:
        """See `Framework.norm`."""
        from unidist_torch.framework.arithmetic import norm

        return norm(buffer, order)

    def clamp(self, buffer: Buffer, limit: float) -> None:
        """See `Framework.clamp`."""
        from unidist_torch.framework.arithmetic import clamp

        clamp(buffer, limit)

    def dtype(self, tensor: torch.Tensor) -> DType:
        """See `Framework.dtype`."""
        from unidist_torch.memory import dtype_of

        return dtype_of(tensor)

    def parameters(self, model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
        """See `Framework.parameters`."""
        return dict(model.named_parameters())

    def model_state(self, model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
        """See `Framework.model_state`."""
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def without_memory(self) -> AbstractContextManager[Any]:
        """See `SizesModels.without_memory`."""
        import torch

        return torch.device("meta")

    def parameter_figures(self, model: torch.nn.Module) -> Mapping[str, ParameterFigures]:
        """See `SizesModels.parameter_figures`."""
        from torch.nn.parameter import is_lazy

        found = {}
        for path, parameter in model.named_parameters():
            if is_lazy(parameter):
                raise UsageError(f"parameter {path!r} has no shape yet: run the lazy model once, then return it")
            found[path] = ParameterFigures(parameter.numel(), parameter.element_size(), parameter.requires_grad)
        return found

    def activations(self, model: torch.nn.Module, inputs: Sequence[Any]) -> MeasuredActivations:
        """See `SizesModels.activations`."""
        from unidist_torch.framework.saved_activations import measure

        return measure(model, inputs)

    def count(self, model: torch.nn.Module, inputs: Sequence[Any]) -> CountedPass:
        """See `CountsOperations.count`."""
        from unidist_torch.framework.flop_count import count

        return count(model, inputs)
