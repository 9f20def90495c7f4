"""Trainings in PyTorch with divided sequences on the ranks of a pool, many in one call, each beside one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - everybody's name for it
from torch.utils.checkpoint import checkpoint

import unidist.torch as ud
from unidist.checkpoint.format.interface import placements_of
from unidist.errors import UnidistError
from unidist.runtime import context
from unidist.settings.environment import set_variables
from unidist.testing._training import largest_error
from unidist_torch.memory import dtype_of

BATCH, TOKENS, WIDTH, HEADS, WORDS = 4, 13, 16, 4, 11


@dataclass(frozen=True)
class Case:
    """One training.

    Args:
        model: name of `MODELS`.
        strategy: the strategy line; `clip_norm=0.3` and `accumulate=2` in it are done alone, too.
        step: use `TrainStep` in place of a loop.
        engine: carries everything.
        tokens: of a sample.
        limit: largest difference.
        steps: updates.
    """

    model: str
    strategy: str
    step: bool = False
    engine: str = "shm"
    tokens: int = TOKENS
    limit: float = 1e-12
    steps: int = 3


# nanoGPT, as it is found on GitHub: shortened, not changed.


class CausalSelfAttention(nn.Module):
    """nanoGPT's attention, with and without the fused one."""

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd, self.dropout, self.flash = HEADS, WIDTH, 0.0, flash
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.0), nn.Dropout(0.0)
        self.register_buffer("bias", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, tokens, width)."""
        B, T, C = x.size()  # noqa: N806 - of the original
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=self.dropout, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            att = self.attn_dropout(F.softmax(att, dim=-1))
            y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class NanoBlock(nn.Module):
    """A block of nanoGPT."""

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), CausalSelfAttention(flash)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, tokens, width)."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """nanoGPT: tied embeddings, and the loss inside of the model."""

    def __init__(self, flash: bool = True) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(WORDS, WIDTH),
                "wpe": nn.Embedding(32, WIDTH),
                "drop": nn.Dropout(0.0),
                "h": nn.ModuleList([NanoBlock(flash) for _ in range(2)]),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        """Return the logits and the loss."""
        _b, t = idx.size()
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


# A Llama without a library: rotary embeddings, grouped queries, RMS norms, gated units, padding.


class RMSNorm(nn.Module):
    """Llama's norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x, normalized."""
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return heads turned by their position."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class LlamaBlock(nn.Module):
    """A block of Llama, with two heads of keys for four of queries."""

    def __init__(self) -> None:
        super().__init__()
        width = WIDTH // HEADS
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * width, bias=False) for n in (HEADS, 2, 2))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.norm1, self.norm2 = RMSNorm(), RMSNorm()

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Take and return (batch, tokens, width)."""
        b, t, _ = x.shape
        normal = self.norm1(x)
        q, k, v = (layer(normal).view(b, t, -1, WIDTH // HEADS).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        k, v = (
            each[:, :, None].expand(b, 2, 2, t, WIDTH // HEADS).reshape(b, HEADS, t, WIDTH // HEADS) for each in (k, v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.o(mixed.transpose(1, 2).reshape(b, t, WIDTH))
        normal = self.norm2(x)
        return x + self.down(F.silu(self.gate(normal)) * self.up(normal))


class Llama(nn.Module):
    """Rotary tables from the length of its input; a loss over shifted labels outside."""

    def __init__(self, padded: bool, recomputes: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks, self.norm = nn.ModuleList([LlamaBlock() for _ in range(2)]), RMSNorm()
        self.padded, self.recomputes = padded, recomputes
        width = WIDTH // HEADS
        self.register_buffer("speeds", 1.0 / (100.0 ** (torch.arange(0, width, 2) / width)), persistent=False)

    def forward(self, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits (batch, tokens, words)."""
        x = self.embed(tokens)
        length = tokens.shape[1]
        angles = torch.outer(torch.arange(length, device=tokens.device), self.speeds)
        angles = torch.cat((angles, angles), dim=-1).to(x.dtype)
        mask = None
        if attention_mask is not None:
            mask = torch.ones(length, length, dtype=torch.bool).tril() & attention_mask[:, None, None, :].bool()
        for block in self.blocks:
            if self.recomputes:
                x = checkpoint(block, x, angles.cos(), angles.sin(), mask, use_reentrant=False)
            else:
                x = block(x, angles.cos(), angles.sin(), mask)
        return self.head(self.norm(x))


