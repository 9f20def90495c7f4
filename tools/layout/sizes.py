"""A folder holds as many modules as a reader can keep in view."""

from __future__ import annotations

from collections import Counter

from tools.layout.project import CORE, Project

MOST_IN_A_FOLDER = 16
MOST_IN_THE_ROOT = 20
"""For the root of the core, where the contracts lie."""


def check_sizes(project: Project) -> list[str]:
    """Return each folder with too many modules; `__init__` files and facades are not counted."""
    counts = Counter(
        module.folder for module in project.modules.values() if not module.is_package and not module.is_facade
    )
    found = []
    for folder, count in sorted(counts.items()):
        most = MOST_IN_THE_ROOT if folder == CORE else MOST_IN_A_FOLDER
        if count > most:
            found.append(f"{project.modules[folder].path}:1: {count} modules in one folder, at most {most}")
    return found
