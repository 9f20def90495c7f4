"""Processes of a job beside its ranks: parameter servers, evaluators.

`SideRoster` is the launcher's list of them: it chooses their hosts, shows what they print, and ends them. `SideHost`
runs those of one host in the loop of the local launcher, or of an agent. Imports `output.lines` alone of this package.
"""
