"""The variables by which the launcher tells an evaluator what it is."""

SOCKET_VARIABLE = "UNIDIST_EVALUATOR_FD"
"""Number of an inherited socket: lines of JSON go to the launcher, and its end is the end of the job."""
AFTER_VARIABLE = "UNIDIST_EVALUATED_STEP"
"""The last checkpoint that an earlier process has reported; -1: none."""
READER_VARIABLE = "UNIDIST_EVALUATOR"
"""A name of the evaluator that stays when its process is started again."""
