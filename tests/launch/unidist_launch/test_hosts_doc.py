"""docs/hosts.md names every option of the commands that it is about."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from unidist_kubernetes.command import kubernetes
from unidist_slurm.command import slurm

DOCS = Path(__file__).resolve().parents[3] / "docs" / "hosts.md"


@pytest.mark.parametrize("group", [slurm, kubernetes], ids=["slurm", "kubernetes"])
def test_every_option_is_documented(group: click.Group) -> None:
    text = DOCS.read_text()
    for name, command in group.commands.items():
        assert f"unidist {group.name} {name}" in text
        options = [item for item in command.params if isinstance(item, click.Option)]
        assert [item.opts for item in options if not any(f"{opt}" in text for opt in item.opts)] == []
