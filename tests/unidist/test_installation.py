"""What completes an installation, and the notice that another distribution has written into the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from unidist.installation import DISTRIBUTION, check_package, damage, install_command

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("__init__.py", "_version.py", "errors.py", "installation.py", "lazy.py")
OTHER = 'from . import api\n__version__ = "0.7.2"\n'


def test_an_extra_is_installed_by_the_names_of_its_libraries() -> None:
    command = install_command("unidist-train[spark]")
    assert re.fullmatch(r"pip install 'pyspark>=3\.5' 'pyarrow>=15' '(pandas<3,>=2|pandas>=2,<3)' fsspec", command)


@pytest.mark.parametrize("requirement", ["tensorboardX", "no-such-package[extra]", "unidist-train[no-such-extra]"])
def test_what_is_not_installed_or_has_no_such_extra_is_named_itself(requirement: str) -> None:
    assert install_command(requirement).replace("'", "") == f"pip install {requirement}"


def test_nothing_tells_to_install_an_extra_from_an_index_that_may_not_have_it() -> None:
    folders = ("unidist", "adapters", "plugins", "launch", "examples", "docs")
    sources = [
        path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".in")
    ]
    assert len(sources) > 500
    # The page about installation says what will work once the index has it.
    told = re.compile(rf"pip install [^\n`]*{DISTRIBUTION}\[")
    assert [path for path in sources if path.name != "install.md" and told.search(path.read_text("utf-8"))] == []


def test_here_nothing_is_damaged() -> None:
    check_package()
    assert damage() == ""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder like site-packages with as much of unidist as `import unidist` reads, and the launcher's first file."""
    for folder, names in (("unidist", COPIED), ("launch/unidist_launch", ("__init__.py", "__main__.py"))):
        target = tmp_path / Path(folder).name
        target.mkdir()
        for name in names:
            shutil.copy(ROOT / folder / name, target)
    return tmp_path


def python(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-S", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False, cwd=site)


def install_other(site: Path) -> None:
    for path, text in {
        "unidist/__init__.py": OTHER,
        "unidist/_version.py": "",
        "unidist/api.py": "",
        "unidist-0.7.2.dist-info/METADATA": "Name: unidist\nVersion: 0.7.2\n",
    }.items():
        (site / path).parent.mkdir(exist_ok=True)
        (site / path).write_text(text)


def test_a_package_without_foreign_files_is_silent(site: Path) -> None:
    done = python(site, "-W", "error", "-c", "import unidist; print(unidist.lazy.__name__)")
    assert (done.stdout, done.stderr) == ("unidist.lazy\n", "")


def test_the_other_distribution_over_ours_is_said_where_ours_is_used(site: Path) -> None:
    install_other(site)
    assert "unidist 0.7.2 was installed into it" in python(site, "-c", "import unidist.lazy").stderr.splitlines()[-1]
    done = python(site, "-m", "unidist_launch", "doctor")
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith(f"unidist: error: {site}/unidist belongs to unidist-train, and unidist 0.7.2 was installed")
    assert "Run: pip uninstall --yes unidist unidist-train && pip install" in line


def test_ours_over_the_other_warns(site: Path) -> None:
    install_other(site)
    for name in COPIED[:2]:
        shutil.copy(ROOT / "unidist" / name, site / "unidist")
    done = python(site, "-c", "import unidist; print(unidist.lazy.__name__)")
    assert done.stdout == "unidist.lazy\n"
    assert "UserWarning" in done.stderr
    assert "The other one cannot work now" in done.stderr


def test_files_that_the_other_has_removed_are_missed(site: Path) -> None:
    for name in COPIED[:2]:
        (site / "unidist" / name).unlink()
    [line] = python(site, "-m", "unidist_launch", "doctor").stderr.splitlines()
    assert "another distribution named unidist was installed into it" in line


def test_the_other_before_an_editable_installation_is_named_with_its_folder(site: Path) -> None:
    shutil.rmtree(site / "unidist")
    install_other(site)
    [line] = python(site, "-m", "unidist_launch", "doctor").stderr.splitlines()
    assert line == (
        f"unidist: error: `import unidist` finds {site}/unidist, which is another distribution with the same import "
        "name. Run: pip uninstall --yes unidist"
    )
