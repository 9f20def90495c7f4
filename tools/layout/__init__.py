"""Checks of the sources' layout: imports, public names, class names, sizes of folders, wording of docstrings.

`python -m tools.layout` runs every rule. `project` reads the sources (nothing is imported); each other module holds one
rule, a function from a `Project` to lines of the form "file:line: text". A rule imports `project` and no other rule.
"""
