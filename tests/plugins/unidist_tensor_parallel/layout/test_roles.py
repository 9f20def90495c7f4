"""Plans of patterns, and roles that are found without one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from unidist.errors import ConfigurationError
from unidist_tensor_parallel.layout.roles import (
    CuttableLayer,
    LayerKind,
    Role,
    assign,
    automatic,
    general,
    matches,
    read_roles,
    report,
    spread,
)

PATHS = ["embed", "blocks.0.qkv", "blocks.0.net.up", "blocks.10.qkv", "blocks.10.net.up"]


def test_patterns_are_read_from_text_and_files(tmp_path: Path) -> None:
    expected = {"blocks.*.qkv": Role.QKV, "embed": Role.VOCABULARY}
    assert read_roles("blocks.*.qkv=qkv+embed=vocabulary") == expected
    yaml, json = tmp_path / "plan.yaml", tmp_path / "plan.json"
    yaml.write_text("blocks.*.qkv: qkv\nembed: vocabulary\n")
    json.write_text('{"blocks.*.qkv": "qkv", "embed": "vocabulary"}')
    assert read_roles(str(yaml)) == read_roles(str(json)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [("a=colum", "column"), ("nowhere.yaml", "PATTERN=ROLE"), ("+", "No such file|PATTERN"), ("a=", "role")],
)
def test_plans_that_cannot_be_read_say_why(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_roles(text)


def test_files_without_a_mapping_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    for content in ("- a\n", "a: [\n", "{}\n"):
        path.write_text(content)
        with pytest.raises(ConfigurationError, match="plan"):
            read_roles(str(path))


def test_a_star_stays_within_a_component_and_two_do_not() -> None:
    assert matches("blocks.*.qkv", "blocks.10.qkv")
    assert not matches("blocks.*", "blocks.10.qkv")
    assert matches("blocks.**", "blocks.10.net.up")
    assert matches("**.up", "blocks.10.net.up")
    assert matches("blocks.*.u*", "blocks/0/up")


def test_the_first_pattern_that_matches_counts_and_each_must_match() -> None:
    plan = {"blocks.0.*": Role.REPLICATE, "blocks.*.qkv": Role.QKV}
    assert assign(plan, PATHS) == {"blocks.0.qkv": Role.REPLICATE, "blocks.10.qkv": Role.QKV}
    with pytest.raises(ConfigurationError, match=r"'blocks\.\*\.kqv'.*matches no layer.*blocks\.\*\.qkv"):
        assign({"blocks.*.kqv": Role.QKV}, PATHS)


def linear(path: str, inputs: int, outputs: int, feeds: tuple[str, ...] | None = ("",)) -> CuttableLayer:
    return CuttableLayer(path, LayerKind.LINEAR, inputs, outputs, feeds)


def test_pairs_of_linear_layers_are_columns_and_rows() -> None:
    layers = [
        linear("a", 4, 8, ("b",)),
        linear("b", 8, 8, ("c",)),
        linear("c", 8, 8, ("d",)),
        linear("d", 8, 2),
    ]
    found = automatic(layers, 2)
    assert found.roles == {"a": Role.COLUMN, "b": Role.ROW, "c": Role.COLUMN, "d": Role.ROW}
    assert not found.reasons


def test_two_columns_may_feed_one_row() -> None:
    found = automatic([linear("gate", 4, 8, ("down",)), linear("up", 4, 8, ("down",)), linear("down", 8, 4)], 2)
    assert found.roles == {"gate": Role.COLUMN, "up": Role.COLUMN, "down": Role.ROW}


def test_a_layer_that_also_feeds_something_else_stays_whole() -> None:
    found = automatic([linear("a", 4, 8, ("b", "")), linear("b", 8, 4)], 2)
    assert not found.roles
    assert "column_gather" in found.reasons["a"]
    mixed = automatic([linear("a", 4, 8, ("c",)), linear("b", 4, 8, ("c", "")), linear("c", 8, 4)], 2)
    assert not mixed.roles


def test_pairs_that_would_cut_a_shared_weight_in_two_ways_stay_whole() -> None:
    twins = [replace(linear("up", 8, 8, ("down",)), weight=1), replace(linear("down", 8, 8), weight=1)]
    found = automatic(twins, 2)
    assert not found.roles
    assert found.reasons["up"] == "'up' shares its weight with 'down', which would not be cut in the same way"


def test_pairs_that_cut_shared_weights_in_the_same_way_are_cut() -> None:
    layers = [
        replace(linear(f"{block}.{name}", 8, 8, feeds), weight=weight)
        for block in "ab"
        for name, weight, feeds in (("up", 1, (f"{block}.down",)), ("down", 2, ()))
    ]
    assert set(automatic(layers, 2).roles.values()) == {Role.COLUMN, Role.ROW}
    layers += [replace(linear("other", 8, 8), weight=2)]  # which is cut by nobody
    assert not automatic(layers, 2).roles


def test_too_few_units_are_named() -> None:
    pair = [linear("a", 4, 2, ("b",)), linear("b", 2, 4)]
    assert "2 hidden units are fewer than the 3 ranks" in automatic(pair, 3).reasons["a"]
    attention = CuttableLayer("attention", LayerKind.ATTENTION, 8, 8, units=2)
    assert automatic([attention], 2).roles == {"attention": Role.ATTENTION}
    assert "2 heads" in automatic([attention], 3).reasons["attention"]
    assert automatic([replace(attention, whole_because="why")], 2).reasons == {"attention": "why"}


def test_a_vocabulary_is_an_embedding_that_an_output_layer_shares_or_mirrors() -> None:
    embedding = CuttableLayer("embed", LayerKind.EMBEDDING, 50, 8, weight=1)
    position = CuttableLayer("position", LayerKind.EMBEDDING, 16, 8, weight=2)
    tied = replace(linear("head", 8, 50), weight=1)
    found = automatic([embedding, position, tied], 2)
    assert found.roles == {"embed": Role.VOCABULARY, "head": Role.VOCABULARY}
    assert "16 rows" in found.reasons["position"]
    assert automatic([embedding, replace(tied, weight=3)], 2).roles == found.roles


def test_the_report_says_what_is_cut_and_why_something_is_not() -> None:
    text = report(
        {"blocks.0.up": Role.COLUMN, "blocks.1.up": Role.COLUMN}, {"head": "it is small"}, cut=800, total=1000, size=4
    )
    assert "80.0% of 1,000 parameters are cut; a rank holds 40.0%" in text
    assert re.search(r"column +blocks\.\*\.up \(x2\)", text)
    assert "head: it is small" in text
    assert general("blocks.10.net.0") == "blocks.*.net.*"
    assert general("layer_12/dense1") == "layer_12/dense1"


def test_a_role_of_one_path_is_that_of_all_paths_of_the_layer() -> None:
    places = [["a.up", "b.up"], ["a.down"]]
    assert spread({"b.up": Role.COLUMN, "a.down": Role.ROW}, places) == {
        "a.up": Role.COLUMN,
        "b.up": Role.COLUMN,
        "a.down": Role.ROW,
    }
    with pytest.raises(ConfigurationError, match=r"'a.up' \(column\) and 'b.up' \(row\) are one layer"):
        spread({"a.up": Role.COLUMN, "b.up": Role.ROW}, places)
