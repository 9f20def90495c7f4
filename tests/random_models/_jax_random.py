"""Random functions in JAX, trained in one process and on ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _model_programs import WORDS, Program, Vocabulary
from _trained import Piece, Pieces
from jax import lax

import unidist.jax as ud

# Blocks. Each is a tree of the shapes of its parameters, made of (width, size), and a function of these parameters, the
# activations (batch, tokens, width), and the size.

Tree = Any
Shapes = Callable[[int, int], Tree]


def _dense(p: Tree, x: jax.Array) -> jax.Array:
    return x @ p["kernel"] + p["bias"]


def _layer(width: int, out: int = 0) -> Tree:
    return {"kernel": (width, out or width), "bias": (out or width,)}


def _norm(p: Tree, x: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-3) * p["scale"] + p["bias"]


def _heads(x: jax.Array, count: int) -> jax.Array:
    return x.reshape(*x.shape[:2], count, -1)


def _attention(p: Tree, x: jax.Array, n: int) -> jax.Array:
    q, k, v = (_heads(each, n) for each in jnp.split(_dense(p["qkv"], x), 3, -1))
    return _dense(p["out"], jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))


def _written_out(p: Tree, x: jax.Array, n: int) -> jax.Array:
    q, k, v = (_heads(x @ p[name], n) for name in "qkv")
    scores = jnp.einsum("bshe,bthe->bhst", q, k)
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return jnp.einsum("bhst,bthe->bshe", jax.nn.softmax(scores), v).reshape(x.shape) @ p["o"]


def _convolved(p: Tree, x: jax.Array, groups: int) -> jax.Array:
    return lax.conv_general_dilated(
        x, p["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=groups
    )


def _recurrent(p: Tree, x: jax.Array) -> jax.Array:
    def step(state: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = jnp.tanh(_dense(p["inner"], state) + _dense(p["outer"], row))
        return state, state

    return lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[1].swapaxes(0, 1)


def _gated(p: Tree, x: jax.Array) -> jax.Array:
    def step(state: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        update = jax.nn.sigmoid(_dense(p["update"], jnp.concatenate([state, row], -1)))
        state = update * state + (1 - update) * jnp.tanh(_dense(p["new"], jnp.concatenate([state, row], -1)))
        return state, state

    return lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[1].swapaxes(0, 1)


def _deep(p: Tree, x: jax.Array) -> jax.Array:
    return lax.scan(lambda y, layer: (y + jnp.tanh(_dense(layer, y)), None), x, p)[0]


@jax.custom_vjp
def _scaled(x: jax.Array, factor: jax.Array) -> jax.Array:
    return x * factor


_scaled.defvjp(lambda x, factor: (x * factor, (x, factor)), lambda kept, g: (g * kept[1], (g * kept[0]).sum()))

_BLOCKS: dict[str, tuple[Shapes, Callable[[Tree, jax.Array, int], jax.Array]]] = {
    "dense": (lambda w, n: _layer(w), lambda p, x, n: _dense(p, x)),
    "no_bias": (lambda w, n: {"kernel": (w, w)}, lambda p, x, n: x @ p["kernel"]),
    "mlp": (
        lambda w, n: {"up": _layer(w, 2 * w), "down": _layer(2 * w, w)},
        lambda p, x, n: _dense(p["down"], jax.nn.gelu(_dense(p["up"], x))),
    ),
    "swiglu": (
        lambda w, n: {"gate": (w, 5), "up": (w, 5), "down": (5, w)},
        lambda p, x, n: (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"],
    ),
    "highway": (
        lambda w, n: {"gate": _layer(w), "layer": _layer(w)},
        lambda p, x, n: x + jax.nn.sigmoid(_dense(p["gate"], x)) * (jnp.tanh(_dense(p["layer"], x)) - x),
    ),
    "squeeze_excite": (
        lambda w, n: {"down": _layer(w, 2), "up": _layer(2, w)},
        lambda p, x, n: x * jax.nn.sigmoid(_dense(p["up"], jnp.tanh(_dense(p["down"], x.mean(1, keepdims=True))))),
    ),
    "layer_norm": (lambda w, n: {"scale": (w,), "bias": (w,)}, lambda p, x, n: _norm(p, x)),
    "rms_norm": (
        lambda w, n: {"scale": (w,)},
        lambda p, x, n: x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-2) * p["scale"],
    ),
    "group_norm": (
        lambda w, n: {"scale": (w,), "bias": (w,)},
        lambda p, x, n: _norm({"scale": 1.0, "bias": 0.0}, _heads(x, n)).reshape(x.shape) * p["scale"] + p["bias"],
    ),
    "conv": (lambda w, n: {"kernel": (3, w, w)}, lambda p, x, n: _convolved(p, x, 1)),
    "grouped_conv": (lambda w, n: {"kernel": (2, w // n, w)}, _convolved),
    "depthwise": (lambda w, n: {"kernel": (3, 1, w)}, lambda p, x, n: _convolved(p, x, x.shape[-1])),
    "attention": (lambda w, n: {"qkv": _layer(w, 3 * w), "out": _layer(w)}, _attention),
    "attention_written_out": (lambda w, n: dict.fromkeys("qkvo", (w, w)), _written_out),
    "heads": (
        lambda w, n: {"up": (w, 2, 3), "down": (2, 3, w)},
        lambda p, x, n: jnp.einsum("bthe,hew->btw", jnp.tanh(jnp.einsum("btw,whe->bthe", x, p["up"])), p["down"]),
    ),
    "recurrent": (lambda w, n: {"inner": _layer(w), "outer": _layer(w)}, lambda p, x, n: _recurrent(p, x)),
    "gated": (lambda w, n: {"update": _layer(2 * w, w), "new": _layer(2 * w, w)}, lambda p, x, n: _gated(p, x)),
    "stacked": (lambda w, n: {"kernel": (2, w, w), "bias": (2, w)}, lambda p, x, n: _deep(p, x)),
    "positions": (lambda w, n: {"table": (9, w)}, lambda p, x, n: x + p["table"][: x.shape[1]]),
    "looked_up": (lambda w, n: {"table": (9, w)}, lambda p, x, n: x + p["table"][jnp.arange(x.shape[1]) * 3 % 5]),
    "sliced": (
        lambda w, n: {"table": (9, w)},
        lambda p, x, n: x + lax.dynamic_slice_in_dim(p["table"], 9 - x.shape[1], x.shape[1]),
    ),
    "scalar": (lambda w, n: (), lambda p, x, n: x * p),
    "own_gradient": (lambda w, n: {"scale": ()}, lambda p, x, n: _scaled(x, p["scale"])),
    "twice": (lambda w, n: _layer(w), lambda p, x, n: _dense(p, jnp.tanh(_dense(p, x)))),
    "transposed_twin": (lambda w, n: {"kernel": (w, 2 * w)}, lambda p, x, n: jnp.tanh(x @ p["kernel"]) @ p["kernel"].T),
    "unused": (lambda w, n: {"unused": (w,), **_layer(w)}, lambda p, x, n: _dense(p, x)),
    "empty": (lambda w, n: {"empty": (0, w), **_layer(w)}, lambda p, x, n: _dense(p, x) + p["empty"].sum()),
    "low_rank": (
        lambda w, n: {"base": (w, w), "a": (w, 2), "b": (2, w)},
        lambda p, x, n: x @ (lax.stop_gradient(p["base"]) + p["a"] @ p["b"]),
    ),
    "mixture": (
        lambda w, n: {"router": (w, 3), "parts": (3, w, w)},
        lambda p, x, n: jnp.einsum("btw,ewv,bte->btv", x, p["parts"], jax.nn.softmax(x @ p["router"])),
    ),
    "best_of_parts": (
        lambda w, n: {"router": (w, 3), "parts": (3, w, w)},
        lambda p, x, n: jnp.einsum("btw,btwv->btv", x, p["parts"][jnp.argmax(x @ p["router"], -1)]),
    ),
    "fourier": (lambda w, n: _layer(w), lambda p, x, n: jnp.fft.fft2(_dense(p, x)).real / 4),
    "cumsum": (lambda w, n: _layer(w), lambda p, x, n: jnp.cumsum(_dense(p, x), 1) / x.shape[1]),
    "einsum": (lambda w, n: {"core": (w, w, 2)}, lambda p, x, n: jnp.einsum("btw,wvr->btv", x, p["core"])),
    "outer": (
        lambda w, n: _layer(w),
        lambda p, x, n: jax.nn.softmax(jnp.einsum("btw,bsw->bts", x, x)) @ _dense(p, x),
    ),
    "shift": (lambda w, n: _layer(w), lambda p, x, n: _dense(p, jnp.roll(x, 1, 1))),
    "max_pool": (
        lambda w, n: _layer(w),
        lambda p, x, n: lax.reduce_window(_dense(p, x), -jnp.inf, lax.max, (1, 3, 1), (1, 1, 1), "SAME"),
    ),
    "sorted": (lambda w, n: _layer(w), lambda p, x, n: jnp.sort(_dense(p, x), 1)),
    "recomputed": (
        lambda w, n: {"up": _layer(w, 2 * w), "down": _layer(2 * w, w)},
        lambda p, x, n: jax.checkpoint(lambda p, x: _dense(p["down"], jnp.tanh(_dense(p["up"], x))))(p, x),
    ),
    "jitted": (lambda w, n: _layer(w), lambda p, x, n: jax.jit(lambda p, x: jnp.tanh(_dense(p, x)))(p, x)),
    "mapped": (lambda w, n: _layer(w), lambda p, x, n: jax.vmap(_dense, (None, 1), 1)(p, x)),
    "branch": (
        lambda w, n: {"layer": _layer(w), "other": _layer(w)},
        lambda p, x, n: lax.cond(x.shape[1] > 4, lambda x: _dense(p["layer"], x), lambda x: _dense(p["other"], x), x),
    ),
    "halves": (
        lambda w, n: _layer(w // 2),
        lambda p, x, n: jnp.concatenate([jnp.split(x, 2, -1)[1], _dense(p, jnp.split(x, 2, -1)[0])], -1),
    ),
    "bilinear": (
        lambda w, n: {"kernel": (w, w, w)},
        lambda p, x, n: jnp.tanh(jnp.einsum("bti,btj,ijk->btk", x, jnp.tanh(x), p["kernel"])),
    ),
}


def _compute(program: Program, params: Tree, inputs: jax.Array) -> jax.Array:
    x = params["first"]["kernel"][inputs] if program.words else _dense(params["first"], inputs)
    for number, block in enumerate(program.all_blocks):
        own = params["blocks"][f"block_{number}" if program.container == "dict" else number]
        own = jax.tree.map(lax.stop_gradient, own) if block.frozen else own

        def run(own: Tree, x: jax.Array, block: Any = block) -> jax.Array:
            found = _BLOCKS[block.kind][1](own, x, block.size)
            return x + found if block.residual else found

        x = (jax.checkpoint(run) if program.container == "recomputed" else run)(own, x)
    x = _norm(params["norm"], x)
    if program.pooled:
        x = x.mean(1)
    return x @ params["first"]["kernel"].T if program.tied else _dense(params["last"], x)


def make(program: Program) -> Tree:
    """Return the parameters, the same random values everywhere."""
    width = program.width
    blocks: Tree = [_BLOCKS[block.kind][0](width, block.size) for block in program.all_blocks]
    if program.container == "dict":
        blocks = {f"block_{number}": block for number, block in enumerate(blocks)}
    elif program.container == "tuple":
        blocks = tuple(blocks)
    shapes = {
        "first": {"kernel": (WORDS, width)} if program.words else _layer(width),
        "blocks": blocks,
        "norm": {"scale": (width,), "bias": (width,)},
        **({} if program.tied else {"last": _layer(width, WORDS)}),
    }
    rng = np.random.default_rng(program.seed)

    def is_shape(x: Tree) -> bool:
        return isinstance(x, tuple) and all(isinstance(each, int) for each in x)

    return jax.tree.map(lambda shape: jnp.asarray(0.5 * rng.standard_normal(shape)), shapes, is_leaf=is_shape)


_LOSSES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "mse": lambda outputs, targets: jnp.square(outputs - targets).mean(),
    "cross_entropy": lambda outputs, targets: optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean(),
    "huber": lambda outputs, targets: optax.huber_loss(outputs, targets).mean(),
    "l1": lambda outputs, targets: jnp.abs(outputs - targets).mean(),
}

_OPTIMIZERS: dict[str, tuple[Callable[..., Any], float, dict[str, Any], tuple[tuple[str, Any], ...]]] = {
    "sgd": (optax.sgd, 0.05, {}, ()),
    "momentum": (optax.sgd, 0.05, {"momentum": 0.9}, (("nesterov", True),)),
    "adamw": (optax.adamw, 0.01, {"weight_decay": 0.1, "eps": 1e-3}, (("nesterov", True), ("eps_root", 1e-3))),
    "adam": (optax.adam, 0.01, {"eps": 1e-3}, (("nesterov", True),)),
    "amsgrad": (optax.amsgrad, 0.01, {"eps": 1e-3}, ()),
    "radam": (optax.radam, 0.01, {"eps": 1e-3}, ()),
    "rmsprop": (optax.rmsprop, 0.01, {"eps": 1e-2}, (("momentum", 0.9),)),
    "adagrad": (optax.adagrad, 0.01, {"eps": 1e-3}, ()),
    "adadelta": (optax.adadelta, 0.5, {"eps": 1e-3}, ()),
    "adamax": (optax.adamax, 0.01, {"eps": 1e-3}, ()),
    "yogi": (optax.yogi, 0.01, {"eps": 1e-3}, ()),
    "lamb": (optax.lamb, 0.01, {"eps": 1e-3}, (("weight_decay", 0.1),)),
}


def _is_sensible(program: Program) -> bool:
    if program.way == "loop":  # which computes its loss from whole parameters
        return not any(item.startswith(_DIVIDES) for job in program.jobs for item in job.strategy.split(","))
    return not program.uneven  # `TrainStep` takes ranks as equal


_DIVIDES = ("pipeline", "tensor", "zero=3")


VOCABULARY = Vocabulary(
    framework="jax",
    kinds=tuple(_BLOCKS),
    containers=("list", "dict", "tuple", "recomputed"),
    optimizers={name: options for name, (_, _, _, options) in _OPTIMIZERS.items()},
    whole=("lamb",),
    losses=tuple(_LOSSES),
    ways=("step", "loop"),
    items=(
        ("accumulate=2", "accumulate=3"),
        (
            *("zero=1", "zero=1:whole=true", "zero=1:bucket_mb=0.0002", "zero=2", "zero=2:bucket_mb=0.0002"),
            *("zero=3", "zero=3:whole=true", "zero=3:bucket_mb=0.0002"),
        ),
        (
            "tensor=2:plan=last=column",
            "tensor=2:plan=first=column+last=row",
            "tensor=2:plan=first=vocabulary",
            "tensor=2:plan=blocks.*=column",
            "tensor=2:plan=blocks.*=row",
        ),
        ("pipeline=2:microbatches=2", "pipeline=2", "pipeline=2:microbatches=4:schedule=interleaved"),
        ("clip_norm=0.3", "clip_norm=0.3:p=inf"),
        ("clip_value=0.01",),
        ("data:bucket_mb=0.0002",),
    ),
    engines=("shm", "tcp"),
    sensible=_is_sensible,
)


def _optimizer(program: Program) -> Any:
    kind, rate, options, _ = _OPTIMIZERS[program.optimizer]
    rates: Any = (lambda count: rate / (1 + count)) if program.schedule else rate
    return kind(rates, **{**options, **dict(program.options)})


def _loss_fn(program: Program) -> Callable[..., jax.Array]:
    return lambda params, inputs, targets: _LOSSES[program.loss](_compute(program, params, inputs), targets)


def _pieces(params: Tree) -> Pieces:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [Piece(jax.tree_util.keystr(path), None, np.asarray(leaf).copy()) for path, leaf in leaves]


def alone(program: Program, *, pieces: int) -> Generator[float, None, Pieces]:
    """Train in this process, without unidist; see the module for PyTorch."""
    params, optimizer, loss_fn = make(program), _optimizer(program), _loss_fn(program)
    state = optimizer.init(params)
    compute = jax.jit(jax.value_and_grad(loss_fn))
    for update in range(program.updates * len(program.jobs)):
        total, summed = 0.0, jax.tree.map(jnp.zeros_like, params)
        for turn in range(program.passes):
            inputs, targets = program.data(update, turn)
            for number in reversed(range(pieces)):
                part = program.share(number, pieces)
                weight = len(inputs[part]) / len(inputs) / program.passes
                loss, gradients = compute(params, inputs[part], targets[part])
                summed = jax.tree.map(lambda a, b, weight=weight: a + weight * b, summed, gradients)
                total += weight * float(loss)
        for name, value in program.jobs[0].items.items():
            limit, _, order = value.partition(":p=")
            if name == "clip_norm":
                flat = jnp.concatenate([jnp.ravel(each) for each in jax.tree.leaves(summed)])
                factor = jnp.minimum(1.0, float(limit) / (jnp.linalg.norm(flat, float(order or 2)) + 1e-6))
                summed = jax.tree.map(lambda each, factor=factor: each * factor, summed)
            elif name == "clip_value":
                summed = jax.tree.map(lambda each, most=float(limit): jnp.clip(each, -most, most), summed)
        updates, state = optimizer.update(summed, state, params)
        params = optax.apply_updates(params, updates)
        yield total
        if (update + 1) % program.updates == 0:
            yield float(loss_fn(params, *program.data(update, program.passes)))
    return _pieces(params)


def on_rank(program: Program, number: int, folder: str) -> Generator[float, None, Pieces]:
    """Train one job of the program on this rank; see the module for PyTorch."""
    params, optimizer, loss_fn = make(program), _optimizer(program), _loss_fn(program)
    if number:
        params = jax.tree.map(lambda each: 0.5 * each, params)
    step: Any = None
    if program.way == "step":
        step = ud.TrainStep(loss_fn, params, optimizer)
    else:
        params, optimizer = ud.distribute(params, optimizer)
        state = optimizer.init(params)
    mine = program.share(ud.data_rank(), ud.data_size())
    weight = (mine.stop - mine.start) * ud.data_size() / program.batch
    if number:
        before = f"{folder}/{number - 1}"
        if step is not None:
            if "pipeline" in program.jobs[number].items:  # which needs the shapes of a batch
                step.evaluate(*(each[mine] for each in program.data(0, 0)))
            ud.load(before, step)
        else:
            loaded = ud.load(before, params, state, optimizer=optimizer)
            params, state = loaded.params, loaded.opt_state

    @jax.jit
    def run(params: Tree, state: Tree, inputs: jax.Array, targets: jax.Array) -> tuple[Tree, Tree, jax.Array]:
        loss, gradients = jax.value_and_grad(lambda *args: weight * loss_fn(*args))(params, inputs, targets)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    def mean(loss: jax.Array) -> float:
        return float(ud.allreduce(jnp.asarray(float(loss)), name="loss"))

    for update in range(number * program.updates, (number + 1) * program.updates):
        total = 0.0
        for turn in range(program.passes):
            batch = [each[mine] for each in program.data(update, turn)]
            if step is not None:
                total += float(step(*batch)) / program.passes
            else:
                params, state, loss = run(params, state, *batch)
                total += mean(loss) / program.passes
        yield total
    batch = [each[mine] for each in program.data(update, program.passes)]
    yield float(step.evaluate(*batch)) if step is not None else mean(weight * loss_fn(params, *batch))
    if number + 1 < len(program.jobs):
        if step is not None:
            ud.save(f"{folder}/{number}", step)
        else:
            ud.save(f"{folder}/{number}", params, state, optimizer=optimizer)
    return _pieces(params if step is None else step.params)
