"""The place of each rank's script, compared with every update: a step or a batch that one rank leaves out is noticed.

Gradients meet by their order, so after a `continue` on one rank each step averages gradients of different steps. With
the place go the learning rates: a scheduler that looks at a loss of one rank alone makes replicas differ.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unidist.errors import MismatchError
from unidist.gradients.interface import NOTICE_BYTES
from unidist.negotiation import gather_objects
from unidist.waits.script_line import script_line

if TYPE_CHECKING:
    from unidist.communicator import Communicator
    from unidist.runtime_api import RuntimeAPI

_COUNT = 1
_NUMBER = 2
"""Bytes of a count and of a number, which may wrap around."""
_LAYOUT = (("update", _NUMBER), ("resets", _COUNT), ("unused", _COUNT), ("batch", _NUMBER), ("rate", _NUMBER))
_PLACE_BYTES = sum(size for _, size in _LAYOUT)
NUM_FLAGS = NOTICE_BYTES - 2 * _PLACE_BYTES


class DrawnBatches:
    """The batches that this rank's script has drawn from loaders of `shard`. Owned by a runtime.

    Attributes:
        total: number of batches, of all loaders.
        latest: number of the latest one in its epoch, from 1; 0: none yet.
    """

    def __init__(self, runtime: RuntimeAPI) -> None:
        self.total = self.latest = 0

    def drawn(self, number: int) -> None:
        """Note that the script has drawn a batch.

        Args:
            number: in its epoch, from 1.
        """
        self.total += 1
        self.latest = number

    def close(self) -> None:
        """Release nothing."""


@dataclass(frozen=True)
class ScriptPlace:
    """The place of one rank's script at an exchange.

    Args:
        update: number of the update, from 1.
        resets: calls of `zero_grad` since the last exchange.
        drawn: batches drawn since then.
        passes: backward passes since then.
        batch: number in its epoch of the latest one.
        rates: the learning rates of the update.
    """

    update: int
    resets: int
    drawn: int
    passes: int
    batch: int
    rates: tuple[float, ...] = ()

    @property
    def rate(self) -> int:
        """A number that stands for all learning rates."""
        return zlib.crc32(repr(self.rates).encode())

    @property
    def unused(self) -> int:
        """Batches beyond one for each backward pass, of which ranks may do different numbers."""
        return self.drawn - self.passes

    def described(self) -> str:
        """Return it in words."""
        words = [f"update {self.update}"]
        if self.batch:
            words.append(f"batch {self.batch} ({self.drawn} drawn since the last exchange)")
        words.append(f"{self.resets} zero_grad() since then" if self.batch else f"{self.resets} zero_grad() before it")
        return ", ".join(words)


class ScriptPosition:
    """Compares the places of the ranks' scripts, after `compare` was called.

    Args:
        runtime: whose batches are counted.

    Attributes:
        rates: returns the learning rates of the next update, which are compared as well; None: they are not.
    """

    rates: Callable[[], tuple[float, ...]] | None = None

    def __init__(self, runtime: RuntimeAPI) -> None:
        self._runtime = runtime
        self._communicator: Communicator | None = None
        self._batches = runtime.owned(DrawnBatches)
        self._resets = 0
        self._total: int | None = None  # at the last exchange; None: there was none, and ranks may have begun otherwise

    def compare(self, communicator: Communicator) -> None:
        """Compare from now on. Not in an elastic job, where each step is a transaction, and ranks come late.

        Args:
            communicator: over the ranks that exchange.
        """
        if not self._runtime.is_elastic:
            self._communicator = communicator

    def reset(self) -> None:
        """Note a call of `zero_grad`."""
        self._resets += 1

    def place(self, update: int, passes: int) -> ScriptPlace | None:
        """Return this rank's place at the exchange of an update; None: it is not compared. Begins the next counts.

        Args:
            update: number of the update, from 1.
            passes: backward passes that it is made of.
        """
        place = None
        if self._communicator is not None and self._total is not None:
            drawn = self._batches.total - self._total
            rates = () if self.rates is None else self.rates()
            place = ScriptPlace(update, self._resets, drawn, passes, self._batches.latest, rates)
        self._total = self._batches.total
        self._resets = 0
        return place

    def check(self, place: ScriptPlace | None, largest: bytes) -> None:
        """Raise MismatchError on all ranks if their places differ. Collective if they do.

        Args:
            place: of this rank; None: it has joined, or is not compared.
            largest: of each byte of the ranks' notices, the largest one.
        """
        communicator = self._communicator
        if communicator is None:
            return
        differing = _differing(largest)
        # A loader that one rank alone looks into, or that begins again elsewhere, is no step that was left out.
        if not {"update", "resets"} & differing and not {"unused", "batch"} <= differing:
            if "rate" in differing:
                self._refuse_rates(communicator, () if place is None else place.rates)
            return
        line = script_line(threading.get_ident())
        places = gather_objects(communicator, None if place is None else (place.described(), line))
        lines = [
            f"  rank {communicator.members[index]}: {told[0]}" + (f", at {told[1]}" if told[1] else "")
            for index, told in enumerate(places)
            if told is not None
        ]
        raise MismatchError(
            "the ranks exchange gradients of different steps; one of them has left a step or a batch out:\n"
            + "\n".join(lines)
            + "\nA step that one rank skips (a `continue` past a bad batch, say) must be skipped by all: agree on it "
            "first, with ud.allreduce(flag, op=ud.Max), or let that rank's loss be 0 * loss."
        )

    def _refuse_rates(self, communicator: Communicator, own: tuple[float, ...]) -> None:
        rates: list[tuple[float, ...]] = gather_objects(communicator, own)
        told = "; ".join(
            f"rank {communicator.members[index]}: {', '.join(map(repr, each))}"
            for index, each in enumerate(rates)
            if each
        )
        raise MismatchError(
            f"the ranks would update with different learning rates ({told}). A scheduler that looks at a loss needs "
            "the same one on every rank: scheduler.step(ud.allreduce(loss)). --verify off leaves this comparison out"
        )


def notice_of(flags: bytes, place: ScriptPlace | None = None) -> bytes:
    """Return what the exchange of an update carries.

    Args:
        flags: of a binding; all ranks learn the largest of each byte.
        place: of this rank, to be compared.
    """
    assert len(flags) == NUM_FLAGS
    return flags + (bytes(2 * _PLACE_BYTES) if place is None else _encoded(place))


def _encoded(place: ScriptPlace) -> bytes:
    """Return a place so that the largest bytes of all ranks show whether it is the same on all of them."""
    data = b"".join((getattr(place, name) % (1 << 8 * size)).to_bytes(size, "little") for name, size in _LAYOUT)
    return data + bytes(255 - each for each in data)


def _differing(largest: bytes) -> set[str]:
    """Return which parts of the places differ; none if no rank has told its place."""
    most, least = largest[NUM_FLAGS:-_PLACE_BYTES], largest[-_PLACE_BYTES:]
    if not any(least):
        return set()
    differing = set()
    begin = 0
    for name, size in _LAYOUT:
        if any(most[i] + least[i] != 255 for i in range(begin, begin + size)):
            differing.add(name)
        begin += size
    return differing
