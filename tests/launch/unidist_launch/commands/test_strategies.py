"""`unidist strategies`."""

from __future__ import annotations

import json
import subprocess
import sys

from click.testing import CliRunner

from unidist.errors import ConfigurationError
from unidist_launch.commands.strategies import strategies


def test_json_tells_options_and_pairs() -> None:
    done = CliRunner().invoke(strategies, ["--json"], standalone_mode=False)
    assert done.exception is None
    found = json.loads(done.stdout)
    zero = next(item for item in found["strategies"] if item["name"] == "zero")
    assert zero["axis"] == "data"
    assert zero["options"][0] | {"help": ""} == {"name": "", "type": "1|2|3", "default": None, "help": ""}
    assert {"name": "whole", "type": "auto|true|false", "default": "auto"}.items() <= zero["options"][2].items()
    refused = next(pair for pair in found["pairs"] if (pair["first"], pair["second"]) == ("data", "zero=3"))
    assert refused["worlds"] == []
    assert "both own the gradient exchange" in refused["error"]


def test_with_names_only_these_and_their_pairs() -> None:
    done = CliRunner().invoke(strategies, ["--json", "clip_norm"], standalone_mode=False)
    found = json.loads(done.stdout)
    assert [item["name"] for item in found["strategies"]] == ["clip_norm"]
    assert found["pairs"]
    assert all("clip_norm=1.0" in (pair["first"], pair["second"]) for pair in found["pairs"])


def test_the_list_says_what_does_not_go_together_and_why() -> None:
    done = CliRunner().invoke(strategies, ["zero", "identity"], standalone_mode=False)
    lines = done.stdout.splitlines()
    assert ["identity", "not", "with"] in [line.split()[:3] for line in lines]  # tpu is not with anything
    row = next(line.split() for line in lines if line.startswith("zero=1 "))
    assert row[1:4] == ["not", "with", "data"]
    mark = row[4].rstrip(",")
    assert any(line.startswith(f"{mark}: strategies 'data' and 'zero' both own") for line in lines)


def test_an_unknown_name_lists_the_choices() -> None:
    done = CliRunner().invoke(strategies, ["zerro"], standalone_mode=False)
    assert isinstance(done.exception, ConfigurationError)
    assert "zero" in str(done.exception)


def test_no_framework_is_imported() -> None:
    code = """
import sys
from click.testing import CliRunner
from unidist_launch.commands.strategies import strategies
assert CliRunner().invoke(strategies, ["--json"], standalone_mode=False).exception is None
heavy = {"torch", "tensorflow", "keras", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
