"""The import hook: `import horovod` gives unidist, and the real Horovod stays within reach. Each test in a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from unidist.horovod_imports.path import PATH_ENTRY, with_path_entry

HOOKED = "import unidist; unidist.as_horovod()\n"
OURS = (
    "import unidist.errors; ours = unidist.errors.HorovodInternalError\n"
    "assert horovod.common.exceptions.HorovodInternalError is ours\n"
)


def python(code: str, *, path: list[Path | str] | None = None, cwd: Path | None = None) -> str:
    """Run code in a new process, with `path` in front of this process's, and return what it prints."""
    entries = [*map(str, path or ()), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entries)}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A folder with a package that stands for an installed Horovod."""
    package = tmp_path / "installed" / "horovod"
    (package / "common").mkdir(parents=True)
    (package / "torch").mkdir()
    (package / "__init__.py").write_text("from horovod.common import exceptions\nREAL = True\n")
    (package / "common" / "__init__.py").touch()
    (package / "common" / "exceptions.py").write_text("class HorovodInternalError(RuntimeError): pass\n")
    (package / "torch" / "__init__.py").touch()
    (package / "torch" / "mpi_ops.py").write_text(
        "import horovod.common.exceptions as e\nstarted = False\ndef is_initialized(): return started\n"
    )
    return package.parent


def test_imports_are_answered_by_unidist_once_it_was_asked() -> None:
    python(
        HOOKED
        + "import sys; finders = list(sys.meta_path); unidist.as_horovod(); assert sys.meta_path == finders\n"
        + "import horovod.common.exceptions\n"
        + OURS
        + "from horovod.common.exceptions import HostsUpdatedInterrupt; from unidist.elastic import state\n"
        + "assert HostsUpdatedInterrupt is state.HostsUpdatedInterrupt\n"
        + "from horovod.common.util import *; assert split_list([1, 2], 2) == [[1], [2]]\n"
        + "assert horovod.__version__ == '0.28.1' and 'common' in dir(horovod)"
    )


def test_what_there_is_not_says_what_to_use_instead() -> None:
    shown = python(
        HOOKED
        + """
import horovod.common.util
for line in (
    "from horovod import mxnet",
    "from horovod.common.util import gpu_available", "horovod.common.util.gpu_available", "import horovod.nonsense",
):
    try:
        exec(line)
    except (ImportError, AttributeError) as error:
        print(type(error).__name__, error)
print(hasattr(horovod, "nonsense"), hasattr(horovod, "__cached__"))
"""
    )
    lines = shown.splitlines()
    assert "horovod.mxnet. MXNet is retired" in lines[0]
    name = "horovod.common.util.gpu_available"
    assert lines[1] == f"ModuleNotFoundError unidist has no {name}: use {lines[1].partition('use ')[2]}"
    assert lines[2] == lines[1].replace("ModuleNotFoundError", "AttributeError")
    assert "docs/horovod.md" in lines[3]
    assert lines[4] == "False False"


def test_helpers_that_scripts_borrow_from_horovod_are_there() -> None:
    python(
        HOOKED
        + """
import os
import horovod
from horovod.common.basics import HorovodBasics
from horovod.common.util import _cache, env, gloo_built, is_version_greater_equal_than, mpi_built
from horovod.runner.common.util.env import get_env_rank_and_size
from horovod.runner.util.threads import in_thread
from unidist.horovod_imports.path import PATH_ENTRY
assert os.path.dirname(horovod.__file__) == PATH_ENTRY and os.path.isfile(horovod.__file__)
assert _cache(len)("ab") == 2 and get_env_rank_and_size() == (0, 1)
from horovod.common.util import *
assert "_cache" not in horovod.common.util.__all__ and "env" in horovod.common.util.__all__
basics = HorovodBasics()
basics.init()
assert basics._add_process_set_impl([0]) is None and basics._remove_process_set_impl(0) is None
assert basics._get_process_set_ids_and_ranks() == {0: [0]}
assert basics._process_set_rank(0) == 0 and basics._process_set_size(0) == 1
try:
    basics._process_set_size(7)
except ValueError as error:
    assert "no process set has the number 7" in str(error), error
else:
    raise AssertionError
