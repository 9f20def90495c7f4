"""`unidist build horovod`, with a stand-in for pip and the compiler; the real build is what `make test` begins with."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
import tarfile
import time
from datetime import timedelta
from pathlib import Path

import pytest
from unidist_command import Command

from unidist.errors import ConfigurationError
from unidist_launch.horovod_build import build as horovod_build
from unidist_launch.horovod_build import sources as horovod_sources
from unidist_launch.horovod_build.build import Wanted

LIMIT = timedelta(seconds=60)


# What is wanted


@pytest.mark.parametrize(
    ("wanted", "version"),
    [
        (Wanted("2.13.0+cpu", "2.21.0"), "0.28.1+torch2.13.0.tensorflow2.21.0"),
        (Wanted("2.13.0", ""), "0.28.1+torch2.13.0"),
        (Wanted("", "2.21.0", mpi=True), "0.28.1+tensorflow2.21.0.mpi"),
        (Wanted("2.13.0", "2.21.0", mpi=True, nccl=True), "0.28.1+torch2.13.0.tensorflow2.21.0.mpi.nccl"),
    ],
)
def test_the_version_says_what_the_wheel_fits(wanted: Wanted, version: str) -> None:
    assert wanted.version == version
    assert wanted.is_met_by(version)


@pytest.mark.parametrize(
    ("installed", "met"),
    [
        ("0.28.1+torch2.13.0.tensorflow2.21.0", True),
        ("0.28.1+torch2.13.0.tensorflow2.21.0.mpi", True),
        ("0.28.1+torch2.13.0", False),
        ("0.28.1+torch2.13.1.tensorflow2.21.0", False),
        ("0.28.1+torch2.13.0.tensorflow2.20.0", False),
        ("0.28.0+torch2.13.0.tensorflow2.21.0", False),
        ("0.28.1", False),
        ("", False),
    ],
)
def test_an_installed_version_fits_if_its_frameworks_do(installed: str, met: bool) -> None:
    assert Wanted("2.13.0+cpu", "2.21.0").is_met_by(installed) is met


def test_a_build_without_mpi_does_not_meet_one_with_it() -> None:
    assert not Wanted("2.13.0", "", mpi=True).is_met_by("0.28.1+torch2.13.0")


def test_the_compilation_is_told_what_is_there_and_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    env = Wanted("2.13.0", "", nccl=True).environment("/tools", "/tools/cmake")
    expected = {
        "PYTHONPATH": "/tools",
        "HOROVOD_CMAKE": "/tools/cmake",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_LOCAL_VERSION": "torch2.13.0.nccl",
    }
    assert expected.items() <= env.items()
    assert env["MAKEFLAGS"].startswith("-j")
    monkeypatch.setenv("MAKEFLAGS", "-j7")
    assert Wanted("", "2.21.0", mpi=True).environment("", "")["MAKEFLAGS"] == "-j7"
    assert "HOROVOD_GPU_OPERATIONS" not in Wanted("", "2.21.0", mpi=True).environment("", "")


def test_without_torch_it_builds_for_tensorflow_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"tensorflow-cpu": "2.21.0"}
    monkeypatch.setattr(horovod_build, "_installed", lambda name: versions.get(name, ""))
    wanted = Wanted.here()
    assert wanted.version == "0.28.1+tensorflow2.21.0"
    assert wanted.frameworks == "TensorFlow 2.21.0"
    env = wanted.environment("/tools", "/tools/cmake")
    assert {"HOROVOD_WITH_TENSORFLOW": "1", "HOROVOD_WITHOUT_PYTORCH": "1"}.items() <= env.items()
    assert not {"HOROVOD_WITHOUT_TENSORFLOW", "HOROVOD_WITH_PYTORCH"} & env.keys()


# The changes of the sources


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """What the changes look for, with other text around it."""
    folder = tmp_path / "horovod-0.28.1"
    for change in horovod_sources.CHANGES:
        path = folder / change.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"before\n{change.old}\nafter\n")
    return folder


def test_the_sources_are_changed_where_they_must(sources: Path) -> None:
    horovod_sources.apply(sources)
    assert "CMAKE_CXX_STANDARD 17" in (sources / "CMakeLists.txt").read_text()
    assert "CMAKE_CXX_STANDARD 17" in (sources / "horovod/torch/CMakeLists.txt").read_text()
    assert "xla_mpi_ops" not in (sources / "horovod/tensorflow/CMakeLists.txt").read_text()
    for change in horovod_sources.CHANGES:
        text = (sources / change.file).read_text()
        assert text.startswith("before\n")
        assert text.endswith("after\n")


@pytest.mark.parametrize("content", ["nothing of it", None, "twice"])
def test_other_sources_are_refused_and_left_as_they_are(sources: Path, content: str | None) -> None:
    victim = sources / "horovod/torch/CMakeLists.txt"
    before = (sources / "CMakeLists.txt").read_text()
    if content is None:
        victim.unlink()
    else:
        victim.write_text(victim.read_text() * 2 if content == "twice" else content)
    with pytest.raises(ConfigurationError, match=r"horovod/torch/CMakeLists.txt"):
        horovod_sources.apply(sources)
    assert (sources / "CMakeLists.txt").read_text() == before


# The whole, with a stand-in for pip

_PIP = """
import os, shutil, subprocess, sys
from pathlib import Path
what, *arguments = sys.argv[1:]
Path(os.environ["CALLS"]).open("a").write(" ".join([what, *arguments]) + "\\n")
if what == "install" and "--target" in arguments:
    folder = Path(arguments[arguments.index("--target") + 1])
    if "cmake<4" in arguments:
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "cmake").write_text("#!/bin/sh\\n")
        (folder / "bin" / "cmake").chmod(0o755)
