"""Which parts of a model are its blocks; no framework."""

from __future__ import annotations

import pytest

from unidist.errors import ConfigurationError
from unidist_activations._blocks import ModelMember, find_blocks


def parts(*lines: str) -> list[ModelMember]:
    """Return members from lines "path kind"; a kind in brackets is a Sequential, in braces a ModuleList."""
    paths = [line.split()[0] for line in lines]
    return [
        ModelMember(
            tuple(path.split(".")),
            kind.strip("[]{}"),
            has_members=any(other.startswith(f"{path}.") for other in paths),
            is_container=kind[0] in "[{",
            is_callable=kind[0] != "{",
        )
        for path, kind in (line.split() for line in lines)
    ]


GPT = parts(
    "embedding Embedding",
    "blocks {List}",
    *(
        f"blocks.{i}{rest}"
        for i in range(3)
        for rest in (" Block", ".attention Attention", ".attention.qkv Linear", ".attention.out Linear", ".mlp [Seq]")
    ),
    "head Linear",
)
TRANSLATOR = parts(
    *(
        line
        for side in ("encoder", "decoder")
        for line in (
            f"{side} Stack",
            f"{side}.layers {{List}}",
            *(
                f"{side}.layers.{i}{rest}"
                for i in range(4)
                for rest in (" Layer", ".own Attention", ".own.out Linear", ".cross Attention", ".cross.out Linear")
            ),
        )
    )
)
RESNET = parts(
    "stem Conv",
    *(
        line
        for i in range(4)
        for line in (f"layer{i} [Seq]", *(f"layer{i}.{j}{rest}" for j in range(2) for rest in (" Basic", ".conv Conv")))
    ),
)
PLAIN = parts(*(line for i in range(3) for line in (f"{i} [Seq]", f"{i}.0 Linear", f"{i}.1 Tanh")), "3 Linear")
FLAT = parts("0 Linear", "1 Tanh", "2 Linear")


def found(members: list[ModelMember], *patterns: str) -> list[str]:
    return [".".join(path) for path in find_blocks(members, patterns, separator=".")]


@pytest.mark.parametrize(
    ("members", "blocks"),
    [
        (GPT, ["blocks.0", "blocks.1", "blocks.2"]),
        (TRANSLATOR, [f"{side}.layers.{i}" for side in ("encoder", "decoder") for i in range(4)]),
        (RESNET, [f"layer{i}.{j}" for i in range(4) for j in range(2)]),
        (PLAIN, ["0", "1", "2"]),
    ],
    ids=["gpt", "translator", "resnet", "sequentials"],
)
def test_what_a_model_repeats_are_its_blocks(members: list[ModelMember], blocks: list[str]) -> None:
    assert found(members) == blocks


def test_nothing_that_repeats_is_an_error_that_lists_the_parts() -> None:
    with pytest.raises(ConfigurationError, match=r"no blocks that repeat.*blocks=PATTERN. Parts: 0, 1, 2\."):
        found(FLAT)


@pytest.mark.parametrize(
    ("patterns", "blocks"),
    [
        (["blocks.*"], ["blocks.0", "blocks.1", "blocks.2"]),
        (["blocks.[02]", "head"], ["blocks.0", "blocks.2", "head"]),
        (["head", "blocks.1.mlp"], ["blocks.1.mlp", "head"]),
        (["*.*.attention"], [f"blocks.{i}.attention" for i in range(3)]),
    ],
)
def test_blocks_by_pattern(patterns: list[str], blocks: list[str]) -> None:
    assert found(GPT, *patterns) == blocks


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            ["block.*"],
            "pattern 'block.*' matches no part of the model. Parts: embedding, blocks.0, blocks.0.attention,",
        ),
        (["head", "blocks.7"], "pattern 'blocks.7' matches no part"),
        (["blocks"], "'blocks', a list that is never run itself. Name its members: blocks.*"),
        (
            ["blocks.*", "blocks.1.mlp"],
            "'blocks.1.mlp' (by 'blocks.1.mlp') lies inside of 'blocks.1' (by 'blocks.*')",
        ),
    ],
)
def test_bad_patterns_are_errors(patterns: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        found(GPT, *patterns)
    assert message in str(caught.value)


def test_a_long_list_of_parts_is_cut() -> None:
    with pytest.raises(ConfigurationError, match=r"m39 and 60 more\."):
        found(parts(*(f"m{i} Linear" for i in range(100))), "x")
