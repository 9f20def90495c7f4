"""Seeds of the ranks: different where they have different samples, equal where they train on the same ones."""

from __future__ import annotations

import importlib
import importlib.util
import random

from unidist.errors import UsageError
from unidist.runtime.context import Context

_STEP = 15_485_863  # between the seeds of two ranks: far from the seeds that people try one after another
_LIMIT = 2**32  # numpy's seeds are below it


def seed_python(seed: int, runtime: Context) -> int:
    """Seed the generators of Python and numpy, and return the seed for the framework's.

    Args:
        seed: from 0, below 2**32; the same on every rank.
        runtime: of this process.

    Returns:
        `seed` itself on the first rank of the data axis, another one on each of the others.

    Raises:
        UsageError: a seed out of range.
    """
    if not 0 <= seed < _LIMIT:
        raise UsageError(f"seed({seed}): give a number from 0, below 2**32")
    rank, _ = runtime.data_place()
    own = (seed + _STEP * rank) % _LIMIT
    random.seed(own)
    if importlib.util.find_spec("numpy") is not None:
        importlib.import_module("numpy").random.seed(own)
    return own
