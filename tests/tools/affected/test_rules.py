"""What connects files, each rule on a small made-up project."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tools.affected import read_graph
from tools.affected.graph import Graph

Write = Callable[[dict[str, str]], Path]

LAZY = """
    from typing import TYPE_CHECKING
    from unidist.lazy import lazy_names
    if TYPE_CHECKING:
        from unidist_p.a import A
        from unidist_p.b import B
    __getattr__ = lazy_names(__name__, {"a": "A", "b": "B"})
"""


def graph_of(root: Path, *deleted: str) -> Graph:
    files = (path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    return read_graph(root, {*files, *deleted})


@pytest.fixture
def chosen(write: Write) -> Callable[..., set[str]]:
    """Return `chosen(files, *changed)`, which names the test files that a change of this project affects."""

    def chosen(files: dict[str, str], *changed: str) -> set[str]:
        return {test.rpartition("/")[2] for test in graph_of(write(files)).affected(changed)}

    return chosen


Chosen = Callable[..., set[str]]


@pytest.mark.parametrize(
    "line",
    [
        "import unidist.x.m",
        "from unidist.x import m",
        "from unidist.x.m import name",
        "def test_it():\n    from unidist.x import m",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from unidist.x.m import name",
        "import importlib\nimportlib.import_module('unidist.x.m')",
        "from unidist.above import n",
        "NAMES = ['unidist.x.m']",
        "NAME = 'unidist.x.m:Name'",
        "SCRIPT = '''\n    import os\n    from unidist.x import (\n        m,\n    )\n'''",
        "SCRIPT = 'import os, unidist.x.m as y; y.run()'",
        "name = 'm'\nMODULE = f'unidist.x.{name}'",
        "COMMAND = 'from unidist.x.{name} import y'",
    ],
)
def test_an_import_or_a_name_of_a_module_depends_on_it_and_on_packages_on_the_way(chosen: Chosen, line: str) -> None:
    files = {
        "unidist/x/m.py": "name = 1",
        "unidist/other.py": "",
        "unidist/above.py": "from .x.m import name as n",
        "tests/test_a.py": line,
        "tests/test_b.py": "import unidist.other",
    }
    assert chosen(files, "unidist/x/m.py") == {"test_a.py"}
    assert chosen(files, "unidist/x/__init__.py") == {"test_a.py"}
    assert chosen(files, "unidist/other.py") == {"test_b.py"}


def test_docstrings_and_messages_of_packages_name_nothing(chosen: Chosen) -> None:
    files = {
        "unidist/m.py": "",
        "unidist/n.py": '"""See unidist.m."""\nMESSAGE = "call unidist.m.run instead"',
        "tests/test_a.py": '"""See unidist.m."""\nimport unidist.n',
    }
    assert chosen(files, "unidist/m.py") == set()


def test_a_name_of_a_lazy_package_depends_on_the_module_that_defines_it(chosen: Chosen) -> None:
    files = {
        "unidist/lazy.py": "",
        "plugins/unidist_p/__init__.py": LAZY,
        "plugins/unidist_p/a.py": "",
        "plugins/unidist_p/b.py": "",
        "tests/test_a.py": "from unidist_p import A",
        "tests/test_b.py": "def test():\n    from unidist_p.b import B",
        "tests/test_both.py": "import unidist_p",
    }
    assert chosen(files, "plugins/unidist_p/a.py") == {"test_a.py", "test_both.py"}
    assert chosen(files, "plugins/unidist_p/b.py") == {"test_b.py", "test_both.py"}
    assert chosen(files, "plugins/unidist_p/__init__.py") == {"test_a.py", "test_b.py", "test_both.py"}
    assert chosen(files, "unidist/lazy.py") == {"test_a.py", "test_b.py", "test_both.py"}


def test_any_name_of_a_lazy_facade_may_be_used(chosen: Chosen) -> None:
    files = {
        "unidist/torch/__init__.py": LAZY.replace("unidist_p", "unidist_t"),
        "adapters/unidist_t/a.py": "",
        "adapters/unidist_t/b.py": "",
        "tests/test_a.py": "from unidist.torch import A",
        "tests/test_both.py": "import unidist.torch as ud",
    }
    assert chosen(files, "adapters/unidist_t/a.py") == {"test_a.py", "test_both.py"}
    assert chosen(files, "adapters/unidist_t/b.py") == {"test_both.py"}


def test_a_package_that_imports_at_once_brings_all_along(chosen: Chosen) -> None:
    files = {
        "unidist/torch/__init__.py": "from unidist_t.a import A\nfrom unidist_t.b import B",
        "adapters/unidist_t/a.py": "",
        "adapters/unidist_t/b.py": "",
        "tests/test_a.py": "from unidist.torch import A",
    }
    assert chosen(files, "adapters/unidist_t/b.py") == {"test_a.py"}


def test_helpers_are_imported_by_their_names_alone(chosen: Chosen) -> None:
    files = {
        "unidist/m.py": "",
        "tests/helpers/pools.py": "import unidist.m",
        "tests/parallel/_zero.py": "import unidist.m",
        "tests/parallel/test_a.py": "from pools import Pool",
        "tests/parallel/test_b.py": "SCRIPT = 'import _zero; _zero.run()'",
        "tests/parallel/test_c.py": "MODULE = '_zero'",
        "tests/parallel/test_d.py": "WORD = 'other'",
        "tests/parallel/other.py": "",
        "tests/test_e.py": "WORD = 'other'",
    }
    assert chosen(files, "unidist/m.py") == {"test_a.py", "test_b.py", "test_c.py"}
    assert chosen(files, "tests/helpers/pools.py") == {"test_a.py"}
    assert chosen(files, "tests/parallel/other.py") == {"test_d.py"}


def test_a_file_that_is_a_script_too_does_not_depend_on_the_one_that_a_package_runs(chosen: Chosen) -> None:
    files = {"tests/test_a.py": "if __name__ == '__main__': main()", "tests/__main__.py": ""}
    assert chosen(files, "tests/__main__.py") == set()


def test_a_module_that_is_run_is_named_by_its_package(chosen: Chosen) -> None:
    files = {"launch/unidist_launch/__main__.py": "", "tests/test_a.py": "COMMAND = ['python', '-m', 'unidist_launch']"}
    assert chosen(files, "launch/unidist_launch/__main__.py") == {"test_a.py"}


@pytest.mark.parametrize(
    "line",
    [
        "ROOT = Path(__file__).resolve().parents[1]\nPAGE = ROOT / 'docs' / 'zero.md'",
        "PAGE = str(Path(__file__).parents[1] / 'docs/zero.md')",
        "ROOT = Path(__file__).parent.parent\nPAGES = sorted((ROOT / 'docs').glob('*.md'))",
        "def test_it(root):\n    page = root / 'docs' / 'zero.md'",
        "COMMAND = 'cat docs/zero.md'",
        "name = 'zero'\nPAGE = f'docs/{name}.md'",
    ],
)
def test_a_path_depends_on_the_file_or_on_all_in_the_folder(chosen: Chosen, line: str) -> None:
    files = {"docs/zero.md": "", "docs/sub/one.md": "", "tests/test_a.py": line, "tests/test_b.py": "x = 'zero'"}
    assert chosen(files, "docs/zero.md") == {"test_a.py"}


def test_scripts_depend_on_what_they_import_and_the_nearest_of_a_name_is_meant(chosen: Chosen) -> None:
    files = {
        "unidist/m.py": "",
        "examples/torch/digits.py": "import unidist.m",
        "examples/jax/digits.py": "",
        "tests/examples/torch/test_digits.py": "SCRIPT = 'digits.py'",
        "tests/examples/jax/test_jax.py": "SCRIPT = 'digits.py'",
        "tests/test_any.py": "SCRIPT = 'digits.py'",
        "tests/field/scripts/loop.py": "import unidist.m",
        "tests/field/test_loop.py": "SCRIPTS = Path(__file__).parent / 'scripts'\nscript = SCRIPTS / name",
    }
    assert chosen(files, "unidist/m.py") == {"test_digits.py", "test_any.py", "test_loop.py"}
    assert chosen(files, "examples/jax/digits.py") == {"test_jax.py", "test_any.py"}


def test_who_reads_a_folder_of_sources_depends_on_its_files_alone(chosen: Chosen) -> None:
    files = {
        "unidist/m.py": "",
        "plugins/unidist_p/a.py": "import unidist.m",
        "tests/test_a.py": "from pathlib import Path\nFILES = (Path(__file__).parents[1] / 'plugins').rglob('*.py')",
    }
    assert chosen(files, "plugins/unidist_p/a.py") == {"test_a.py"}
    assert chosen(files, "unidist/m.py") == set()


def test_data_of_a_package_belongs_to_the_module_that_names_it(chosen: Chosen) -> None:
    files = {
        "plugins/unidist_p/a.py": "from importlib import resources\nx = resources.files('unidist_p') / 'templates'",
        "plugins/unidist_p/templates/one/m.py.in": "from unidist.m import x",
        "unidist/m.py": "",
        "tests/test_a.py": "import unidist_p.a",
    }
    assert chosen(files, "plugins/unidist_p/templates/one/m.py.in") == {"test_a.py"}
    assert chosen(files, "unidist/m.py") == {"test_a.py"}, "what code in a template imports"


def test_a_module_in_c_depends_on_the_folders_that_setup_py_names(chosen: Chosen) -> None:
    files = {
        "setup.py": """
            KERNELS = "unidist/native"
            def extension(name, *folders):
                return Extension(name, sources=folders, include_dirs=[KERNELS])
            setup(ext_modules=[extension("unidist._k", KERNELS), extension("unidist_p._p", "plugins/unidist_p/native")])
        """,
        "unidist/native/k.h": "",
        "unidist/k.py": "from unidist import _k",
        "plugins/unidist_p/native/p.c": "",
        "tests/test_k.py": "import unidist.k",
        "tests/test_p.py": "def test():\n    from unidist_p import _p",
    }
    assert chosen(files, "plugins/unidist_p/native/p.c") == {"test_p.py"}
    assert chosen(files, "unidist/native/k.h") == {"test_k.py", "test_p.py"}


PLUGINS = {
    "setup.cfg": """
        [options.entry_points]
        console_scripts =
            unidist = unidist_launch.cli:main
        torch.backends =
            unidist = unidist_t.backend:register
        unidist =
            core = unidist.plugin
            zero = unidist_zero.plugin
            t = unidist_t.plugin
            j = unidist_j.plugin
            loop = unidist_loop.plugin
    """,
    "unidist/plugin.py": "Spec('data', 'unidist.data:Data')",
    "unidist/data.py": "",
    "unidist/manager.py": "class PluginManager: ...",
    "unidist/context.py": "from unidist.manager import PluginManager",
    "launch/unidist_launch/cli.py": "",
    "plugins/unidist_zero/plugin.py": """
        StrategySpec("zero", "unidist_zero.strategy:Zero", "a text")
        BindingSpec("zero", "torch", "unidist_zero.torch:Zero")
        BindingSpec("zero", "jax", "unidist_zero.jax:Zero")
        ObserverSpec("watch", "unidist_zero.options:observer", OPTIONS)
    """,
    "plugins/unidist_zero/strategy.py": "",
    "plugins/unidist_zero/torch.py": "",
    "plugins/unidist_zero/jax.py": "",
    "plugins/unidist_zero/options.py": "OPTIONS = ['--watch-port', 'see --other']",
    "plugins/unidist_loop/plugin.py": """
        NAME = "constant"
        SUMMARIES = {"first": "a", "second": "b"}
        Spec(name=NAME, path="unidist_loop.a:A")
        for name, text in SUMMARIES.items():
            Spec(name, f"unidist_loop.b:{name}")
        for each in ("third", "fourth"):
            Spec(each, "unidist_loop.c:C")
    """,
    "plugins/unidist_loop/a.py": "",
    "plugins/unidist_loop/b.py": "",
    "plugins/unidist_loop/c.py": "",
    "adapters/unidist_t/plugin.py": "FrameworkSpec('torch', 'unidist_t.framework:Torch')",
    "adapters/unidist_t/framework.py": "",
    "adapters/unidist_t/backend.py": "",
    "adapters/unidist_j/plugin.py": "FrameworkSpec('jax', 'unidist_j.framework:Jax', keras='unidist_j.keras')",
    "adapters/unidist_j/framework.py": "",
    "tests/test_zero.py": "LINE = 'zero=2,clip=1'",
    "tests/test_torch.py": "import torch\nLINE = 'zero=2'",
    "tests/test_keras.py": "import keras\nLINES = ['--strategy=zero']",
    "tests/test_path.py": "import torch\nPATH = 'ones/zero/data'",
    "tests/test_loop.py": "WORDS = 'constant second fourth'",
    "tests/test_option.py": "ARGUMENTS = ['--watch-port=0']",
    "tests/test_context.py": "import unidist.context",
    "tests/test_command.py": "PROGRAM = Path(sysconfig.get_path('scripts'), 'unidist')",
    "tests/test_backend.py": "import torch\nSCRIPT = 'start(\"unidist\")'",
}


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("plugins/unidist_zero/strategy.py", "zero torch keras"),
        ("plugins/unidist_zero/plugin.py", "zero torch keras option"),
        ("plugins/unidist_zero/torch.py", "zero torch"),
        ("plugins/unidist_zero/jax.py", "zero keras"),
        ("plugins/unidist_zero/options.py", "option"),
        ("adapters/unidist_t/framework.py", "torch path backend"),
        ("plugins/unidist_loop/a.py", "loop"),
        ("plugins/unidist_loop/b.py", "loop"),
        ("plugins/unidist_loop/c.py", "loop"),
        ("unidist/data.py", "context"),
        ("launch/unidist_launch/cli.py", "command"),
        ("adapters/unidist_t/backend.py", "backend"),
    ],
)
def test_names_that_plugins_register_are_words_of_tests(chosen: Chosen, changed: str, tests: str) -> None:
    assert chosen(PLUGINS, changed) == {f"test_{name}.py" for name in tests.split()}


def test_fixtures_bring_along_what_they_use_only_to_those_who_use_them(chosen: Chosen) -> None:
    files = {
        "unidist/pool.py": "",
        "unidist/leaks.py": "",
        "unidist/hook.py": "",
        "unidist/testing/fixtures.py": "import pytest, unidist.leaks\n@pytest.fixture\ndef leak_check(): ...",
        "tests/conftest.py": "pytest_plugins = ['unidist.testing.fixtures', 'pools', 'hooks']\nFOLDER = 'unidist.pool'",
        "tests/helpers/pools.py": "import pytest, unidist.pool\n@pytest.fixture(scope='session')\ndef rank_pool(): ...",
        "tests/helpers/hooks.py": "import unidist.hook\ndef pytest_configure(config): ...",
        "tests/a/conftest.py": "import pytest\n@pytest.fixture(autouse=True)\ndef _clean(leak_check): ...",
        "tests/a/test_a.py": "def test(rank_pool): ...",
        "tests/b/test_b.py": "@pytest.mark.usefixtures('rank_pool')\ndef test(): ...",
        "tests/test_c.py": "",
    }
    assert chosen(files, "unidist/pool.py") == {"test_a.py", "test_b.py"}
    assert chosen(files, "unidist/leaks.py") == {"test_a.py"}
    assert chosen(files, "tests/a/conftest.py") == {"test_a.py"}
    every = {"test_a.py", "test_b.py", "test_c.py"}
    assert chosen(files, "unidist/hook.py") == every
    assert chosen(files, "tests/helpers/pools.py") == every
    assert chosen(files, "unidist/testing/fixtures.py") == every
    assert chosen(files, "tests/conftest.py") == every


def test_every_test_of_a_package_depends_on_each_of_its_files_alone(chosen: Chosen) -> None:
    files = {
        "unidist/control/wire.py": "import unidist.errors",
        "unidist/errors.py": "",
        "plugins/unidist_p/launcher.py": "",
        "tests/unidist/control/deep/test_a.py": "",
        "tests/unidist/elastic/test_b.py": "",
        "tests/plugins/unidist_p/test_c.py": "",
    }
    assert chosen(files, "unidist/control/wire.py") == {"test_a.py"}
    assert chosen(files, "plugins/unidist_p/launcher.py") == {"test_c.py"}
    assert chosen(files, "unidist/errors.py") == set()


def test_a_deleted_file_is_still_missed_by_what_names_it(write: Write) -> None:
    root = write(
        {
            "unidist/x/m.py": "",
            "tests/test_a.py": "from unidist.x import gone",
            "tests/test_b.py": "from unidist.x.gone import name",
            "tests/test_c.py": "NAME = 'unidist.x.gone:Name'",
            "tests/test_d.py": "import _helper",
            "tests/test_e.py": "PAGE = 'docs/gone.md'",
            "tests/test_f.py": "import unidist_p.plugin",
        }
    )
    gone = ["unidist/x/gone.py", "tests/helpers/_helper.py", "docs/gone.md", "plugins/unidist_p/plugin.py"]
    graph = graph_of(root, *gone, "tests/test_gone.py")
    assert graph.affected([gone[0]]) == {"tests/test_a.py", "tests/test_b.py", "tests/test_c.py"}
    assert [sorted(graph.affected([file])) for file in gone[1:]] == [[f"tests/test_{name}.py"] for name in "def"]


def test_a_changed_test_is_affected_and_what_nobody_knows_affects_nothing(chosen: Chosen) -> None:
    files = {"tests/test_a.py": "", "tests/test_b.py": "", "tests/helpers/test_data.txt": ""}
    assert chosen(files, "tests/test_a.py") == {"test_a.py"}
    assert chosen(files, "unknown.txt", "never/was.py") == set()


def test_a_chain_of_reasons_leads_from_the_change_to_the_test(write: Write) -> None:
    graph = graph_of(
        write(
            {
                "unidist/a.py": "",
                "unidist/b.py": "from unidist.a import x",
                "tests/test_a.py": "NAME = 'unidist.b:y'",
                "tests/test_b.py": "",
            }
        )
    )
    assert graph.explain(["unidist/a.py"], "tests/test_a.py") == [
        "unidist/a.py has changed",
        "unidist/b.py imports unidist.a",
        "tests/test_a.py names unidist.b",
    ]
    assert graph.explain(["unidist/a.py"], "tests/test_b.py") == []
