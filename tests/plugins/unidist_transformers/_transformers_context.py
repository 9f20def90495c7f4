"""Models of transformers with divided sequences, beside one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers

import unidist.torch as ud
from unidist.settings.environment import set_variables

WORDS, WIDTH, TOKENS = 50, 32, 13
_SIZES = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}


def build(kind: str) -> Any:
    """Return a model in float64 with fixed values, in evaluation mode: no dropout."""
    torch.manual_seed(0)
    sdpa = {"attn_implementation": "sdpa"}
    if kind == "llama":
        config: Any = transformers.LlamaConfig(
            **_SIZES, intermediate_size=48, num_key_value_heads=2, tie_word_embeddings=True, **sdpa
        )
        model: Any = transformers.LlamaForCausalLM(config)
    elif kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=WORDS, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0, **sdpa
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.BertConfig(**_SIZES, intermediate_size=48, max_position_embeddings=64, **sdpa)
        model = transformers.BertForMaskedLM(config)
    return model.double().eval()


def batch(number: int) -> dict[str, torch.Tensor]:
    """Return a padded batch."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, WORDS, (2, TOKENS), generator=generator)
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def train(kind: str, *, distributed: bool) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """Train; returns losses, parameters and logits."""
    model = build(kind)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    if distributed:
        model, optimizer = ud.distribute(model, optimizer)
    losses, logits = [], None
    for number in range(3):
        found = model(**batch(number))
        found.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(found.loss.detach()))
        logits = found.logits.detach()
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}, logits


def errors_of(cases: Sequence[tuple[str, str]]) -> list[dict[str, float]]:
    """Return how far losses, parameters and logits are from those of one process."""
    errors = []
    for kind, strategy in cases:
        losses, whole, logits = train(kind, distributed=False)
        with set_variables({"UNIDIST_STRATEGY": strategy}):
            ud.init()
            try:
                own, parts, found = train(kind, distributed=True)
                assert isinstance(found, ud.context.SequenceTensor)
                errors.append(
                    {
                        "loss": max(abs(one - other) for one, other in zip(own, losses, strict=True)),
                        "logits": float((ud.context.whole(found) - logits).abs().max()),
                        "parameters": max(float((parts[name] - whole[name]).abs().max()) for name in whole),
                    }
                )
            finally:
                ud.shutdown()
    return errors
