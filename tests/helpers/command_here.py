"""Runs the `unidist` command in this process, and leaves the process as it was: for commands that start nothing.

It takes a fifth of the time of a process of its own. What a process would have for itself is set for the call and taken
back: folder, variables, standard streams (the descriptors, too), `sys.argv` and `sys.path`, logging, and the plugins
that the command line has found. Warnings are errors, as elsewhere in tests. What the command must not do here is an
error, even where the command would catch it: start a process or a thread, or handle signals.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import locale
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast
from unittest import mock

from unidist.launcher import Job
from unidist_launch import cli
from unidist_launch.launchers.elastic import ElasticLauncher
from unidist_launch.launchers.local import LocalLauncher

_FORBIDDEN: tuple[tuple[Any, str], ...] = (
    *((subprocess.Popen, "__init__"), (os, "fork"), (os, "forkpty"), (os, "system")),
    *((os, name) for name in ("execv", "execve", "posix_spawn", "posix_spawnp", "_exit", "kill", "killpg")),
    *((signal, name) for name in ("signal", "set_wakeup_fd", "pthread_sigmask", "setitimer", "alarm", "pthread_kill")),
    *((threading.Thread, "start"), (faulthandler, "register"), (faulthandler, "enable"), (atexit, "register")),
)
_FOR_A_PROCESS = ("PYTHON", "LD_")
"""Variables that begin so are read when a process starts."""


def run(arguments: Sequence[str], *, folder: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run `unidist ARGUMENTS` in a folder, with these variables beside those of this process.

    Raises:
        AssertionError: the command does what only a process of its own may do.
        Exception: what the command does not catch; its process would write a traceback.
    """
    early = sorted(name for name in env if name.startswith(_FOR_A_PROCESS))
    assert not early, f"{', '.join(early)}: read when a process starts; use Command.run"
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(_variables(env))
        enter(_imports(folder))
        enter(_fresh_loggers())
        enter(_fresh_command_line())
        enter(mock.patch.object(sys, "argv", [cli.__file__, *arguments]))
        done: list[str] = []
        enter(_caught_output(done))
        enter(_nothing_started())
        code = _exit_code(cli.main)
    return subprocess.CompletedProcess(tuple(arguments), code, *done)


@contextmanager
def jobs_not_started() -> Iterator[list[Job]]:
    """Have the launchers of this host put the jobs that they are to run into a list, and start nothing."""
    jobs: list[Job] = []

    def note(launcher: object, job: Job) -> int:
        jobs.append(job)
        return 0

    with mock.patch.object(LocalLauncher, "run", note), mock.patch.object(ElasticLauncher, "run", note):
        yield jobs


def _exit_code(main: Callable[[], object]) -> int:
    """Return the exit code as the interpreter finds it."""
    try:
        main()
    except SystemExit as exc:
        if exc.code is None:
            return 0
        if isinstance(exc.code, int):
            return exc.code & 0xFF
        print(exc.code, file=sys.stderr)
        return 1
    return 0


