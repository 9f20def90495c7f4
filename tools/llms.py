"""Write `llms.txt`: the pages of the documentation, with what its lists say of each, for programs that write scripts.

    python -m tools.llms

The form is that of https://llmstxt.org. A test holds the file to them, so run this when such a list or the
navigation of `mkdocs.yml` changes.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "llms.txt"
_LEFT_OUT = ("reference/", "decisions/")
"""Folders of pages that are made from the sources, or are for people who change unidist: one link each."""
_ENTRY = re.compile(r'^(?P<indent> *)- (?:"?(?P<title>[^:"]+)"?:)? ?(?P<path>[\w/-]+\.md)?$')

_BEGIN = """\
# unidist

> Distributed training for PyTorch, TensorFlow, Keras 3 and JAX: a script of one process runs on many,
> with the strategy (ZeRO, pipeline, tensor, context and more), the engine and the number of processes
> chosen on the command line.

```python
import unidist.torch as ud  # or unidist.keras, unidist.tensorflow, unidist.jax

ud.init()
loader = ud.shard(loader)
step = ud.TrainStep(model, optimizer, loss_fn)  # or: model, optimizer = ud.distribute(model, optimizer)
for inputs, targets in loader:
    loss = step(inputs, targets)
```

    unidist launch -np 2 --strategy zero=2,accumulate=4 train.py

- Every rank makes the same calls in the same order: nothing collective is inside `if ud.rank() == 0`.
- Call `ud.init()` first. Losses and gradients are means over the samples of all ranks.
- The package of this project is `unidist-train`; `pip install unidist` is another project.
"""


def text() -> str:
    """Return what the file is to hold."""
    lines = [_BEGIN]
    section = ""
    listed = _listed()
    for title, path, is_nested in _navigation():
        if path is None:
            section = title
            continue
        if path.startswith(_LEFT_OUT) and not path.endswith("README.md"):
            continue
        heading = section if is_nested else "Pages"
        if f"\n## {heading}\n" not in "\n".join(lines):
            lines.append(f"\n## {heading}\n")
        about = f": {listed[path]}" if path in listed else ""
        lines.append(f"- [{title or 'All of them'}](docs/{path}){about}")
    return "\n".join(lines) + "\n"


def _navigation() -> list[tuple[str, str | None, bool]]:
    """Return the entries of `mkdocs.yml`: the title, the page (None: a section begins), whether it is in a section."""
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    found = [match for match in map(_ENTRY.match, listed.splitlines()) if match]
    return [(each["title"] or "", each["path"], len(each["indent"]) > 2) for each in found]


def _listed() -> dict[str, str]:
    """Return what the lists of pages in the documentation say of each, by its path."""
    found = {}
    for folder in ("", "how-to/", "decisions/"):
        content = (ROOT / "docs" / folder / "README.md").read_text(encoding="utf-8")
        entries = re.findall(r"^- \[[^]]+\]\(([\w/-]+\.md)\): (.*(?:\n  .*)*)", content, re.MULTILINE)
        found.update({folder + path: " ".join(about.split()) for path, about in entries})
    return found


if __name__ == "__main__":
    OUT.write_text(text(), encoding="utf-8")
