"""The list of names has every metric that profiles have and rules speak of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cudadent42.profiles.names import METRICS, is_known
from cudadent42.profiles.rules import PLACEHOLDER, builtin_rules

RESULTS = Path(__file__).resolve().parents[4] / "benchmarks" / "results"
PROFILES = sorted(RESULTS.rglob("profile.json"))


def test_there_are_profiles_to_learn_from() -> None:
    assert PROFILES


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: str(path.parent.relative_to(RESULTS)))
def test_every_metric_of_a_committed_profile_is_known(path: Path) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    names = {*document["metrics"], *document.get("missing", {})}
    assert {name for name in names if not is_known(name)} == set()


def test_every_name_in_a_rule_is_known() -> None:
    words = {"limiter"}
    for rule in builtin_rules():
        named = {*rule.names(), *(name for name, _ in PLACEHOLDER.findall(rule.evidence))} - words
        assert {name for name in named if not is_known(name)} == set(), rule.id


def test_misspelt_names_are_not_known() -> None:
    assert not is_known("bank_conflict")
    assert not is_known("")
    assert "bank_conflicts" in METRICS
