"""`python -m tools.release`: whether the sources are those of a release, before `make release` builds them."""

from __future__ import annotations

import re
import sys
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOP = re.compile(r"^## \[([^]]+)\]", re.MULTILINE)


def problems(root: Path = ROOT) -> list[str]:
    """Return what keeps the sources from being a release, a line each."""
    found = []
    version = re.findall(r'__version__ = "(.+)"', (root / "unidist/_version.py").read_text("utf-8"))[0]
    if "dev" in version:
        found.append(f"unidist/_version.py says {version}, which is between releases")
    newest = TOP.findall((root / "CHANGELOG.md").read_text("utf-8"))[0]
    if newest != version:
        found.append(f"CHANGELOG.md begins with {newest}, and the version is {version}: run towncrier build")
    fragments = [path.name for path in fragments_of(root)]
    if fragments:
        found.append(f"changelog.d has changes that are not in CHANGELOG.md: {', '.join(fragments)}")
    return found


def fragments_of(root: Path = ROOT) -> list[Path]:
    """Return the files of changes that no release has taken."""
    return sorted((root / "changelog.d").glob("+*.md"))


def main() -> int:
    """Print the problems; 1 if there are any."""
    found = problems()
    for problem in found:
        print(f"release: {problem}", file=sys.stderr)
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    if not config.has_option("metadata", "project_urls"):
        print("release: note: setup.cfg gives no address of the repository (project_urls)", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
