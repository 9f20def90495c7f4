"""Runs a script of tests/field on a rank, and the original beside it, and compares what they trained."""

from __future__ import annotations

import copy
import gc
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

SCRIPTS = Path(__file__).parents[1] / "field" / "scripts"


def ported(name: str, arguments: Sequence[str], out: str, strategy: str, dtype: str) -> list[float] | str:
    """Run the ported script on this rank, under a strategy; return its losses, or the error that ended it."""
    import unidist.torch as ud
    from unidist.errors import UnidistError
    from unidist.settings.environment import set_variables

    with mock.patch.dict(os.environ), set_variables({"UNIDIST_STRATEGY": strategy}):
        try:
            made = _run(SCRIPTS / "ported" / name, [*arguments, "--out", out], dtype)
        except UnidistError as exc:
            return f"{type(exc).__name__}: {exc}"
        finally:
            ud.shutdown()
    return made["losses"]  # type: ignore[no-any-return]  # as the script made them


def original(
    name: str, arguments: Sequence[str], dtype: str, saved: str | None = None, parts: Sequence[str] = ("model",)
) -> tuple[list[float], dict[str, float]]:
    """Run the original script, without unidist, and compare its models with those that the ported one saved.

    Args:
        name: of the script.
        arguments: of the script.
        dtype: PyTorch's default type meanwhile.
        saved: the checkpoint.
        parts: names of the models in the script, and in the checkpoint if there are several.

    Returns:
        The losses, and the largest difference for each model.
    """
    try:
        return _original(name, arguments, dtype, saved, parts)
    finally:
        # What the script has made refers to torch.distributed's store, whose server would answer the next group with
        # the keys of this one.
        gc.collect()


def _original(
    name: str, arguments: Sequence[str], dtype: str, saved: str | None, parts: Sequence[str]
) -> tuple[list[float], dict[str, float]]:
    import unidist.torch as ud

    made = _run(SCRIPTS / "original" / name, arguments, dtype)
    models = {part: made[part] for part in parts}
    if saved is None:
        return made["losses"], {}
    loaded = {part: copy.deepcopy(model) for part, model in models.items()}
    ud.init()
    try:
        ud.load(saved, loaded if len(parts) > 1 else loaded[parts[0]])
    finally:
        ud.shutdown()
    return made["losses"], {part: _distance(model, loaded[part]) for part, model in models.items()}


def _distance(one: Any, other: Any) -> float:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((first.double() - second.double()).abs().max()) for first, second in pairs)


def _run(script: Path, arguments: Sequence[str], dtype: str) -> dict[str, Any]:
    import torch

    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with mock.patch.object(sys, "argv", [str(script), *arguments]):
            return runpy.run_path(str(script), run_name="__main__")
    finally:
        torch.set_default_dtype(torch.float32)
        end_torch_distributed()


def end_torch_distributed() -> None:
    """End the process group that a Trainer or an Accelerator has made, and let accelerate forget that there was one."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        gc.collect()
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
