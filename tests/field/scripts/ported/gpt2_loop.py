"""transformers' GPT-2 in a plain loop: the gradients of several passes, then a clipped update."""

import argparse
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import unidist.torch as ud

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--passes", type=int, default=2)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--out", required=True)
args = parser.parse_args()

ud.init()
ud.seed(0)
text = torch.tensor(list(Path(argparse.__file__).read_bytes()[: 33 * 256])).view(-1, 33)
loader = ud.shard(DataLoader(text, args.batch_size))

config = GPT2Config(vocab_size=128, n_positions=64, n_embd=32, n_layer=2, n_head=4, use_cache=False)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
config.bos_token_id = config.eos_token_id = None
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer = ud.distribute(model, optimizer)

losses = []
for _, ids in zip(range(args.steps), loader, strict=False):
    loss = torch.zeros(())
    for micro_batch in ids.chunk(args.passes):
        micro_loss = model(micro_batch, labels=micro_batch).loss / args.passes
        micro_loss.backward()
        loss += micro_loss.detach()
    ud.clip_grad_norm_(optimizer, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(ud.allreduce(loss, name="loss").item())
ud.save(args.out, model)