"""
    )


def test_processes_that_this_one_starts_are_answered_too(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import multiprocessing, subprocess, sys\n"
        "def name(_):\n    import horovod.common.exceptions as e\n    return e.HorovodInternalError.__module__\n"
        "if __name__ == '__main__':\n"
        "    sys.stdout.reconfigure(line_buffering=True)\n"
        "    import unidist; unidist.as_horovod()\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool: print(pool.map(name, [0]))\n"
        "    code = 'import horovod.common.exceptions as e; print(e.HorovodInternalError.__module__)'\n"
        "    subprocess.run([sys.executable, '-c', code], check=True)\n"
    )
    assert python(
        f"import runpy; runpy.run_path({str(tmp_path / 'script.py')!r}, run_name='__main__')"
    ).splitlines() == [
        "['unidist.errors']",
        "unidist.errors",
    ]


def test_names_survive_pickling_under_horovods_module() -> None:
    python(
        HOOKED
        + "import pickle; from unidist.errors import HorovodInternalError as ours\n"
        + r"assert pickle.loads(b'chorovod.common.exceptions\nHorovodInternalError\n.') is ours"
        + "\nassert pickle.loads(pickle.dumps(ours)) is ours\n"
        + "import cloudpickle, horovod.common.util as module\n"
        + "assert cloudpickle.loads(cloudpickle.dumps(lambda: module))() is module"
    )


def test_an_installed_horovod_that_was_imported_before_is_put_aside_and_found_again(stand_in: Path) -> None:
    python(
        "import horovod; real = horovod.common.exceptions\n"
        + HOOKED
        + "import horovod, horovod.common.exceptions, sys\n"
        + OURS
        + "from unidist.horovod_imports import real_horovod, real_module\n"
        + "assert real_module('horovod.common.exceptions') is real\n"
        + "path = list(sys.path)\n"
        + "with real_horovod():\n"
        + "    import horovod; assert horovod.REAL and horovod.common.exceptions is real\n"
        + "    with real_horovod(): import horovod.torch.mpi_ops as operations\n"
        + "assert operations.e is real and real_module('horovod.torch.mpi_ops') is operations and sys.path == path\n"
        + "import horovod, horovod.common.exceptions; assert not hasattr(horovod, 'REAL')\n"
        + OURS,
        path=[stand_in],
    )


def test_the_folder_on_the_path_is_enough_and_the_engine_may_be_first(stand_in: Path) -> None:
    python(
        "from unidist.horovod_imports import real_horovod\n"
        "with real_horovod(): from horovod.common import exceptions as real\n"
        "import horovod.common.exceptions\n"
        + OURS
        + "assert real.HorovodInternalError is not horovod.common.exceptions.HorovodInternalError\n",
        path=[PATH_ENTRY, stand_in],
    )


def test_without_the_hook_nothing_is_answered_and_the_real_horovod_is_where_it_is(stand_in: Path) -> None:
    python(
        "from unidist.horovod_imports import real_horovod, real_module\n"
        "with real_horovod(): import horovod.torch.mpi_ops as operations\n"
        "import horovod; assert horovod.REAL and real_module('horovod.torch.mpi_ops') is operations",
        path=[stand_in],
    )


def test_a_horovod_that_runs_is_not_replaced(stand_in: Path) -> None:
    shown = python(
        "import horovod.torch.mpi_ops; horovod.torch.mpi_ops.started = True\n"
        "import unidist\n"
        "try: unidist.as_horovod()\n"
        "except unidist.errors.UsageError as error: print(error)\n"
        "import horovod; assert horovod.REAL",
        path=[stand_in],
    )
    assert shown.startswith("horovod.torch.init() has started Horovod itself in this process.")


def test_a_users_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')")
    shown = python("import horovod.common; print(horovod.common)", path=[PATH_ENTRY, tmp_path])
    assert shown.splitlines() == ["mine", "<module 'horovod.common' (unidist)>"]


def test_the_folder_is_put_in_front_once() -> None:
    assert with_path_entry("") == PATH_ENTRY
    assert with_path_entry(f"/a:{PATH_ENTRY}:/b") == f"{PATH_ENTRY}:/a:/b"
    assert python("import runpy; runpy.run_module('unidist.horovod_imports', run_name='__main__')") == f"{PATH_ENTRY}\n"
