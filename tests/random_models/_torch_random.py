"""Random models in PyTorch, trained in one process and on ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from _model_programs import WORDS, Block, Program, Vocabulary
from _trained import Piece, Pieces
from torch import nn
from torch.nn import functional as F  # noqa: N812 - everybody's name for it
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import unidist.torch as ud
from unidist.checkpoint.format.interface import placements_of
from unidist_expert_parallel.torch import MixtureOfExperts
from unidist_torch.memory import dtype_of
from unidist_zero import gathered

# Blocks. Each is a class of its own with the attributes that the first function makes of (width, size), and the forward
# that the second one is.

Made = dict[str, Any]


def _linear(width: int, out: int = 0, **options: Any) -> nn.Linear:
    return nn.Linear(width, out or width, **options)


def _zeros(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def _heads(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(2)


def _fused(self: Any, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (_heads(each, self.num_heads) for each in self.qkv(x).chunk(3, -1))
    return self.proj(_rows(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


def _written_out(self: Any, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (_heads(layer(x), self.num_heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
    weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
    return self.o_proj(_rows(weights @ v))


def _grouped(self: Any, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (
        _heads(self.q(x), self.num_heads),
        _heads(self.k(x), self.num_kv_heads),
        _heads(self.v(x), self.num_kv_heads),
    )
    k, v = (each.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for each in (k, v))
    return self.o(_rows(F.scaled_dot_product_attention(q, k, v)))


def _attention(width: int, size: int) -> Made:
    return {"num_heads": size, "qkv": _linear(width, 3 * width), "proj": _linear(width)}


def _projections(width: int, size: int) -> Made:
    return {"num_heads": size, **{f"{name}_proj": _linear(width) for name in "qkvo"}}


def _encoder(width: int, size: int, **options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(width, size, 2 * width, dropout=0.0, batch_first=True, **options)


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, factor)
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, factor = ctx.saved_tensors
        return gradient * factor, (gradient * x).sum()


_BLOCKS: dict[str, tuple[Callable[[int, int], Made], Callable[[Any, torch.Tensor], torch.Tensor]]] = {
    "linear": (lambda w, n: {"layer": _linear(w)}, lambda m, x: m.layer(x)),
    "no_bias": (lambda w, n: {"layer": _linear(w, bias=False)}, lambda m, x: m.layer(x)),
    "mlp": (
        lambda w, n: {"up": _linear(w, 2 * w), "down": _linear(2 * w, w)},
        lambda m, x: m.down(F.gelu(m.up(x))),
    ),
    "sequential": (
        lambda w, n: {"net": nn.Sequential(_linear(w, 3 * w), nn.ReLU(), _linear(3 * w, w), nn.Tanh())},
        lambda m, x: m.net(x),
    ),
    "swiglu": (
        lambda w, n: {name: _linear(*shape, bias=False) for name, *shape in (("w1", w, 5), ("w3", w, 5), ("w2", 5, w))},
        lambda m, x: m.w2(F.silu(m.w1(x)) * m.w3(x)),
    ),
    "bottleneck": (
        lambda w, n: {"down": _linear(w, 2), "norm": nn.LayerNorm(2), "up": _linear(2, w)},
        lambda m, x: m.up(F.relu(m.norm(m.down(x)) + 0.1)),
    ),
    "highway": (
        lambda w, n: {"gate": _linear(w), "layer": _linear(w)},
        lambda m, x: torch.lerp(x, m.layer(x).tanh(), m.gate(x).sigmoid()),
    ),
    "squeeze_excite": (
        lambda w, n: {"down": _linear(w, 2), "up": _linear(2, w)},
        lambda m, x: x * m.up(m.down(x.mean(1, keepdim=True)).tanh()).sigmoid(),
    ),
    "conv1d": (lambda w, n: {"conv": nn.Conv1d(w, w, 3, padding=1)}, lambda m, x: m.conv(x.mT).mT),
    "conv1d_grouped": (lambda w, n: {"conv": nn.Conv1d(w, w, 1, groups=n)}, lambda m, x: m.conv(x.mT).mT),
    "depthwise": (
        lambda w, n: {"deep": nn.Conv1d(w, w, 3, padding="same", groups=w), "point": nn.Conv1d(w, w, 1)},
        lambda m, x: m.point(m.deep(x.mT).relu()).mT,
    ),
    "conv_transpose": (lambda w, n: {"conv": nn.ConvTranspose1d(w, w, 3, padding=1)}, lambda m, x: m.conv(x.mT).mT),
    "conv2d": (
        lambda w, n: {"conv": nn.Conv2d(1, 2, 3, padding=1), "mix": nn.Conv2d(2, 1, 1)},
        lambda m, x: m.mix(m.conv(x[:, None]).tanh())[:, 0],
    ),
    "channels_last": (
        lambda w, n: {"conv": nn.Conv2d(w, w, 3, padding=1).to(memory_format=torch.channels_last)},
        lambda m, x: m.conv(x.mT[..., None]).squeeze(-1).mT,
    ),
    "layer_norm": (lambda w, n: {"norm": nn.LayerNorm(w)}, lambda m, x: m.norm(x)),
    "plain_norm": (lambda w, n: {"norm": nn.LayerNorm(w, elementwise_affine=False)}, lambda m, x: m.norm(x)),
    "group_norm": (lambda w, n: {"norm": nn.GroupNorm(n, w)}, lambda m, x: m.norm(x.mT).mT),
    "instance_norm": (lambda w, n: {"norm": nn.InstanceNorm1d(w, affine=True)}, lambda m, x: m.norm(x.mT).mT),
    "rms_norm": (lambda w, n: {"norm": nn.RMSNorm(w, eps=1e-2)}, lambda m, x: m.norm(x)),
    "batch_norm_in_evaluation": (lambda w, n: {"norm": nn.BatchNorm1d(w)}, lambda m, x: m.norm(x.mT).mT),
    "sync_batch_norm": (lambda w, n: {"norm": nn.BatchNorm1d(w)}, lambda m, x: m.norm(x.mT).mT),
    "weight_norm": (lambda w, n: {"layer": parametrizations.weight_norm(_linear(w))}, lambda m, x: m.layer(x)),
    "spectral_norm": (lambda w, n: {"layer": parametrizations.spectral_norm(_linear(w))}, lambda m, x: m.layer(x)),
    "positions": (lambda w, n: {"table": nn.Embedding(9, w)}, lambda m, x: x + m.table(torch.arange(x.shape[1]))),
    "learned_positions": (lambda w, n: {"table": _zeros(1, 9, w)}, lambda m, x: x + m.table[:, : x.shape[1]]),
    "padded_embedding": (
        lambda w, n: {"table": nn.Embedding(9, w, padding_idx=0)},
        lambda m, x: x + m.table((torch.arange(x.shape[1]) * 3) % 5),
    ),
    "embedding_bag": (
        lambda w, n: {"bag": nn.EmbeddingBag(6, w, mode="mean")},
        lambda m, x: x + m.bag(torch.tensor([[0, 1, 2], [3, 3, 0]])).mean(0),
    ),
    "multihead": (
        lambda w, n: {"attention": nn.MultiheadAttention(w, n, batch_first=True)},
        lambda m, x: m.attention(x, x, x, need_weights=False)[0],
    ),
    "multihead_causal": (
        lambda w, n: {"attention": nn.MultiheadAttention(w, n, bias=False, batch_first=True)},
        lambda m, x: m.attention(x, x, x, attn_mask=torch.ones(x.shape[1], x.shape[1]).triu(1).bool())[0],
    ),
    "cross_attention": (
        lambda w, n: {
            "attention": nn.MultiheadAttention(w, n, kdim=3, vdim=3, batch_first=True),
            "memory": _zeros(2, 3),
        },
        lambda m, x: m.attention(x, m.memory.expand(len(x), -1, -1), m.memory.expand(len(x), -1, -1))[0],
    ),
    "fused_attention": (_attention, _fused),
    "attention_written_out": (_projections, _written_out),
    "grouped_attention": (
        lambda w, n: {
            "num_heads": 2,
            "num_kv_heads": 1,
            "q": _linear(w),
            "k": _linear(w, w // 2),
            "v": _linear(w, w // 2),
            "o": _linear(w),
        },
        _grouped,
    ),
    "encoder_layer": (lambda w, n: {"layer": _encoder(w, n)}, lambda m, x: m.layer(x)),
    "encoder_layer_norm_first": (lambda w, n: {"layer": _encoder(w, n, norm_first=True)}, lambda m, x: m.layer(x)),
    "encoder": (
        lambda w, n: {"layers": nn.TransformerEncoder(_encoder(w, n), 2, enable_nested_tensor=False)},
        lambda m, x: m.layers(x),
    ),
    "decoder_layer": (
        lambda w, n: {"layer": nn.TransformerDecoderLayer(w, n, 2 * w, dropout=0.0, batch_first=True)},
        lambda m, x: m.layer(x, x.detach() + 0.5),
    ),
    "rnn": (lambda w, n: {"cell": nn.RNN(w, w, batch_first=True)}, lambda m, x: m.cell(x)[0]),
    "gru": (lambda w, n: {"cell": nn.GRU(w, w, num_layers=n, batch_first=True)}, lambda m, x: m.cell(x)[0]),
    "lstm": (
        lambda w, n: {"cell": nn.LSTM(w, w // 2, batch_first=True, bidirectional=True)},
        lambda m, x: m.cell(x)[0],
    ),
    "gru_cell": (
        lambda w, n: {"cell": nn.GRUCell(w, w)},
        lambda m, x: torch.stack([m.cell(x[:, i], x[:, i - 1]) for i in range(x.shape[1])], 1),
    ),
    "bilinear": (lambda w, n: {"layer": nn.Bilinear(w, w, w)}, lambda m, x: m.layer(x, x.tanh()).tanh()),
    "prelu": (lambda w, n: {"act": nn.PReLU(w if n > 1 else 1)}, lambda m, x: m.act(x.mT).mT),
    "no_dropout": (
        lambda w, n: {"drop": nn.Dropout(0.0), "layer": _linear(w)},
        lambda m, x: m.drop(m.layer(m.drop(x))),
    ),
    "twice": (lambda w, n: {"layer": _linear(w)}, lambda m, x: m.layer(m.layer(x).tanh())),
    "transposed_twin": (
        lambda w, n: {"layer": _linear(w, 2 * w, bias=False)},
        lambda m, x: m.layer(x).tanh() @ m.layer.weight,
    ),
    "tied_layers": (lambda w, n: _tied(_linear(w), _linear(w)), lambda m, x: m.second(m.first(x).tanh())),
    "scalar": (lambda w, n: {"scale": nn.Parameter(torch.tensor(0.5))}, lambda m, x: x * m.scale),
    "own_function": (lambda w, n: {"scale": nn.Parameter(torch.tensor(0.5))}, lambda m, x: _Scale.apply(x, m.scale)),
    "parameter_list": (
        lambda w, n: {"all": nn.ParameterList([_zeros(w), _zeros(w, w)])},
        lambda m, x: (x + m.all[0]) @ m.all[1],
    ),
    "parameter_dict": (
        lambda w, n: {"all": nn.ParameterDict({"shift": _zeros(w), "scale": _zeros(1)})},
        lambda m, x: x * m.all["scale"] + m.all["shift"],
    ),
    "transposed_parameter": (
        lambda w, n: {"weight": nn.Parameter(torch.zeros(2 * w, w).t())},
        lambda m, x: F.linear(x, m.weight[:, : x.shape[-1]]),
    ),
    "unused_parameter": (lambda w, n: {"unused": _zeros(w), "layer": _linear(w)}, lambda m, x: m.layer(x)),
    "unused_layer": (lambda w, n: {"spare": _linear(w), "layer": _linear(w)}, lambda m, x: m.layer(x)),
    "empty_parameter": (
        lambda w, n: {"empty": _zeros(0, w), "layer": _linear(w)},
        lambda m, x: m.layer(x) + m.empty.sum(),
    ),
    "low_rank": (
        lambda w, n: {"base": _linear(w).requires_grad_(False), "a": _zeros(2, w), "b": _zeros(w, 2)},
        lambda m, x: m.base(x) + x @ m.a.T @ m.b.T,
    ),
    "module_list": (
        lambda w, n: {"parts": nn.ModuleList([_linear(w), nn.LayerNorm(w)])},
        lambda m, x: m.parts[1](m.parts[0](x)),
    ),
    "module_dict": (
        lambda w, n: {"parts": nn.ModuleDict({"a": _linear(w), "b": nn.Sequential(_linear(w), nn.Tanh())})},
        lambda m, x: m.parts["a"](x) * m.parts["b"](x),
    ),
    "mixture": (
        lambda w, n: {"router": _linear(w, 3), "parts": nn.ModuleList(_linear(w) for _ in range(3))},
        lambda m, x: (torch.stack([part(x) for part in m.parts], -1) * m.router(x).softmax(-1).unsqueeze(-2)).sum(-1),
    ),
    "experts": (
        lambda w, n: {"experts": MixtureOfExperts(w, 4, hidden=3, top_k=n)},
        lambda m, x: m.experts(x),
    ),
    "buffer": (
        lambda w, n: {"mask": torch.linspace(-1, 1, w), "layer": _linear(w)},
        lambda m, x: m.layer(x * m.mask),
    ),
    "fourier": (lambda w, n: {"layer": _linear(w)}, lambda m, x: torch.fft.fft2(m.layer(x)).real / 4),
    "cumsum": (lambda w, n: {"layer": _linear(w)}, lambda m, x: m.layer(x).cumsum(1) / x.shape[1]),
    "einsum": (lambda w, n: {"core": _zeros(w, w, 2)}, lambda m, x: torch.einsum("btw,wvr->btv", x, m.core)),
    "outer": (
        lambda w, n: {"layer": _linear(w)},
        lambda m, x: torch.einsum("btw,bsw->bts", x, x).softmax(-1) @ m.layer(x),
    ),
    "shift": (lambda w, n: {"layer": _linear(w)}, lambda m, x: m.layer(x.roll(1, 1))),
    "mean_of_tokens": (lambda w, n: {"layer": _linear(w)}, lambda m, x: m.layer(x) + x.mean(1, keepdim=True)),
    "max_pool": (
        lambda w, n: {"layer": _linear(w)},
        lambda m, x: F.max_pool1d(m.layer(x).mT, 3, stride=1, padding=1).mT,
    ),
    "flat_tokens": (lambda w, n: {"layer": _linear(w)}, lambda m, x: m.layer(x.reshape(-1, x.shape[-1])).view_as(x)),
    "recomputed": (
        lambda w, n: {"up": _linear(w, 2 * w), "down": _linear(2 * w, w)},
        lambda m, x: checkpoint(lambda y: m.down(m.up(y).tanh()), x, use_reentrant=False),
    ),
    "hooked": (lambda w, n: {"layer": _hooked(_linear(w))}, lambda m, x: m.layer(x)),
    "halves": (
        lambda w, n: {"layer": _linear(w // 2)},
        lambda m, x: torch.cat([x.chunk(2, -1)[1], m.layer(x.chunk(2, -1)[0])], -1),
    ),
    "branch": (
        lambda w, n: {"layer": _linear(w), "other": _linear(w)},
        lambda m, x: m.layer(x) if x.shape[-1] > 4 else m.other(x),
    ),
}


def _tied(first: nn.Linear, second: nn.Linear) -> Made:
    second.weight = first.weight
    return {"first": first, "second": second}


def _hooked(layer: nn.Linear) -> nn.Linear:
    layer.register_forward_hook(_doubled)
    return layer


def _doubled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return 2 * output


# Models.


class _Block(nn.Module):
    """The parts of a kind of block, and the residual connection around them."""

    compute: Callable[[torch.Tensor], torch.Tensor]

    def __init__(self, block: Block, width: int) -> None:
        super().__init__()
        self.residual = block.residual
        for name, value in _BLOCKS[block.kind][0](width, block.size).items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)
        if block.frozen:
            self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, tokens, width)."""
        return x + self.compute(x) if self.residual else self.compute(x)


