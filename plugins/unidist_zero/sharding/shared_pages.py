"""Parameters in shared memory: the ranks of a host map one copy of them, so nothing is gathered.

The hard part is when a rank may write. All ranks read the parameters, in forward and backward and wherever the script
looks at them, and each writes its shard during the update:

- A rank begins to write after a barrier that each rank enters within its own `step`, after the script's hooks before
  the step have run. So no rank is in forward, backward, an evaluation, or between `synchronize` and `step` any more.
- A rank leaves `step` after a second barrier, which each enters once its shard is written. So reads after `step` see
  new values, and no rank writes until this rank is in its next `step`.
- A rank that has joined takes part in every update, and so in both barriers.

The script's own writes (`load_state_dict`, a broadcast, averaged weights for an evaluation) go to the rank's view,
which is copied on write: no other rank sees them, as if each had its own memory. In the next update each rank publishes
what it finds written to its shard.
"""

from __future__ import annotations

from unidist.buffer import HOST, Buffer
from unidist.communicator import Communicator, Work
from unidist.communicator_capabilities import SharesMemory
from unidist.errors import ConfigurationError
from unidist.gradients.buckets import ALIGNMENT_BYTES
from unidist.negotiation.objects import gather_objects
from unidist_zero.sharding.partition import Partition
from unidist_zero.sharding.shard_groups import ShardGroup, groups_of


class SharedBuckets:
    """The memory of a partition's buckets, one copy for all ranks of a shard group. Every rank makes the same calls.

    Args:
        partition: of the buckets, all in host memory.
        shard_group: the ranks that map the memory; `obstacle` finds none.
    """

    def __init__(self, partition: Partition, shard_group: ShardGroup) -> None:
        self._communicator = shard_group.communicator
        self._buckets = partition.buckets
        self._begins: list[int] = []
        nbytes = 0
        for cut in partition.buckets:
            self._begins.append(nbytes)
            nbytes += -(-cut.count * cut.dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        assert isinstance(shard_group.communicator, SharesMemory)
        self._memory = shard_group.communicator.allocate_shared(nbytes)
        rank = shard_group.communicator.rank
        self._own = [
            (begin + cut.begin(rank) * cut.dtype.itemsize, cut.counts[rank] * cut.dtype.itemsize)
            for begin, cut in zip(self._begins, partition.buckets, strict=True)
        ]
        self._work: Work | None = None

    @property
    def is_first(self) -> bool:
        """True on the rank that writes the initial values."""
        return self._communicator.rank == 0

    def shared(self, number: int) -> Buffer:
        """Return bucket `number` in the memory that all ranks write to."""
        return self._part(self._memory.shared, number)

    def view(self, number: int) -> Buffer:
        """Return bucket `number` as this rank sees it; other ranks do not see what is written there."""
        return self._part(self._memory.view, number)

    def own(self, number: int) -> Buffer:
        """Return this rank's shard of bucket `number`, visible to all ranks."""
        cut, rank = self._buckets[number], self._communicator.rank
        return self.shared(number).slice(cut.begin(rank), cut.counts[rank])

    def wait(self) -> None:
        """Barrier: earlier writes of all ranks are visible, and none is in progress."""
        self._communicator.barrier().wait()

    def begin_update(self) -> None:
        """Return when this rank may write to its shards, which hold what the script has written to them. Collective."""
        self.wait()
        self._memory.publish(self._own)

    def end_update(self) -> None:
        """Signal that this rank's shards are written."""
        self._work = self._communicator.barrier()

    def finish_update(self) -> None:
        """Return when the shards of all ranks are written. Collective."""
        work, self._work = self._work, None
        assert work is not None, "follows end_update"
        work.wait()

    def _part(self, memory: Buffer, number: int) -> Buffer:
        cut = self._buckets[number]
        return memory.slice(self._begins[number], cut.count * cut.dtype.itemsize).cast(cut.dtype)


def obstacle(communicator: Communicator, memory_kinds: set[str]) -> str:
    """Return why parameters cannot be in memory that these ranks share, or "" if they can."""
    elsewhere = sorted(memory_kinds - {HOST})
    if elsewhere:
        return f"there are parameters in {', '.join(elsewhere)} memory; only those in host memory can be shared"
    if not isinstance(communicator, SharesMemory):
        return f"the engine cannot share memory between ranks ({communicator.description}); shm can"
    return communicator.sharing_obstacle()


def obstacle_in_groups(communicator: Communicator, num_shards: int, memory_kinds: set[str]) -> str:
    """Return why groups of `num_shards` neighbours cannot share memory, or "" if all can. Collective."""
    group = communicator.split(groups_of(communicator.rank, communicator.size, num_shards)[0])
    assert group is not None
    own = obstacle(group, memory_kinds)
    group.close()
    return next((reason for reason in gather_objects(communicator, own) if reason), "")


def may_share(wish: str, communicator: Communicator, memory_kinds: set[str], num_shards: int | None = None) -> bool:
    """Return whether parameters go to memory that ranks share.

    Args:
        wish: the option `shared`: "auto" if possible, "true", or "false".
        communicator: over these ranks.
        memory_kinds: where the parameters are.
        num_shards: size of the groups of neighbours that share memory; then this is collective. None: all ranks.

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