elif what == "download":
    if "OFFLINE" in os.environ:
        sys.exit("ERROR: Could not find a version that satisfies the requirement horovod==0.28.1")
    shutil.copy(os.environ["SDIST"], ".")
elif what == "wheel":
    print("[ 50%] Building CXX object", flush=True)
    subprocess.run(["c++", "horovod.cc"], check=True)
    folder = Path(arguments[arguments.index("--wheel-dir") + 1])
    folder.mkdir()
    import sysconfig
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    local = os.environ["HOROVOD_LOCAL_VERSION"]
    (folder / f"horovod-0.28.1+{local}-{tag}-{tag}-{platform}.whl").write_text("a wheel")
"""


class FakeBuild:
    """The builder with a pip of our own, and a compiler that does as it is told."""

    def __init__(self, folder: Path, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache = folder / "cache"
        self.calls = folder / "calls"
        self._bin = folder / "bin"
        self._bin.mkdir()
        pip = folder / "pip.py"
        pip.write_text(_PIP)
        with tarfile.open(folder / "horovod-0.28.1.tar.gz", "w:gz") as archive:
            archive.add(sources, "horovod-0.28.1")
        monkeypatch.setenv("SDIST", str(folder / "horovod-0.28.1.tar.gz"))
        monkeypatch.setenv("CALLS", str(self.calls))
        monkeypatch.setenv("PATH", f"{self._bin}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.delenv("HOROVOD_CMAKE", raising=False)
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(horovod_build, "_PIP", [sys.executable, str(pip)])
        self.program("c++", "exit 0")
        self.program("make", "exit 0")

    def program(self, name: str, script: str) -> None:
        """Put a program on the PATH."""
        path = self._bin / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def run(self, *, force: bool = False) -> None:
        """Make the wheel."""
        wanted = Wanted("2.13.0", "2.21.0")
        horovod_build.run(wanted, force=force, wheel_only=True, cache_dir=self.cache, timeout=LIMIT)

    @property
    def num_compilations(self) -> int:
        """How often the sources were compiled."""
        return sum(line.startswith("wheel") for line in self.calls.read_text().splitlines())


@pytest.fixture
def fake(tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch) -> FakeBuild:
    """A builder for tests."""
    return FakeBuild(tmp_path, sources, monkeypatch)


def test_a_wheel_is_built_once_and_comes_from_the_cache_then(
    fake: FakeBuild, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.run()
    out, err = capsys.readouterr()
    wheel = Path(out.strip())
    assert wheel.read_text() == "a wheel"
    assert wheel.name.startswith("horovod-0.28.1+torch2.13.0.tensorflow2.21.0-cp3")
    assert "about 9 minutes on 2 cores" in err
    assert str(fake.cache / "logs") in err
    fake.run()
    assert capsys.readouterr().out == out
    assert fake.num_compilations == 1
    fake.run(force=True)
    assert fake.num_compilations == 2
    assert [path for path in wheel.parent.iterdir() if path != wheel and path.name != ".lock"] == []


def test_another_revision_of_the_builder_builds_anew(fake: FakeBuild, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.run()
    monkeypatch.setattr(horovod_build, "REVISION", horovod_build.REVISION + 1)
    fake.run()
    assert fake.num_compilations == 2


def test_the_build_tools_never_go_into_the_environment(fake: FakeBuild) -> None:
    fake.run()
    installs = [line for line in fake.calls.read_text().splitlines() if line.startswith("install")]
    assert len(installs) == 2
    assert all("--target" in line for line in installs)


def test_a_failed_compilation_is_one_error_with_the_log_and_its_lines(fake: FakeBuild) -> None:
    fake.program("c++", r"printf 'mpi_ops.cc:7:1: \377 error: no such thing\n' >&2; echo other; exit 1")
    with pytest.raises(ConfigurationError, match="does not compile") as caught:
        fake.run()
    text = str(caught.value)
    assert "mpi_ops.cc:7:1: \N{REPLACEMENT CHARACTER} error: no such thing" in text
    log = Path(text.partition("The log is ")[2].partition(";")[0])
    assert b"\377 error" in log.read_bytes()
    assert not list(fake.cache.rglob("*.whl"))


def test_without_a_network_the_error_says_so(fake: FakeBuild, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLINE", "1")
    with pytest.raises(ConfigurationError, match="network") as caught:
        fake.run()
    assert "Could not find a version" in str(caught.value)


def test_a_cmake_of_the_users_is_taken_if_it_is_there(fake: FakeBuild, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_CMAKE", "/no/such/cmake")
    with pytest.raises(ConfigurationError, match="/no/such/cmake"):
        fake.run()
    assert "cmake<4" not in fake.calls.read_text()


def test_sources_of_another_version_are_not_built(fake: FakeBuild, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "CMakeLists.txt").write_text("other")
    with tarfile.open(tmp_path / "horovod-0.28.1.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "other", "horovod-0.28.1")
    with pytest.raises(ConfigurationError, match="not the sources"):
        fake.run()
    assert fake.num_compilations == 0


@pytest.mark.parametrize(("option", "program"), [("--wheel-only", "c++"), ("--mpi", "mpicxx"), ("--nccl", "nvcc")])
def test_a_missing_program_is_named(command: Command, option: str, program: str) -> None:
    folder = command.folder / "bin"
    folder.mkdir()
    for name in {"c++", "make", "mpicxx"} - {program}:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    env = {"PATH": str(folder), "HOROVOD_CUDA_HOME": "", "CUDA_HOME": "", "CXX": "c++"}
    done = command.run_here("build", "horovod", "--force", option, "--cache-dir", "cache", env=env)
    assert done.returncode == 2
    assert f"{program} is not on the PATH" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_framework_there_is_nothing_to_build_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="neither PyTorch nor TensorFlow"):
        horovod_build.run(Wanted("", ""), force=False, wheel_only=False, cache_dir=tmp_path, timeout=LIMIT)


def test_a_cache_that_cannot_be_written_is_an_error_that_says_what_to_do(command: Command) -> None:
    (command.folder / "file").write_text("")
    done = command.run("build", "horovod", "--force", "--cache-dir", "file/cache")
    assert done.returncode == 2
    assert "--cache-dir" in done.stderr


def test_a_second_call_is_instant(command: Command) -> None:
    wanted = Wanted.here()
    try:
        installed = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("Horovod is not installed; `unidist build horovod` does it")
    if not wanted.is_met_by(installed):
        pytest.skip(f"Horovod {installed} is not {wanted.version}; `unidist build horovod` mends it")
    begin = time.monotonic()
    done = command.run("build", "horovod")
    seconds = time.monotonic() - begin
    assert done.returncode == 0
    assert f"Horovod {installed} is installed" in done.stdout
    assert seconds < 30  # building takes minutes


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_build_leaves_no_compiler_running(command: Command, number: signal.Signals) -> None:
    name = command.script(
        """
        from datetime import timedelta
        from pathlib import Path
        from unidist_launch.horovod_build.steps import Steps
        steps = Steps(Path("log"), timeout=timedelta(seconds=60), say=print)
        code = "sleep 1000 & echo star''ted; sleep 1000"
        steps.run("compiling", ["sh", "-c", code], env=os.environ, cwd=Path("."), failure="it failed")
        """
    )
    log = command.folder / "log"
    process = subprocess.Popen(
        [sys.executable, name],
        cwd=command.folder,
        env={**os.environ, "TEST_MARK": command.mark},
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
    )
    assert command.wait_until(lambda: log.exists() and b"started" in log.read_bytes(), 60)
    assert len(command.alive()) >= 3
    process.send_signal(number)
    assert process.wait(timeout=60) != 0
    # A process that was ended may need a moment to go.
    assert command.wait_until(lambda: not command.alive(), 10), command.alive()
