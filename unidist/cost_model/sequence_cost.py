"""The cost of dividing the tokens of each sample over ranks that have the whole model, and of dividing experts.

Liu et al. 2023 (Ring Attention, https://arxiv.org/abs/2310.01889), section 3: each rank passes its keys and values on
to its neighbour, p - 1 times in the forward pass, with their gradients in the backward pass. Jacobs et al. 2023
(Ulysses, https://arxiv.org/abs/2309.14509), section 3: an all-to-all of queries, keys, values and outputs instead.
Llama 3 (https://arxiv.org/abs/2407.21783, section 3.3.2) gathers keys and values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from unidist.cost_model.figures import ModelFigures
from unidist.cost_model.memory import Category, RankMemory
from unidist.cost_model.step import Exchange, Moment, RankStep

SequenceExchange = Literal["ring", "gather", "ulysses"]
"""How attention reaches the tokens of other ranks."""
_TRAINED: tuple[Category, ...] = ("parameters", "gradients", "master", "optimizer")


def divided_sequence(step: RankStep, axis: str, num_ranks: int, exchange: SequenceExchange = "ring") -> RankStep:
    """Return the step with the tokens of each sample divided evenly over the ranks of `axis`, attention's work too.

    Args:
        step: without.
        axis: of the mesh; gradients are averaged over it with `unidist.mesh.REPLICA_AXES`.
        num_ranks: along it.
        exchange: "ring" passes keys and values on while attention is computed with those at hand; "gather" waits for
            all of them; "ulysses" gives each rank all tokens of some heads.
    """
    step = step.with_tokens(num_ranks)
    if num_ranks < 2:
        return step
    name = "keys and values"
    # `keys` and `border` are those of this rank's tokens.
    if exchange == "ring":
        return step.exchanging(
            Exchange(name, "sendrecv", axis, "keys", "forward", num_ranks - 1, beside=True),
            Exchange(name, "sendrecv", axis, "keys", "backward", 2 * (num_ranks - 1), beside=True),
        )
    if exchange == "gather":  # what comes out is of all tokens
        return step.exchanging(
            Exchange(name, "allgather", axis, "keys", "forward", scale=num_ranks),
            Exchange(name, "allgather", axis, "keys", "backward", scale=num_ranks),
            Exchange(name, "reducescatter", axis, "keys", "backward", scale=num_ranks),
        )
    moments: tuple[Moment, ...] = ("forward", "backward")
    return step.exchanging(
        *(
            each
            for moment in moments
            for each in (
                Exchange("heads for tokens", "alltoall", axis, "border", moment, 2),
                Exchange("heads for tokens", "alltoall", axis, "keys", moment),
            )
        )
    )


def sequence_memory(memory: RankMemory, num_ranks: int) -> RankMemory:
    """Return what a rank holds when the tokens of each sample are divided: activations are."""
    return replace(memory, activations=replace(memory.activations, share=memory.activations.share / num_ranks))


def divided_experts(step: RankStep, axis: str, num_ranks: int, model: ModelFigures, top_k: int) -> RankStep:
    """Return the step with the experts of each block divided over the ranks of `axis`, which have other samples.

    Tokens go to the ranks of their experts and back, forward and backward: four all-to-alls (Lepikhin et al. 2020,
    https://arxiv.org/abs/2006.16668, section 3.2). Experts are taken to be chosen equally often.

    Args:
        step: without.
        axis: of the mesh.
        num_ranks: along it.
        model: says how many parameters are of experts.
        top_k: experts that each token goes to.
    """
    step = step.with_experts(num_ranks, model.experts / model.parameters)
    if num_ranks < 2:
        return step
    moments: tuple[Moment, ...] = ("forward", "backward")
    return step.exchanging(
        *(Exchange("tokens to experts", "alltoall", axis, "border", moment, 2, scale=top_k) for moment in moments)
    )


def expert_memory(memory: RankMemory, num_ranks: int, model: ModelFigures) -> RankMemory:
    """Return what a rank holds when experts are divided: the rest of the model, and its part of the experts."""
    part = model.experts / model.parameters
    return memory.split(1 / (1 - part + part / num_ranks), *_TRAINED)
