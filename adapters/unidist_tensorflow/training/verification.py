"""`--verify` for Keras: the unchanged model is kept until the first batch, and both models compute the same of it.

For strategies that run the steps themselves (pipeline). Values that ranks hold in common are compared at checkpoints
alone: while a graph runs, a rank's variables are not at rest.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from unidist.checkpoint.format.interface import kept_state, placements_of
from unidist.checkpoint.format.pieces import Piece
from unidist.negotiation import allgather_object
from unidist.optim.interface import ChecksBeforeSave
from unidist.strategy.interface import Plan, RunsSteps
from unidist.verification import Leaf, ReplicaCheck, difference, digests, raise_together
from unidist_tensorflow.checkpoint.names import stable_paths
from unidist_tensorflow.checkpoint.states import ModelState
from unidist_tensorflow.memory import dtype_of

if TYPE_CHECKING:
    from unidist.runtime.context import Context

_log = logging.getLogger("unidist")

_MAX_BYTES = 512 << 20
"""A larger model is not copied."""
_ATTRIBUTE = "_unidist_output_check"

LossOfOutputs = Callable[[Any], Any]
"""From the unchanged model's outputs to the loss, without those that layers add."""


class CheckpointCheck(ChecksBeforeSave):
    """Compares the trainable variables that several ranks hold, when a checkpoint begins. Follows the updates."""

    name = "verify"

    def __init__(self, check: ReplicaCheck) -> None:
        self._check = check

    def on_step(self, step: int) -> None:
        """Do nothing."""

    def before_save(self) -> None:
        """Compare."""
        self._check.before_save()

    def state(self) -> dict[str, Any]:
        """Return nothing: a checkpoint keeps no checks."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Do nothing."""


def checkpoint_check(model: Any, runtime: Context, plan: Plan) -> CheckpointCheck | None:
    """Return the comparison of the variables that several ranks hold; None if there is none to be made."""
    verify = runtime.settings.verify
    may_differ = not all(strategy.keeps_replicas for strategy in plan.strategies)
    if not verify.first or may_differ or runtime.is_elastic or runtime.topology.world_size == 1:
        return None

    return CheckpointCheck(ReplicaCheck(runtime, lambda: _pieces_of(model), divided=True, every=verify.every))


def _pieces_of(model: Any) -> list[Piece]:
    """Return the pieces of the trainable variables that this rank holds."""
    if not getattr(model, "built", True):
        return []
    places = placements_of(model)
    trained = {id(variable) for variable in model.trainable_variables}
    names = {
        places.placement(path, tuple(variable.shape), dtype_of(variable)).name
        for path, variable in stable_paths(model.weights).items()
        if id(variable) in trained
    }
    state = kept_state(model) or ModelState(model)
    return [piece for piece in state.pieces() if piece.tensor.name in names]


class OutputCheck:
    """Compares outputs and loss of the distributed model on the first batch with those of the script's own model.

    Args:
        model: before any strategy has changed it, with rank 0's values.
        runtime: whose ranks.
        plan: of the run.
    """

    def __init__(self, model: Any, runtime: Context, plan: Plan) -> None:
        self._runtime = runtime
        self._plan = plan
        # Ranks along the axes of the model have the same batch: one of them computes it.
        self._computes = all(runtime.axis_rank(axis) == 0 for axis in plan.model_axes)
        self._reference = _copied(model) if self._computes else None

    def attach(self, model: Any) -> None:
        """Leave it for the first step, see `pending_check`."""
        self._pieces = lambda: _pieces_of(model)
        self._digests = digests(self._pieces())
        model.__dict__[_ATTRIBUTE] = self

    def before_step(self, found: Callable[[], tuple[Any, Any]], inputs: Any, loss_of: LossOfOutputs) -> None:
        """Compare, before anything is trained. Collective over all ranks.

        Args:
            found: returns outputs and loss of the distributed model on the batch, as in inference. Collective.
            inputs: of the batch.
            loss_of: see `LossOfOutputs`.

        Raises:
            MismatchError: on every rank; names the output and both values.
        """
        wanted, obstacle = None, "" if self._reference is not None or not self._computes else "it cannot be copied"
        if digests(self._pieces()) != self._digests:
            obstacle = "its variables were loaded or changed after it was distributed"
        elif self._reference is not None:
            try:
                outputs = self._reference(inputs, training=False)
                wanted = outputs, sum(self._reference.losses, loss_of(outputs))
            except Exception as error:  # of the script's model, outside of its training: nothing to compare with
                obstacle = f"{type(error).__name__}: {error}"
        self._reference = None
        obstacles = [text for text in allgather_object(self._runtime.operations(), obstacle, name="verify") if text]
        if obstacles:
            _log.info("--verify: the model's outputs are not compared: %s", obstacles[0])
            return
        text = ""
        values = found()
        if wanted is not None:
            coarse = (
                self._plan.precision is not None or keras.config.dtype_policy().compute_dtype != keras.config.floatx()
            )
            texts = (
                difference(one, other, _leaf, coarse=coarse, path=name)
                for name, one, other in zip(("the output", "the loss"), wanted, values, strict=True)
            )
            text = next((each for each in texts if each), "")
        raise_together(self._runtime, text, strategies=" and ".join(each.name for each in self._plan.strategies))


def output_check(model: Any, runtime: Context, plan: Plan) -> OutputCheck | None:
    """Return the check of a model whose steps a strategy will run; None if there is none to be made."""
    verifies = runtime.settings.verify.first and plan.find(RunsSteps) is not None and not runtime.is_elastic
    return OutputCheck(model, runtime, plan) if verifies and runtime.topology.world_size > 1 else None


def pending_check(model: Any) -> OutputCheck | None:
    """Return the check that `OutputCheck.attach` has left for the first step, once. For strategies with `RunsSteps`."""
    found: OutputCheck | None = model.__dict__.pop(_ATTRIBUTE, None)
    return found


def _copied(model: Any) -> Any:
    """Return a copy of a built model with its values, or None."""
    if not model.built or sum(int(np.prod(each.shape)) * 4 for each in model.weights) > _MAX_BYTES:
        return None
    states = random.getstate(), np.random.get_state()  # initial values that nobody needs draw from them
    try:
        made = keras.models.clone_model(model)
        made.set_weights(model.get_weights())
    except Exception as error:
        _log.debug("--verify: %s cannot be copied: %s", type(model).__name__, error)
        return None
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
    return made


def _leaf(value: Any) -> Leaf | None:
    if not (tf.is_tensor(value) or isinstance(value, np.ndarray)):
        return None
    array = np.asarray(tf.cast(value, tf.float32) if value.dtype in (tf.bfloat16, tf.float16) else value)
    return Leaf(tuple(array.shape), tf.as_dtype(value.dtype).name, array)
