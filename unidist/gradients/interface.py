"""The exchange of gradients: the contract between the strategies that implement it and the bindings that use it.

Framework-free. A binding writes each gradient to `buffer(i)` and reports it with `ready(i)`. `finish()` completes the
round and returns which parameters have a gradient on any rank. A gradient that is missing on this rank counts as zeros;
one that is missing on all ranks stays missing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unidist.buffer import Buffer
from unidist.communicator import Communicator
from unidist.errors import PluginError
from unidist.gradients.buckets import ParameterInfo
from unidist.gradients.pieces import GradientPiece

NOTICE_BYTES = 19
"""What a binding tells the other ranks with each round, see `GradientExchange.finish`."""
NO_NOTICE = bytes(NOTICE_BYTES)


@dataclass(frozen=True)
class RoundResult:
    """The result of a round.

    Args:
        present: for each parameter, whether any rank had a gradient.
        notice: of each byte of the ranks' notices, the largest; see `GradientExchange.finish`.
    """

    present: tuple[bool, ...]
    notice: bytes = NO_NOTICE


@dataclass(frozen=True)
class ReducedGradients:
    """This rank's part of the reduced gradients of a complete round.

    Args:
        memory: flat pieces, each of one dtype. Elements of no gradient (padding, a gradient that is missing on all
            ranks) are zeros, so norms can be computed over whole pieces.
        divided_over: the ranks of this communicator hold different pieces, which together are all gradients, each
            element once; None: every rank holds all of them.
        copies: for each piece, the number of ranks along the axes of the model that hold these gradients, including
            this rank (parameters that tensor parallelism replicates), so that each counts once. Empty: one.
        deferred: the inner step multiplies by `GradientExchange.pending_factor` itself, after it has converted the
            gradients to the type that it computes in: in 16 bits small values would be lost. False: they are multiplied
            in place.
        parameters: of the gradients, equal on all ranks of `divided_over`; `ExchangeSeries` fills it in, and `pieces`.
        pieces: returns what of `memory` belongs to which of `parameters`; None: nobody can tell (sparse gradients).
    """

    memory: tuple[Buffer, ...]
    divided_over: Communicator | None = None
    copies: tuple[int, ...] = ()
    deferred: bool = False
    parameters: tuple[ParameterInfo, ...] = ()
    pieces: Callable[[], Sequence[GradientPiece]] | None = None

    @property
    def num_copies(self) -> tuple[int, ...]:
        """`copies` for each piece, with the default filled in."""
        return self.copies or (1,) * len(self.memory)


class GradientExchange(ABC):
    """Exchanges the gradients of one optimizer. A round is: `ready` for some parameters, in any order, then `finish`.

    Every rank of the data axis calls `finish` the same number of times. After it, the buffers hold the result until the
    next round begins.

    Attributes:
        parameters: the parameters of the gradients.
        scale: factor that is applied to every sum; set between two rounds, else by `rescale`. It includes one over the
            loss scale if all gradients have at least 32 bits.
        pending_factor: factor that is still to be applied to the reduced gradients, if `reduced` says that they are
            deferred; set by `Update.conclude`, for the inner step that follows.
        bucket_bytes: size of its buckets, if `ExchangeOptions.bucket_bytes` decides it; else None.
        buffers_move: the buffers are in other memory in each pass: call `buffer` just before a gradient is written.
        reduces_each_pass: each backward pass of a window is a separate round: `ready` is called in all of them,
            `end_pass` after each but the last. The results are added up over the passes.
        adds_passes: `end_pass` may be called between any two backward passes before `finish`. A binding then asks
            `was_ready` before it writes a gradient, and ends the pass in which it was.
        has_other_memory: `switch_memory` may be called.
        shares_notice: the ranks learn each other's notices in the next round; False: this rank's comes back. The same
            on every rank.
    """

    parameters: tuple[ParameterInfo, ...]
    scale: float = 1.0
    pending_factor: float = 1.0
    bucket_bytes: int | None = None
    buffers_move: bool = False
    reduces_each_pass: bool = False
    adds_passes: bool = False
    has_other_memory: bool = False
    shares_notice: bool = True

    @property
    def is_local(self) -> bool:
        """Whether the next round involves no other rank, so that nobody is told of it. The same on every rank."""
        return False

    @abstractmethod
    def buffer(self, index: int) -> Buffer:
        """Return the buffer for the gradient of parameter `index`.

        Always the same memory, unless `buffers_move`, until `switch_memory` is called.
        """

    def switch_memory(self) -> None:
        """Continue in the other one of two memories, where every `buffer` is another one. Between two rounds.

        The old buffers keep their results until the next switch. Not collective: ranks may use either memory.
        """
        raise NotImplementedError(f"{type(self).__name__} has one memory")

    def early_bucket(self, index: int) -> int | None:
        """Return the number of the bucket of parameter `index` whose exchange starts as soon as it is full.

        None: it starts in `finish`, or with each gradient.
        """
        return None

    @abstractmethod
    def ready(self, index: int) -> None:
        """Report that this rank's gradient of parameter `index` is in its buffer and may be exchanged."""

    @abstractmethod
    def accumulate(self, index: int) -> None:
        """Report that a gradient is in its buffer, and that more may be added to it before `finish`."""

    @abstractmethod
    def finish(self, *, scale: float | None = None, notice: bytes = NO_NOTICE) -> RoundResult:
        """Complete the round: every buffer holds `scale` times the sum over all ranks.

        Args:
            scale: factor for this round's sums instead of `self.scale`; only in a round in which no `ready` was called.
            notice: `NOTICE_BYTES` bytes; every rank learns the largest of all ranks' for each of them.
        """

    def rescale(self, scale: float) -> None:
        """Multiply the sums by another factor from now on, those of earlier passes of this round too. Not collective.

        Called between two passes, before the gradients of the next one: an earlier pass is exchanged with the factor
        of before. A round that is complete keeps its results.
        """
        self.scale = scale

    def holds(self, index: int) -> bool:
        """Return whether a gradient of parameter `index` of an earlier pass of the window can still be added to."""
        return not self.reduces_each_pass

    def was_ready(self, index: int) -> bool:
        """Return whether `ready` was called for parameter `index` since the last `end_pass` or `finish`."""
        raise NotImplementedError(f"{type(self).__name__} exchanges one backward pass")

    def end_pass(self) -> None:
        """Complete a pass that is not the last before `finish`, and keep its result. Collective.

        Only if `reduces_each_pass` or `adds_passes`.
        """
        raise NotImplementedError(f"{type(self).__name__} reduces a window once")

    @abstractmethod
    def reduced(self) -> ReducedGradients:
        """Return the memory of the reduced gradients. It may be changed in place until the next round."""

    def pieces(self) -> Sequence[GradientPiece]:
        """Return this rank's part of the reduced gradients parameter by parameter: over the memory of `reduced`.

        The default is for exchanges that leave each rank all gradients.
        """
        if self.reduced().divided_over is not None:
            raise PluginError(
                f"{type(self).__name__} leaves each rank a part of the gradients, and does not say which: a rule asks "
                "for the pieces of each parameter (`GradientExchange.pieces`). Leave one of the strategies out"
            )
        return [
            GradientPiece(number, parameter, 0, self.buffer(number)) for number, parameter in enumerate(self.parameters)
        ]

    @property
    @abstractmethod
    def in_round(self) -> bool:
        """True between the first `ready` or `accumulate` and `finish`."""

    @abstractmethod
    def close(self) -> None:
        """Release buffers and communicators. Idempotent."""
