"""Shards, rules and errors as JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unidist.buffer import DType
from unidist.control import Message
from unidist.errors import ConfigurationError, PeerLostError, StalledError, UnidistError, UsageError
from unidist_parameter_server.optimizers import Adagrad, Adam, AddDifference, Momentum, Rule, Velocity
from unidist_parameter_server.store.shards import Piece, Shard

_RULES: dict[str, type[Rule]] = {kind.__name__: kind for kind in (AddDifference, Adagrad, Adam, Momentum, Velocity)}
_ERRORS: dict[str, type[UnidistError]] = {
    kind.__name__: kind for kind in (ConfigurationError, PeerLostError, StalledError, UsageError)
}


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
    shards: tuple[Shard, ...]
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

    def to_json(self) -> Message:
        """Return it as the values of a message."""
        shards = [
            [
                *(shard.memory, shard.dtype.value, shard.begin, shard.count),
                [[piece.parameter, piece.start, piece.stop, piece.first] for piece in shard.pieces],
            ]
            for shard in self.shards
        ]
        own = {name: value for name, value in vars(self).items() if name != "shards"}
        return {**own, "shards": shards}

    @classmethod
    def from_json(cls, message: Message) -> SegmentLayout:
        """Return what `to_json` was of."""
        shards = tuple(
            Shard(memory, DType(dtype), begin, count, tuple(Piece(*piece) for piece in pieces))
            for memory, dtype, begin, count, pieces in message["shards"]
        )
        return cls(**{**message, "shards": shards})


def rules_to_json(rules: Sequence[Rule]) -> Message:
    """Return the rules of all parameters; each is written once.

    Raises:
        ConfigurationError: servers do not know one.
    """
    numbers: dict[int, int] = {}
    different: list[list[Any]] = []
    which = []
    for rule in rules:
        number = numbers.get(id(rule))
        if number is None:
            name = type(rule).__name__
            if _RULES.get(name) is not type(rule):
                raise ConfigurationError(
                    f"servers step by {', '.join(_RULES)}, and not by {name}; leave servers= out, or use push=delta"
                )
            number = numbers[id(rule)] = len(different)
            different.append([name, dict(vars(rule))])
        which.append(number)
    return {"different": different, "which": which}


def rules_of(message: Message) -> list[Rule]:
    """Return the rules of all parameters; equal ones are one object."""
    different = [_RULES[name](**options) for name, options in message["different"]]
    return [different[number] for number in message["which"]]


def failure(error: UnidistError) -> Message:
    """Return the message that an error is for the other end."""
    kind = next((name for name, known in _ERRORS.items() if type(error) is known), "PeerLostError")
    return {"type": "failed", "kind": kind, "text": str(error), "ranks": list(getattr(error, "ranks", ()))}


def told_error(message: Message) -> UnidistError:
    """Return the error of a message."""
    kind = _ERRORS[message["kind"]]
    if issubclass(kind, PeerLostError):
        return kind(message["text"], ranks=message["ranks"])
    return kind(message["text"])