@contextmanager
def _nothing_started() -> Iterator[None]:
    """Make an error of each call that only a process of its own may make. Other threads of the tests may make them."""
    caller = threading.get_ident()
    seen: list[str] = []

    def forbidden(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != caller:
                return original(*args, **kwargs)
            given = [repr(each) for each in args if not isinstance(each, subprocess.Popen | threading.Thread)]
            seen.append(f"{name}({', '.join(given)})")
            raise AssertionError(_only_alone(seen))

        return call

    with ExitStack() as stack:
        for owner, name in _FORBIDDEN:
            original = getattr(owner, name)
            stack.enter_context(mock.patch.object(owner, name, forbidden(f"{owner.__name__}.{name}", original)))
        yield
    assert not seen, _only_alone(seen)


def _only_alone(calls: Sequence[str]) -> str:
    return f"run_here is for commands that start nothing, and this one calls {'; '.join(calls)}: use Command.run"


@contextmanager
def _variables(env: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(env)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update({name: text for name, text in before.items() if os.environ.get(name) != text})


@contextmanager
def _imports(folder: Path) -> Iterator[None]:
    """Work in a folder and import from it instead of from that of the tests, as `python -m` does.

    What is imported from there is forgotten afterwards; plugins that the folder has are found.
    """
    path, modules, before = list(sys.path), set(sys.modules), Path.cwd()
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    tests = ("", str(before), str(Path(__file__).parent))
    os.chdir(folder)
    sys.path[:] = [str(folder), *(each for each in path if each in given or each not in tests)]
    importlib.invalidate_caches()
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path
        for name in sys.modules.keys() - modules:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and folder in Path(file).parents:
                del sys.modules[name]


@contextmanager
def _fresh_loggers() -> Iterator[None]:
    """Let `unidist` and its loggers be as in a new process; then as they were."""
    root = logging.getLogger("unidist")
    loggers = [root, *(each for name, each in _named_loggers() if name.startswith("unidist"))]
    before = {each: (each.level, each.propagate, each.disabled, each.handlers[:]) for each in loggers}
    for each in loggers:
        _restore(each, logging.NOTSET, True, False, [])
    name = logging.getLevelName(logging.WARNING)
    try:
        yield
    finally:
        logging.addLevelName(logging.WARNING, name)
        now = [root, *(each for name, each in _named_loggers() if name.startswith("unidist"))]
        for each in now:
            _restore(each, *before.get(each, (logging.NOTSET, True, False, [])))


def _named_loggers() -> list[tuple[str, logging.Logger]]:
    loggers = logging.Logger.manager.loggerDict.items()
    return [(name, each) for name, each in loggers if isinstance(each, logging.Logger)]


def _restore(logger: logging.Logger, level: int, propagate: bool, disabled: bool, handlers: list[Any]) -> None:
    logger.setLevel(level)
    logger.propagate, logger.disabled = propagate, disabled
    for handler in [each for each in logger.handlers if each not in handlers]:
        logger.removeHandler(handler)
    logger.handlers[:] = handlers


@contextmanager
def _fresh_command_line() -> Iterator[None]:
    """Let the command line look for plugins again: it keeps what it has found."""
    kept = ("_own", "_all")
    before = {name: vars(cli.cli).pop(name) for name in kept if name in vars(cli.cli)}
    try:
        yield
    finally:
        for name in kept:
            vars(cli.cli).pop(name, None)
        vars(cli.cli).update(before)


@contextmanager
def _caught_output(into: list[str]) -> Iterator[None]:
    """Give the process standard streams of its own, which are no terminal; append the text of both outputs to a list.

    Also those of C: libraries write there, and ask there how wide the terminal is.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    encoding = locale.getpreferredencoding(False)
    with ExitStack() as stack:
        files = [cast(BinaryIO, stack.enter_context(tempfile.TemporaryFile())) for _ in range(2)]
        nothing = os.open(os.devnull, os.O_RDONLY)
        stack.callback(os.close, nothing)
        for number, descriptor in enumerate((nothing, files[0].fileno(), files[1].fileno())):
            saved = os.dup(number)
            stack.callback(os.close, saved)
            stack.callback(os.dup2, saved, number)
            os.dup2(descriptor, number)
        streams = [
            stack.enter_context(open(0, encoding=encoding, closefd=False)),
            stack.enter_context(open(1, "w", encoding=encoding, closefd=False)),
            stack.enter_context(open(2, "w", encoding=encoding, errors="backslashreplace", closefd=False, buffering=1)),
        ]
        for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
            stack.enter_context(mock.patch.object(sys, name, stream))
        yield
        for file, stream in zip(files, streams[1:], strict=True):
            stream.flush()
            file.seek(0)
            text = file.read().decode(encoding, "surrogateescape")
            into.append(text.replace("\r\n", "\n").replace("\r", "\n"))
