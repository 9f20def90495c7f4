"""A script for sbatch that runs a job of unidist. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unidist.errors import ConfigurationError

_TIME = re.compile(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d(:\d\d)?)?|UNLIMITED", re.IGNORECASE)
_MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE)
_OPTION = re.compile(r"--?[a-zA-Z][\w-]*(=.+| .+)?")


@dataclass(frozen=True)
class BatchScript:
    """Contents of a batch script.

    Args:
        interpreter: Python of the nodes; the one that runs unidist there.
        arguments: of `unidist launch`.
        options: of sbatch, by their long names without dashes; None leaves one out, True is an option without value.
        more: further lines for sbatch, as the user writes them: "--constraint=a100".
        setup: shell lines that run before the job, such as "module load cuda".

    Raises:
        ConfigurationError: a value cannot stand in such a script; says which, and what sbatch takes.
    """

    interpreter: str
    arguments: Sequence[str]
    options: Mapping[str, str | int | bool | None] = field(default_factory=dict)
    more: Sequence[str] = ()
    setup: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name, value in self.options.items():
            if isinstance(value, str) and (not value or re.search(r"\s", value)):
                raise ConfigurationError(f"--{name} {value!r}: sbatch takes one word here.")
        for name, pattern, example in (("time", _TIME, "90, 1:30:00 or 2-12:00:00"), ("mem", _MEMORY, "64G")):
            text = self.options.get(name)
            if isinstance(text, str) and not pattern.fullmatch(text):
                raise ConfigurationError(f"--{name} {text!r} cannot be read; sbatch takes for example {example}.")
        for line in self.more:
            if not _OPTION.fullmatch(line):
                raise ConfigurationError(f"--sbatch {line!r}: write an option of sbatch, such as --constraint=a100.")

    def text(self) -> str:
        """Return the script."""
        lines = ["#!/bin/bash", "# Written by `unidist slurm script`. Submit it: sbatch FILE"]
        for name, value in self.options.items():
            if value is True:
                lines.append(f"#SBATCH --{name}")
            elif value is not None and value is not False:
                lines.append(f"#SBATCH --{name}={value}")
        lines += [f"#SBATCH {line}" for line in self.more]
        lines += ["", "set -e", *self.setup]
        command = shlex.join([self.interpreter, "-m", "unidist_launch", "launch", *self.arguments])
        # With exec, signals that Slurm sends to the script (--signal=B:TERM@60) reach the launcher.
        lines += [f"exec {command}", ""]
        return "\n".join(lines)
