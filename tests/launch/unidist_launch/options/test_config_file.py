"""Options in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from unidist.errors import ConfigurationError
from unidist_launch.options.config_file import ValueKind, read

OPTIONS = {
    "num-proc": ValueKind.TEXT,
    "strategy": ValueKind.TEXT,
    "timeout": ValueKind.TEXT,
    "quiet": ValueKind.FLAG,
    "plugin": ValueKind.LIST,
    "env": ValueKind.ENVIRONMENT,
}


def written(folder: Path, text: str, name: str = "job.yaml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_yaml_and_toml_say_the_same(tmp_path: Path) -> None:
    yaml = "num-proc: 4\ntimeout: 1.5\nquiet: true\nplugin: ['no:zero']\nenv: {A: 1, B: x, C: true, D: ''}\n"
    toml = "num_proc = 4\ntimeout = 1.5\nquiet = true\nplugin = 'no:zero'\nenv = ['A=1', 'B=x', 'C=true', 'D=']\n"
    found = {
        "num-proc": "4",
        "timeout": "1.5",
        "quiet": True,
        "plugin": ("no:zero",),
        "env": ("A=1", "B=x", "C=true", "D="),
    }
    assert read(written(tmp_path, yaml), OPTIONS) == found
    assert read(written(tmp_path, toml, "job.toml"), OPTIONS) == found
    assert read(written(tmp_path, "", "empty.yml"), OPTIONS) == {}


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("num-prok: 2", "a.yaml", r"a\.yaml: unknown option 'num-prok'\. Did you mean 'num-proc'"),
        ("num-proc: 2\nnum_proc: 3", "a.yaml", "given twice"),
        ("num-proc: [1, 2]", "a.yaml", "'num-proc' is a text or a number; found"),
        ("strategy:", "a.yaml", "'strategy' is a text or a number; found None"),
        ("quiet: 1", "a.yaml", "'quiet' is true or false; found 1"),
        ("plugin: [1]", "a.yaml", "'plugin' is a list of texts"),
        ("env: 3", "a.yaml", "'env' is a table of names and values"),
        ("- a", "a.yaml", "holds list; expected a table"),
        ("{", "a.yaml", "not valid YAML"),
        ("= 3", "a.toml", "not valid TOML"),
        ("", "a.json", r"must end in \.yaml, \.yml or \.toml"),
    ],
)
def test_what_is_wrong_is_told_with_the_file(tmp_path: Path, text: str, name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        read(written(tmp_path, text, name), OPTIONS)
    assert name in str(caught.value)


def test_a_missing_file_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be read: .*No such file"):
        read(tmp_path / "none.yaml", OPTIONS)
