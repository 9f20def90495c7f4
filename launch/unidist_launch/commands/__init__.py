"""The commands of `unidist` that come with the launcher.

A command reads its options, calls the folders that do the work, and prints. Imports all other folders.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_launch.commands.arguments import check_launch, launch_parameters
    from unidist_launch.commands.job_commands import job_command, run_program

__all__ = [
    "check_launch", "job_command", "launch_parameters", "run_program",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "arguments": "check_launch launch_parameters",
        "job_commands": "job_command run_program",
    },
)
