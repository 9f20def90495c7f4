"""Whether a thread waits in a library, outside of Python, as for the results of a compiled program."""

from __future__ import annotations

import sysconfig
import threading

from unidist.waits.script_line import innermost

__all__ = ["waits_natively"]

_PYTHON = sysconfig.get_paths()["stdlib"]


def waits_natively(thread: int) -> bool:
    """Return whether a thread of this process is asleep for another thread, in a function that is not Python's.

    In time.sleep(), a lock of Python's own modules, a read of a file or a socket it is not: it goes on by itself, or by
    others. Where the kernel does not tell what a thread is asleep in, the answer is no.

    Args:
        thread: its identifier.
    """
    file = innermost(thread)
    if not file or (file.startswith(_PYTHON) and "-packages" not in file):
        return False
    native = next((each.native_id for each in threading.enumerate() if each.ident == thread), None)
    try:
        with open(f"/proc/self/task/{native}/wchan", encoding="ascii") as wchan:
            return "futex" in wchan.read()
    except OSError:
        return False
