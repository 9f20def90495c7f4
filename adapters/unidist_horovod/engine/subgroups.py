"""Subgroups of a communicator: the process sets that they need, made by all ranks in the same order."""

from __future__ import annotations

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator
from unidist.engines.single import SingleCommunicator
from unidist.errors import ConfigurationError, UsageError
from unidist_horovod.bindings.carriers import array_of
from unidist_horovod.engine.communicator import HorovodCommunicator


def split(parent: HorovodCommunicator, ranks: tuple[int, ...]) -> Communicator | None:
    """Do `HorovodCommunicator.split`."""
    parent.check_issue("split")
    for rank in ranks:
        parent.check_rank(rank, "ranks")
    if ranks and (parent.rank not in ranks or len(set(ranks)) != len(ranks)):
        raise UsageError(
            f"split: rank {parent.rank} passed ranks {ranks}; pass each rank once, this one included, or ()"
        )
    number = parent.next_split()
    groups = _groups_of_all(parent, ranks)
    _make_sets(parent, groups)
    if not ranks:
        return None
    members = tuple(parent.members[rank] for rank in ranks)
    if len(members) == 1:
        return SingleCommunicator(member=members[0], timeout=parent.timeout)
    process_set = parent.process.process_set(members)
    assert process_set is not None, "made above"
    # Groups of one split differ in their first rank.
    name = f"{parent.name}/{number}.{min(ranks)}"
    return HorovodCommunicator(
        parent.process, parent.links, name, members, ranks.index(parent.rank), process_set, parent.timeout
    )


def _groups_of_all(parent: HorovodCommunicator, ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the groups that the ranks of `parent` chose, as ranks of the world, in the same order on every rank."""
    size = parent.size
    own, all_choices = Buffer.allocate(size, DType.INT32), Buffer.allocate(size * size, DType.INT32)
    array_of(own)[:] = [*ranks, *[-1] * (size - len(ranks))]
    parent.allgather(own, all_choices).wait()
    choices = array_of(all_choices).reshape(size, size).tolist()
    return sorted({tuple(sorted(parent.members[rank] for rank in choice if rank >= 0)) for choice in choices})


def _make_sets(parent: HorovodCommunicator, groups: list[tuple[int, ...]]) -> None:
    missing = [group for group in groups if len(group) > 1 and parent.process.process_set(group) is None]
    if missing and parent.size != parent.process.binding.place()[1]:
        raise ConfigurationError(
            f"split of {parent.description} into {[list(group) for group in groups]}: Horovod makes process sets "
            f"with all ranks of the job taking part, and has none of {list(missing[0])}. Split the world "
            "communicator instead, or use another engine."
        )
    parent.process.add_process_sets(missing)
