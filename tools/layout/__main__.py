"""Checks the layout of this project, or of that in another folder: python -m tools.layout [FOLDER].

Prints a line for each violation and exits with 1 if there is one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.layout.class_names import check_class_names
from tools.layout.cycles import check_cycles, check_roots
from tools.layout.directions import check_directions
from tools.layout.project import Project, read_project
from tools.layout.public_names import check_public_names
from tools.layout.sizes import check_sizes
from tools.layout.stated_imports import check_stated_imports
from tools.layout.unstable_imports import check_unstable_imports
from tools.layout.wording import check_wording

RULES: dict[str, Callable[[Project], list[str]]] = {
    "directions": check_directions,
    "cycles": check_cycles,
    "roots": check_roots,
    "public names": check_public_names,
    "class names": check_class_names,
    "sizes": check_sizes,
    "wording": check_wording,
    "stated imports": check_stated_imports,
    "unstable imports": check_unstable_imports,
}


def main(arguments: Sequence[str]) -> int:
    """Print the violations of a project, by default this one; return the exit status."""
    project = read_project(Path(arguments[0]) if arguments else Path(__file__).resolve().parents[2])
    failed = False
    for name, rule in RULES.items():
        for violation in rule(project):
            failed = True
            print(f"{violation} [{name}]")
    if not failed:
        print("layout: imports run down, names are public, folders are small, docstrings are plain and true")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
