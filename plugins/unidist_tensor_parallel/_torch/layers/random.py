"""Random numbers of a cut model: equal on all ranks of the axis outside of cut regions, different inside.

Identical computations (dropout of the residual) draw from torch's generator, which `partition` has synchronized over
the axis. From the output of a column layer to the input of the next row layer ranks compute different things: there
each rank has its own numbers, seeded by the generator's state. So there is no second state to be saved: recomputing a
part of the model (`torch.utils.checkpoint` restores the generator) and loading a checkpoint give the same numbers. If
nothing is drawn in a region, the generator is unchanged afterwards, as in one process.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from unidist_tensor_parallel._torch.layers.axis import TensorAxis
from unidist_tensor_parallel._torch.layers.rank_bound import RankBound


class CutRandom(RankBound):
    """Switches torch's generator of a device at the beginning and end of cut regions.

    Args:
        axis: this rank's number seeds its numbers.
    """

    def __init__(self, axis: TensorAxis) -> None:
        self._axis = axis
        self._outer: tuple[Any, torch.Tensor, torch.Tensor] | None = None

    def begin(self, device: torch.device) -> None:
        """Begin a cut region; within one, does nothing."""
        if self._outer is not None:
            return
        generator = _generator(device)
        outer = generator.get_state()
        digest = hashlib.blake2b(outer.numpy().tobytes(), digest_size=7, salt=b"%d" % self._axis.rank).digest()
        generator.manual_seed(int.from_bytes(digest, "little"))
        self._outer = (generator, outer, generator.get_state())

    def end(self) -> None:
        """End the region, if there is one; torch's generator continues as on the other ranks."""
        if self._outer is None:
            return
        generator, outer, fresh = self._outer
        self._outer = None
        drawn = not torch.equal(generator.get_state(), fresh)
        generator.set_state(outer)
        if drawn:  # the next region must not have the same numbers
            torch.empty((), device=generator.device).uniform_(generator=generator)

    def synchronize(self) -> None:
        """Give all ranks of the axis the generator states of the first. Collective."""
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
