"""Refusals of random programs that a reader has judged: each says what does not go together, and what to do."""

from __future__ import annotations

REASONABLE = {
    "too few ranks for the axes of a line": r"does not divide world_size 4. Launch 8 processes",
    "ZeRO and a pipeline with sharded parameters": r"pipeline=2 and 'zero' with sharded parameters",
    "two strategies that cut parameters": r"both take parameters out of their layers",
    "two strategies that exchange gradients": r"both own the gradient exchange; give one of them",
    "a model whose ranks keep whole parameters": r"parameter_server keeps whole models, which are divided by '.*';",
    "an optimizer that the store of parameters lacks": r"parameter_server.* in its store\b",
    "a store of parameters in memory, and an engine without": r"parameters in memory that all ranks share: the engine",
    "clipping a gradient that is in the store alone": r"parameter_server=sync and .*the mean gradient is in the store",
    "shards of a number that does not divide the ranks": r"zero:shard=2 does not divide the \d ranks",
    "no blocks that repeat": r"the model has no blocks that repeat: name the parts",
    "heads that do not divide, with Ulysses": r"exchange=ulysses divides the heads of an attention",
    "no row of blocks for sequence=true": r"sequence=true needs blocks one after the other in a list",
    "sequence=true in a pipeline": r"sequence=true needs all blocks on every rank of its axis",
    "sequence=true in blocks with others in between": r"is not the output of .*, the block before it",
    "sequence=true and context": r"sequence=true and context both divide the tokens",
    "a layer that mixes tokens, with context": r"context: .* mixes tokens of the sequence",
    "an operation without a rule for divided sequences": r"context: .* has no rule for a divided sequence",
    "an autograd.Function with context": r"context: .* is an autograd.Function",
    "several backward passes before a step, and accumulate": r"accumulate=N counts one backward pass per step",
    "experts in a pipeline of Keras": r"with Keras a pipeline cannot divide a model with experts",
    "a model whose layers cannot be followed": r"has no graph of layers to follow",
    "no attention that can get some of the tokens": r"no attention of \w+ can get some of the tokens",
    "sequence=true and a layer that is not cut": r"sequence=true cuts the tokens of .* is not cut: what follows it",
    "sequence=true and a decoder": r"sequence=true does not cut '.*': a decoder's blocks",
    "sequence=true and a mean over tokens": r"sequence=true: when the tokens of .* are cut over the ranks",
    "clipping by the script with a store of parameters": r"the gradients were to be clipped, but in a synchronous step",
    "shards of parameters in another memory order": r"sharded in the order of its memory, which is not",
    "no layer that can be cut": r"no layer of (\w+ can|this model was found that could) be cut",
    "tensor and pipeline, with JAX": r"tensor and pipeline do not go together with JAX",
    "clipping by Keras of a divided model": r"sees this rank's part of a divided model only",
    "rows of an embedding that are added up": r"is sparse, and .* takes each occurrence of a row by itself",
    "an optimizer that looks at whole tensors": r"looks at a parameter's whole tensor, and .* is cut over ranks",
}
"""By the reason, a pattern of the texts."""
