"""Trains models of transformers with experts on the ranks of a pool, each beside one process."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812 - everybody's name for it

import unidist.torch as ud
from unidist.checkpoint.format.interface import placements_of
from unidist.settings.environment import set_variables
from unidist.testing._training import largest_error
from unidist_torch.memory import dtype_of

VOCABULARY, BATCH, LENGTH, STEPS = 24, 8, 6, 2


def make(kind: str, *, balance: bool) -> Any:
    """Return a small model, in float64 unless its products are grouped; the same in every process."""
    import transformers

    torch.manual_seed(0)
    common = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2,
        "output_router_logits": balance, "router_aux_loss_coef": 0.1, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "attention_dropout": 0.0,
    }  # fmt: skip
    if kind in ("mixtral", "grouped"):
        config: Any = transformers.MixtralConfig(num_local_experts=4, **common)
    elif kind == "qwen2":
        config = transformers.Qwen2MoeConfig(
            num_experts=4, moe_intermediate_size=12, shared_expert_intermediate_size=12, **common
        )
    elif kind == "qwen3":
        config = transformers.Qwen3MoeConfig(num_experts=4, moe_intermediate_size=12, head_dim=8, **common)
    elif kind == "olmoe":
        config = transformers.OlmoeConfig(num_experts=4, **common)
    else:
        config = transformers.GptOssConfig(num_local_experts=4, head_dim=8, **common)
    # Grouped products of torch are not in float64.
    experts = "grouped_mm" if kind == "grouped" else "eager"
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation=experts
    )
    if kind != "grouped":
        model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batch(step: int) -> dict[str, torch.Tensor]:
    """Return the tokens of all ranks; the last ones of each second text are padding."""
    rng = np.random.default_rng((3, step))
    words = torch.from_numpy(rng.integers(3, VOCABULARY, (BATCH, LENGTH)))
    mask = torch.ones_like(words)
    mask[1::2, -2:] = 0
    labels = torch.where(mask == 1, words, -100)
    return {"input_ids": words, "labels": labels, "attention_mask": mask}


def loss_of(model: Any, values: dict[str, torch.Tensor], *, balance: bool) -> torch.Tensor:
    """Return the model's own loss, in float32, if it has the balance loss in it; else the same in the model's type."""
    outputs = model(**values)
    if balance:
        found: torch.Tensor = outputs.loss
        return found
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), values["labels"][:, 1:].flatten())


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return one whose updates do not show the rounding of small gradients."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-2)


def errors_of(cases: Sequence[tuple[str, str, bool]]) -> dict[str, float | str]:
    """Train each case, (kind, strategy, balance); return the largest difference from one process, or the error."""
    found: dict[str, float | str] = {}
    for kind, strategy, balance in cases:
        key = f"{kind} {strategy}{' balance' if balance else ''}"
        try:
            found[key] = _error(kind, strategy, balance)
        except Exception:
            found[key] = traceback.format_exc(limit=-4)
    return found


def _error(kind: str, strategy: str, balance: bool) -> float:
    alone = make(kind, balance=balance)
    optimizer = optimizer_of(alone)
    losses = []
    for number in range(STEPS):
        loss = loss_of(alone, batch(number), balance=balance)
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: value.detach().numpy() for name, value in alone.named_parameters()}
    differences = []
    with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            model = make(kind, balance=balance)
            model, optimizer = ud.distribute(model, optimizer_of(model))
            rank, size = ud.data_rank(), ud.data_size()
            each = BATCH // size
            for number in range(STEPS):
                mine = {name: value[rank * each : (rank + 1) * each] for name, value in batch(number).items()}
                loss = loss_of(model, mine, balance=balance)
                mean = ud.allreduce(loss.detach().clone(), name="loss")
                differences.append(abs(float(mean) - losses[number]))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            places = placements_of(model)
            for path, value in model.named_parameters():
                place = places.placement(path, tuple(value.shape), dtype_of(value))
                whole = expected[place.name][np.ix_(*place.indices)]
                differences.append(largest_error(value.detach().numpy(), whole))
            held = sum(value.numel() for value in model.parameters())
            assert held < sum(value.numel() for value in alone.parameters()), "nothing was divided"
        finally:
            ud.shutdown()
    return max(differences)
