"""Optimizer state away from the parameters: in host memory beside an accelerator, or in files mapped to memory.

With an accelerator the inner optimizer steps on the host, on copies of this rank's shards, as ZeRO-Offload does (Ren et
al. 2021, https://arxiv.org/abs/2101.06840): reduced gradients are copied to the host, updated shards back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from unidist.errors import ConfigurationError
from unidist.jobs import SpillFolder
from unidist_torch.host_copies import pins

_IN_FILE = "_unidist_in_file"


class StateMemory(ABC):
    """Memory for the optimizer's state of this rank's shards, and for what it steps on. The host can read all of it.

    Attributes:
        option: as it was given to the strategy.
    """

    def __init__(self, option: str) -> None:
        self.option = option

    def is_away(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor must be copied before the host can step on it: it is in an accelerator's memory."""
        return tensor.device.type != "cpu"

    def check(self, parameters: Iterable[torch.Tensor]) -> None:  # noqa: B027 - nothing to refuse is a valid answer
        """Raise ConfigurationError if offloading is useless for these parameters. The same on every rank."""

    def making_state(self, leaves: Iterable[torch.Tensor]) -> AbstractContextManager[Any]:
        """Return a context in which an optimizer steps, and creates its state in this memory.

        Args:
            leaves: the optimizer's parameters.
        """
        return nullcontext()

    @abstractmethod
    def zeros(self, shape: Iterable[int], stride: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        """Return dense zeros of a shape and memory order.

        Raises:
            ConfigurationError: there is too little memory; says how much was asked for.
        """

    @abstractmethod
    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with these values in this memory; the tensor itself if it is there already."""

    def zeros_like(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return zeros of a tensor's shape and memory order."""
        stride = torch.empty_like(tensor, device="meta").stride()  # dense, where the tensor itself is not
        return self.zeros(tensor.shape, stride, dtype or tensor.dtype)


class HostStateMemory(StateMemory):
    """Host memory, pinned if possible, so that an accelerator copies from it directly."""

    def __init__(self) -> None:
        super().__init__("host")

    def check(self, parameters: Iterable[torch.Tensor]) -> None:
        """See `StateMemory.check`: parameters in host memory have their state there, too."""
        if not any(map(self.is_away, parameters)):
            raise ConfigurationError(
                "zero:offload=host: there is nothing to offload, all parameters are in host memory already, and so is "
                "the optimizer's state. Move the model to an accelerator first, or keep the state in files with "
                "offload=FOLDER, or leave offload out"
            )

    def zeros(self, shape: Iterable[int], stride: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        """See `StateMemory.zeros`."""
        made = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="cpu", pin_memory=pins())
        return made.zero_()

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `StateMemory.moved`. State is never copied to the accelerator, so it need not be pinned."""
        return tensor.cpu()


class FileStateMemory(StateMemory):
    """Files mapped to memory: the system writes to disk what does not fit.

    A mapped file has no name any more, so nothing is left behind, however the process ends.

    Args:
        folder: on a fast disk with enough room for this host's optimizer state.

    Raises:
        ConfigurationError: the folder does not exist, or no file can be created in it.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self._files = SpillFolder(folder, option="zero:offload", contents="optimizer state")

    def making_state(self, leaves: Iterable[torch.Tensor]) -> AbstractContextManager[Any]:
        """See `StateMemory.making_state`."""
        return StateInFiles(self, leaves)

    def zeros(self, shape: Iterable[int], stride: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        """See `StateMemory.zeros`: in a file of their own."""
        shape, stride = torch.Size(shape), tuple(stride)
        count = shape.numel()
        if not count:
            return torch.empty_strided(shape, stride, dtype=dtype)
        with self._files.file(count * dtype.itemsize) as (_, name):
            flat = torch.from_file(name, shared=True, size=count, dtype=dtype)
        made = flat.as_strided(shape, stride)
        setattr(made, _IN_FILE, True)
        return made

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor was made here."""
        return getattr(tensor, _IN_FILE, False)

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `StateMemory.moved`."""
        if self.holds(tensor):
            return tensor
        made = self.zeros_like(tensor)
        made.copy_(tensor.detach())
        return made


class StateInFiles(TorchFunctionMode):
    """Context in which state that an optimizer creates for its parameters is allocated in files.

    If it were created in ordinary memory and then moved, all of it would be in memory at once.

    Args:
        files: allocates.
        leaves: the optimizer's parameters.
    """

    def __init__(self, files: FileStateMemory, leaves: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._files = files
        self._leaves = {id(leaf) for leaf in leaves}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let `torch.zeros_like` of a parameter give memory of a file."""
        kwargs = kwargs or {}
        if func is torch.zeros_like and args and id(args[0]) in self._leaves:
            return self._files.zeros_like(args[0].detach(), kwargs.get("dtype"))
        return func(*args, **kwargs)


def make_state_memory(offload: str | None) -> StateMemory | None:
    """Return the memory that the option `offload` asks for; None: state stays beside the parameters.

    Raises:
        ConfigurationError: the folder is unusable.
    """
    if offload is None:
        return None
    return HostStateMemory() if offload == "host" else FileStateMemory(offload)


def refuse_device_steps(groups: Iterable[dict[str, Any]], memory: StateMemory) -> None:
    """Raise ConfigurationError if parameter groups ask for a step that only accelerators can run."""
    if any(group.get("capturable") for group in groups):
        raise ConfigurationError(
            f"zero:offload={memory.option}: the optimizer steps on the host, and capturable=True is for steps on an "
            "accelerator; leave it out"
        )
