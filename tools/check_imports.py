"""Checks who imports whom: launch -> core <- adapters <- plugins' bindings, and no framework in the core.

    python tools/check_imports.py

Prints one line per violation and exits with 1 if there is one. Reads the sources only; nothing is imported.
"""

from __future__ import annotations

import ast
import configparser
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FRAMEWORKS = frozenset(("torch", "tensorflow", "keras", "jax", "horovod", "mpi4py"))
HEAVY = FRAMEWORKS | {"numpy"}
FACADES = frozenset(("torch.py", "tensorflow", "keras"))
"""Modules and packages of the core that re-export what an adapter has, and do nothing else."""
ROOTS = ("unidist", "adapters", "plugins", "launch")


@dataclass(frozen=True)
class Import:
    """One import statement: the top-level package, the line, and whether it runs when the module is imported."""

    package: str
    line: int
    at_import: bool


def check(root: Path) -> list[str]:
    """Return the violations in the project at `root`, one line each, as "file:line: text"."""
    entry_modules = plugin_modules(root)
    found = []
    for area in ROOTS:
        for path in sorted((root / area).rglob("*.py")):
            parts = path.relative_to(root).parts
            module = ".".join(parts if area == "unidist" else parts[1:]).removesuffix(".py")
            for item in imports(ast.parse(path.read_text(encoding="utf-8"))):
                reason = forbidden(parts, item, is_plugin_module=module in entry_modules)
                if reason:
                    found.append(f"{'/'.join(parts)}:{item.line}: imports {item.package}: {reason}")
    return found


def forbidden(parts: tuple[str, ...], item: Import, *, is_plugin_module: bool) -> str:
    """Return why the file at `parts` (relative to the project) must not have this import; "" if it may."""
    area, package = parts[0], item.package
    ours = package.startswith("unidist_")
    if is_plugin_module and item.at_import and package in HEAVY:
        return "a module named by an entry point is loaded in every process; import this where it is used"
    if area == "unidist" and parts[1] not in FACADES:
        if package in FRAMEWORKS:
            return "the core knows no framework; go through unidist/framework.py"
        if ours:
            return "the core knows no plugin; let it register what the core shall find"
    if area == "launch" and package in HEAVY:
        return "the launcher starts in milliseconds; leave this to the ranks"
    if area != "launch" and package == "unidist_launch":
        return "nothing imports the launcher"
    if area == "adapters" and ours and package != parts[1]:
        return "adapters know the core alone"
    return ""


def imports(tree: ast.Module) -> Iterator[Import]:
    """Yield every absolute import of a module, those inside functions and under TYPE_CHECKING included."""
    deferred = set[ast.AST]()
    for node in ast.walk(tree):
        is_type_checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if is_type_checking or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            deferred.update(ast.walk(node))
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in names:
            assert isinstance(node, ast.Import | ast.ImportFrom)
            yield Import(name.partition(".")[0], node.lineno, node not in deferred)


def plugin_modules(root: Path) -> frozenset[str]:
    """Return the modules that setup.cfg names as entry points of the group `unidist`."""
    config = configparser.ConfigParser()
    config.read(root / "setup.cfg", encoding="utf-8")
    lines = config.get("options.entry_points", "unidist", fallback="").strip().splitlines()
    return frozenset(line.partition("=")[2].strip() for line in lines)


def main() -> int:
    """Print the violations of this project."""
    found = check(Path(__file__).resolve().parents[1])
    print("\n".join(found) if found else "imports: dependencies point one way")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
