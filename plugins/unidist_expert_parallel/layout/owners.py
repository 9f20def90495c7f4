"""Which rank of the axis holds which experts. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping

from unidist.errors import ConfigurationError

AXIS = "expert"


def held_experts(num_experts: int, rank: int, size: int) -> range:
    """Return the experts that a rank of the axis holds: neighbours, as many on every rank."""
    each = num_experts // size
    return range(rank * each, (rank + 1) * each)


def check_division(num_experts: Mapping[str, int], size: int) -> None:
    """Raise unless the ranks of the axis divide the experts of every layer.

    Args:
        num_experts: by the path of the layer.
        size: ranks of the axis.

    Raises:
        ConfigurationError: names the first layer that cannot be divided, and the sizes that divide all.
    """
    for path, count in num_experts.items():
        if count % size:
            common = math.gcd(*num_experts.values())
            choices = ", ".join(f"expert={n}" for n in range(1, common + 1) if common % n == 0)
            raise ConfigurationError(
                f"expert={size}: the {count} experts of {path!r} do not divide over {size} ranks; choices: {choices}"
            )
