"""The status of a running job: a web page, `unidist top`, and figures for Prometheus.

`model` is the status itself, which other observers of jobs can use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_status.model import JobStatus, title_of

__all__ = [
    "JobStatus", "title_of",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "model": "JobStatus title_of",
    },
)
