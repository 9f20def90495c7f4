"""The strategy `pipeline`: consecutive layers on consecutive ranks, and schedules that say who computes when.

At the root are the strategy, its interface to frameworks (`binding`), its planning and its command. `schedules` are
plain data, `simulation` runs them on paper, `execution` runs them on a rank; these three know no framework. `_torch`
and `_keras` divide models and compute stages. The launcher loads the root, `schedules` and `simulation`, so they import
neither numpy nor a framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist_pipeline.binding import PipelineBinding

if TYPE_CHECKING:
    from unidist_pipeline.strategy import Pipeline

__all__ = ["Pipeline", "PipelineBinding", "schedules", "simulation"]


def __getattr__(name: str) -> object:
    if name == "Pipeline":
        from unidist_pipeline.strategy import Pipeline

        return Pipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
