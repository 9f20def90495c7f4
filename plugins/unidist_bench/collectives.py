"""The collectives that can be measured: their names, the buffers they use, and what they cannot do. Pure.

The size of a row is that of nccl-tests: the larger of the two buffers, so what goes into a reduce-scatter and what
comes out of an all-gather. Of a message it is the message.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from unidist.errors import unknown_choice


class Collective(StrEnum):
    """An operation that `unidist bench` measures. Names are those of `unidist.communicator.Communicator`."""

    ALLREDUCE = "allreduce"
    ALLGATHER = "allgather"
    REDUCESCATTER = "reducescatter"
    BROADCAST = "broadcast"
    ALLTOALL = "alltoall"
    BARRIER = "barrier"
    SENDRECV = "sendrecv"
    """A message from rank 0 to the last rank and back; its time is half of that."""


@dataclass(frozen=True)
class Traits:
    """Facts about a collective that are known without running it.

    Args:
        reduces: it has a reduction.
        divided: its larger buffer consists of a piece for each rank.
        in_place: it can work in place.
        only_in_place: it has one buffer anyway.
        can_be_named: negotiation knows it.
        has_data: it moves anything.
    """

    reduces: bool = False
    divided: bool = False
    in_place: bool = False
    only_in_place: bool = False
    can_be_named: bool = True
    has_data: bool = True


TRAITS = {
    Collective.ALLREDUCE: Traits(reduces=True, in_place=True),
    Collective.ALLGATHER: Traits(divided=True, in_place=True),
    Collective.REDUCESCATTER: Traits(reduces=True, divided=True, in_place=True),
    Collective.BROADCAST: Traits(in_place=True, only_in_place=True),
    Collective.ALLTOALL: Traits(divided=True),
    Collective.BARRIER: Traits(has_data=False),
    Collective.SENDRECV: Traits(can_be_named=False),
}

ALL = "all"
_OTHER_SPELLINGS = {"pingpong": Collective.SENDRECV}


def parse(words: tuple[str, ...]) -> tuple[Collective, ...]:
    """Return the collectives that the words name, each once; without words all-reduce. `all-reduce` is a name, too.

    Raises:
        ConfigurationError: a word names none; lists the choices.
    """
    found: list[Collective] = []
    for word in words or (Collective.ALLREDUCE,):
        name = word.lower().replace("-", "").replace("_", "")
        if name == ALL:
            found += Collective
        elif name in _OTHER_SPELLINGS:
            found.append(_OTHER_SPELLINGS[name])
        elif name in list(Collective):
            found.append(Collective(name))
        else:
            raise unknown_choice("collective", word, [*map(str, Collective), ALL])
    return tuple(dict.fromkeys(found))
