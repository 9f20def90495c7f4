"""Random numbers of a cut model: the same on all ranks of the axis where all compute alike, else each rank its own.

What all compute alike (dropout of the residual) draws from torch's generator, which `partition` has made the same on
all ranks of the axis. From the output of a column layer to the input of the next row layer ranks compute different
things: there the generator has numbers of its own on each rank, made from its state before. So there is no second
state to be saved: recomputing a part of the model (`torch.utils.checkpoint` brings the generator back to what it was)
and loading a checkpoint give the same numbers. Where nothing is drawn in between, the generator is as if nothing had
happened, and so as in one process.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from unidist_tensor_parallel._torch.layers.axis import TensorAxis


class CutRandom:
    """Switches torch's generator of a device where a cut region begins and ends.

    Args:
        axis: this rank's number makes its numbers.
    """

    def __init__(self, axis: TensorAxis) -> None:
        self._axis = axis
        self._outer: tuple[Any, torch.Tensor, torch.Tensor] | None = None

    def begin(self, device: torch.device) -> None:
        """A cut region begins; nothing happens within one."""
        if self._outer is not None:
            return
        generator = _generator(device)
        outer = generator.get_state()
        digest = hashlib.blake2b(outer.numpy().tobytes(), digest_size=7, salt=b"%d" % self._axis.rank).digest()
        generator.manual_seed(int.from_bytes(digest, "little"))
        self._outer = (generator, outer, generator.get_state())

    def end(self) -> None:
        """The region ends, if there is one; torch's generator goes on as on the other ranks."""
        if self._outer is None:
            return
        generator, outer, fresh = self._outer
        self._outer = None
        drawn = not torch.equal(generator.get_state(), fresh)
        generator.set_state(outer)
        if drawn:  # the next region must not have the same numbers
            torch.empty((), device=generator.device).uniform_(generator=generator)

    def agree(self) -> None:
        """Give all ranks of the axis the generators of the first. Collective."""
        state = torch.get_rng_state()
        self._axis.broadcast(state)
        torch.set_rng_state(state)
        if torch.cuda.is_available():
            state = torch.cuda.get_rng_state()
            self._axis.broadcast(state)
            torch.cuda.set_rng_state(state)


def _generator(device: torch.device) -> Any:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator
