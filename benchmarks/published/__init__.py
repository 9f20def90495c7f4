"""Published figures beside what the planner predicts from the same inputs: `python -m benchmarks.published`.

`figures.json` holds every figure with its inputs and its source, `predictions` computes ours, `systems` has what the
papers' systems do and unidist does not, `page` writes docs/published.md and docs/published.svg. Tests go through the
same rows, so that page, plot and tests cannot disagree.
"""
