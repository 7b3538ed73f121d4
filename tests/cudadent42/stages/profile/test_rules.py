"""The rules as data: what comes along is sound, what is wrong is refused with its name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudadent42.base.errors import UsageError
from cudadent42.profiles.formulas import FORMULAS, evaluate
from cudadent42.profiles.records import Profile
from cudadent42.profiles.rules import PLACEHOLDER, builtin_rules, parse

RULE = """
[[rule]]
id = "x"
kind = "cause"
title = "X"
when = ["a_share > 0.5"]
evidence = "{a_share:%}"
meaning = "m"
experiment = "e"
gain = { formula = "part", of = ["a_share"] }
"""


def test_texts_speak_only_of_what_the_rule_needs() -> None:
    """So that no text is ever left with a hole."""
    free = {
        "limiter",
        "grid_blocks",
        "instructions",
        "bytes_min",
        "dram_bytes",
        "peak_gflops",
        "achieved_gflops",
    }
    also_counted = {
        "multiprocessors",
        "barrier_share",
        "long_scoreboard_share",
        "busiest_share",
        "tensor_share",
        "dram_share",
        "l2_share",
        "second_pipe_share",
    }
    of_one_kind = {
        "local_instructions",
        "leading_pipe_share",
        "clock_hz",
        "cpu_miss_bytes",
        "clusters",
        "memory_share",
    }
    of_clusters = {"cluster_blocks", "clusters_fit", "sm_idle_share", "roof_share", "dram_gbps_share"}
    for rule in builtin_rules():
        for name, _ in PLACEHOLDER.findall(rule.evidence):
            assert name in {*rule.names(), *free, *also_counted, *of_one_kind, *of_clusters}, (rule.id, name)


def test_every_rule_says_what_to_try() -> None:
    for rule in builtin_rules():
        assert rule.title[0].isupper()
        assert len(rule.experiment) > 10
        assert not rule.experiment.endswith(".")
        assert rule.when


def test_what_rules_of_counters_need_is_known_of_a_full_profile(
    profile_of: Callable[..., Profile],
) -> None:
    from cudadent42.profiles.quantities import quantities

    names = set(quantities(profile_of("hopper-full")))
    other = ("ablation_", "cpu_", "static_", "spill_", "cluster_")
    for rule in builtin_rules():
        if not any(name.startswith(other) for name in rule.names()):
            assert set(rule.names()) <= names, rule.id


def test_a_rule_is_read() -> None:
    (rule,) = parse(RULE, "test")
    assert rule.names() == ("a_share",)
    assert rule.when[0].holds(0.6)
    assert not rule.when[0].holds(0.5)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('kind = "cause"', 'kind = "guess"', "kind 'guess'"),
        ('title = "X"\n', "", "'title' is missing"),
        ('meaning = "m"', 'meaning = "m"\nseverity = 3', "'severity' is not a field"),
        ('"a_share > 0.5"', '"__import__(1)"', "is no condition"),
        ('"a_share > 0.5"', '"a_share > b_share"', "is no condition"),
        ('formula = "part"', 'formula = "eval"', "formula 'eval'"),
        ('formula = "part"', 'formula = "least"', "takes 2 operands"),
        ("[[rule]]", "[[rule", "test: "),
    ],
)
def test_what_cannot_be_understood_is_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        parse(RULE.replace(old, new), "test")


def test_two_rules_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="two rules are called 'x'"):
        parse(RULE + RULE, "test")


_SHARE = st.floats(min_value=0, max_value=1)


@given(name=st.sampled_from(sorted(FORMULAS)), operands=st.lists(_SHARE, min_size=3, max_size=3))
def test_a_gain_is_a_share_of_the_time(name: str, operands: list[float]) -> None:
    count, _ = FORMULAS[name]
    assert 0 <= evaluate(name, operands[:count]) <= 1


def test_closed_forms() -> None:
    assert evaluate("shortfall", [360.0, 720.0]) == 0.5
    assert evaluate("excess", [1.0, 4.0, 0.8]) == pytest.approx(0.6)
    assert evaluate("product", [0.5, 0.4]) == pytest.approx(0.2)
    assert evaluate("rest", [1.2]) == 0
