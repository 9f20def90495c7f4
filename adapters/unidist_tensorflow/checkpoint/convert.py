"""Checkpoints as Keras' own files. Their layout is that of a model, so they are written by one."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import keras

from unidist.checkpoint.format.mapping import NameMapping, mapped_section
from unidist.checkpoint.format.reader import Checkpoint
from unidist.errors import ConfigurationError
from unidist_keras.checkpoint import ModelState
from unidist_tensorflow.framework import TensorFlowFramework


def to_keras_weights(checkpoint: Path, output: Path, *, section: str, mapping: NameMapping, model: str) -> None:
    """Write a file for `model.load_weights`; see `Export`."""
    _loaded(checkpoint, section, mapping, model).save_weights(output)


def to_keras_model(checkpoint: Path, output: Path, *, section: str, mapping: NameMapping, model: str) -> None:
    """Write a file for `keras.models.load_model`; see `Export`."""
    _loaded(checkpoint, section, mapping, model).save(output)


def _loaded(checkpoint: Path, section: str, mapping: NameMapping, model: str) -> Any:
    """Return the model with the weights of a checkpoint."""
    built = _make(model)
    framework = TensorFlowFramework()
    with Checkpoint(checkpoint, convert=framework.convert) as opened:
        found = mapped_section(opened, section, mapping, framework.convert)
        state = ModelState(built)
        state.check(found, strict=True)
        state.load(found, strict=True)
    return built


def _make(path: str) -> Any:
    """Call "module:function", which returns a built model; modules of the current folder are found."""
    module, _, function = path.partition(":")
    if not module or not function:
        raise ConfigurationError(
            "Keras' files have the layout of a model: give --model MODULE:FUNCTION, a function without arguments that "
            f"returns the built model (given: {path!r})"
        )
    sys.path.insert(0, str(Path.cwd()))
    try:
        built = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as exc:
        raise ConfigurationError(f"--model {path}: {exc}") from exc
    finally:
        sys.path.pop(0)
    if not isinstance(built, keras.Model):
        raise ConfigurationError(f"--model {path} returned {type(built).__name__}, which is no Keras model")
    return built
