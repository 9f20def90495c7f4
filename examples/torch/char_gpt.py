"""Writes Python: a small character-level GPT, trained on the standard library's own sources, offline.

    unidist launch -np 2 examples/torch/char_gpt.py
    unidist launch -np 2 --strategy accumulate=2 examples/torch/char_gpt.py --steps 800
    unidist launch -np 4 --strategy pipeline=2,tensor=2 examples/torch/char_gpt.py
    unidist launch -np 2 --strategy context=2 examples/torch/char_gpt.py --context 512
    python examples/torch/char_gpt.py                # the same script alone

The default takes about a minute on two cores. `TrainStep` is one call for every strategy, also for those that divide
the model over the ranks; besides it the script shows what a real loop has: warm-up, gradient clipping, evaluation over
all ranks, a text sample at the end.
"""

import argparse
import json
import math
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - everybody's name for it
from tqdm import trange

import unidist.torch as ud
from unidist.runtime.context import current
from unidist.strategy.plan import StrategyLike

# In names and comments: B batch, T time (characters), C channels (width), H heads, V vocabulary.


class Text:
    """The standard library's modules as one long row of character codes; the last twentieth is for validation."""

    def __init__(self, num_modules: int | None) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:num_modules]
        text = "".join(path.read_text(encoding="utf-8", errors="ignore") for path in files)
        text = text.encode("ascii", "ignore").decode()
        self.alphabet = "".join(sorted(set(text)))
        code = {character: index for index, character in enumerate(self.alphabet)}
        codes = torch.tensor([code[character] for character in text], dtype=torch.uint8)
        self.train, self.validation = codes[: len(codes) * 19 // 20], codes[len(codes) * 19 // 20 :]

    def encode(self, text: str) -> torch.Tensor:
        return torch.tensor([[self.alphabet.index(character) for character in text]])

    def decode(self, codes_T: torch.Tensor) -> str:  # noqa: N803 - shape legend
        return "".join(self.alphabet[code] for code in codes_T.tolist())


def draw(
    codes: torch.Tensor, batch: int, context: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `batch` random windows, and the same windows one character later; (B, T) each."""
    starts = torch.randint(len(codes) - context - 1, (batch,), generator=generator)
    windows = codes[starts[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def own_share(inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: N803
    """Return this rank's windows of a batch that every rank draws; ranks with parts of one model get the same."""
    share, count = ud.data_rank(), ud.data_size()
    return inputs_BT[share::count], targets_BT[share::count]


def strategies() -> StrategyLike:
    """Return what the command line says, and that gradients are clipped, if it does not say how."""
    given = current().plan.strategies
    return None if any(each.name == "clip_norm" for each in given) else [*given, "clip_norm=1"]


class Block(nn.Module):
    """Attention and a two-layer net, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.net = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:  # noqa: N803 - shape legend
        qkv = self.qkv(self.norm1(x_BTC)).unflatten(-1, (3, self.heads, -1))  # (B, T, 3, H, C/H)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, C/H) each
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTC = x_BTC + self.project(attended.transpose(1, 2).flatten(2))  # noqa: N806
        return x_BTC + self.net(self.norm2(x_BTC))


class GPT(nn.Module):
    """Predicts the next character; the embedding and the output layer share their weights."""

    def __init__(self, vocabulary: int, context: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.context = context
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, codes_BT: torch.Tensor) -> torch.Tensor:  # noqa: N803 - shape legend
        """Return logits (B, T, V)."""
        x_BTC = self.embed(codes_BT) + self.position(torch.arange(codes_BT.shape[1]))  # noqa: N806
        return self.head(self.norm(self.blocks(x_BTC)))


def next_character_loss(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:  # noqa: N803 - shape legend
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def validate(step: ud.TrainStep, text: Text, batch: int, context: int) -> float:
    """Return the validation loss, averaged over all ranks."""
    generator = torch.Generator().manual_seed(1000)
    batches = [own_share(*draw(text.validation, batch, context, generator)) for _ in range(4)]
    return sum(step.evaluate(*each).item() for each in batches) / len(batches)


def write(step: ud.TrainStep, text: Text, start: str, length: int, context: int) -> str:
    """Return `start`, continued by the model. Every rank computes the same, as a model spread over ranks demands."""
    generator = torch.Generator().manual_seed(0)
    codes = text.encode(start)
    for _ in range(length):
        logits_V = step.predict(codes[:, -context:])[0, -1] / 0.8  # noqa: N806
        drawn = torch.multinomial(logits_V.softmax(0), 1, generator=generator)
        codes = torch.cat([codes, drawn[None]], dim=1)
    return text.decode(codes[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument(
        "--batch-size", type=int, default=16, help="windows per step and share of the data (default: 16)"
    )
    parser.add_argument("--global-batch-size", type=int, metavar="N", help="windows per step of all shares, instead")
    parser.add_argument("--context", type=int, default=128, help="characters per window (default: 128)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3, help="largest learning rate (default: 0.002)")
    parser.add_argument("--modules", type=int, help="read only so many modules of the library (default: all)")
    parser.add_argument("--sample", type=int, default=400, help="characters to write at the end (default: 400)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loss-log", type=Path, metavar="FILE", help="write the loss of each step to this JSON file")
    args = parser.parse_args()

    ud.init()
    leads = ud.rank() == 0
    ud.seed(args.seed)
    text = Text(args.modules)
    model = GPT(len(text.alphabet), args.context, args.layers, args.width, args.heads)
    count = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    step = ud.TrainStep(model, optimizer, next_character_loss, strategies())
    batch = args.global_batch_size or args.batch_size * ud.data_size()
    warmup = max(1, args.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda number: min((number + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * number / args.steps)),
    )
    if leads:
        print(f"{len(text.train):,} characters, {count:,} parameters, {ud.size()} process(es)", flush=True)

    generator = torch.Generator().manual_seed(args.seed + 1)
    losses = []
    bar = trange(1, args.steps + 1, disable=not leads)
    for number in bar:
        loss = step(*own_share(*draw(text.train, batch, args.context, generator)))
        schedule.step()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{loss.item():.3f}", perplexity=f"{loss.exp().item():.1f}", refresh=False)
        if number == 1 or number % max(1, args.steps // 4) == 0:
            validation = validate(step, text, batch, args.context)
            if leads:
                bar.write(f"step {number}: validation loss {validation:.3f}, perplexity {math.exp(validation):.1f}")
    step.optimizer.flush()  # with --strategy accumulate=N: the last window may be short

    sample = write(step, text, "def ", args.sample, args.context)
    if leads:
        print(f"---- a sample ----\n{sample}", flush=True)
        if args.loss_log:
            args.loss_log.write_text(json.dumps({"loss": losses}), encoding="utf-8")
    ud.shutdown()


if __name__ == "__main__":
    main()
