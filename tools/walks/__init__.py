"""How many files and calls of Python the most frequent operations pass: `python -m tools.walks`.

`counting` makes a `Walk` of recorded calls, and knows the limits; it runs nothing. `recording` runs the operations on
two ranks and records the calls of each rank's own thread. `step_counts` has what a step costs besides, and its limits.
"""
