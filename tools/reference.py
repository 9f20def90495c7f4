"""A hook of mkdocs: the site has the version and the repository's address, the API reference all that is public.

Pages of the core are written by hand, because their order matters; what they leave out is put at the end of the first
one. Pages of the other areas list all packages with public names. `mkdocs.yml` names this file.
"""

from __future__ import annotations

import ast
import re
from configparser import ConfigParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CORE = "reference/core.md"
AREAS = {f"reference/{area}.md": area for area in ("adapters", "plugins", "launch")}
"""Pages by their path in docs, and the folder whose packages they show."""
FACADES = ("unidist.torch", "unidist.tensorflow", "unidist.keras", "unidist.jax")


def on_config(config: Any) -> None:
    """Called by mkdocs first: take the version and the address of the repository from where they are given once."""
    version = re.findall(r'__version__ = "(.+)"', (ROOT / "unidist/_version.py").read_text(encoding="utf-8"))[0]
    config["site_name"] = f"unidist {version}"
    config["repo_url"] = url = repository((ROOT / "setup.cfg").read_text(encoding="utf-8"))
    config["repo_name"] = url and url.rpartition("/")[2]


def repository(setup: str) -> str | None:
    """Return the address of the repository that a setup.cfg gives, or None."""
    found = ConfigParser()
    found.read_string(setup)
    urls = found.get("metadata", "project_urls", fallback="")
    return dict(re.findall(r"^(\w+) *= *(\S+)$", urls, re.MULTILINE)).get("Repository")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs for each page: append what it has to show besides, as mkdocstrings wants it."""
    path = page.file.src_uri
    names: list[str] = []
    if path in AREAS:
        names = public_modules(ROOT / AREAS[path])
    elif path == CORE:
        shown = shown_by_hand(ROOT / "docs" / "reference")
        names = [name for name in public_modules(ROOT, "unidist") if name not in shown and not _is_facade(name)]
    return markdown + "".join(f"\n\n::: {name}\n" for name in names)


def public_modules(root: Path, package: str = "*") -> list[str]:
    """Return the packages that list names in `__all__`, and modules that are listed there, private ones excepted.

    Args:
        root: the folder that packages are in.
        package: the one to look into; default: all.
    """
    found = set()
    for path in root.glob(f"{package}/**/__init__.py"):
        name = ".".join(path.parent.relative_to(root).parts)
        names = _listed(path)
        if names and "._" not in name:
            found.add(name)
            found |= {f"{name}.{each}" for each in names if (path.parent / f"{each}.py").exists()}
    found |= {f"{path.parent.name}.{path.stem}" for path in root.glob(f"{package}/[a-z]*.py") if _listed(path)}
    return sorted(found)


def shown_by_hand(folder: Path) -> set[str]:
    """Return what the pages in a folder name."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in folder.glob("*.md"))
    return set(re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE))


def _is_facade(name: str) -> bool:
    return name.startswith(FACADES)


def _listed(path: Path) -> list[str]:
    """Return `__all__` of a file; empty if it has none."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []
