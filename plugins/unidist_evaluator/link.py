"""Communication between the launcher and an evaluator: by variables, and by values that a job shares."""

from __future__ import annotations

AFTER_VARIABLE = "UNIDIST_EVALUATED_STEP"
"""The last checkpoint that an earlier process has reported; -1: none."""
READER_VARIABLE = "UNIDIST_EVALUATOR"
"""A name of the evaluator that stays when its process is started again."""


def report_key(name: str, number: int) -> str:
    """Return the key of an evaluator's report, counted from 0 over all its processes: JSON, a step and its values."""
    return f"evaluator/{name}/report/{number}"


def end_key(name: str) -> str:
    """Return the key that the launcher sets when the job has ended well."""
    return f"evaluator/{name}/end"
