"""The command of every rank: a script, a module or any program, checked before anything is started."""

from __future__ import annotations

import difflib
import importlib.machinery
import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from unidist.errors import ConfigurationError
from unidist.horovod_imports import is_asked_for, with_path_entry
from unidist_launch.options.torchrun import NUMBER_FLAGS

_NUMBER_FLAGS = ("-np", "--num-proc", *NUMBER_FLAGS)


def resolve(command: Sequence[str], *, module: bool, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the full command for one rank.

    A path that ends in .py runs with this interpreter, unbuffered; with `module`, the first word is the name
    of a Python module (as in `python -m`); anything else is looked up on the PATH.

    Args:
        command: what stands on the command line after the options.
        module: `-m` was given.
        environ: the environment of the ranks.

    Raises:
        ConfigurationError: there is nothing to run, or it does not exist.
    """
    if not command:
        wanted = "the name of a module after -m" if module else "a script, `-m MODULE`, or a command"
        raise ConfigurationError(f"nothing to run: give {wanted}, for example `unidist launch -np 2 train.py`.")
    name, *arguments = command
    if module:
        _check_module(name, environ)
        return (sys.executable, "-u", "-m", name, *arguments)
    if name.endswith(".py"):
        _check_script(Path(name))
        return (sys.executable, "-u", name, *arguments)
    program = shutil.which(name, path=environ.get("PATH", os.defpath))
    if program is None:
        raise ConfigurationError(_why_not_runnable(name))
    return (program, *arguments)


def check_order(command: Sequence[str], num_proc: int | None) -> None:
    """Refuse a number of processes that stands after the script, which would get it as one of its arguments.

    Args:
        command: the words after the options.
        num_proc: the number that stands before them; with one, the script may have arguments of any name.

    Raises:
        ConfigurationError: the number is misplaced; shows the order.
    """
    if num_proc is not None:
        return
    for index, word in enumerate(command[1:], start=1):
        flag, equals, value = word.partition("=")
        if flag in _NUMBER_FLAGS:
            number = value if equals else " ".join(command[index + 1 : index + 2])
            raise ConfigurationError(
                f"{flag} stands after {command[0]!r}, which would get it as an argument. Options of `unidist launch` "
                f"stand before the command: `unidist launch -np {number or 'N'} {command[0]}`. If {command[0]!r} has "
                f"such an option too, give -np before it as well."
            )


def _check_script(script: Path) -> None:
    if script.is_file():
        if not os.access(script, os.R_OK):
            raise ConfigurationError(f"script {str(script)!r} cannot be read by this user.")
        return
    if script.exists():
        raise ConfigurationError(f"script {str(script)!r} is not a file.")
    folder = script.parent
    there = [path.name for path in folder.glob("*.py")] if folder.is_dir() else []
    near = difflib.get_close_matches(script.name, there, n=1)
    tip = f" Did you mean {str(folder / near[0])!r}?" if near else ""
    raise ConfigurationError(f"script {str(script)!r} does not exist (looked in {str(folder.resolve())!r}).{tip}")


def _check_module(name: str, environ: Mapping[str, str]) -> None:
    """Look for the outermost package only: finding what is inside would run its code here."""
    top = name.partition(".")[0]
    if not all(part.isidentifier() for part in name.split(".")) or Path(name).is_file():
        raise ConfigurationError(f"-m {name!r}: not the name of a module; write package.module, without .py.")
    added = environ.get("PYTHONPATH", "")
    if is_asked_for(environ):
        added = with_path_entry(added)
    path = [os.getcwd(), *filter(None, added.split(os.pathsep)), *sys.path]
    if importlib.machinery.PathFinder.find_spec(top, path) is None and importlib.util.find_spec(top) is None:
        raise ConfigurationError(f"module {name!r} does not exist: {top!r} is neither here nor installed.")


def _why_not_runnable(name: str) -> str:
    if os.sep not in name and Path(name).is_file():
        return f"command {name!r} is not on the PATH; to run the file here, write './{name}'."
    if Path(name).is_dir():
        return f"command {name!r} is a folder."
    if Path(name).is_file():
        return f"command {name!r} is not executable: `chmod +x {name}`, or name the program that runs it."
    return f"command {name!r} does not exist{'' if os.sep in name else ' on the PATH'}."
