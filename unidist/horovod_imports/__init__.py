"""Answers `import horovod` with unidist, so that Horovod's scripts run unchanged.

`table` says which module of ours stands for which of Horovod's; `hook` puts it into Python's import system; the folder
`path_entry` does the same for every process that has it on its PYTHONPATH. Imports the root only: the facades are
imported when a script imports Horovod's module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.horovod_imports.hook import as_horovod, real_horovod, real_module
    from unidist.horovod_imports.path import AS_HOROVOD, PATH_ENTRY, is_asked_for, with_path_entry

__all__ = [
    "AS_HOROVOD", "PATH_ENTRY", "as_horovod", "is_asked_for", "real_horovod", "real_module", "with_path_entry",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "hook": "as_horovod real_horovod real_module",
        "path": "AS_HOROVOD PATH_ENTRY is_asked_for with_path_entry",
    },
)
