"""The hardware rules are complete as data, and say what a person needs when they are broken."""

import pytest

from hybridge.compiler.targets.ascend.constraints import (
    RULES,
    SOCS,
    AnyOf,
    OneOf,
    Range,
    padded_heads,
    violations,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.operator}-{rule.fact}")
def test_every_rule_has_a_source_and_a_remedy(rule):
    assert rule.source
    assert rule.remedy
    assert rule.socs <= set(SOCS)


def test_no_fact_of_an_operator_is_limited_twice_on_a_soc():
    keys = [(rule.operator, rule.fact, soc) for rule in RULES for soc in rule.socs]
    assert len(keys) == len(set(keys))


def test_all_broken_rules_are_told_with_value_and_limit():
    facts = {"head dimension": 64, "key heads": 1, "query heads": 48, "block size": 100}
    found = violations("indexer_3", "LightningIndexer", "ascend-950", facts)
    assert [each.rule.fact for each in found] == ["head dimension", "query heads", "block size"]
    text = str(found[1])
    assert text.startswith("indexer_3: LightningIndexer: query heads is 48, must be 8, 16, 24, 32")
    assert "pad the indexer's heads" in text


def test_a_rule_holds_only_on_its_socs():
    facts = {"query heads": 48}
    assert violations("n", "LightningIndexer", "ascend-a3", facts) == []
    assert len(violations("n", "LightningIndexer", "ascend-950", facts)) == 1


@pytest.mark.parametrize(
    ("allowed", "inside", "outside"),
    [
        (OneOf((8, 16)), [8, 16], [0, 12, "8"]),
        (Range(16, 64, 16), [16, 48, 64], [0, 24, 80, "16"]),
        (Range(-5.0, -1e-30), [-5.0, -0.1], [0.0, -6]),
        (AnyOf((Range(1, 4), OneOf((8,)))), [1, 4, 8], [5, 0, 9]),
    ],
)
def test_sets_of_values(allowed, inside, outside):
    assert all(value in allowed for value in inside)
    assert not any(value in allowed for value in outside)


@pytest.mark.parametrize(("heads", "padded"), [(1, 1), (6, 8), (64, 64), (96, 128), (200, 200)])
def test_heads_are_filled_up_to_what_attention_takes(heads, padded):
    assert padded_heads(heads) == padded
