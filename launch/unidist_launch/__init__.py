"""The `unidist` command: launches jobs, and shows what is installed.

The root has what other plugins extend: commands (`command_spec`), options of
commands (`command_options`) and observers of jobs (`observers`). Each folder has one part of the launcher; none but
`commands` and `launchers` imports all others.
"""

__all__ = ["command_options", "command_spec", "observers"]
