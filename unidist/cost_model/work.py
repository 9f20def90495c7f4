"""The work of one update: floating-point operations, memory traffic, and the activations that blocks pass on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from unidist.cost_model.figures import Workload


@dataclass(frozen=True)
class PieceWork:
    """The work of one forward pass of the whole model for some samples.

    Args:
        blocks: floating-point operations of all blocks.
        outside: those of everything outside of the blocks (the head).
        traffic: bytes read and written by those operations of the blocks that are not matrix products.
        border: elements that one block passes to the next.
        keys: elements of the keys and values of one block's attention; 0 if they are not known.
        attention: of `blocks`, the products of queries, keys and values; 0 if they are not told apart.
        skipped: the part of `attention` that a kernel leaves out, such as what a causal mask hides.
        products: matrix products of all blocks, each of which starts on its own.
    """

    blocks: float
    outside: float
    traffic: float
    border: float
    keys: float = 0.0
    attention: float = 0.0
    skipped: float = 0.0
    products: float = 0.0


@dataclass(frozen=True)
class Layer:
    """A part of a model, for people.

    Args:
        path: of it in the model.
        parameters: number of parameters, without those of other layers.
        flops: floating-point operations of its forward pass for one sample.
    """

    path: str
    parameters: int
    flops: float


class ModelWork(ABC):
    """A model, and the batch of one update.

    Attributes:
        batch: samples of one update, on all ranks together.
        num_blocks: blocks of the model; stages of a pipeline are made of whole ones.
        divides: what must be a multiple of the number of ranks that cut each block, by its name for messages.
        sequence: tokens of a sample; 0 if there are none, or their number is not known.
        experts: of each block; 1 if it is none of experts.
        top_k: of these, how many each token goes through.
    """

    batch: int
    num_blocks: int
    divides: dict[str, int]
    sequence: int = 0
    experts: int = 1
    top_k: int = 1

    @abstractmethod
    def workload(self, samples: int) -> Workload:
        """Return the same for the estimator of memory, with `samples` in one forward pass of one rank."""

    @abstractmethod
    def with_batch(self, batch: int) -> ModelWork:
        """Return the same with another batch of one update."""

    @abstractmethod
    def forward(self, samples: int, itemsize: int) -> PieceWork:
        """Return what a forward pass of the whole model computes; a backward pass computes twice as much.

        Args:
            samples: in this pass.
            itemsize: bytes of an element of the activations.
        """

    def layers(self) -> Sequence[Layer]:
        """Return the blocks one by one where they are known by their paths; the default is none."""
        return ()


@dataclass(frozen=True)
class CountedBlock:
    """A block of a model: what is given to stages of a pipeline as a whole.

    Args:
        path: of it; the parameters below it are its own.
        flops: floating-point operations of its matrix products and convolutions in one forward pass.
        passed: elements that it gives to the next one.
    """

    path: str
    flops: float
    passed: float


@dataclass(frozen=True)
class CountedPass:
    """One forward pass.

    Args:
        samples: in it.
        blocks: in order; one or more.
        outside: floating-point operations of what belongs to no block.
        widths: dims of the blocks' matrices, each once: a size that cuts every block divides all of them.
        heads: of attention, where the model tells.
    """

    samples: int
    blocks: Sequence[CountedBlock]
    outside: float
    widths: Sequence[int]
    heads: int | None = None
