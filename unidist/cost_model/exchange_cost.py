"""The exchanges of the data axis: what of gradients and parameters moves for an update, with and without ZeRO."""

from __future__ import annotations

from unidist.cost_model.step import Exchange, Moment, Moved, Operation, RankStep
from unidist.mesh import REPLICA_AXES

BUCKET_BYTES = float(32 << 20)
"""Of a bucket of gradients, if a strategy does not say; the last one is exchanged when the backward pass has ended."""

BEHIND_BLOCKS = 0.4
"""Of the gathers and reduce-scatters of stage 3, the part of the time that is gained by prefetching them.

Block by block they are as busy as the computing beside them, which they slow down: collectives take multiprocessors and
memory bandwidth from products. On A100, H100 and MI250 products of GPT and LLaMA are on average 18.9 % slower beside
collectives, and runs without overlap 10.2 % slower than those with it (https://arxiv.org/abs/2507.03114, abstract). If
all exchanges are behind arithmetic, C becomes 1.189 C, and C + E is 1.102 of that: E is 0.31 C, of which 0.12 C are
gained, 0.39 of it. FSDP on 512 A100 (https://arxiv.org/abs/2304.11277, section 5.4) fits to that: see
docs/published.md.
"""


def allreduced(step: RankStep, *, beside: bool = True, bucket_bytes: float = BUCKET_BYTES) -> RankStep:
    """Return the step with one all-reduce of the gradients: 2 (p-1)/p of them are moved.

    Args:
        step: without it.
        beside: buckets are exchanged while the backward pass of the last piece runs.
        bucket_bytes: of one of them.
    """
    return step.exchanging(
        Exchange("gradients", "allreduce", REPLICA_AXES, "gradients", "update", beside=beside, tail_bytes=bucket_bytes)
    )


def served(
    step: RankStep,
    *,
    servers: int,
    waiting: float = 1.0,
    push_every: float = 1.0,
    fetch_every: float = 1.0,
    copies: int = 1,
) -> RankStep:
    """Return the step with a push of the gradients to servers, and a fetch of the parameters from them.

    Each rank sends its gradients once, against 2 (p-1)/p times of an all-reduce, but each server receives those of all
    ranks (Li et al. 2014, https://www.usenix.org/conference/osdi14/technical-sessions/presentation/li_mu). What servers
    compute is not counted.

    Args:
        step: without it.
        servers: how many, on the hosts of the ranks.
        waiting: the part of these times that a rank waits for; the rest, in which the links carry what is of other
            ranks, goes on beside arithmetic. 1 where all ranks push at the same time.
        push_every: in how many updates.
        fetch_every: likewise.
        copies: servers that get each push.
    """
    beside = waiting < 1
    return step.exchanging(
        Exchange(
            "push", "push", REPLICA_AXES, "gradients", "update", 1 / push_every, copies,
            beside=beside, gained=1 - waiting, servers=servers,
        ),
        Exchange(
            "fetch", "fetch", REPLICA_AXES, "parameters", "update", 1 / fetch_every,
            beside=beside, gained=1 - waiting, servers=servers,
        ),
    )  # fmt: skip


def sharded(
    step: RankStep, *, stage: int, shared: bool = False, gathers_per_block: float = 1.0, prefetched: bool = True
) -> RankStep:
    """Return the step with the exchanges of a stage of ZeRO (Rajbhandari et al. 2020, section 7).

    Stages 1 and 2 reduce-scatter gradients, and gather the updated parameters: as much as an all-reduce. Stage 3
    gathers parameters in every forward and every backward pass instead: half as much again, more often where there are
    several pieces. Where ranks share the memory of the parameters nothing is gathered.

    Args:
        step: without ZeRO.
        stage: 1, 2 or 3.
        shared: parameters are in memory that the ranks share.
        gathers_per_block: operations in which stage 3 gathers a block: 1 where it is one unit, else as many as it has
            matrices.
        prefetched: stage 3 gathers the next block, and reduces the gradients of the last one, while it computes.
    """
    if stage < 3 or shared:
        step = step.exchanging(
            Exchange(
                "gradients", "reducescatter", REPLICA_AXES, "gradients", "update", beside=True, tail_bytes=BUCKET_BYTES
            )
        )
        parameters = Exchange("parameters", "allgather", REPLICA_AXES, "parameters", "update")
        return step if shared else step.exchanging(parameters)

    def by_block(operation: Operation, moved: Moved, moment: Moment) -> Exchange:
        return Exchange(
            moved,
            operation,
            REPLICA_AXES,
            moved,
            moment,
            gathers_per_block,
            by_block=True,
            beside=prefetched,
            gained=BEHIND_BLOCKS,
            tail_bytes=BUCKET_BYTES,
        )

    return step.exchanging(
        by_block("reducescatter", "gradients", "update"),
        by_block("allgather", "parameters", "forward"),
        by_block("allgather", "parameters", "backward"),
    )
