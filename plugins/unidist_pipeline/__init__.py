"""The strategy `pipeline`: consecutive layers on consecutive ranks, and schedules that say who computes when.

At the root are the strategy, its interface to frameworks (`binding`), its planning and its command. `schedules` are
plain data, `simulation` runs them on paper, `execution` runs them on a rank; these three know no framework. `_torch`,
`_keras` and `_jax` divide models and compute stages. The launcher loads the root, `schedules` and `simulation`, so they
import neither numpy nor a framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_pipeline.binding import PipelineBinding
    from unidist_pipeline.strategy import Pipeline

__all__ = [
    "Pipeline", "PipelineBinding",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "binding": "PipelineBinding",
        "strategy": "Pipeline",
    },
)
