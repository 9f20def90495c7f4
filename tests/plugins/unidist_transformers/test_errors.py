"""What cannot be is one line that says what to do, on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from unidist.errors import ConfigurationError
from unidist_transformers.versions import check_version

Run = Callable[..., Any]


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("line", "options", "text"),
    [
        ("pipeline=2", {}, "'pipeline' runs the forward and backward passes itself.*leave 'pipeline' out"),
        ("data", {"bound": True}, "the model is distributed by unidist already.*leave ud.distribute"),
        (
            "data",
            {"device_map": {"a": "cpu", "b": "disk"}},
            "device_map over cpu, disk, and with unidist each rank has",
        ),
        ("accumulate=2", {"gradient_accumulation_steps": 2}, "accumulates 2 batches, and the script 2 .*in one place"),
        ("data", {"save_on_each_node": True}, "rank 0 writes a checkpoint"),
        ("data", {"fsdp": True}, r"fsdp=.*: the strategy line of unidist says how to distribute"),
    ],
)
def test_every_rank_says_what_to_do(line: str, options: dict[str, Any], text: str, answers: Run) -> None:
    found = answers(line, **options)
    assert all(isinstance(each, str) for each in found), found
    for each in found:
        assert "\n" not in each
        assert re.search(text, each), each


@pytest.mark.parametrize(
    ("library", "version"), [("transformers", "5.5.4"), ("transformers", "6.0"), ("accelerate", "1.0.1")]
)
def test_another_version_is_refused_with_the_range(library: str, version: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"works with {library} >= \d\.\d, < \d, and {version} is installed"):
        check_version(library, version)
    check_version(library)


@pytest.mark.parallel
def test_a_folder_that_does_not_fit_is_named_and_nothing_changed(rank_pool: Any, tmp_path: Any) -> None:
    for text, kind, folder in (
        ("neither model.safetensors nor", "gpt2", tmp_path),
        ("does not fit: it lacks", "llama", tmp_path / "gpt2"),
    ):
        for found in rank_pool(2, env={"OMP_NUM_THREADS": "1"}).run(load, (kind, str(folder), str(tmp_path / "gpt2"))):
            assert re.search(text, found), found


@pytest.mark.parallel
def test_a_plain_save_pretrained_of_a_part_says_what_to_call(rank_pool: Any, tmp_path: Any) -> None:
    """A divided model's own `save_pretrained` wrote a folder of one rank's part, as if it were whole."""
    for found in rank_pool(2, env={"OMP_NUM_THREADS": "1"}).run(save_plainly, (str(tmp_path),)):
        assert "(tensor)" in found
        assert "ud.save_pretrained(model, folder)" in found
    assert not list(tmp_path.rglob("*.safetensors"))


def save_plainly(folder: str) -> str:
    import torch
    from transformers_runs import make_model

    import unidist.torch as ud
    from unidist.errors import UsageError

    ud.init()
    try:
        model: Any = make_model("llama")
        model, _ = ud.distribute(model, torch.optim.SGD(model.parameters()), "tensor=2")
        try:
            model.save_pretrained(f"{folder}/{ud.rank()}")
        except UsageError as exc:
            return str(exc)
        return "it was saved"
    finally:
        ud.shutdown()


def load(kind: str, folder: str, made: str) -> str:
    import torch
    from transformers_runs import make_model

    import unidist.torch as ud

    ud.init()
    try:
        ud.save_pretrained(make_model("gpt2"), made)
        model = make_model(kind)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        try:
            ud.load_pretrained(model, folder)
        except ud_errors() as exc:
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
            return str(exc)
        return "it was loaded"
    finally:
        ud.shutdown()


def ud_errors() -> type[Exception]:
    from unidist.errors import CheckpointError

    return CheckpointError
