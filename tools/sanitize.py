"""Runs the C code under the sanitizers of GCC: `make sanitize`.

The extensions are built again, into `out/sanitize`, beside a copy of the core that finds them there; those of the
checkout stay as they are. Two builds: one for addresses and undefined behaviour, one for threads. With each run

- `tests/native/*.c`, one for each engine in C, where threads are the ranks: the thread sanitizer sees one process only,
- the tests of what has C code, whose ranks are processes.

A report of a sanitizer ends the process that it is about, and with it the test. Needs Linux and GCC with its
sanitizers.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "out" / "sanitize"
KERNELS = ROOT / "unidist/algorithms/native"
HARNESSES = {
    ROOT / "tests/native/shm_group.c": ROOT / "unidist/engines/shm_native",
    ROOT / "tests/native/tcp_group.c": ROOT / "plugins/unidist_tcp/native",
}
"""The folder with the C code of each."""
EXTENSIONS = (
    "unidist/engines/_shm", "unidist/algorithms/_kernels", "unidist_tcp/_tcp",
    "unidist_parameter_server/native/_shards",
)  # fmt: skip
COMPILER = os.environ.get("CC", "gcc")
FLAGS = ("-g", "-fno-omit-frame-pointer")


@dataclass(frozen=True)
class Build:
    """One build.

    Args:
        name: its folder in `OUT`.
        sanitizers: as `-fsanitize=` takes them.
        libraries: of the sanitizers; the interpreter knows nothing of them, so they are loaded before it.
        options: variables for the sanitizers. A report ends the process.
        tests: what pytest runs, with its options.
        programs: random programs that the harness runs.
        env: variables for the tests alone.
    """

    name: str
    sanitizers: str
    libraries: Sequence[str]
    options: Mapping[str, str]
    tests: Sequence[str]
    programs: int
    env: Mapping[str, str] = field(default_factory=dict)


PARALLEL = "tests/parallel"
BUILDS = (
    Build(
        name="address",
        sanitizers="address,undefined",
        libraries=("libasan.so", "libubsan.so"),
        options={
            # CPython never frees some memory.
            "ASAN_OPTIONS": "detect_leaks=0:exitcode=99",
            "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1:exitcode=99",
        },
        tests=(
            "tests/unidist/algorithms", "tests/unidist/engines", f"{PARALLEL}/test_shm_closing.py",
            f"{PARALLEL}/test_shm_communicator.py", f"{PARALLEL}/test_shm_faults.py", f"{PARALLEL}/test_init_cycles.py",
            f"{PARALLEL}/test_tcp_communicator.py", "tests/plugins/unidist_tcp",
            "tests/plugins/unidist_parameter_server/optimizers/test_native.py",
            "tests/plugins/unidist_parameter_server/store",
            # The sanitizer itself needs more address space than there is.
            "--deselect", f"{PARALLEL}/test_shm_faults.py::test_a_limited_address_space_is_lived_with_or_told",
        ),
        programs=30,
        env={"PYTHONMALLOC": "malloc"},  # of which the sanitizer knows what is freed
    ),
    Build(
        name="thread",
        sanitizers="thread",
        libraries=("libtsan.so",),
        # A rank forks with threads around, as DataLoader does.
        options={"TSAN_OPTIONS": "halt_on_error=1:exitcode=99:die_after_fork=0"},
        tests=(
            f"{PARALLEL}/test_shm_closing.py", f"{PARALLEL}/test_shm_communicator.py",
            f"{PARALLEL}/test_tcp_communicator.py",
            "-k", "closing or (not TinyWindows and (works or polling or random or thread or abort or death or lives))",
        ),
        programs=10,
    ),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Build and run what the command line asks for; exits with 1 if a sanitizer reports something or a test fails."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.sanitize", description="Run the C code under the sanitizers of GCC."
    )
    parser.add_argument("builds", nargs="*", metavar="BUILD", help="default: address thread")
    parser.add_argument("--native-only", action="store_true", help="without the tests in Python, in seconds")
    chosen = parser.parse_args(arguments)
    by_name = {build.name: build for build in BUILDS}
    if unknown := set(chosen.builds) - set(by_name):
        parser.error(f"no build is called {', '.join(sorted(unknown))}; choices: {', '.join(by_name)}")
    for build in [by_name[name] for name in chosen.builds or by_name]:
        print(f"-- {build.sanitizers}: threads as ranks", flush=True)
        run_native(build)
        if not chosen.native_only:
            print(f"-- {build.sanitizers}: processes as ranks", flush=True)
            run_tests(build)


def run_native(build: Build) -> None:
    """Compile the harnesses with the C code, without Python, and run them."""
    OUT.mkdir(parents=True, exist_ok=True)
    options = dict(build.options)
    if "ASAN_OPTIONS" in options:
        options["ASAN_OPTIONS"] = "detect_leaks=1:exitcode=99"
    for harness, engine in HARNESSES.items():
        program = OUT / f"{harness.stem}-{build.name}"
        sources = sorted(path for folder in (engine, KERNELS) for path in folder.glob("*.c") if path.name != "module.c")
        flags = ["-std=gnu11", "-O1", "-fwrapv", "-Wall", "-Wextra", *FLAGS, f"-fsanitize={build.sanitizers}"]
        folders = [f"-I{engine}", f"-I{KERNELS}"]
        libraries = ["-lm", "-lpthread", "-ldl"]
        _run([COMPILER, *flags, *folders, str(harness), *map(str, sources), *libraries, "-o", str(program)])
        _run([str(program), "1", str(build.programs)], options)


def run_tests(build: Build) -> None:
    """Build the extensions, and run the tests with them."""
    tree = OUT / build.name
    shutil.rmtree(tree, ignore_errors=True)
    for package in (ROOT / "unidist", ROOT / "plugins/unidist_tcp", ROOT / "plugins/unidist_parameter_server"):
        shutil.copytree(package, tree / package.name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    flags = {"CC": COMPILER, "CFLAGS": " ".join(FLAGS), "LDFLAGS": f"-fsanitize={build.sanitizers}"}
    flags["CFLAGS"] += f" -fsanitize={build.sanitizers}"
    place = ["--build-temp", str(OUT / f"{build.name}-objects"), "--build-lib", str(tree)]
    _run([sys.executable, "setup.py", "--quiet", "build_ext", "--force", *place], flags)
    missing = [name for name in EXTENSIONS if not (tree / f"{name}.abi3.so").exists()]
    if missing:  # the extensions are optional, so their build does not fail
        raise SystemExit(f"make sanitize: {', '.join(missing)} could not be built with -fsanitize={build.sanitizers}")
    libraries = [
        subprocess.check_output([COMPILER, f"-print-file-name={name}"], text=True).strip() for name in build.libraries
    ]
    path = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
    # -P: the core comes from the copy, and not from the folder in which the tests run.
    env = {"LD_PRELOAD": " ".join(libraries), "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *build.tests]
    _run(pytest, {**build.options, **build.env, **env})


def _run(command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    code = subprocess.run(command, cwd=ROOT, env={**os.environ, **(env or {})}, check=False).returncode
    if code:
        raise SystemExit(f"make sanitize: {Path(command[0]).name} ended with {code}")


if __name__ == "__main__":
    main()
