"""The exchange of one fragment's values: their mean over the ranks, which may overlap with later updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from unidist.buffer import HOST, Buffer
from unidist.gradients import Bucket, BucketCompressor, GradientCompressor, ParameterInfo, plan_buckets

if TYPE_CHECKING:
    from unidist.communicator import Communicator, Work
    from unidist.framework import Framework

_WHOLE = 2**62
"""Bytes of a bucket: all values of a type are one operation."""


class FragmentExchange:
    """Memory for the values of some parameters, and their mean over the ranks.

    Args:
        parameters: equal on every rank.
        framework: allocates the memory.
        communicators: by kind of memory, "host" and, if needed, that of devices.
        compressor: of the values; None: they travel as they are.
    """

    def __init__(
        self,
        parameters: Sequence[ParameterInfo],
        *,
        framework: Framework,
        communicators: Mapping[str, Communicator],
        compressor: GradientCompressor | None,
    ) -> None:
        self._start: list[Callable[[], Work]] = []
        self._compressions: list[BucketCompressor] = []
        self._works: list[Work] = []
        self._places: dict[int, Buffer] = {}
        for layout in plan_buckets(parameters, bucket_bytes=_WHOLE, first_bucket_bytes=_WHOLE):
            communicator = communicators[HOST if layout.memory == HOST else "device"]
            if layout.memory == HOST:
                memory = communicator.allocate(layout.count * layout.dtype.itemsize).cast(layout.dtype)
            else:
                memory = framework.allocate(layout.count, layout.dtype, layout.memory)
            self._places |= {slot.parameter: memory.slice(slot.offset, slot.count) for slot in layout.slots}
            compression = None
            if compressor is not None and communicator.size > 1:
                members = tuple(parameters[slot.parameter] for slot in layout.slots)
                compression = compressor.attach(Bucket(layout, members, memory, communicator, framework))
            self._start.append(_starter(communicator, memory, compression))
            if compression is not None:
                self._compressions.append(compression)

    def buffer(self, index: int) -> Buffer:
        """Return the memory for the value of parameter `index`; after `wait` it holds the mean."""
        return self._places[index]

    @property
    def is_pending(self) -> bool:
        """Whether an exchange was started whose result was not waited for."""
        return bool(self._works)

    def start(self) -> None:
        """Start the exchange of the values in memory. Every rank calls it in the same order."""
        self._works = [start() for start in self._start]

    def progress(self) -> None:
        """Advance an exchange that is under way, without waiting; some engines move data only when they are asked."""
        for work in self._works:
            work.done()

    def wait(self, waiting: Callable[[Work], None]) -> None:
        """Complete the exchange.

        Args:
            waiting: waits for one operation, and records that.
        """
        works, self._works = self._works, []
        for work in works:
            waiting(work)

    def close(self) -> None:
        """Release what compressors hold. Idempotent."""
        for compression in self._compressions:
            compression.close()
        self._compressions.clear()


def _starter(communicator: Communicator, memory: Buffer, compression: BucketCompressor | None) -> Callable[[], Work]:
    scale = 1.0 / communicator.size
    if compression is not None:
        return lambda: compression.allreduce(scale)
    return lambda: communicator.allreduce(memory, memory, scale=scale)