def _in_evaluation(self: nn.Module, mode: bool = True) -> nn.Module:
    return nn.Module.train(self, False)


_CLASSES = {kind: type(kind, (_Block,), {"compute": compute}) for kind, (_, compute) in _BLOCKS.items()}
for _kind in ("batch_norm_in_evaluation", "spectral_norm"):  # in training they change with each pass
    _CLASSES[_kind].train = _in_evaluation  # type: ignore[method-assign]


class _Pool(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


class Model(nn.Module):
    """Blocks between an input layer and an output layer, in one of several containers."""

    def __init__(self, container: str, first: nn.Module, blocks: list[nn.Module], last: list[nn.Module]) -> None:
        super().__init__()
        self.first, self.names = first, [f"block_{number}" for number in range(len(blocks))]
        if container == "attributes":
            for name, block in zip(self.names, blocks, strict=True):
                setattr(self, name, block)
        else:
            named = dict(zip(self.names, blocks, strict=True))
            self.blocks = nn.ModuleDict(named) if container == "dict" else nn.ModuleList(blocks)
        self.last = nn.Sequential(*last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take what the first layer takes, return what the last one returns."""
        x = self.first(x)
        if isinstance(self.__dict__["_modules"].get("blocks"), nn.ModuleList):
            for block in self.blocks:
                x = block(x)
        else:
            for name in self.names:
                x = (self.blocks[name] if hasattr(self, "blocks") else getattr(self, name))(x)
        return self.last(x)


def make(program: Program) -> nn.Module:
    """Return the model with the same random values everywhere, none of them zero."""
    torch.manual_seed(program.seed)
    width = program.width
    first = nn.Embedding(WORDS, width) if program.words else nn.Linear(width, width)
    blocks = [_CLASSES[block.kind](block, width) for block in program.all_blocks]
    head = nn.Linear(width, WORDS, bias=not program.tied)
    if program.tied:
        head.weight = first.weight
    last = [nn.LayerNorm(width), *([_Pool()] if program.pooled else []), head]
    if program.container == "sequential":
        model: nn.Module = nn.Sequential(first, *blocks, *last)
    elif program.container == "nested":
        model = nn.Sequential(nn.Sequential(first, nn.Sequential(*blocks)), nn.Sequential(*last))
    else:
        model = Model(program.container, first, blocks, last)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.double().train()


# Training.

_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], tuple[tuple[str, Any], ...]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}, (("weight_decay", 0.1), ("foreach", True), ("fused", True))),
    "momentum": (
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9},
        (("nesterov", True), ("dampening", 0.1), ("maximize", True), ("fused", True)),
    ),
    "adamw": (
        torch.optim.AdamW,
        {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3},
        (("amsgrad", True), ("foreach", True), ("fused", True), ("maximize", True)),
    ),
    "adam": (
        torch.optim.Adam,
        {"lr": 0.01, "eps": 1e-3},
        (("amsgrad", True), ("weight_decay", 0.1), ("fused", True), ("foreach", True)),
    ),
    "nadam": (torch.optim.NAdam, {"lr": 0.01, "eps": 1e-3}, (("decoupled_weight_decay", True), ("weight_decay", 0.1))),
    "radam": (torch.optim.RAdam, {"lr": 0.01, "eps": 1e-3}, (("weight_decay", 0.1), ("foreach", True))),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "eps": 1e-2}, (("momentum", 0.9), ("weight_decay", 0.1))),
    "adagrad": (
        torch.optim.Adagrad,
        {"lr": 0.01, "eps": 1e-3},
        (("lr_decay", 0.1), ("initial_accumulator_value", 0.1)),
    ),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.5, "eps": 1e-3}, (("weight_decay", 0.1),)),
    "adamax": (torch.optim.Adamax, {"lr": 0.01, "eps": 1e-3}, (("weight_decay", 0.1),)),
    "asgd": (torch.optim.ASGD, {"lr": 0.01}, (("t0", 1.0), ("weight_decay", 0.1))),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}, (("weight_decay", 0.1),)),
}

_LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mse": F.mse_loss,
    "cross_entropy": lambda outputs, targets: F.cross_entropy(outputs.reshape(-1, WORDS), targets.reshape(-1)),
    "huber": lambda outputs, targets: F.huber_loss(outputs, targets),
    "l1": lambda outputs, targets: (outputs - targets).abs().mean(),
}


def _is_sensible(program: Program) -> bool:
    """Return False for programs whose numbers need not be those of one process."""
    names = {name for job in program.jobs for name in job.items}
    runs_twice = program.way in ("loop: two backward passes", "loop: no_sync")
    return not (
        # Statistics are those of each micro-batch (docs/pipeline.md), and move with each pass.
        (any(block.kind == "sync_batch_norm" for block in program.blocks) and ("pipeline" in names or runs_twice))
        # It says that the optimizer treats each element by itself.
        or (program.optimizer == "adafactor" and any("whole=false" in job.strategy for job in program.jobs))
        # PyTorch's load_state_dict makes a float64 of its float32.
        or (program.optimizer == "nadam" and len(program.jobs) > 1)
        # A window of several passes is clipped once, which is what the strategy is for.
        or (program.way in _CLIPS and program.passes > 1)
        # Micro-batches of fewer samples are fewer (docs/experts.md).
        or ({"pipeline", "expert"} <= names and program.uneven)
        # It counts one pass for each step.
        or (runs_twice and program.passes > 1)
    )


_CLIPS = {"loop: clip_grad_norm_": (("clip_norm", "0.3"),)}
"""What a loop of the script's own clips."""

VOCABULARY = Vocabulary(
    framework="torch",
    kinds=tuple(_BLOCKS),
    containers=("list", "sequential", "dict", "attributes", "nested"),
    optimizers={name: options for name, (_, _, options) in _OPTIMIZERS.items()},
    whole=("adafactor",),
    losses=tuple(_LOSSES),
    ways=("step", "loop", "loop: two backward passes", "loop: no_sync", "loop: clip_grad_norm_"),
    items=(
        ("accumulate=2", "accumulate=3"),
        (
            *("zero=1", "zero=1:whole=true", "zero=1:bucket_mb=0.0002", "zero=1:shared=false", "zero=1:shard=2"),
            *("zero=2", "zero=2:whole=false", "zero=2:bucket_mb=0.0002", "zero=2:shared=false", "zero=2:shard=2"),
            *("zero=3", "zero=3:shared=false", "zero=3:shared=false:prefetch=2", "zero=3:whole=true:shared=false"),
        ),
        ("tensor=2", "tensor=2:sequence=true"),
        (
            "pipeline=2:microbatches=2",
            "pipeline=2",
            "pipeline=2:microbatches=3:schedule=gpipe",
            "pipeline=2:microbatches=4:schedule=interleaved",
            "pipeline=2:microbatches=4:schedule=zb-h1",
            "pipeline=2:microbatches=4:schedule=zbv",
            "pipeline=2:microbatches=4:schedule=zb-h2",
            "pipeline=2:microbatches=4:schedule=v-half",
            "pipeline=2:microbatches=4:schedule=dualpipev",
            "pipeline=2:microbatches=1",
        ),
        ("context=2", "context=2:exchange=gather", "context=2:exchange=ulysses"),
        ("expert=2",),
        ("activations=recompute",),
        ("clip_norm=0.3", "clip_norm=0.3:p=inf", "clip_norm=0.3:p=1"),
        ("clip_value=0.01",),
        ("data:bucket_mb=0.0002", "parameter_server=sync"),
    ),
    engines=("shm", "tcp", "gloo"),
    sensible=_is_sensible,
)


def _optimizer(program: Program, model: nn.Module) -> torch.optim.Optimizer:
    kind, options, _ = _OPTIMIZERS[program.optimizer]
    options = {**options, **dict(program.options)}
    parameters: Iterable[Any] = model.parameters()
    if program.groups:
        parameters = list(parameters)
        biases = [each for each in parameters if each.ndim < 2]
        others = [each for each in parameters if each.ndim >= 2]
        parameters = [{"params": others}, {"params": biases, "lr": 2 * options["lr"], "weight_decay": 0.0}]
    return kind(parameters, **options)


def _schedule(program: Program, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n)) if program.schedule else None


def _tensors(program: Program, update: int, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = program.data(update, turn)
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def alone(program: Program, *, pieces: int) -> Generator[float, None, Pieces]:
    """Train in this process, without unidist: yield the losses of each job, and return all parameters.

    Args:
        program: what to do.
        pieces: so many parts of a batch add up to its gradient, from the last sample to the first if there are
            several: this changes nothing but the rounding of sums.
    """
    model = make(program)
    optimizer = _optimizer(program, model)
    schedule, loss_fn = _schedule(program, optimizer), _LOSSES[program.loss]
    if any(block.kind == "sync_batch_norm" for block in program.blocks):
        pieces = min(pieces, 1)
    for update in range(program.updates * len(program.jobs)):
        total = 0.0
        for turn in range(program.passes):
            inputs, targets = _tensors(program, update, turn)
            for number in reversed(range(pieces)):
                part = program.share(number, pieces)
                loss = loss_fn(model(inputs[part]), targets[part]) * (len(inputs[part]) / len(inputs) / program.passes)
                loss.backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
        for name, value in [*program.jobs[0].items.items(), *_CLIPS.get(program.way, ())]:
            limit, _, order = value.partition(":p=")
            if name == "clip_norm":
                nn.utils.clip_grad_norm_(model.parameters(), float(limit), float(order or 2))
            elif name == "clip_value":
                nn.utils.clip_grad_value_(model.parameters(), float(limit))
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        yield total
        if (update + 1) % program.updates == 0:
            model.eval()
            with torch.no_grad():
                inputs, targets = _tensors(program, update, program.passes)
                yield float(loss_fn(model(inputs), targets))
            model.train()
    return [Piece(name, None, value.detach().numpy().copy()) for name, value in model.named_parameters()]


def on_rank(program: Program, number: int, folder: str) -> Generator[float, None, Pieces]:
    """Train one job of the program on this rank: yield the loss of each update, and return this rank's parameters.

    Args:
        program: what to do.
        number: of the job.
        folder: for checkpoints, by the numbers of the jobs that write them.
    """
    torch.set_num_threads(1)
    model = make(program)
    if number:  # what is loaded must not have been there before
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
    if any(block.kind == "sync_batch_norm" for block in program.blocks):
        model = ud.SyncBatchNorm.convert(model)
    optimizer: Any = _optimizer(program, model)
    schedule, loss_fn = _schedule(program, optimizer), _LOSSES[program.loss]
    step: Any = None
    if program.way == "step":
        step = ud.TrainStep(model, optimizer, loss_fn)
        model = step.model
    else:
        model, optimizer = ud.distribute(model, optimizer)
    if number:
        loaded = ud.load(f"{folder}/{number - 1}", model, optimizer)
        if schedule is not None:
            schedule.load_state_dict(loaded.extra["schedule"])
    mine = program.share(ud.data_rank(), ud.data_size())
    weight = (mine.stop - mine.start) * ud.data_size() / program.batch

    def mean(loss: torch.Tensor) -> float:
        return float(ud.allreduce(torch.tensor(float(loss.detach()), dtype=torch.float64), name="loss"))

    for update in range(number * program.updates, (number + 1) * program.updates):
        total = 0.0
        for turn in range(program.passes):
            inputs, targets = (each[mine] for each in _tensors(program, update, turn))
            if step is not None:
                total += float(step(inputs, targets)) / program.passes
                continue
            halves = 2 if program.way in ("loop: two backward passes", "loop: no_sync") else 1
            for half in range(halves):
                with model.no_sync() if program.way == "loop: no_sync" and not half else nullcontext():
                    loss = loss_fn(model(inputs), targets) * weight / halves
                    loss.backward()
                total += mean(loss) / program.passes
            if program.way in _CLIPS:
                ud.clip_grad_norm_(optimizer, 0.3)
            optimizer.step()
            optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        yield total
    inputs, targets = (each[mine] for each in _tensors(program, update, program.passes))
    if step is not None:
        yield float(step.evaluate(inputs, targets))
    else:
        model.eval()
        with torch.no_grad():
            yield mean(loss_fn(model(inputs), targets) * weight)
    if number + 1 < len(program.jobs):
        ud.save(f"{folder}/{number}", model, optimizer, extra={"schedule": schedule.state_dict() if schedule else {}})
    places = placements_of(model)
    pieces = []
    with gathered(model) if program.jobs[number].items.get("zero", "").startswith("3") else nullcontext():
        for path, value in model.named_parameters():
            place = places.placement(path, tuple(value.shape), dtype_of(value))
            pieces.append(Piece(place.name, place.indices, value.detach().numpy().copy()))
    return pieces
