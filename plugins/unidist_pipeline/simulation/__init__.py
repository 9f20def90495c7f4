"""Runs schedules on paper: how long they take and how much memory they hold, as figures, in a terminal, as a picture.

Imports `schedules` only. Loaded by the launcher: rich and matplotlib are imported when something is drawn.
"""

from __future__ import annotations

from unidist_pipeline.simulation.costs import Costs
from unidist_pipeline.simulation.simulator import Simulation, simulate

__all__ = ["Costs", "Simulation", "simulate"]
