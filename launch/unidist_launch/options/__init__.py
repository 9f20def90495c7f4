"""The options of `unidist launch`: their meaning, their other sources (a file, Horovod's names), and checks.

Plugins add options (`observer_options`, `plugin_options`). Imports `display` and the root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_launch.options import command_line, hosts
    from unidist_launch.options.elastic_options import ELASTIC_GROUP, only_for_elastic_jobs
    from unidist_launch.options.numbers import Real, Seconds, Whole

__all__ = [
    "ELASTIC_GROUP", "Real", "Seconds", "Whole", "command_line", "hosts", "only_for_elastic_jobs",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "": "command_line hosts",
        "elastic_options": "ELASTIC_GROUP only_for_elastic_jobs",
        "numbers": "Real Seconds Whole",
    },
)
