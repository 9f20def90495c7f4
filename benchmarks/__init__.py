"""Side-by-side measurements: `python -m benchmarks` (or `make bench`).

Everything that is compared runs in turn in the same processes, so that a noisy machine is noisy for both; what is
reported are ratios of medians.
"""