class Classifier(nn.Module):
    """torch's encoder on vectors, pooled over what is not padding, and the first token."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(2 * WIDTH, WORDS)
        self.batch_first = batch_first

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        """Take (batch, tokens, width) or (tokens, batch, width), and (batch, tokens); return (batch, words)."""
        hidden = self.encoder(x, src_key_padding_mask=padding)
        hidden = hidden if self.batch_first else hidden.transpose(0, 1)
        kept = (~padding)[..., None].to(hidden.dtype)
        pooled = (hidden * kept).sum(1) / kept.sum(1)
        return self.head(torch.cat([pooled, hidden[:, 0]], -1))


class Translator(nn.Module):
    """torch's encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.net = nn.Transformer(WIDTH, HEADS, 1, 1, 24, dropout=0.0, batch_first=True)

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        """Return logits of the target."""
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1], dtype=self.embed.weight.dtype)
        hidden = self.net(self.embed(src), self.embed(tgt), tgt_mask=mask, tgt_is_causal=True)
        return hidden @ self.embed.weight.t()


class Pipelined(nn.Module):
    """A language model that torch.fx can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.zeros(TOKENS, WIDTH))
        self.blocks = nn.Sequential(*(NanoBlock(flash=True) for _ in range(4)))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.head(self.blocks(self.embed(tokens) + self.places))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "nano": NanoGPT,
    "nano spelled out": lambda: NanoGPT(flash=False),
    "llama": lambda: Llama(padded=False),
    "llama padded": lambda: Llama(padded=True),
    "llama recomputed": lambda: Llama(padded=True, recomputes=True),
    "encoder": lambda: Classifier(batch_first=True),
    "encoder, tokens first": lambda: Classifier(batch_first=False),
    "translator": Translator,
    "pipelined": Pipelined,
}


def make(name: str) -> nn.Module:
    """Return a model in float64 with fixed values."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def batch(case: Case, number: int) -> tuple[tuple[Any, ...], torch.Tensor]:
    """Return the arguments of the model and the targets of one pass, of all samples."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, WORDS, (BATCH, case.tokens), generator=generator)
    lengths = torch.randint(max(1, case.tokens // 2), case.tokens + 1, (BATCH, 1), generator=generator)
    padding = torch.arange(case.tokens) >= lengths
    labels = torch.randint(0, WORDS, (BATCH, case.tokens), generator=generator)
    if case.model.startswith("nano"):
        labels[:, : case.tokens // 3] = -1  # equally many of each sample: shares have equal weights
        return (tokens, labels), labels
    if case.model == "pipelined":
        return (tokens,), tokens
    if case.model.startswith("llama"):
        return (
            (tokens, (~padding).long()) if "padded" in case.model or "recomputed" in case.model else (tokens,)
        ), tokens
    if case.model.startswith("encoder"):
        x = torch.randn(BATCH, case.tokens, WIDTH, generator=generator, dtype=torch.float64)
        return (x, padding), labels[:, 0]
    return (tokens, labels[:, :7]), labels[:, 1:8]


def loss_of(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of outputs, as scripts write it."""
    if isinstance(outputs, tuple):
        return outputs[1]
    if outputs.ndim == 2:
        return F.cross_entropy(outputs, targets)
    if outputs.shape[1] == targets.shape[1] and targets.shape[1] != 7:  # a language model: the next token
        shifted = outputs[..., :-1, :].contiguous()
        return F.cross_entropy(shifted.view(-1, WORDS), targets[..., 1:].contiguous().view(-1))
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def train(case: Case, *, distributed: bool, rank: int = 0, size: int = 1) -> tuple[list[float], nn.Module]:
    """Train; returns losses and the model."""
    model: Any = make(case.model)
    passes = 2 if "accumulate=2" in case.strategy else 1
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    step = None
    if distributed and case.step:
        step = ud.TrainStep(model, optimizer, loss_of)
        model = step.model
    elif distributed:
        model, optimizer = ud.distribute(model, optimizer)
    losses = []
    for number in range(case.steps * passes):
        arguments, targets = batch(case, number)
        tokens_first = case.model == "encoder, tokens first"
        arguments = tuple(each[rank::size].contiguous() for each in arguments)
        if tokens_first:
            arguments = (arguments[0].transpose(0, 1).contiguous(), *arguments[1:])
        targets = targets[rank::size].contiguous()
        if step is not None:
            losses.append(float(step(arguments, targets)))
            continue
        loss = loss_of(model(*arguments), targets)
        losses.append(float(loss.detach()))
        (loss if distributed else loss / passes).backward()
        if not distributed and "clip_norm=0.3" in case.strategy and number % passes == passes - 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        if distributed or number % passes == passes - 1:
            optimizer.step()
            optimizer.zero_grad()
    return losses, model


