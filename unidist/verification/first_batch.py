"""The first batch, computed twice: by the script's own model and by the one that the strategies have made of it.

An adapter copies the model, runs both and says what it found; which rank has anything to compare, and that all of
them raise or none, is decided here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from unidist.errors import MismatchError
from unidist.mesh import SAMPLE_AXES
from unidist.negotiation import allgather_object
from unidist.runtime import context
from unidist.strategy.interface import Plan
from unidist.verification.outputs import ToLeaf, difference
from unidist.verification.replicas import Pieces, digests

if TYPE_CHECKING:
    from unidist.runtime.context import Context

MAX_COPIED_BYTES = 512 << 20
"""Values of a larger model are not copied."""
_ATTRIBUTE = "_unidist_first_batch"

_log = logging.getLogger("unidist")


class NotComparableError(Exception):
    """Raised by a run of the unchanged model whose results mean nothing; its text says why."""


class FirstBatchCheck:
    """Compares what the distributed model computes of the first batch with what the script's own model computes.

    Args:
        runtime: whose ranks.
        plan: of the run.

    Attributes:
        computes: this rank runs the unchanged model: of ranks that have the same batch, one does.
        divided: ranks hold parts of the model, or compute parts of a sample.
        reference: on a rank that computes, a copy of the model before any strategy has changed it, with rank 0's
            values; None if it cannot be copied. The adapter sets it.
    """

    def __init__(self, runtime: Context, plan: Plan) -> None:
        mesh = plan.mesh
        same_batch = [axis for axis, size in mesh.axes.items() if size > 1 and axis not in mesh.members(SAMPLE_AXES)]
        self.computes = all(runtime.axis_rank(axis) == 0 for axis in same_batch)
        self.divided = bool(plan.model_axes or same_batch)
        self.reference: Any = None
        self._runtime = runtime
        self._plan = plan

    def attach(self, model: Any, pieces: Pieces) -> None:
        """Leave it for the first step of the distributed model, see `pending_check`."""
        self.watch(pieces)
        model.__dict__[_ATTRIBUTE] = self

    def watch(self, pieces: Pieces) -> None:
        """Remember the values that the model was distributed with: a script may load others before the first batch."""
        self._pieces = pieces
        self._digests = digests(pieces())

    def compare(
        self,
        expected: Callable[[Any], Sequence[Any]],
        found: Callable[[], Sequence[Any]],
        names: Sequence[str],
        to_leaf: ToLeaf,
        *,
        coarse: bool = False,
    ) -> None:
        """Compare now, once. Collective over all ranks.

        Args:
            expected: runs the unchanged model, which it gets, on one of the ranks that have the same batch; any
                exception means that there is nothing to compare with.
            found: runs the distributed model, on every rank.
            names: of the values that both return, for the message.
            to_leaf: see `ToLeaf`.
            coarse: the script's own model computes in a type of 16 bits, as one under `precision` does.

        Raises:
            MismatchError: on every rank; names the value and both numbers.
        """
        if not context.is_current(self._runtime):
            return  # another job has begun
        wanted, obstacle = None, ""
        if digests(self._pieces()) != self._digests:
            obstacle = "its parameters were loaded or changed after it was distributed"
        elif self.reference is not None:
            try:
                wanted = expected(self.reference)
            except NotComparableError as error:
                obstacle = str(error)
            except Exception as error:  # of the script's model, outside of its training
                obstacle = f"{type(error).__name__}: {error}"
        elif self.computes:
            obstacle = "it cannot be copied"
        self.reference = None
        obstacles = self._gather(obstacle)
        if obstacles:
            _log.info("--verify: the model's outputs are not compared: %s", next(iter(obstacles.values())))
            return

        values, text = found(), ""
        if wanted is not None:
            coarse = coarse or self._plan.precision is not None
            parts = any(strategy.returns_parts for strategy in self._plan.strategies)
            texts = (
                difference(one, other, to_leaf, coarse=coarse, parts=parts, path=name)
                for name, one, other in zip(names, wanted, values, strict=True)
            )
            try:  # this rank alone: nothing in here may be collective
                text = next((each for each in texts if each), "")
            except NotComparableError as error:
                _log.info("--verify: the model's outputs are not compared: %s", error)
        for rank, each in self._gather(text).items():
            strategies = " and ".join(strategy.name for strategy in self._plan.strategies)
            raise MismatchError(
                f"the model computes something else with {strategies} than without it: on rank {rank}, {each}. This is "
                "a defect of the strategy, or the model does what the strategy cannot divide. Train with another "
                "strategy; --verify off turns this check off."
            )

    def _gather(self, text: str) -> dict[int, str]:
        """Return the texts of all ranks that have one. Collective."""
        texts = allgather_object(self._runtime.operations(), text, name="verify")
        return {rank: each for rank, each in enumerate(texts) if each}


def first_batch_check(runtime: Context, plan: Plan, model: Any) -> FirstBatchCheck | None:
    """Return the check of a whole model in a run with these settings; None if there is nothing to compare."""
    if not runtime.settings.verify.first or runtime.is_elastic or runtime.topology.world_size == 1:
        return None
    obstacles = (strategy.output_obstacle(model, runtime) for strategy in plan.strategies)
    if obstacle := next((each for each in obstacles if each), ""):
        _log.info("--verify: the model's outputs are not compared: %s", obstacle)
        return None
    return FirstBatchCheck(runtime, plan)


def pending_check(model: Any) -> FirstBatchCheck | None:
    """Return the check that was left for the model's first step, once; None if there is none."""
    found: FirstBatchCheck | None = model.__dict__.pop(_ATTRIBUTE, None)
    return found
