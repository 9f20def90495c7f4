"""The memory of one rank, by category, in a form that strategies can change in any order.

A category is a product: parameters of the model x bytes for each x the share that this rank holds. A strategy of
precision changes the bytes, a strategy that shards changes the share, so the order of these changes does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeVar

Place = Literal["device", "host", "file"]
"""Where memory is: where the model computes, in host memory beside an accelerator, or in a file mapped to memory."""

Category = Literal["parameters", "gradients", "master", "optimizer"]
T = TypeVar("T")


def changed(item: T, **fields: Any) -> T:
    """Return a frozen dataclass with other fields: `dataclasses.replace`, five times as fast, without checks.

    A search changes hundreds of thousands of them.
    """
    found = object.__new__(type(item))
    vars(found).update(vars(item), **fields)
    return found


CATEGORIES: tuple[Category, ...] = ("parameters", "gradients", "master", "optimizer")


@dataclass(frozen=True)
class Holding:
    """One category on one rank.

    Args:
        bytes_each: bytes for one parameter, 0 if there is nothing of this category.
        share: of all parameters, how many this rank holds; 1 is all of them, 1/N after sharding over N ranks.
        place: where it is.
    """

    bytes_each: float = 0.0
    share: float = 1.0
    place: Place = "device"


@dataclass(frozen=True)
class HeldActivations:
    """The activations that are kept for the backward pass.

    Args:
        policy: "keep" all; "recompute": only the inputs of blocks, the rest is computed again, one block at a
            time; "offload": all, but outside the device, except for one block at a time.
        itemsize: bytes of one element.
        share: of the activations of this rank's batch; below 1 if a block is split over ranks.
        place: of offloaded activations.
    """

    policy: Literal["keep", "recompute", "offload"] = "keep"
    itemsize: int = 4
    share: float = 1.0
    place: Place = "host"


@dataclass(frozen=True)
class WorkingMemory:
    """Memory beside the model's own: a gathered unit, a staging window.

    Args:
        name: for the table ("gathered unit").
        num_elements: how many elements it holds at once.
        like: they are as wide as the elements of this category.
    """

    name: str
    num_elements: int
    like: Category = "parameters"


@dataclass(frozen=True)
class RankMemory:
    """All that one rank holds. Frozen: a strategy returns another one, made by `replace`, `split` or `add`.

    Args:
        parameters: the weights as forward and backward use them.
        gradients: as the optimizer's step finds them.
        master: copies of the weights in a wider type, that the optimizer updates.
        optimizer: its state.
        activations: what is kept of forward.
        working: everything else.
    """

    parameters: Holding
    gradients: Holding
    optimizer: Holding
    master: Holding = Holding()
    activations: HeldActivations = HeldActivations()
    working: tuple[WorkingMemory, ...] = ()

    def holding(self, category: Category) -> Holding:
        """Return one category."""
        found: Holding = getattr(self, category)
        return found

    def split(self, num_ranks: float, *categories: Category) -> RankMemory:
        """Return the same with each of these categories cut into equal shares over `num_ranks` more ranks.

        Where shares are not equal, that of the rank which holds most, as one over `num_ranks`: 2.5 for 40 %.
        """
        shares = {name: self._shared(name, num_ranks) for name in categories}
        return changed(self, **shares)

    def widths(self, **bytes_each: float) -> RankMemory:
        """Return the same with other bytes for each parameter, by category: `widths(parameters=2, master=4)`."""
        widths = {name: changed(getattr(self, name), bytes_each=value) for name, value in bytes_each.items()}
        return changed(self, **widths)

    def moved(self, place: Place, *categories: Category) -> RankMemory:
        """Return the same with these categories somewhere else."""
        places = {name: changed(self.holding(name), place=place) for name in categories}
        return changed(self, **places)

    def add(self, *working: WorkingMemory) -> RankMemory:
        """Return the same with more working memory."""
        return changed(self, working=(*self.working, *working))

    def _shared(self, category: Category, num_ranks: float) -> Holding:
        found = self.holding(category)
        return changed(found, share=found.share / num_ranks)
