"""Checkpoints as Keras' own files."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
from click.testing import CliRunner

import unidist.keras as ud
from unidist_launch.commands.checkpoint import checkpoint

MODULE = """
import keras

def build():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2)])

def nothing():
    return 3
"""


def test_weights_and_whole_models_load_with_keras_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checkpointed_model.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)

    def build() -> keras.Model:
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2)])

    saved, loaded = build(), build()
    ud.init()
    ud.save(tmp_path / "c", saved)
    ud.shutdown()

    def convert(output: str, *options: str) -> BaseException | None:
        done = CliRunner().invoke(checkpoint, ["convert", "c", output, *options], standalone_mode=False)
        return done.exception

    assert convert("w.weights.h5", "--model", "checkpointed_model:build") is None
    loaded.load_weights("w.weights.h5")
    assert convert("w.keras", "--model", "checkpointed_model:build") is None
    for each in (loaded, keras.models.load_model("w.keras")):
        for first, second in zip(saved.weights, each.weights, strict=True):
            np.testing.assert_array_equal(first, second)
    assert "give --model MODULE:FUNCTION" in str(convert("x.weights.h5"))
    assert "returned int, which is no Keras model" in str(
        convert("x.weights.h5", "--model", "checkpointed_model:nothing")
    )
    assert "no attribute 'gone'" in str(convert("x.weights.h5", "--model", "checkpointed_model:gone"))
