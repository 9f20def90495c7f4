"""A GPT in JAX whose batches have rows of padding, trained with weighted losses beside one process."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from gpt_jax import HEADS, WIDTH, WORDS, apply, gpt, norm

import unidist.jax as ud
from unidist.errors import UsageError
from unidist.settings.environment import set_variables

ROWS, TOKENS, STEPS, IGNORED = 8, 8, 2, -100
PLAN = "words=vocabulary+blocks.*.qkv=qkv+blocks.*.out=row+blocks.*.up=column+blocks.*.down=row"


@dataclass(frozen=True)
class Case:
    """A training.

    Args:
        line: of strategies.
        passes: backward passes of an update.
        way: "step" for `TrainStep`, "loop" for `distribute`.
        weighted: with weights; else with a divisor that is hidden from unidist, which would find it.
    """

    line: str
    passes: int = 1
    way: str = "step"
    weighted: bool = True


def batch(step: int, turn: int, *, has_empty: bool = True) -> tuple[Any, Any]:
    """Return tokens and targets of all ranks: rows have other lengths, and the first half of some passes is padding."""
    generator = np.random.default_rng((7, step, turn))
    tokens, targets = (generator.integers(1, WORDS, (ROWS, TOKENS)) for _ in range(2))
    lengths = generator.integers(1, TOKENS + 1, ROWS)
    if has_empty and (step + turn) % 2:
        lengths[: ROWS // 2] = 0
    is_padding = np.arange(TOKENS)[None] >= lengths[:, None]
    return np.where(is_padding, 0, tokens), np.where(is_padding, IGNORED, targets)


def count(tokens: Any, targets: Any) -> Any:
    """Return the number of tokens that count."""
    del tokens
    return (targets != IGNORED).sum()


def params() -> Any:
    """Return the model, with the same values everywhere."""
    made = gpt(jax.random.key(0))
    made["places"] = 0.3 * jax.random.normal(jax.random.key(1), (TOKENS, WIDTH))
    return made


def _logits(params: Any, tokens: Any, positions: Any, attention: Any) -> Any:
    x = params["words"][tokens] + params["places"][positions]
    for block in params["blocks"]:
        x = x + attention({name: block[name] for name in ("norm", "qkv", "out")}, x)
        x = x + apply(block["down"], jax.nn.relu(apply(block["up"], norm(block, x))))
    return params["temperature"] * (x @ params["words"].T)


def losses_of(params: Any, tokens: Any, targets: Any) -> tuple[Any, Any]:
    """Return the loss of each token, and which of them count."""
    logits = _logits(params, tokens, jnp.arange(TOKENS), _attend)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
    return losses, (targets != IGNORED).astype(losses.dtype)


def loss_fn(params: Any, tokens: Any, targets: Any) -> Any:
    """Return the mean over what counts."""
    losses, kept = losses_of(params, tokens, targets)
    return (losses * kept).sum() / jnp.maximum(kept.sum(), 1)


def _hidden(params: Any, tokens: Any, targets: Any) -> Any:
    losses, kept = losses_of(params, tokens, targets)
    return (losses * kept / jnp.maximum(jnp.broadcast_to(kept.sum(), kept.shape), 1)).sum()


def _shared(params: Any, tokens: Any, targets: Any) -> Any:
    """Return the mean over what counts of a sequence that is divided."""
    positions = ud.context.positions(TOKENS)
    tokens, targets = ud.context.split((tokens, targets))

    def attention(block: Any, x: Any) -> Any:
        q, k, v = _heads(block, x)
        return apply(block["out"], ud.context.attention(q, k, v, is_causal=True).reshape(x.shape))

    logits = _logits(params, tokens, positions, attention)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
    return ud.context.mean(losses, where=targets != IGNORED)


def _attend(block: Any, x: Any) -> Any:
    """Return the output of the attention of a block; the softmax of JAX's own function is always in float32."""
    q, k, v = _heads(block, x)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(jnp.tri(TOKENS, dtype=bool), scores, -1e300), -1)
    return apply(block["out"], jnp.einsum("bnts,bsnh->btnh", weights, v).reshape(x.shape))


