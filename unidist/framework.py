"""The framework adapter: gives the core access to the tensors and models of PyTorch, TensorFlow or another library.

The core and the strategies access tensors and parameters only through this interface. The binding of optimizers is a
separate contract, `unidist.optim.BindsOptimizers`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from unidist.buffer import Buffer, DType
from unidist.errors import UsageError
from unidist.registry import load_object

__all__ = [
    "Framework",
    "FrameworkSpec",
    "Tensor",
]

Tensor = Any
"""A tensor of the framework, opaque to the core."""


class Framework(ABC):
    """The core's access to a framework's tensors and models. Created once per process, without arguments."""

    name: str

    @abstractmethod
    def is_tensor(self, value: object) -> bool:
        """Return whether `value` is this framework's tensor. Must not import anything."""

    @abstractmethod
    def is_model(self, value: object) -> bool:
        """Return whether `value` is this framework's model (torch.nn.Module, keras.Model)."""

    @abstractmethod
    def buffer(self, tensor: Tensor) -> Buffer:
        """Return the tensor's elements as a buffer that may be read, and not be written to: see `store`.

        It is the tensor's own memory, without a copy. What can change while its memory cannot be shown, as a variable
        of TensorFlow, gives its present elements, which later changes leave alone.

        Raises:
            UsageError: the tensor is not contiguous, is sparse, or has a dtype without a DType.
        """

    def store(self, tensor: Tensor, buffer: Buffer) -> None:
        """Give a tensor, a parameter for example, the elements of a buffer of the same count and type.

        Raises:
            UsageError: the framework's tensors do not change (JAX), or this adapter cannot change them.
        """
        raise UsageError(
            f"tensors of {self.name} cannot be given new elements. Change parameters between two updates, by "
            "`unidist.optim.ActsOnParameters`"
        )

    @abstractmethod
    def tensor(self, buffer: Buffer, shape: Sequence[int]) -> Tensor:
        """Return a tensor of `shape` over the buffer's memory, which it keeps alive.

        Without a copy if the framework can use the memory directly, as it always can for memory of `allocate`.
        """

    @abstractmethod
    def allocate(self, count: int, dtype: DType, memory: str) -> Buffer:
        """Return `count` zeroed elements in memory of the framework: "host", or that of a device ("cuda:0").

        Raises:
            UsageError: the framework has no such memory; lists the choices.
        """

    @abstractmethod
    def zero(self, buffer: Buffer) -> None:
        """Set every element to zero."""

    @abstractmethod
    def multiply(self, buffer: Buffer, factor: float) -> None:
        """Multiply every element of a floating-point or complex buffer by `factor`, in place."""

    @abstractmethod
    def add(self, source: Buffer, target: Buffer) -> None:
        """Add the elements of `source` to those of `target`, of the same type and kind of memory."""

    @abstractmethod
    def convert(self, source: Buffer, target: Buffer) -> None:
        """Write the elements of `source` to `target`, rounded to its type; floating point, one kind of memory.

        A number too large for the target's type becomes infinite, without a warning.
        """

    @abstractmethod
    def norm(self, buffer: Buffer, order: float) -> float:
        """Return the norm of a floating-point or complex buffer: the `order`-th root of the sum of powers of |x|.

        Accurate to 1e-12 for types of 64 bits for each real number, to 1e-5 for others, even if powers of the
        elements exceed the type's range. Infinite if an element is, NaN if one is NaN.

        Args:
            buffer: at least one element.
            order: above 0; `math.inf` for the largest |x|.
        """

    def norms(self, buffers: Sequence[Buffer], order: float) -> list[float]:
        """Return the norm of each buffer, see `norm`. An adapter of devices waits for them once, not for each."""
        return [self.norm(buffer, order) for buffer in buffers]

    @abstractmethod
    def clamp(self, buffer: Buffer, limit: float) -> None:
        """Move every element of a floating-point buffer into [-limit, limit], in place; NaN stays NaN."""

    @abstractmethod
    def dtype(self, tensor: Tensor) -> DType:
        """Return the tensor's element type."""

    @abstractmethod
    def parameters(self, model: Any) -> Mapping[str, Tensor]:
        """Return every trainable parameter of the model by its stable path, in registration order.

        A parameter that is used in several places appears once, under its first path. Frozen ones may be listed too, as
        in PyTorch, where a flag distinguishes them; if they are not, they are in `model_state`.
        """

    @abstractmethod
    def model_state(self, model: Any) -> Mapping[str, Tensor]:
        """Return parameters and persistent buffers by path: all that must be equal on every rank at the start."""


@dataclass(frozen=True)
class FrameworkSpec:
    """A framework adapter, not yet imported.

    Args:
        name: short name ("torch").
        path: "module:Class" of an `unidist.framework.Framework`.
        requires: the package that must be installed, by import name.
        summary: one line for lists.
        conformance: module with the adapter's part of `unidist.testing.StrategyConformance`; "" if it has none.
        exports: conversions of checkpoints: `(suffix, "module:function")`, see `unidist.checkpoint.convert`.
        imports: conversions to checkpoints: `(file in the folder, "module:function")`, see there.
        keras: module that has the names of `unidist.keras` for Keras on the backend `name`; "" if Keras has no such
            backend, or the adapter does not support it. A name that it lacks does not exist on this backend.
        check: "module:function" for `unidist doctor`, which raises ConfigurationError if the adapter does not work with
            the installed version of the framework, and imports neither; "" if there is no such version.
        native: module in C that the adapter is slower without, and what is slower, for `unidist doctor`; or ("", "").
    """

    kind: ClassVar[str] = "framework"
    hook: ClassVar[str] = "unidist_register_frameworks"

    name: str
    path: str
    requires: str
    summary: str
    conformance: str = ""
    exports: tuple[tuple[str, str], ...] = ()
    imports: tuple[tuple[str, str], ...] = ()
    keras: str = ""
    check: str = ""
    native: tuple[str, str] = ("", "")

    def load(self) -> Framework:
        """Import the class and return a new adapter."""
        framework: Framework = load_object(self.path, f"framework {self.name!r}")()
        return framework

    def check_version(self) -> None:
        """Raise if the adapter does not work with the installed version of the framework.

        Raises:
            ConfigurationError: it does not; says what was found, and what to install.
        """
        if self.check:
            load_object(self.check, f"framework {self.name!r}")()
