"""`--verify` for JAX: what ranks hold in common is compared between the first steps, and at checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from unidist.verification import CheckpointCheck, ReplicaCheck, replica_check
from unidist_jax.checkpoint import Training, kept_training

if TYPE_CHECKING:
    from unidist.runtime.context import Context
    from unidist.strategy.interface import Plan


def step_check(training: Training, runtime: Context, plan: Plan, *, shares_state: bool) -> ReplicaCheck | None:
    """Return the comparison of what the ranks of one training hold, which checkpoints make; None if there is none.

    Args:
        training: whose parameters; its optimizer is bound.
        runtime: whose ranks.
        plan: of the run.
        shares_state: each rank has whole parameters and the whole state, of which scalars (counts, learning rates) are
            equal, too.
    """
    check = replica_check(
        runtime,
        plan,
        lambda: kept_training(training)[0].kept_state().pieces(),
        holds_parts=not shares_state,
        more=lambda: _digests_of_scalars(training.opt_state) if shares_state else {},
    )
    if check is not None:
        training.optimizer.binding.distributed_update.follow(CheckpointCheck(check))
    return check


def _digests_of_scalars(opt_state: Any) -> Mapping[str, bytes]:
    leaves = jax.tree_util.tree_flatten_with_path(opt_state)[0]
    return {
        f"the optimizer's {jax.tree_util.keystr(path, simple=True, separator='/')!r}": hashlib.blake2b(
            np.asarray(leaf).tobytes(), digest_size=8
        ).digest()
        for path, leaf in leaves
        if np.ndim(leaf) == 0
    }
