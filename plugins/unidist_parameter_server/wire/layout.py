"""The part of a store that one server keeps."""

from __future__ import annotations

from dataclasses import dataclass

from unidist_parameter_server.store.shards import StoreShard

__all__ = ["SegmentLayout"]


@dataclass(frozen=True)
class SegmentLayout:
    """The part of a store that one server keeps.

    Args:
        store: name of the store, unique in the job.
        segment: number of this part, which is that of the server that has it at first.
        shards: in it.
        num_slots: arrays of the optimizer.
        num_workers: number of workers.
        num_parameters: number of parameters.
        needed: number of gradients that make a synchronous step; 0: there are none.
        log_length: number of updates that are remembered for each shard.
        backup: number of the server that has a copy; None: none has.
    """

    store: str
    segment: int
    shards: tuple[StoreShard, ...]
    num_slots: int
    num_workers: int
    num_parameters: int
    needed: int
    log_length: int
    backup: int | None

    @property
    def nbytes(self) -> int:
        """Memory that it takes on a server, in bytes."""
        copies = 1 + self.num_slots + (self.num_workers if self.needed else 0)
        return sum(shard.nbytes * copies + 8 * (len(shard.pieces) + self.num_workers) for shard in self.shards)