def errors_of(cases: Sequence[Case]) -> list[dict[str, float]]:
    """Train each case on the ranks and in one process; returns the largest difference of parameters and losses."""
    found = []
    for case in cases:
        try:
            found.append(_errors(case))
        except Exception as error:
            raise RuntimeError(f"{case}: {type(error).__name__}: {error}") from error
    return found


def _errors(case: Case) -> dict[str, float]:
    losses, whole = train(case, distributed=False)
    expected = dict(whole.named_parameters())
    with runtime(case.strategy, case.engine) as current:
        size = current.axis_size("data")
        found, model = train(case, distributed=True, rank=current.axis_rank("data"), size=size)
        places = placements_of(model)
        errors = {}
        held = _gathered(model)
        for path, value in held.items():
            place = places.placement(path, tuple(value.shape), dtype_of(value))
            part = expected[place.name].detach().numpy()
            if place.shape != tuple(value.shape):
                part = part[np.ix_(*place.indices)]
            errors[path] = largest_error(value.numpy(), part)
        assert errors
        if size == 1 or case.step:
            errors["loss"] = largest_error(np.array(found), np.array(losses))
    return errors


def _gathered(model: Any) -> dict[str, torch.Tensor]:
    """Return the parameters' values; with zero=3 they are gathered."""
    from unidist_zero import gathered

    with gathered(model):
        return {path: parameter.detach().clone() for path, parameter in model.named_parameters()}


@contextmanager
def runtime(strategy: str, engine: str = "shm") -> Iterator[context.Context]:
    """Run unidist with a strategy inside of the block."""
    with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": engine}):
        ud.init()
        try:
            yield context.current()
        finally:
            ud.shutdown()


def evaluated(strategy: str) -> dict[str, float]:
    """Return how far outputs and metrics in evaluation are from those of one process, and how much a rank has."""
    case = Case("llama padded", strategy)
    (tokens, mask), labels = batch(case, 0)
    whole = make(case.model).eval()
    with torch.no_grad():
        expected = whole(tokens, mask)
    with runtime(strategy):
        model = make(case.model)
        model, _ = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model.eval()
        with torch.no_grad():
            logits = model(tokens, mask)
            assert isinstance(logits, ud.context.SequenceTensor)
            accuracy = (logits.argmax(-1) == labels)[mask.bool()].float().mean().item()
            first = logits[:, -1].softmax(-1)
            found = {
                "logits": float((ud.context.whole(logits) - expected).abs().max()),
                "last": float((first - expected[:, -1].softmax(-1)).abs().max()),
                "accuracy": abs(accuracy - float((expected.argmax(-1) == labels)[mask.bool()].float().mean())),
                "numbers": float(np.abs(logits.numpy() - expected.numpy()).max()),
                "share": logits.local.numel() / logits.numel(),
            }
            for length in (1, 2, 3):  # as a model writes text
                part = ud.context.whole(model(tokens[:, :length], mask[:, :length]))
                found[f"{length} tokens"] = float((part - whole(tokens[:, :length], mask[:, :length])).abs().max())
    return found


