"""What every program of ours begins and ends with: standard streams that are open, and an exit code that is kept."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

_MODES = {0: ("stdin", "r"), 1: ("stdout", "w"), 2: ("stderr", "w")}


def run_program(main: Callable[[], object]) -> NoReturn:
    """Run the main function of a program, and end the process with what it returns, or with what it exits with.

    With PYTHONINSPECT, which is meant for the user's script, Python would show a traceback of our exit, and ask for
    input: the process ends without.
    """
    open_standard_streams()
    if not sys.flags.inspect:
        sys.exit(main())  # type: ignore[arg-type]
    try:
        code = main()
    except SystemExit as exc:
        code = exc.code
    except BaseException as exc:
        sys.excepthook(type(exc), exc, exc.__traceback__)
        code = 1
    _leave(code)


def open_standard_streams() -> None:
    """Open /dev/null for those of descriptors 0 to 2 that are closed. Call it before anything opens a descriptor.

    Otherwise a pipe or an event poll of ours becomes standard error, and whoever writes a message destroys it.
    """
    for number, (name, mode) in _MODES.items():
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is taken, and those below are open.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            if getattr(sys, name) is None:
                stream = open(number, mode, closefd=False)  # noqa: SIM115 - it stays open
                setattr(sys, name, stream)
                setattr(sys, f"__{name}__", stream)


def _leave(code: object) -> NoReturn:
    """Do what Python does at exit, and end the process."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # nobody reads it any more
            code = code or 120
    os._exit((code or 0) & 0xFF)
