"""Docstrings in plain English: few of them have the idioms of a translation.

A bound on the share, and not on each, because every phrase has a use in which it is right. Docstrings that only refer
to another ("See `Engine.close`.") are not counted.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tools.layout.project import Project

LARGEST_SHARE = 0.03

PHRASES = (
    "alike",
    "anew",
    "comes? to (it|the|this)",
    "of (its|one's|their) own",
    "that there (are|is)",
    "what (becomes|there is) of",
    "whoever",
)
IDIOM = re.compile(rf"\b({'|'.join(PHRASES)})\b", re.IGNORECASE)
HEADLESS_TITLE = re.compile(r"(How|What|Where|Who) ")
"""A title that is a relative clause. Of modules and classes only: a function's first line is a sentence."""
REFERENCE = re.compile(r"See [^.]*(\.\w[^.]*)*\.?")


@dataclass(frozen=True)
class Docstring:
    """The docstring of a module, class or function."""

    path: str
    line: int
    text: str
    is_of_function: bool

    @property
    def is_reference(self) -> bool:
        """Whether it says no more than where to look."""
        return REFERENCE.fullmatch(self.text.strip()) is not None

    @property
    def idiom(self) -> str:
        """The first idiom in it; "" if it has none."""
        headless = None if self.is_of_function else HEADLESS_TITLE.match(self.text)
        found = headless or IDIOM.search(" ".join(self.text.split()))
        return found.group().strip() if found else ""


def check_wording(project: Project) -> list[str]:
    """Return each docstring with an idiom if they are more than the largest share of all; else nothing."""
    counted = [item for item in docstrings(project) if not item.is_reference]
    found = [item for item in counted if item.idiom]
    if len(found) <= LARGEST_SHARE * len(counted):
        return []
    return [f'{item.path}:{item.line}: "{item.idiom}": say it in plain English' for item in found]


def docstrings(project: Project) -> Iterator[Docstring]:
    """Yield every docstring of the project."""
    for module in project.modules.values():
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            text = ast.get_docstring(node)
            if text:
                is_of_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                yield Docstring(module.path, node.body[0].lineno, text, is_of_function)
