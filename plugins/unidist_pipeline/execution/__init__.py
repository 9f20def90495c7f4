"""Runs a schedule on one rank: its stages, its messages to neighbouring ranks, and errors that end all ranks.

Knows no framework: `_torch` and `_keras` implement `executor.Stage`. Imports `schedules`, the root and the
core. Private.
"""
