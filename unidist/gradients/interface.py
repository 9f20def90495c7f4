"""The exchange of gradients: the contract between strategies that own it and the adapters that feed it.

Framework-free. A binding writes each gradient to `buffer(i)` and reports it with `ready(i)`; `finish()` completes the
round and tells which parameters have a gradient on any rank. A gradient that is missing on this rank counts as zeros;
one that is missing on all ranks stays missing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from unidist.buffer import Buffer
from unidist.communicator import Communicator
from unidist.gradients.buckets import ParameterInfo


@dataclass(frozen=True)
class RoundResult:
    """What came out of a round.

    Args:
        present: per parameter, whether any rank had a gradient.
        notice: the largest notice of any rank, see `GradientExchange.finish`.
    """

    present: tuple[bool, ...]
    notice: int


@dataclass(frozen=True)
class ReducedGradients:
    """What this rank holds of the reduced gradients when a round is complete.

    Args:
        memory: flat pieces, each of one dtype. What no parameter has there (padding, a gradient that is missing on all
            ranks) is zeros, so norms may be taken of whole pieces.
        divided_over: the ranks of this communicator hold different pieces, which together are all gradients, each
            element once; None: this rank holds all of them, and so does every other.
        copies: for each piece, how many ranks along the axes of the model hold these gradients too, this one included
            (what tensor parallelism repeats): so each counts once. Empty: one.
        deferred: the inner step multiplies by `GradientExchange.pending_factor` itself, when it brings the gradients to
            the type that it computes in: 16 bits would lose what is small. False: they are multiplied in place.
    """

    memory: tuple[Buffer, ...]
    divided_over: Communicator | None = None
    copies: tuple[int, ...] = ()
    deferred: bool = False

    @property
    def num_copies(self) -> tuple[int, ...]:
        """`copies`, for each piece."""
        return self.copies or (1,) * len(self.memory)


class GradientExchange(ABC):
    """One optimizer's gradients. A round is: `ready` for some parameters, in any order, then `finish`.

    Every rank of the data axis calls `finish` equally often. After it, the buffers hold the result until the
    next round begins.

    Attributes:
        parameters: whose gradients these are.
        scale: factor that is applied to every sum; set between two rounds. One over the loss scale is a part of it
            where all gradients have at least 32 bits.
        pending_factor: what the reduced gradients remain to be multiplied by where `reduced` says that they are
            deferred; set by `Update.conclude`, for the inner step that follows.
        bucket_bytes: size of its buckets, if it has some whose size `ExchangeOptions.bucket_bytes` decides; else None.
        buffers_move: the buffers are in other memory in each pass: call `buffer` just before a gradient is written.
        reduces_each_pass: each backward pass of a window is a round of its own: `ready` is called in all of them,
            `end_pass` after each but the last. What comes out is added up over the passes.
    """

    parameters: tuple[ParameterInfo, ...]
    scale: float = 1.0
    pending_factor: float = 1.0
    bucket_bytes: int | None = None
    buffers_move: bool = False
    reduces_each_pass: bool = False

    @abstractmethod
    def buffer(self, index: int) -> Buffer:
        """Return the buffer for the gradient of parameter `index`: always the same memory, unless `buffers_move`."""

    @abstractmethod
    def ready(self, index: int) -> None:
        """Report that this rank's gradient of parameter `index` is in its buffer and may be exchanged."""

    @abstractmethod
    def accumulate(self, index: int) -> None:
        """Report that a gradient is in its buffer, and that more may be added to it before `finish`."""

    def accepts_in_place(self, index: int) -> bool:
        """Return whether `submit_in_place` can be called for parameter `index`."""
        return False

    def submit_in_place(self, index: int, gradient: Buffer) -> None:
        """Report, instead of calling `ready`, that this rank's gradient of parameter `index` is in this memory.

        The memory must not change before `finish`, which writes the result to the buffer as usual.

        Args:
            index: of a parameter for which `accepts_in_place` is true.
            gradient: of the parameter's dtype and number of elements, in host memory.
        """
        raise NotImplementedError(f"{type(self).__name__} wants every gradient in its buffer")

    @abstractmethod
    def finish(self, *, scale: float | None = None, notice: int = 0) -> RoundResult:
        """Complete the round: every buffer holds `scale` times the sum over all ranks.

        Args:
            scale: factor for this round's sums instead of `self.scale`; only in a round in which no `ready` was called.
            notice: 0 to 255; every rank learns the largest of all ranks.
        """

    def end_pass(self) -> None:
        """Complete a pass that is not its window's last; for exchanges with `reduces_each_pass`. Collective."""
        raise NotImplementedError(f"{type(self).__name__} reduces a window once")

    @abstractmethod
    def reduced(self) -> ReducedGradients:
        """Return the memory of the reduced gradients, to be changed in place, between `finish` and the next round."""

    @property
    @abstractmethod
    def in_round(self) -> bool:
        """True between the first `ready` or `accumulate` and `finish`."""

    @abstractmethod
    def close(self) -> None:
        """Give back buffers and communicators. Idempotent."""
