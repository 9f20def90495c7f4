"""What users can name is in the documentation, and its links lead somewhere."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import textwrap
from pathlib import Path

import pytest

from unidist.runtime import hookspecs
from unidist.settings.environment import VARIABLES
from unidist_launch import command_options, command_spec, observers
from unidist_pipeline.schedules import registration
from unidist_tensor_parallel import library_roles
from unidist_torch import file_names
from unidist_track import tracker

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path
    for folder in (ROOT, ROOT / "docs", ROOT / "examples")
    for path in folder.glob("*.md" if folder == ROOT else "**/*.md")
)

MAX_LINE = 100
MAX_CELL = 120


def words(page: str) -> set[str]:
    """Return every name that a page shows as code, alone or in a longer piece of code."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```.*?```", text, re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return set(re.findall(r"\w+", " ".join(blocks + inline)))


def public_names() -> list[str]:
    """Return `__all__` of the PyTorch facade without importing torch."""
    tree = ast.parse((ROOT / "unidist" / "torch" / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    raise AssertionError("unidist.torch has no __all__")


HOOKS = [
    (name, list(inspect.signature(function).parameters))
    for module in (
        hookspecs,
        command_options,
        command_spec,
        observers,
        registration,
        tracker,
        library_roles,
        file_names,
    )
    for name, function in vars(module).items()
    if name.startswith("unidist_")
]


@pytest.mark.parametrize(("name", "arguments"), HOOKS)
def test_every_hook_is_in_the_plugin_guide_with_its_arguments(name: str, arguments: list[str]) -> None:
    text = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    assert f"| `{name}({', '.join(arguments)})` |" in text


def test_the_plugin_guide_names_no_hook_that_does_not_exist() -> None:
    named = {word for word in words("plugins.md") if re.match("unidist_(register|add)_", word)}
    assert named <= {name for name, _ in HOOKS}


@pytest.mark.parametrize("name", VARIABLES)
def test_every_environment_variable_is_documented(name: str) -> None:
    assert name in words("environment.md")


def test_no_other_variable_is_documented() -> None:
    assert {word for word in words("environment.md") if word.startswith("UNIDIST_")} <= set(VARIABLES)


@pytest.mark.parametrize("name", public_names())
def test_every_public_name_of_the_torch_facade_is_documented(name: str) -> None:
    assert name in words("torch.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    named = set(re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    docs = ROOT / "docs"
    assert named == {str(page.relative_to(docs)) for page in docs.rglob("*.md")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_source_files_that_a_page_names_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    roots = ("unidist", "adapters", "plugins", "launch", "tests", "tools", "examples", "benchmarks", "docs")
    for path in re.findall(rf"`((?:{'|'.join(roots)})/[\w./-]+)`", text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_wrap_and_no_table_cell_holds_a_paragraph(page: Path) -> None:
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        cells = re.split(r"(?<!\\)\|", line.strip()) if line.lstrip().startswith("|") else []
        longest = max((len(cell.strip()) for cell in cells), default=0)
        assert longest <= MAX_CELL, f"{page.name}:{number}: a cell of {longest} characters"
        assert cells or len(line) <= MAX_LINE, f"{page.name}:{number}: {len(line)} characters"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_python_code_imports_from_unidist_exists(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        for module, names in re.findall(r"^ *from (unidist[\w.]*) import ([\w, ]+)$", block, re.MULTILINE):
            library = {"unidist.ray": "ray", "unidist.spark": "pyspark"}.get(module)
            if library is not None:
                pytest.importorskip(library, reason=f"{library} is not installed; `make test-integrations` has it")
            loaded = importlib.import_module(module)
            for name in names.split(", "):
                listed = name in getattr(loaded, "__all__", ())  # it may need a library that is not installed
                assert listed or hasattr(loaded, name), f"{page.name}: {module}.{name}"


_YOURS = """
GPT LengthBuckets MyDataset MyModel Net RotateHalf Trainer accuracy accuracy_of ask_who_goes_on batches config
criterion cross_entropy dataset decode epoch first folder ids lengths loader loss loss_fn loss_of main mask
matrices micro_batches model names net optimizer other out pad params plain_model projected rest resumes rows
scale scaler second step steps train train_images train_labels update variables weights
"""
YOURS = set(_YOURS.split())
"""Names that stand for what the reader's script has: models, data, functions. What a library has is imported."""


def python_blocks(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^( *)```python\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for _, block in found]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if python_blocks(page)], ids=lambda page: str(page.relative_to(ROOT))
)
def test_code_compiles_and_imports_what_it_uses(page: Path) -> None:
    blocks = python_blocks(page)
    for block in blocks:
        compile(block, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    code = "\n".join(blocks)
    assert undefined(code) <= YOURS, "define it on the page, or import it"


def undefined(code: str) -> set[str]:
    """Return the names that code uses and defines nowhere, in whatever order."""
    tree = ast.parse(code)
    names = {node.id: None for node in ast.walk(tree) if isinstance(node, ast.Name)}
    defined = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
    return names.keys() - defined - set(dir(builtins))


def test_names_that_nothing_defines_are_found() -> None:
    code = "import a.b\nfrom c import d as e\ndef f(g):\n    return [h + Path(e) for h in g]\nf(a)\n"
    assert undefined(code) == {"Path"}


SOURCES = sorted(path for area in ("unidist", "adapters", "plugins", "launch") for path in (ROOT / area).rglob("*.py"))


def test_indented_code_in_docstrings_compiles() -> None:
    # Code whose lines a tool that wraps text has joined shows as nonsense in `help` and in the reference.
    wrong = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                for block in indented_code(ast.get_docstring(node) or ""):
                    try:
                        compile(block, path.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                    except SyntaxError:
                        wrong.append(f"{path.relative_to(ROOT)}: {block}")
    assert wrong == []


def indented_code(docstring: str) -> list[str]:
    """Return the blocks that are indented by four spaces after a blank line and look like Python, not like a table."""
    blocks = re.findall(r"(?:\A|\n\n)((?:    .*\n?|\n(?=    ))+)", docstring + "\n")
    return [
        textwrap.dedent(block)
        for block in blocks
        if re.search(r"^    [\w., ]+ = \w|^    (from|import|def|with) |\(.*\)$", block, re.M)
        and not re.search(r"\S {3,}\S", block)  # columns of a table
    ]


def test_every_make_target_that_the_readme_names_exists() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8") + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:`|^    |&& )make ([a-z]+)", text, re.MULTILINE))
    targets = set(re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"demo", "test", "check", "bench"} <= named <= targets
