"""Random faults in real jobs: each ends with the exact sum, or with one error that names the cause, and leaves nothing.

`plans` makes jobs and faults from a seed, as plain data; `training` is what the ranks run; `job` starts it, finds its
processes and harms them; `judge` says how a run ended. `python -m benchmarks.faults --runs 50 --seed 1` prints a table.
"""