def _heads(block: Any, x: Any) -> Any:
    parts = jnp.split(apply(block["qkv"], norm(block, x)), 3, axis=-1)
    return (each.reshape(*each.shape[:2], HEADS, WIDTH // HEADS) for each in parts)


def optimizer() -> Any:
    """Return the optimizer."""
    return optax.sgd(0.5, momentum=0.5)


def alone(passes: int, *, divided: bool) -> tuple[Any, list[float]]:
    """Train in this process on all batches of an update at once; return parameters and losses of passes."""
    function = jax.jit(jax.value_and_grad(loss_fn))
    held, chosen = params(), optimizer()
    state, losses = chosen.init(held), list[float]()
    for step in range(STEPS):
        batches = [batch(step, turn, has_empty=not divided) for turn in range(passes)]
        losses += [float(function(held, *each)[0]) for each in batches]
        _, gradients = function(held, *(np.concatenate(parts) for parts in zip(*batches, strict=True)))
        updates, state = chosen.update(gradients, state, held)
        held = optax.apply_updates(held, updates)
    return held, losses


def errors_of(cases: Sequence[Case]) -> list[float | str]:
    """Train each; return the largest difference of a parameter or a loss from one process, or the error."""
    references: dict[tuple[int, bool], tuple[Any, list[float]]] = {}
    found: list[float | str] = []
    for case in cases:
        key = case.passes, "context" in case.line
        if key not in references:
            references[key] = alone(key[0], divided=key[1])
        try:
            with set_variables({"UNIDIST_STRATEGY": case.line, "UNIDIST_ENGINE": "shm"}):
                ud.init()
                try:
                    found.append(_error(case, *references[key]))
                finally:
                    ud.shutdown()
        except Exception:
            found.append(traceback.format_exc(limit=-4))
    return found


def _error(case: Case, wanted: Any, losses: list[float]) -> float:
    size, rank = ud.data_size(), ud.data_rank()
    mine = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    divided = "context" in case.line
    step = (_by_step if case.way == "step" else _Loop)(case)
    found = []
    for number in range(STEPS):
        for turn in range(case.passes):
            given = [each[mine] for each in batch(number, turn, has_empty=not divided)]
            found.append(float(step(*given)))
            if case.way == "step" and case.weighted and turn == 0 and case.passes > 1:
                assert abs(float(step.evaluate(*given)) - found[-1]) < 1e-12
    differences = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), step.params, wanted)
    return float(max([*jax.tree.leaves(differences), *np.abs(np.array(found) - losses)]))


def _by_step(case: Case) -> Any:
    if not case.weighted:
        return ud.TrainStep(_hidden, params(), optimizer())
    loss = _shared if "context" in case.line else loss_fn
    return ud.TrainStep(loss, params(), optimizer(), weight=count)


class _Loop:
    def __init__(self, case: Case) -> None:
        del case
        self.params, self._optimizer = ud.distribute(params(), optimizer())
        self._state = self._optimizer.init(self.params)

        def loss(params: Any, tokens: Any, targets: Any) -> Any:
            return ud.weighted(loss_fn(params, tokens, targets), count(tokens, targets))

        @jax.jit
        def step(params: Any, state: Any, *given: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(params, *given)
            updates, state = self._optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, ud.allreduce(value, name="loss")

        self._step = step

    def __call__(self, *given: Any) -> Any:
        self.params, self._state, loss = self._step(self.params, self._state, *given)
        return loss


def refused(weights: Sequence[float]) -> list[str]:
    """Give each rank's weight to a step; return what it says."""
    with set_variables({"UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            step = ud.TrainStep(loss_fn, params(), optimizer(), weight=lambda *_: weights[ud.rank()])
            return [_message(step), _message(step.evaluate)]
        finally:
            ud.shutdown()


def _message(function: Any) -> str:
    try:
        function(*batch(0, 0))
    except UsageError as error:
        return str(error)
    return ""


def of_nothing(line: str) -> tuple[float, float]:
    """Train on batches in which nothing counts; return the loss, and how far parameters have moved."""
    with set_variables({"UNIDIST_STRATEGY": line, "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            step = ud.TrainStep(loss_fn, params(), optax.sgd(1.0), weight=count)
            tokens, targets = batch(0, 0)
            loss = float(step(tokens, np.full_like(targets, IGNORED)))
            moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), step.params, params())
            return loss, max(jax.tree.leaves(moved))
        finally:
            ud.shutdown()
