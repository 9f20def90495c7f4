"""A GPT of 17 million parameters: 8 layers of width 384, 64 tokens of context."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH, LAYERS, HEADS, CONTEXT = 4096, 384, 8, 6, 64


class Block(nn.Module):
    """Attention and a two-layer network, each behind a norm and beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_btd: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x_btd.shape
        q, k, v = (
            part.view(batch, tokens, HEADS, WIDTH // HEADS).transpose(1, 2)
            for part in self.qkv(self.norm1(x_btd)).chunk(3, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_btd = x_btd + self.out(attended.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return x_btd + self.down(functional.gelu(self.up(self.norm2(x_btd))))


class GPT(nn.Module):
    """Token and position embeddings, blocks, and a linear head that is not tied."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids_bt: torch.Tensor) -> torch.Tensor:
        x_btd = self.tokens(ids_bt) + self.positions(torch.arange(ids_bt.shape[1], device=ids_bt.device))
        return self.head(self.norm(self.blocks(x_btd)))
