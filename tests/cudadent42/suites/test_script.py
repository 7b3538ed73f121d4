"""Suites that were recorded from a script: cases with calls, dtypes and strides of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cudadent42.base.errors import UsageError
from cudadent42.base.serialise import dumps, loads
from cudadent42.model.records import Plan
from cudadent42.operations import numerics
from cudadent42.operations.attention.case import AttentionCase, overlap
from cudadent42.operations.attention.inputs import AttentionInputs
from cudadent42.plan import Choices, make_plan
from cudadent42.registry import registry
from cudadent42.suites.loader import parse_suite

HEAD = """
name = "train"
dtypes = ["fp32", "bf16"]
"""
SCRIPT = """
[script]
recording = "abc"
command = ["train.py", "--steps", "2"]
device = "cpu"
seconds = [1.0, 1.5]
notes = ["two places in graphs of torch.compile"]
[[script.unchanged]]
what = "attention, 1 × 2 × 3 × 4"
reason = "dropout"
calls = 3
seconds = [0.1, 0.2]
[[script.elsewhere]]
suite = "captured-moe.toml"
calls = 4
seconds = [0.2, 0.1]
"""
CASES = """
[[case]]
name = "packed"
dtype = "fp32"
batch = 2
num_heads = 4
num_kv_heads = 2
seqlen = 8
head_dim = 16
causal = true
softmax_scale = 0.2
query_strides = [1024, 16, 128]
key_strides = [1024, 16, 128]
value_strides = [1024, 16, 128]
calls = 100
seconds = [0.3, 0.4]
spread = 0.1
[[case]]
name = "plain"
dtype = "bf16"
batch = 1
num_heads = 1
seqlen = 8
head_dim = 16
calls = 5
seconds = [0.1, 0.1]
ours = true
"""
TEXT = HEAD + SCRIPT + CASES


def planned(text: str, folder: Path, **choices: object) -> Plan:
    path = folder / "suite.toml"
    path.write_text(text, encoding="utf-8")
    return make_plan(Choices(suite=str(path), **choices), "cpu", registry)  # type: ignore[arg-type]


def test_a_plan_has_the_script_and_each_case_in_its_own_dtype(tmp_path: Path) -> None:
    plan = planned(TEXT, tmp_path)
    assert [case.id for case in plan.cases] == ["packed/fp32", "plain/bf16"]
    script = plan.script
    assert script is not None
    assert script.command == ("train.py", "--steps", "2")
    assert [(each.case, each.calls, each.seconds, each.ours) for each in script.calls] == [
        ("packed/fp32", 100, (0.3, 0.4), False),
        ("plain/bf16", 5, (0.1, 0.1), True),
    ]
    assert script.unchanged[0].reason == "dropout"
    assert script.elsewhere[0].suite == "captured-moe.toml"
    assert loads(Plan, dumps(plan)) == plan
    assert [case.id for case in planned(TEXT, tmp_path, dtypes=("bf16",)).cases] == ["plain/bf16"]
    with pytest.raises(UsageError, match="no case of the suite train is in fp16"):
        planned(TEXT, tmp_path, dtypes=("fp16",))


@pytest.mark.parametrize("operation", ["attention", "attention_backward", "attention_training_step"])
def test_inputs_have_the_case_s_strides_and_scale(operation: str, tmp_path: Path) -> None:
    case = planned(f'operation = "{operation}"\n' + TEXT, tmp_path).cases[0]
    (inputs,) = numerics(case).input_sets(case, 3, 1, "cpu")
    assert inputs.softmax_scale == 0.2
    assert inputs.query.shape == (2, 4, 8, 16)
    for tensor in inputs.tensors[:3]:
        assert tensor.stride() == (1024, 16, 128, 1)
    assert inputs.query.std() == pytest.approx(1.0, abs=0.1)
    assert not torch.equal(inputs.key, inputs.value)


def test_fresh_values_are_the_same_whatever_the_strides(tmp_path: Path) -> None:
    """What is told from a result that was kept is compared with a copy, which is contiguous."""
    case = planned(TEXT, tmp_path).cases[0]
    (inputs,) = numerics(case).input_sets(case, 3, 1, "cpu")
    copies = AttentionInputs(*(tensor.clone() for tensor in inputs.tensors), inputs.softmax_scale)
    refresh = numerics(case).refresh
    assert refresh is not None
    refresh(case, inputs, 5)
    refresh(case, copies, 5)
    for tensor, copy in zip(inputs.tensors, copies.tensors, strict=True):
        assert tensor.stride() != copy.stride()
        assert torch.equal(tensor, copy)


def test_gaps_between_rows_count_as_memory() -> None:
    plain = AttentionCase("x", "fp32", 2, 4, 2, 8, 8, 16)
    packed = AttentionCase(
        "x", "fp32", 2, 4, 2, 8, 8, 16, query_strides=(1024, 16, 128), key_strides=(1024, 16, 128)
    )
    spanned = 1024 + 7 * 128 + 3 * 16 + 16
    gaps = 4 * (spanned - plain.batch * 4 * 8 * 16) + 4 * (spanned - 32 - 2 * 2 * 8 * 16)
    assert packed.memory_bytes(3) == plain.memory_bytes(3) + 3 * gaps


def test_rows_that_overlap() -> None:
    assert not overlap((2, 4, 8, 16), (1024, 16, 128, 1))
    assert not overlap((2, 4, 8, 16), (512, 128, 16, 1))
    assert overlap((2, 4, 8, 16), (1024, 16, 8, 1))
    assert overlap((2, 4, 8, 16), (1024, 16, 32, 1))
    assert not overlap((1, 4, 8, 16), (1, 16, 64, 1))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seconds = [1.0, 1.5]", "seconds = []", "at least one number, all above 0"),
        ("seconds = [1.0, 1.5]", "seconds = [0.0, 1.5]", "at least one number, all above 0"),
        ("seconds = [1.0, 1.5]", "seconds = [1.0]", "has 2 numbers; expected 1"),
        ("seconds = [0.1, 0.2]", 'seconds = ["x", 0.2]', "expected numbers from 0"),
        ("seconds = [0.3, 0.4]", "seconds = [-1, 0.4]", "expected numbers from 0"),
        ('device = "cpu"', 'device = "tpu"', "device = 'tpu'; expected cpu or cuda"),
        ('device = "cpu"', "", "device = ''; expected cpu or cuda"),
        ("calls = 3", "calls = -3", "calls = -3"),
        ("calls = 100", "", "the key 'calls' is missing"),
        ("spread = 0.1", "spread = -1", "spread = -1"),
        ("ours = true", 'ours = "yes"', "ours = 'yes'; expected true or false"),
        ('reason = "dropout"', "why = 1", "unknown key 'why'"),
        ('dtypes = ["fp32", "bf16"]', 'dtypes = ["fp32"]', "plain is in bf16, which dtypes"),
        ('dtype = "bf16"', 'dtype = "half"', "dtype = 'half'"),
        ("softmax_scale = 0.2", "softmax_scale = 0", "expected a number above 0"),
        ("query_strides = [1024, 16, 128]", "query_strides = [1024, 16]", "three whole numbers"),
        ("query_strides = [1024, 16, 128]", "query_strides = [1024, 0, 128]", "three whole numbers from 1"),
        ("query_strides = [1024, 16, 128]", "query_strides = [1024, 16, 8]", "would overlap"),
    ],
)
def test_wrong_scripts(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(UsageError, match=message):
        parse_suite(TEXT.replace(old, new), "suite.toml")
