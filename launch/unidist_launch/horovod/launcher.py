"""The program by which `horovod.run` starts a job: the command `unidist`, which ends with the process that began it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from unidist_launch import cli

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the command line after the folder that the first argument names."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)
    del sys.argv[1]
    cli.main()
