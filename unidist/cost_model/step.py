"""The work of one rank in a step, in a form that strategies can change in any order.

Arithmetic is a product: that of the model x the share of this rank. Messages are a list. So the order of the
strategies' changes does not matter. `unidist_planner.step_time.prediction` turns the result into seconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from typing_extensions import override

from unidist.cost_model.memory import changed

Operation = Literal["allreduce", "reducescatter", "allgather", "broadcast", "sendrecv", "alltoall", "push", "fetch"]
"""What an exchange is, in the words of `unidist.communicator`; a message and its receipt are one "sendrecv".

With "push" each rank gives all of it to servers, each of which has a part. With "fetch" it gets all of it from them.
"""

Moved = Literal["gradients", "parameters", "border", "keys"]
"""What an exchange moves: all gradients or parameters of the rank's part of the model, what one block of the model
gives to the next for one piece of the batch, or the keys and values of one block for that piece."""

Moment = Literal["forward", "backward", "update"]
"""When: in each piece's forward or backward pass, or once for each update."""


@dataclass(frozen=True)
class Exchange:
    """Messages that a rank takes part in.

    Args:
        name: for tables ("gradients").
        operation: of all ranks of one group of the axis.
        axis: of the mesh.
        moved: what; for a reducescatter and an allgather the whole of it, not one rank's part.
        moment: when. A border, and keys, are moved `count` times for each block that the rank has and each piece of the
            batch.
        count: how often.
        scale: what is moved in each operation is so many times as large.
        by_block: of gradients and parameters: each block is moved by itself, in `count` operations that together move
            it once. False: all at once, `count` times.
        beside: it goes on while the rank computes, so that only what takes longer than that costs time.
        gained: of the time of an exchange beside arithmetic, the part that is gained; the rest is what it slows the
            arithmetic down.
        tail_bytes: of each such exchange, what cannot begin before the computing has ended: the last bucket of
            gradients.
        servers: of a push and a fetch, how many there are.
    """

    name: str
    operation: Operation
    axis: str
    moved: Moved
    moment: Moment
    count: float = 1.0
    scale: float = 1.0
    by_block: bool = False
    beside: bool = False
    gained: float = 1.0
    tail_bytes: float = 0.0
    servers: int = 0


class Order(ABC):
    """The order in which the ranks of a pipeline process the pieces of a batch."""

    axis: str = ""
    """The mesh axis along which pieces are passed on; "" where nothing is."""

    @abstractmethod
    def seconds(self, num_pieces: int, forward: float, backward: float, message: float) -> float:
        """Return the time from the first piece's forward pass to the end of the last one's backward pass.

        Args:
            num_pieces: pieces of the batch of one rank.
            forward: seconds of one piece's forward pass on one rank.
            backward: likewise of its backward pass.
            message: seconds until a neighbour has what a piece's pass gives it.
        """

    @abstractmethod
    def at_least(self, num_pieces: int, forward: float, backward: float) -> float:
        """Return a lower bound of `seconds`, quickly: a search leaves out what cannot be among the best."""


@dataclass(frozen=True)
class OneAfterTheOther(Order):
    """Each rank computes its pieces by itself: no pipeline."""

    @override
    def seconds(self, num_pieces: int, forward: float, backward: float, message: float) -> float:
        return num_pieces * (forward + backward)

    @override
    def at_least(self, num_pieces: int, forward: float, backward: float) -> float:
        return num_pieces * (forward + backward)


@dataclass(frozen=True)
class RankStep:
    """All that one rank does for one update. Frozen: a strategy returns another one.

    Args:
        num_pieces: pieces in which the rank computes its samples, one after the other.
        passes: how many of these divide what the script passes at once: 2 if the script makes two passes for an
            update. The other pieces are cut by the strategy itself.
        share: of the model's arithmetic, what this rank has on average; 1 is all of it.
        parameters: likewise of the model's parameters, the rank that has most.
        uneven: the arithmetic of the rank that has most, by the average.
        blocks: of the model's blocks, what this rank has a part of.
        traffic: of the memory traffic of a block's operations that are no matrix products, what this rank has.
        tokens: of the tokens of a piece, what this rank has; what it moves of borders and keys is in proportion.
        passed: of its part of a border, what it gives to the next stage of a pipeline.
        experts: of the rank's parameters, those that an axis of experts divides: their gradients are exchanged over
            fewer ranks, `unidist.mesh.SHARD_REPLICA_AXES`.
        order: how the pieces follow each other.
        exchanges: messages.
    """

    num_pieces: int = 1
    passes: int = 1
    share: float = 1.0
    parameters: float = 1.0
    uneven: float = 1.0
    blocks: float = 1.0
    traffic: float = 1.0
    tokens: float = 1.0
    passed: float = 1.0
    experts: float = 0.0
    order: Order = OneAfterTheOther()
    exchanges: tuple[Exchange, ...] = ()

    def divided(
        self,
        num_ranks: int,
        *,
        blocks: float = 1.0,
        traffic: float,
        parameters: float | None = None,
        uneven: float = 1.0,
    ) -> RankStep:
        """Return the same with the model divided over `num_ranks` more ranks.

        Args:
            num_ranks: ranks that divide each rank's part.
            blocks: of the blocks that it had, the share that a rank has something of: 1 where each block is cut, 1/n
                where whole blocks are given to n ranks.
            traffic: of the traffic that it had, the share that it keeps.
            parameters: of the parameters that it had, the share of the rank that keeps most; default: 1/n.
            uneven: the arithmetic of the rank that gets most, by that of an equal share.
        """
        return changed(
            self,
            share=self.share / num_ranks,
            parameters=self.parameters * (1 / num_ranks if parameters is None else parameters),
            uneven=self.uneven * uneven,
            blocks=self.blocks * blocks,
            traffic=self.traffic * traffic,
        )

    def with_tokens(self, num_ranks: int) -> RankStep:
        """Return the same with the tokens of each sample divided over `num_ranks` ranks, which have the whole model."""
        return changed(
            self, share=self.share / num_ranks, traffic=self.traffic / num_ranks, tokens=self.tokens / num_ranks
        )

    def with_experts(self, num_ranks: int, part: float) -> RankStep:
        """Return the same with the experts divided over `num_ranks` ranks, each of which has other samples.

        Args:
            num_ranks: ranks that divide them.
            part: of the parameters, those of experts, before.
        """
        kept = 1 - part + part / num_ranks
        return changed(self, parameters=self.parameters * kept, experts=part / num_ranks / kept)

    def in_pieces(self, num_pieces: int) -> RankStep:
        """Return the same with every piece cut into `num_pieces` by the strategy itself (micro-batches)."""
        return changed(self, num_pieces=self.num_pieces * num_pieces)

    def in_passes(self, num_passes: int) -> RankStep:
        """Return the same with `num_passes` passes of the script for one update."""
        return changed(self, num_pieces=self.num_pieces * num_passes, passes=self.passes * num_passes)

    def in_order(self, order: Order) -> RankStep:
        """Return the same with another order of the pieces."""
        return changed(self, order=order)

    def exchanging(self, *exchanges: Exchange) -> RankStep:
        """Return the same with more messages."""
        return changed(self, exchanges=(*self.exchanges, *exchanges))
