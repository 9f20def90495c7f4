"""The buffers of a model that training changes, kept the same on all ranks: statistics, codebooks, counters.

Each rank's forward passes change them by its own samples. After the exchange of an update's gradients those that have
changed are exchanged, too: the mean of the ranks', or rank 0's. Buffers that nothing changes cost nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch.nn.modules.batchnorm import _NormBase

from unidist.communicator import Communicator
from unidist.errors import MismatchError, unknown_choice
from unidist.negotiation import gather_objects
from unidist_torch.memory import buffer_of, memory_kind

__all__ = ["BufferRule", "ModelBuffers", "check_buffer_rule"]

BufferRule = Literal["mean", "rank0", "own"]
"""What the buffers of a model are after each update: the mean of the ranks' (rank 0's of those that are not of floating
point), rank 0's, or each rank's own. Where rank 0 has joined, it is the first rank that has not."""

_UNCHANGED, _CHANGED, _OTHERS_CHANGED = range(3)

_NUM_FIRST = 3
"""Updates until which a module may register its first buffer."""


def check_buffer_rule(rule: str) -> None:
    """Raise ConfigurationError unless it is a `BufferRule`."""
    if rule not in get_args(BufferRule):
        raise unknown_choice("buffers=", rule, get_args(BufferRule))


class ModelBuffers:
    """Exchanges the buffers of one model that a checkpoint keeps (`persistent`).

    Args:
        model: of this rank, as the strategies have divided it.
        rule: "mean" or "rank0".
        over: returns a communicator over the ranks that hold the same part of the model, for a kind of memory
            ("host", "cuda"). Collective over all ranks when first called for one.
    """

    def __init__(self, model: torch.nn.Module, rule: BufferRule, over: Callable[[str], Communicator]) -> None:
        self._modules = list(model.named_modules())
        self._num_updates = 0
        self._averages = rule == "mean"
        self._over = over
        self._seen = {name: _Seen(buffer) for name, buffer in self._present().items()}
        self._exchanged: list[str] = []  # the same on all ranks
        self._kinds = sorted({"host", *(_memory(each) for each in (*model.parameters(), *model.buffers()))})
        self._connect()

    def rebind(self) -> None:
        """Begin again with other ranks, which may have joined with nothing agreed on."""
        self._exchanged = []
        self._connect()

    def _connect(self) -> None:
        """Make the communicators while all ranks do: of a divided model some may have no buffer that changes."""
        for kind in self._kinds:
            self._over(kind)

    def notice(self) -> int:
        """Return what the ranks have to know of each other at an update: 0, unless buffers have changed.

        The largest of all ranks' is for `exchange`.
        """
        self._num_updates += 1
        if self._num_updates == _NUM_FIRST:
            self._modules = [(path, module) for path, module in self._modules if module._buffers]
        changed = self._changed()
        if not changed:
            return _UNCHANGED
        return _CHANGED if changed <= set(self._exchanged) else _OTHERS_CHANGED

    def exchange(self, notice: int, *, root: int = 0, is_joined: bool = False) -> None:
        """Exchange the buffers that have changed on any rank. Collective.

        Args:
            notice: the largest of the ranks' notices.
            root: the first rank that has not joined.
            is_joined: this rank has joined: its buffers have no part in a mean.

        Raises:
            MismatchError: on all ranks; they have given a buffer different shapes or dtypes.
        """
        if notice == _UNCHANGED:
            return
        if notice == _OTHERS_CHANGED:
            self._agree()
        present = self._present()
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for name in self._exchanged:
            buffer = present[name]
            groups.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        with torch.no_grad():
            for (_, dtype), buffers in groups.items():
                over = self._over(_memory(buffers[0]))
                if self._averages and dtype.is_floating_point:
                    _average(buffers, over, weight=0.0 if is_joined else 1.0)
                else:
                    _broadcast(buffers, over, root=root)
        self._seen = {name: _Seen(buffer) for name, buffer in self._present().items()}

    def _changed(self) -> set[str]:
        """Return the buffers that have changed, and those beside them in a module.

        torch's kernels for batch norm change the statistics without counting it; the module counts its batches.
        """
        changed: set[str] = set()
        for path, module in self._modules:
            buffers = _kept(path, module)
            if buffers and (
                (isinstance(module, _NormBase) and module.training)
                or any(name not in self._seen or not self._seen[name].is_still(each) for name, each in buffers.items())
            ):
                changed.update(buffers)
        return changed

    def _present(self) -> dict[str, torch.Tensor]:
        return {name: each for path, module in self._modules for name, each in _kept(path, module).items()}

    def _agree(self) -> None:
        """Exchange from now on what any rank has changed. Collective."""
        present = self._present()
        wanted = sorted({*self._exchanged, *self._changed()})
        told = {name: (tuple(present[name].shape), str(present[name].dtype)) for name in present}
        everyone = gather_objects(self._over("host"), (wanted, told))
        self._exchanged = sorted({name for names, _ in everyone for name in names})
        for name in self._exchanged:
            kinds = [theirs.get(name) for _, theirs in everyone]
            if len(set(kinds)) > 1:
                members = self._over("host").members
                listed = ", ".join(f"rank {members[rank]}: {kind}" for rank, kind in enumerate(kinds))
                raise MismatchError(
                    f"the buffer {name!r} of the model changes in training, and is not of one shape and dtype on all "
                    f"ranks ({listed}), so it cannot be kept the same. Give distribute(buffers='own') to leave each "
                    "rank its own buffers"
                )


def _kept(path: str, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a module that a checkpoint keeps, by their paths."""
    if not module._buffers:
        return {}
    return {
        f"{path}.{name}" if path else name: buffer
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set and buffer.numel()
    }


class _Seen:
    """A buffer as it was at the last exchange."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = weakref.ref(buffer)
        self._version = _version(buffer)

    def is_still(self, buffer: torch.Tensor) -> bool:
        return self._buffer() is buffer and self._version == _version(buffer)


def _memory(tensor: torch.Tensor) -> str:
    return memory_kind(tensor).partition(":")[0]


def _version(buffer: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    changes = 0 if buffer.is_inference() else buffer._version  # which is not counted in inference mode
    return changes, tuple(buffer.shape)


def _average(buffers: Sequence[torch.Tensor], over: Communicator, *, weight: float) -> None:
    """Give each buffer the mean over the ranks whose weight is 1."""
    ones = torch.ones(1, dtype=buffers[0].dtype, device=buffers[0].device)
    flat = torch.cat([ones, *(buffer.reshape(-1) for buffer in buffers)])
    if weight != 1.0:
        flat.zero_()
    memory = buffer_of(flat)
    over.allreduce(memory, memory).wait()
    _give(buffers, flat[1:] / flat[0])


def _broadcast(buffers: Sequence[torch.Tensor], over: Communicator, *, root: int) -> None:
    flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
    over.broadcast(buffer_of(flat), root=root).wait()
    _give(buffers, flat)


def _give(buffers: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    begin = 0
    for buffer in buffers:
        buffer.copy_(flat[begin : begin + buffer.numel()].view(buffer.shape))
        begin += buffer.numel()
