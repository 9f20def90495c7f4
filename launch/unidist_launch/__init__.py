"""The `unidist` command: launches jobs, and shows what is installed.

The root has what other plugins extend: commands (`command_spec`), options of commands (`command_options`) and observers
of jobs (`observers`). Each folder is one part of the launcher; `commands` and `launchers` stand on top of the others.
"""

__all__ = [
    "agent",
    "command_options",
    "command_spec",
    "commands",
    "display",
    "elastic_job",
    "observers",
    "options",
    "remote",
]
