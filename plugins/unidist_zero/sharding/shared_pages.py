"""Parameters in memory that the ranks of a host share: nothing is gathered, and the host holds them once.

When a rank may write is what has to be known. All ranks read the parameters, in forward and backward and wherever the
script looks at them, and each writes its shard, in the update:

- A rank begins to write after a barrier that each rank enters within its own `step`, when the script's hooks before
  the step have run. So nobody is in forward, backward, an evaluation, or between `synchronize` and `step` any more.
- A rank leaves `step` after a second barrier, which each enters when its shard is written. So whoever reads after
  `step` reads new values, and nobody writes until this rank is in its next `step`.
- A rank that has joined takes part in every update, and so in both barriers.

The script's own writes (`load_state_dict`, a broadcast, averaged weights for an evaluation) go to the rank's view,
which is copied on write: no other rank sees them, as if each had memory of its own. In the next update each rank
brings what it finds written to its shard to the others.
"""

from __future__ import annotations

from unidist.buffer import HOST, Buffer
from unidist.communicator import Communicator, Work
from unidist.communicator_capabilities import SharesMemory
from unidist.errors import ConfigurationError
from unidist.gradients.buckets import ALIGNMENT_BYTES
from unidist.negotiation.objects import gather_objects
from unidist_zero.sharding.lanes import Lane, groups_of
from unidist_zero.sharding.partition import Partition


class SharedShards:
    """The memory of a partition's buckets, one for all ranks of a lane. Made, and used, by all of them alike.

    Args:
        partition: of the buckets, all in host memory.
        lane: whose ranks share; `obstacle` finds none.
    """

    def __init__(self, partition: Partition, lane: Lane) -> None:
        self._communicator = lane.shard
        self._buckets = partition.buckets
        self._begins: list[int] = []
        nbytes = 0
        for cut in partition.buckets:
            self._begins.append(nbytes)
            nbytes += -(-cut.count * cut.dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        assert isinstance(lane.shard, SharesMemory)
        self._memory = lane.shard.allocate_shared(nbytes)
        rank = lane.shard.rank
        self._own = [
            (begin + cut.begin(rank) * cut.dtype.itemsize, cut.counts[rank] * cut.dtype.itemsize)
            for begin, cut in zip(self._begins, partition.buckets, strict=True)
        ]
        self._work: Work | None = None

    @property
    def is_first(self) -> bool:
        """True on the rank that writes the first values."""
        return self._communicator.rank == 0

    def shared(self, number: int) -> Buffer:
        """Return bucket `number` in the memory that all write to."""
        return self._part(self._memory.shared, number)

    def view(self, number: int) -> Buffer:
        """Return bucket `number` as this rank sees it; what it writes there others do not see."""
        return self._part(self._memory.view, number)

    def own(self, number: int) -> Buffer:
        """Return this rank's shard of bucket `number`, which all see."""
        cut, rank = self._buckets[number], self._communicator.rank
        return self.shared(number).slice(cut.begin(rank), cut.counts[rank])

    def wait(self) -> None:
        """Return when all ranks have come here: what they did before can be seen, and nobody does it any more."""
        self._communicator.barrier().wait()

    def begin_update(self) -> None:
        """Return when this rank may write to its shards, which hold what the script has written to them. Collective."""
        self.wait()
        self._memory.settle(self._own)

    def end_update(self) -> None:
        """Say that this rank's shards are written."""
        self._work = self._communicator.barrier()

    def finish_update(self) -> None:
        """Return when those of all ranks are. Collective."""
        work, self._work = self._work, None
        assert work is not None, "follows end_update"
        work.wait()

    def _part(self, memory: Buffer, number: int) -> Buffer:
        cut = self._buckets[number]
        return memory.slice(self._begins[number], cut.count * cut.dtype.itemsize).cast(cut.dtype)


def obstacle(communicator: Communicator, memory_kinds: set[str]) -> str:
    """Return why parameters cannot be in memory that these ranks share, or "" if they can be."""
    elsewhere = sorted(memory_kinds - {HOST})
    if elsewhere:
        return f"there are parameters in {', '.join(elsewhere)} memory; only those in host memory can be shared"
    if not isinstance(communicator, SharesMemory):
        return f"the engine cannot share memory between ranks ({communicator.description}); shm can"
    return communicator.sharing_obstacle()


def obstacle_in_groups(communicator: Communicator, num_shards: int, memory_kinds: set[str]) -> str:
    """Return why groups of `num_shards` neighbours cannot share, or "" if all of them can. Collective, and alike."""
    group = communicator.split(groups_of(communicator.rank, communicator.size, num_shards)[0])
    assert group is not None
    own = obstacle(group, memory_kinds)
    group.close()
    return next((reason for reason in gather_objects(communicator, own) if reason), "")


def may_share(wish: str, communicator: Communicator, memory_kinds: set[str], num_shards: int | None = None) -> bool:
    """Say whether parameters are to be in memory that ranks share.

    Args:
        wish: the option `shared`: "auto" where it is possible, "true", or "false".
        communicator: over these ranks.
        memory_kinds: where the parameters are.
        num_shards: groups of so many neighbours share; then this is collective. None: all ranks share.

    Raises:
        ConfigurationError: "true", and it is not possible; says why.
    """
    if wish == "false" or communicator.size == 1:
        return False
    if num_shards in (None, communicator.size):
        reason = obstacle(communicator, memory_kinds)
    else:
        reason = obstacle_in_groups(communicator, num_shards, memory_kinds)
    if reason and wish == "true":
        raise ConfigurationError(f"zero:shared=true: {reason}. Use shared=auto")
    return not reason
