"""Each capability of strategies is asked for in one place: `Plan`."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
CAPABILITIES = (
    "ActsOnGradients", "ChoosesPrecision", "GradientOwner", "KeepsDivision", "OwnsParameters", "RunsSteps",
    "ShardsUpdates", "UpdateGate",
)  # fmt: skip
ASKED = re.compile(rf"(find|all|the)\(({'|'.join(CAPABILITIES)})\)|isinstance\([^()]*\b({'|'.join(CAPABILITIES)})\b")
WITHOUT_A_PLAN = "adapters/unidist_jax/optimizer/spmd_step.py"
"""It looks at the strategies of an update, of which there may be no plan."""


def test_adapters_and_plugins_ask_the_plan_and_not_each_strategy() -> None:
    folders = [ROOT / each for each in ("unidist", "adapters", "plugins", "launch")]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    assert len(files) > 500
    asking = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if ASKED.search(line)
    ]
    elsewhere = [text for text in asking if not text.startswith(("unidist/strategy/", WITHOUT_A_PLAN))]
    assert not elsewhere, "ask `unidist.strategy.Plan` instead"
