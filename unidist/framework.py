"""The framework adapter: binds unidist to PyTorch, TensorFlow or another library of tensors.

The core and the strategies reach tensors, parameters and optimizers through this interface alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unidist.buffer import Buffer, DType

if TYPE_CHECKING:
    from unidist.optim.update import Update

Tensor = Any
"""A tensor of the framework. The core passes tensors through and never looks into one."""


class Framework(ABC):
    """What the core needs to know of a framework. Created once per process, without arguments."""

    name: str

    @abstractmethod
    def is_tensor(self, value: object) -> bool:
        """Say whether `value` is this framework's tensor. Must not import anything."""

    @abstractmethod
    def is_model(self, value: object) -> bool:
        """Say whether `value` is this framework's model (torch.nn.Module, keras.Model)."""

    @abstractmethod
    def buffer(self, tensor: Tensor) -> Buffer:
        """Return the tensor's memory as a buffer, without a copy.

        Raises:
            UsageError: the tensor is not contiguous, is sparse, or has a dtype without a DType.
        """

    @abstractmethod
    def tensor(self, buffer: Buffer, shape: Sequence[int]) -> Tensor:
        """Return a tensor of `shape` over the buffer's memory, without a copy; it keeps `buffer.owner` alive."""

    @abstractmethod
    def allocate(self, count: int, dtype: DType, memory: str) -> Buffer:
        """Return `count` zeroed elements in memory of a kind that only the framework can give ("cuda:0")."""

    @abstractmethod
    def zero(self, buffer: Buffer) -> None:
        """Set every element to zero."""

    @abstractmethod
    def multiply(self, buffer: Buffer, factor: float) -> None:
        """Multiply every element of a floating-point or complex buffer by `factor`, in place."""

    def add(self, source: Buffer, target: Buffer) -> None:
        """Add the elements of `source` to those of `target`, of the same type and kind of memory."""
        from unidist.algorithms._reduce import reduce_into
        from unidist.communicator import ReduceOp

        reduce_into(target, source, ReduceOp.SUM)

    @abstractmethod
    def convert(self, source: Buffer, target: Buffer) -> None:
        """Write the elements of `source` to `target`, rounded to its type; floating point, one kind of memory."""

    @abstractmethod
    def norm(self, buffer: Buffer, order: float) -> float:
        """Return the norm of a floating-point or complex buffer: the `order`-th root of the sum of powers of |x|.

        Added up in float64. Infinite if an element is, NaN if one is NaN.

        Args:
            buffer: at least one element.
            order: above 0; `math.inf` for the largest |x|.
        """

    @abstractmethod
    def clamp(self, buffer: Buffer, limit: float) -> None:
        """Move every element of a floating-point buffer into [-limit, limit], in place; NaN stays NaN."""

    @abstractmethod
    def dtype(self, tensor: Tensor) -> DType:
        """Return the tensor's element type."""

    @abstractmethod
    def parameters(self, model: Any) -> Mapping[str, Tensor]:
        """Return every parameter of the model, trainable or not, by its stable path, in registration order.

        A parameter that is used in several places appears once, under its first path.
        """

    @abstractmethod
    def model_state(self, model: Any) -> Mapping[str, Tensor]:
        """Return parameters and persistent buffers by path: all that must be equal on every rank at the start."""

    @abstractmethod
    def bind_update(self, optimizer: Any, update: Update, *, names: Mapping[str, Tensor] | None) -> Any:
        """Make the optimizer's step go through `update`, and return it (the same class for isinstance).

        From then on the binding tells `update` of every gradient as it becomes ready, and calls
        `update.finish()` before the inner step; see `unidist/optim/update.py` for the order of calls.

        Args:
            optimizer: the framework's own optimizer.
            update: the framework-free side.
            names: paths of the optimizer's parameters, where known; used in messages.
        """
