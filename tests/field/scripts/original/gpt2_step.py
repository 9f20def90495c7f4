"""transformers' GPT-2, a batch for each update, without clipping."""

import argparse
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--steps", type=int, default=4)
args = parser.parse_args()

torch.manual_seed(0)
text = torch.tensor(list(Path(argparse.__file__).read_bytes()[: 33 * 256])).view(-1, 33)
loader = DataLoader(text, args.batch_size)

config = GPT2Config(vocab_size=128, n_positions=64, n_embd=32, n_layer=2, n_head=4, use_cache=False)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
config.bos_token_id = config.eos_token_id = None
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

losses = []
for _, ids in zip(range(args.steps), loader, strict=False):
    loss = model(ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
