"""The manifests are what the command prints, and the container file copies and installs what there is."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from unidist_command import Command

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "kubernetes"


def written() -> list[tuple[str, str]]:
    """Return each manifest with the arguments of the command that wrote it, as the README says."""
    text = (FOLDER / "README.md").read_text()
    (base,) = re.findall(r'W="unidist (.*)"', text)
    return [(file, f"{base} {rest}") for rest, file in re.findall(r"\$W (.*) > (\S+)", text)]


@pytest.mark.parametrize(("file", "arguments"), written())
def test_each_manifest_is_what_the_command_prints(command: Command, file: str, arguments: str) -> None:
    done = command.run(*shlex.split(arguments))
    assert done.returncode == 0, done.stderr
    assert (FOLDER / file).read_text() == done.stdout


def test_no_manifest_is_left_out() -> None:
    assert {file for file, _ in written()} == {file.name for file in FOLDER.glob("*.yaml")}


def test_the_container_file_copies_and_installs_what_there_is() -> None:
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", (FOLDER / "Dockerfile").read_text(), flags=re.MULTILINE))
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    known = {"FROM", "RUN", "COPY", "WORKDIR", "USER", "ENV", "CMD"}
    assert {name for name, _ in steps} == known
    copied = [shlex.split(rest) for name, rest in steps if name == "COPY" and not rest.startswith("--from")]
    sources = [source for words in copied for source in words[:-1]]
    assert all((ROOT / source).exists() for source in sources), sources
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    folders = parser["options"]["package_dir"].split("\n")
    assert {line.split("=")[1].split("/")[0].strip() for line in folders if "=" in line} <= set(sources)
    (extras,) = re.findall(r"whl\)\[([a-z,]+)\]", text)
    assert set(extras.split(",")) <= set(parser["options.extras_require"])
    (last,) = [rest for name, rest in steps if name == "CMD"]
    assert json.loads(last)[0] in parser["options.entry_points"]["console_scripts"]
    for _, arguments in written():
        script = shlex.split(arguments)[-1]
        assert any(source.endswith(f"/{script}") for source in sources), f"{script} is not in the image"


@pytest.mark.soak
def test_the_wheel_that_the_container_file_makes_has_the_modules_in_c(tmp_path: Path) -> None:
    text = (FOLDER / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (?!--from|examples)(.*)$", text, re.MULTILINE):
        *sources, target = line.split()
        for source in sources:
            if (ROOT / source).is_dir():
                ignored = shutil.ignore_patterns("*.so", "__pycache__")
                shutil.copytree(ROOT / source, tmp_path / target, ignore=ignored)
            else:
                shutil.copy(ROOT / source, tmp_path / target)
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "wheels", "."]
    subprocess.run(wheel, cwd=tmp_path, check=True, timeout=300)
    (file,) = (tmp_path / "wheels").glob("*.whl")
    names = zipfile.ZipFile(file).namelist()
    assert {name.split(".")[0] for name in names if name.endswith(".so")} == {
        "unidist/algorithms/_kernels",
        "unidist/engines/_shm",
        "unidist_jax/_handler",
        "unidist_parameter_server/native/_shards",
        "unidist_tcp/_tcp",
        "unidist_tensorflow/_nodes",
    }
    assert "unidist_kubernetes/place.py" in names
