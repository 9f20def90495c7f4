"""The test files that a change can affect: `python -m tools.affected`.

`sources` reads the project: `mentions` what each Python file says, `declared` what setup.py, setup.cfg and plugins do.
Four rules find which files depend on which: `imports`, `strings`, `fixtures` and `words`. What none of them can see is
listed by hand, in `subjects`. All that makes a `Graph`. When in doubt, a test is affected.
"""

from __future__ import annotations

import gc
from collections.abc import Collection
from pathlib import Path

from tools.affected.fixtures import fixture_links
from tools.affected.graph import Graph
from tools.affected.imports import import_links
from tools.affected.sources import read_sources
from tools.affected.strings import string_links
from tools.affected.subjects import is_about_tests, subject_links
from tools.affected.words import word_links


def read_graph(root: Path, files: Collection[str]) -> Graph:
    """Read the project in the folder `root`.

    Args:
        root: the folder.
        files: the paths of the files of the project, relative to `root`. One that is not there counts as an empty file,
            so that what still names it depends on it.

    Raises:
        SyntaxError: in a Python file.
    """
    was_enabled = gc.isenabled()
    gc.disable()  # it would look at each of two million nodes of syntax trees again and again
    try:
        sources = read_sources(root, files)
        links = [*import_links(sources), *string_links(sources), *fixture_links(sources)]
        links += word_links(sources, links)
        links = [link for link in links if not is_about_tests(link.target)]
        return Graph.of(sources.tests, [*links, *subject_links(sources)])
    finally:
        if was_enabled:
            gc.enable()
