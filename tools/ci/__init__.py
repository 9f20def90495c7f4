"""What CI runs after the checks: `python -m tools.ci`, and the record of what was last proven at which commit."""
