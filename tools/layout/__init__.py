"""Checks of the sources' layout: who imports whom, which names are public, how large folders are, how docstrings read.

`python -m tools.layout` runs every rule. `project` reads the sources (nothing is imported); each other module holds one
rule, a function from a `Project` to lines of the form "file:line: text". A rule imports `project` and no other rule.
"""