def random_numbers(strategy: str) -> dict[str, Any]:
    """Return what this rank has drawn for its tokens and for whole tensors, first and when recomputed."""

    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1000))
            self.kept: list[Any] = []

        def block(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            dropped = F.dropout(x, 0.5)
            self.kept.append((whole(dropped) != 0).flatten().tolist())
            return dropped * self.weight[:1] + table

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            table = F.dropout(self.weight[: x.shape[1]], 0.5)
            self.kept.append((table != 0).tolist())
            return checkpoint(self.block, x, table, use_reentrant=False).mean()

    whole = ud.context.whole
    with runtime(strategy):
        torch.manual_seed(ud.rank())
        model: Any = Drops()
        model, _ = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(1, 1000)).backward()
        after = torch.get_rng_state().tolist()
        query = torch.randn(1, 2, 16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

        class Attention(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return F.scaled_dot_product_attention(x, x, torch.ones_like(x), dropout_p=0.5)

        attention: Any = Attention()
        attention.weight = nn.Parameter(torch.ones(1))
        attention, _ = ud.distribute(
            attention, torch.optim.SGD(attention.parameters(), lr=0.1), strategy=f"{strategy}:dim=2"
        )
        sums = whole(attention(query))[..., 0]
    return {"kept": model.kept, "state": after, "sums": sums.tolist()}


def saved(strategy: str) -> float:
    """Return which part of one process' activations this rank keeps for the backward pass."""
    tokens = torch.randint(0, WORDS, (1, 512), generator=torch.Generator().manual_seed(0))

    def kept(model: nn.Module) -> int:
        own = {parameter.untyped_storage().data_ptr() for parameter in [*model.parameters(), *model.buffers()]}
        found: dict[int, tuple[int, torch.Tensor]] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                found[storage.data_ptr()] = storage.nbytes(), tensor.detach()  # its address stays its own
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss_of(model(tokens), tokens).backward()
        return sum(size for size, _ in found.values())

    whole = kept(make("llama"))
    with runtime(strategy):
        model = make("llama")
        model, _ = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        kept(model)  # compares the first batch
        return kept(model) / whole


def checkpoint_errors(folder: str) -> dict[str, float]:
    """Save under one division and load under another, and return how far a further step is from one process."""
    case = Case("llama", "")
    found = {}

    def steps(model: Any, optimizer: Any, numbers: Sequence[int]) -> None:
        for number in numbers:
            (tokens,), labels = batch(case, number)
            loss_of(model(tokens), labels).backward()
            optimizer.step()
            optimizer.zero_grad()

    def new() -> tuple[Any, Any]:
        model = make(case.model)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)

    whole, alone = new()
    steps(whole, alone, range(3))
    with runtime("context=2,zero=1"):
        model, optimizer = ud.distribute(*new())
        steps(model, optimizer, range(2))
        ud.save(folder, model, optimizer)
    for strategy in ("context=2,zero=3", "context=2:exchange=gather", "tensor=2"):
        with runtime(strategy):
            model, optimizer = ud.distribute(*new())
            ud.load(folder, model, optimizer)
            steps(model, optimizer, [2])
            places, expected = placements_of(model), dict(whole.named_parameters())
            worst = 0.0
            for path, value in _gathered(model).items():
                place = places.placement(path, tuple(value.shape), dtype_of(value))
                part = expected[place.name].detach().numpy()
                part = part if place.shape == tuple(value.shape) else part[np.ix_(*place.indices)]
                worst = max(worst, largest_error(value.numpy(), part))
            found[strategy] = worst
    return found


def half_losses(strategy: str) -> list[float]:
    """Return losses of a training in 16 bits."""
    case = Case("llama padded", strategy)
    (tokens, mask), labels = batch(case, 0)
    losses = []
    with runtime(strategy):
        model: Any = make(case.model).float()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer = ud.distribute(model, optimizer)
        for _ in range(8):
            loss = loss_of(model(tokens, mask), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses


def attention_gradients_with_dropout() -> float:
    """Return how far the gradient is from finite differences, with the numbers of dropout held."""
    with runtime("context=2"):
        generator = torch.Generator().manual_seed(0)
        q, k, v, direction = (torch.randn(1, 2, 8, 4, dtype=torch.float64, generator=generator) for _ in range(4))

        class Attention(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.q, self.k, self.v = map(nn.Parameter, (q, k, v))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                torch.manual_seed(0)
                mixed = F.scaled_dot_product_attention(
                    x * 0 + self.q, x * 0 + self.k, x * 0 + self.v, dropout_p=0.3, is_causal=True
                )
                return (mixed * direction).sum()

        model: Any = Attention()
        model, optimizer = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy="context=2:dim=2")
        x = torch.zeros(1, 2, 8, 4, dtype=torch.float64)
        model(x).backward()
        optimizer.synchronize() if hasattr(optimizer, "synchronize") else None
        worst = 0.0
        with torch.no_grad():
            for parameter in model.parameters():
                for index in (0, 13, 40):
                    flat = parameter.view(-1)
                    gradient = float(parameter.grad.view(-1)[index])
                    flat[index] += 1e-6
                    above = float(model(x))
                    flat[index] -= 2e-6
                    below = float(model(x))
                    flat[index] += 1e-6
                    worst = max(worst, abs(gradient - (above - below) / 2e-6))
        return worst


def refusals() -> dict[str, str]:
    """Return what is raised before the first step, in one call."""

    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3, padding=1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x.transpose(1, 2))

    class Reentrant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=True).sum() + 1

    x = torch.randn(BATCH, TOKENS, WIDTH)
    own = torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(17))
    tries: dict[str, tuple[Callable[[], nn.Module], str, Callable[[Any], Any]]] = {
        "convolution": (Convolution, "context=2", lambda model: model(own)),
        "recurrent": (lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True), "context=2", lambda model: model(own)),
        "heads": (
            lambda: nn.TransformerEncoderLayer(WIDTH, 1, 8, batch_first=True), "context=2:exchange=ulysses",
            lambda model: model(own),
        ),
        "different": (lambda: nn.Linear(WIDTH, 2), "context=2", lambda model: model(x + ud.rank())),
        "compiled": (lambda: torch.compile(nn.Linear(WIDTH, 2)), "context=2", lambda model: None),
        "inner": (
            lambda: nn.Sequential(torch.compile(nn.Linear(WIDTH, 2))), "context=2", lambda model: None,
        ),
        "compiled after": (
            lambda: nn.Linear(WIDTH, 2), "context=2",
            lambda model: torch.compile(model, backend="eager")(own),
        ),
        "names": (lambda: nn.Linear(WIDTH, 2), "context=2:inputs=tokens", lambda model: model(own)),
        "exchange": (lambda: nn.Linear(WIDTH, 2), "context=2:exchange=star", lambda model: None),
        "local_sgd": (lambda: nn.Linear(WIDTH, 2), "context=2,local_sgd=2", lambda model: None),
        "reentrant": (
            Reentrant, "context=2",
            lambda model: model(own.clone().requires_grad_()),
        ),
    }  # fmt: skip
    found = {}
    for name, (build, strategy, use) in tries.items():
        try:
            with runtime(strategy):
                model: Any = build()
                model, _ = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
                use(model)
        except UnidistError as error:
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = "nothing was raised"
    return found
