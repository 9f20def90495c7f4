"""Runs schedules on paper: how long they take and how much memory they hold, as figures, in a terminal, as a picture.

Imports `schedules` only. Loaded by the launcher: rich and matplotlib are imported when something is drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_pipeline.simulation.costs import Costs
    from unidist_pipeline.simulation.simulator import Simulation, simulate

__all__ = [
    "Costs", "Simulation", "simulate",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "costs": "Costs",
        "simulator": "Simulation simulate",
    },
)
