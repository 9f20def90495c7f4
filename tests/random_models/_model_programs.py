"""Random trainings as plain data: a model of blocks, an optimizer, strategies, an engine, ranks, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import numpy as np
from hypothesis import strategies as st

WORDS = 7
"""Rows of the vocabulary, and width of what a model returns."""


class _ShortRepr:
    """Prints as the call that makes it, without what has its default."""

    def __repr__(self) -> str:
        given = [(item.name, getattr(self, item.name), item.default) for item in fields(self)]  # type: ignore[arg-type]
        texts = [f"{name}={value!r}" for name, value, default in given if default is MISSING or value != default]
        return f"{type(self).__name__}({', '.join(texts)})"


@dataclass(frozen=True, repr=False)
class Block(_ShortRepr):
    """A block (batch, tokens, width) -> (batch, tokens, width) of a model.

    Args:
        kind: a name in the framework's table of blocks.
        size: heads, groups, channels, ...: what it means depends on the kind.
        residual: the block's input is added to its output.
        frozen: its parameters are not trained.
    """

    kind: str
    size: int = 1
    residual: bool = True
    frozen: bool = False


@dataclass(frozen=True, repr=False)
class Job(_ShortRepr):
    """The ranks that run a program, or a part of it between checkpoints."""

    strategy: str = "data"
    engine: str = "shm"
    ranks: int = 2

    @property
    def items(self) -> dict[str, str]:
        """The strategies of the line by name, each with what follows its name."""
        pairs = (item.partition("=") for item in self.strategy.split(","))
        return {name.partition(":")[0]: value for name, _, value in pairs}

    @property
    def passes(self) -> int:
        """Calls of a step that make an update."""
        return int(self.items.get("accumulate", "1").partition(":")[0])


@dataclass(frozen=True, repr=False)
class Program(_ShortRepr):
    """A training.

    Args:
        framework: "torch", "keras" or "jax".
        blocks: of the model, between an input layer and an output layer.
        jobs: each trains as many updates as the others, and goes on from the checkpoint of the one before it.
        repeat: so many times `blocks`, each with parameters of its own.
        container: the way in which the model holds its blocks; depends on the framework.
        width: of activations.
        tokens: length of a sample.
        words: inputs are numbers of words, not vectors.
        tied: the output layer has the weights of the embedding of words.
        pooled: one output for a sample, not one for each token.
        loss: a name in the framework's table.
        optimizer: likewise.
        options: of the optimizer, on top of those of the table.
        groups: biases are a parameter group of their own.
        schedule: the learning rate falls with each update.
        way: "step" for `TrainStep`, "fit" for Keras' own, else a loop of the script's own.
        batch: samples of all ranks in one pass.
        uneven: ranks have different numbers of them.
        updates: of each job.
        verify: what `--verify` says.
        seed: of parameters and data.
    """

    framework: str
    blocks: tuple[Block, ...]
    jobs: tuple[Job, ...] = (Job(),)
    repeat: int = 1
    container: str = "list"
    width: int = 4
    tokens: int = 4
    words: bool = False
    tied: bool = False
    pooled: bool = False
    loss: str = "mse"
    optimizer: str = "sgd"
    options: tuple[tuple[str, Any], ...] = ()
    groups: bool = False
    schedule: bool = False
    way: str = "step"
    batch: int = 12
    uneven: bool = False
    updates: int = 2
    verify: bool = True
    seed: int = 0

    @property
    def all_blocks(self) -> tuple[Block, ...]:
        """The blocks of the model, repetitions included."""
        return self.blocks * self.repeat

    @property
    def passes(self) -> int:
        """Calls of a step that make an update, in every job."""
        return self.jobs[0].passes

    def data(self, update: int, turn: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return inputs and targets of all ranks for a pass, `update` counted over all jobs."""
        rng = np.random.default_rng((self.seed, update, turn))
        shape = (self.batch, self.tokens)
        inputs = rng.integers(0, WORDS, shape) if self.words else rng.standard_normal((*shape, self.width))
        outputs = shape[:1] if self.pooled else shape
        if self.loss == "cross_entropy":
            return inputs, rng.integers(0, WORDS, outputs)
        return inputs, rng.standard_normal((*outputs, WORDS))

    def share(self, rank: int, size: int) -> slice:
        """Return the samples of a rank, of `size` that train on different ones."""
        if not self.uneven:
            return slice(rank * self.batch // size, (rank + 1) * self.batch // size)
        ends = [self.batch * (number * (number + 1)) // (size * (size + 1)) for number in range(size + 1)]
        return slice(ends[rank], ends[rank + 1])


@dataclass(frozen=True)
class Vocabulary:
    """The choices of a framework, the simplest of each first, since hypothesis shrinks towards it.

    Args:
        framework: its name.
        kinds: of blocks.
        containers: see `Program`.
        optimizers: each with alternatives for `Program.options`.
        whole: those of them that look at all elements of a parameter together.
        losses: see `Program`.
        ways: see `Program`.
        items: alternatives for the items of a strategy line; "" is none.
        engines: of jobs.
        sensible: False for programs whose numbers are documented to differ from one process.
    """

    framework: str
    kinds: Sequence[str]
    containers: Sequence[str]
    optimizers: Mapping[str, Sequence[tuple[str, Any]]]
    whole: Sequence[str]
    losses: Sequence[str]
    ways: Sequence[str]
    items: Sequence[Sequence[str]]
    engines: Sequence[str]
    sensible: Callable[[Program], bool]


_AXES = ("pipeline", "tensor", "context", "expert")
_SAME_IN_ALL_JOBS = ("accumulate", "clip_norm", "clip_value")


def _rarely(value: Any, usual: Any = False) -> st.SearchStrategy[Any]:
    return st.sampled_from([usual] * 4 + [value])


@st.composite
def _lines(draw: st.DrawFn, vocabulary: Vocabulary) -> str:
    chosen = draw(st.lists(st.sampled_from(range(len(vocabulary.items))), max_size=3, unique=True))
    items = [draw(st.sampled_from(vocabulary.items[number])) for number in chosen]
    return ",".join(items) or "data"


def _ranks(draw: st.DrawFn, line: str) -> int:
    taken = math.prod(int(Job(line).items.get(axis, "1").partition(":")[0]) for axis in _AXES)
    return draw(st.sampled_from([ranks for ranks in (2, 4, 3, 1) if ranks % taken == 0] or [4]))


@st.composite
def programs(draw: st.DrawFn, vocabulary: Vocabulary) -> Program:
    """Return a random program: most of them such that strategies find what they need."""
    line = draw(_lines(vocabulary))
    jobs = [Job(line, draw(st.sampled_from(vocabulary.engines)), _ranks(draw, line))]
    if draw(_rarely(True)):
        kept = [item for item in line.split(",") if item.startswith(_SAME_IN_ALL_JOBS)]
        other = [item for item in draw(_lines(vocabulary)).split(",") if not item.startswith(_SAME_IN_ALL_JOBS)]
        second = ",".join([*other, *kept]) or "data"
        jobs.append(Job(second, draw(st.sampled_from(vocabulary.engines)), _ranks(draw, second)))
    used = {name for job in jobs for name in job.items}
    size = draw(st.sampled_from([1, 2]))
    block = st.builds(
        Block, st.sampled_from(vocabulary.kinds), st.just(size), st.sampled_from([True, True, False]), _rarely(True)
    )
    blocks = draw(st.lists(block, min_size=1, max_size=4))
    if "expert" in used:
        blocks.append(Block("experts"))
    ways = vocabulary.ways[:1] if "pipeline" in used else vocabulary.ways
    optimizers = [name for name in vocabulary.optimizers if not ("tensor" in used and name in vocabulary.whole)]
    optimizer = draw(st.sampled_from(optimizers))
    options = [(), *((option,) for option in vocabulary.optimizers[optimizer])]
    words = draw(st.booleans())
    return Program(
        framework=vocabulary.framework,
        blocks=tuple(blocks),
        jobs=tuple(jobs),
        repeat=draw(st.sampled_from([2, 3, 1] if used & {"pipeline", "activations"} else [1, 2, 3])),
        container=draw(st.sampled_from(vocabulary.containers)),
        width=draw(st.sampled_from([4, 8, 6])),
        tokens=draw(st.sampled_from([4, 6, 5])),
        words=words,
        tied=words and draw(_rarely(True)),
        pooled=draw(_rarely(True)),
        loss=draw(st.sampled_from(vocabulary.losses)),
        optimizer=optimizer,
        options=draw(st.sampled_from(options)),
        groups=draw(_rarely(True)),
        schedule=draw(_rarely(True)),
        way=draw(st.sampled_from(ways)),
        batch=draw(st.sampled_from([12, 24])),
        uneven=draw(_rarely(True)),
        updates=draw(st.sampled_from([2, 1, 3])),
        verify=draw(_rarely(False, True)),
        seed=draw(st.integers(0, 99)),
    )


def parts(program: Program) -> Iterator[str]:
    """Yield the names of what a program is made of: a larger program with all of them may fail for the same reason."""
    for block in program.blocks:
        yield f"block {block.kind}"
    for job in program.jobs:
        yield from (f"strategy {item}" for item in job.items if item != "data")
    yield from (f"jobs {number}" for number in range(len(program.jobs)))
