"""The name of an operation is written with its cases, and decides as what they are read back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cudadent42.base import extensions
from cudadent42.base.errors import UsageError
from cudadent42.base.serialise import decode, dumps, encode, loads
from cudadent42.model.cases import case_type
from cudadent42.model.records import Plan
from cudadent42.operations import names
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.operations.moe.case import MoeCase

CASES = (AttentionCase("a", "fp16", 2, 4, 2, 32, 48, 64, causal=True), MoeCase("m", "bf16", 16, 64, 32, 8, 2))

TWIN = """
from dataclasses import dataclass
from typing import ClassVar

from cudadent42.operations.attention.case import AttentionCase


@dataclass(frozen=True)
class TwinCase(AttentionCase):
    operation: ClassVar[str] = "attention_twin"


class OPERATION:
    case_type = TwinCase


NOT_ONE = 3
"""


def plan(case: object) -> Plan:
    return Plan("p", "cpu", (case,), "x", ("x",), 1, 0, 0)  # type: ignore[arg-type]


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Operations of an installed package."""
    (tmp_path / "attention_twin.py").write_text(TWIN)
    metadata = tmp_path / "attention_twin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: attention-twin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[cudadent42.operations]\n"
        "attention_twin = attention_twin:OPERATION\n"
        "absent = attention_twin:ABSENT\n"
        "number = attention_twin:NOT_ONE\n"
        "moe = attention_twin:OPERATION\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    extensions.points.cache_clear()
    yield
    extensions.points.cache_clear()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.operation)
def test_the_name_is_written_and_read(case: AttentionCase | MoeCase) -> None:
    document = json.loads(dumps(plan(case)))
    assert document["cases"][0]["operation"] == case.operation
    assert loads(Plan, json.dumps(document)) == plan(case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.operation)
def test_records_from_before_names_were_written_still_load(case: AttentionCase | MoeCase) -> None:
    document = encode(plan(case))
    del document["cases"][0]["operation"]
    assert decode(Plan, document) == plan(case)


def test_the_name_decides_and_not_the_fields(published: None) -> None:
    twin = case_type("attention_twin")("a", "fp16", 2, 4, 2, 32, 48, 64)
    read = loads(Plan, dumps(plan(twin)))
    assert type(read.cases[0]) is type(twin)
    assert read.operation == "attention_twin"
    document = encode(plan(CASES[0]))
    document["cases"][0]["operation"] = "moe"
    with pytest.raises(ValueError, match="unknown field"):
        decode(Plan, document)


@pytest.mark.parametrize("name", [3, None, ["attention"]])
def test_a_name_that_is_no_text(name: object) -> None:
    document = encode(plan(CASES[0]))
    document["cases"][0]["operation"] = name
    with pytest.raises(ValueError, match=r"Plan\.cases\[0\]\.operation: expected text"):
        decode(Plan, document)


@pytest.mark.parametrize("name", ["convolution", "attention.case", "interface", "..native", "os", ""])
def test_a_name_of_nothing_is_not_imported(name: str) -> None:
    document = encode(plan(CASES[0]))
    document["cases"][0]["operation"] = name
    with pytest.raises(
        UsageError,
        match=r"unknown operation .*expected one of attention, attention_backward, attention_training_step, "
        r"attention_varlen, moe",
    ):
        decode(Plan, document)


def test_what_is_published_comes_after_what_comes_along(published: None) -> None:
    assert names()[:7] == (
        *("attention", "attention_backward", "attention_training_step", "attention_varlen"),
        *("moe", "moe_backward", "moe_training_step"),
    )
    assert {"attention_twin", "absent", "number"} <= set(names())
    assert case_type("moe") is MoeCase, "a package does not replace one that comes along"


def test_what_is_published_wrongly_says_so(published: None) -> None:
    with pytest.raises(UsageError, match="'absent' is published as attention_twin:ABSENT, which cannot be"):
        case_type("absent")
    with pytest.raises(TypeError, match="'number' is a int; expected a Definition"):
        case_type("number")


@pytest.mark.parametrize("causal", [False, True])
def test_scores_are_the_pairs_that_the_mask_lets_through(causal: bool) -> None:
    for seqlen_q in range(9):
        for seqlen_k in range(9):
            case = AttentionCase("a", "fp16", 2, 3, 3, seqlen_q, seqlen_k, 64, causal=causal)
            pairs = sum(
                not causal or key <= query + seqlen_k - seqlen_q
                for query in range(seqlen_q)
                for key in range(seqlen_k)
            )
            assert case.scores == 2 * 3 * pairs
