"""From recordings to suites: nothing recorded is lost on the way, and what is written can be read."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudadent42.model.records import CacheState
from cudadent42.recording.records import Group, Kind, Recording
from cudadent42.recording.suite import Source, suites
from cudadent42.suites.loader import parse_suite

GROUP = Group(
    kind=Kind.ATTENTION,
    what="attention, 1 × 2 × 8 × 16",
    device="cpu",
    dtype="fp32",
    sizes={"batch": 1, "num_heads": 2, "seqlen": 8, "head_dim": 16},
    baseline="pytorch",
    reason=None,
    ours=False,
    gradients=False,
    calls=4,
    seconds=0.4,
    squares=0.05,
)
SOURCE = Source(("train.py",), "abc")


def attention(length: int, **changes: object) -> Group:
    sizes = {"batch": 1, "num_heads": 2, "seqlen_q": 1, "seqlen_k": length, "head_dim": 16}
    return replace(GROUP, **{"sizes": sizes, "what": f"attention to {length}", **changes})  # type: ignore[arg-type]


@st.composite
def groups(draw: st.DrawFn) -> Group:
    gradients = draw(st.booleans())
    calls = draw(st.integers(1, 50))
    seconds = draw(st.floats(1e-6, 10.0))
    backward = draw(st.integers(0, calls)) if gradients else 0
    reason = draw(st.sampled_from([None, None, "dropout", 'a "mask"\n\x7f\ud800 of \\']))
    return attention(
        draw(st.integers(1, 200)),
        reason=reason,
        dtype=draw(st.sampled_from(["fp32", "bf16"])),
        device=draw(st.sampled_from(["cpu", "cpu", "cuda"])),
        ours=draw(st.booleans()),
        gradients=gradients,
        calls=calls,
        seconds=seconds,
        squares=seconds**2 / calls * draw(st.floats(1.0, 3.0)),
        backward_calls=backward,
        backward_seconds=draw(st.floats(0, 5.0)) if backward else 0.0,
    )


@given(st.lists(groups(), max_size=40), st.integers(1, 6), st.integers(1, 3))
def test_no_call_and_no_second_is_lost(recorded: list[Group], most: int, runs: int) -> None:
    recordings = [Recording(1000.0 + run, tuple(recorded)) for run in range(runs)]
    written = suites(recordings, SOURCE, "captured", most_cases=most)
    calls = sum(group.calls for group in recorded)
    seconds = sum(group.seconds + group.backward_seconds for group in recorded)
    assert sum(part.calls for part in written.parts) == calls
    assert sum(part.mean_seconds for part in written.parts) == pytest.approx(seconds)
    for name, text in written.texts.items():
        suite = parse_suite(text, name)
        script = suite.script
        assert script is not None
        assert 1 <= len(suite.shapes) <= most
        assert script.seconds == tuple(1000.0 + run for run in range(runs))
        every = (*script.calls, *script.unchanged, *script.elsewhere)
        assert sum(each.calls for each in every) == calls
        for run in range(runs):
            assert sum(each.seconds[run] for each in every) == pytest.approx(seconds, rel=1e-4)
    raced = any(part.reason is None for part in written.parts)
    assert bool(written.texts) is raced


EXPERTS = replace(
    GROUP,
    kind=Kind.EXPERTS,
    baseline="grouped_mm",
    sizes={"tokens": 8, "hidden": 32, "intermediate": 32, "experts": 4, "top_k": 2},
    seconds=2.0,
)


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("steps", [0, 4])
def test_experts_whose_weights_no_cache_holds_are_raced_cold_and_attention_is_not(
    cold: bool, steps: int
) -> None:
    experts = replace(EXPERTS, gradients=bool(steps), backward_calls=steps, backward_seconds=0.1 * steps)
    written = suites([Recording(10.0, (GROUP, experts), cold_weights=cold)], SOURCE, "mine")
    caches = [parse_suite(text, name).cache for name, text in written.texts.items()]
    assert caches == [CacheState.COLD if cold else CacheState.WARM, CacheState.WARM]


def test_the_suite_with_the_most_time_has_the_name_that_was_asked_for() -> None:
    looped = replace(EXPERTS, baseline="expert_loop", seconds=0.1)
    written = suites([Recording(10.0, (GROUP, EXPERTS, looped))], SOURCE, "mine")
    assert list(written.texts) == ["mine.toml", "mine-attention.toml", "mine-moe-expert-loop.toml"]
    loaded = {name: parse_suite(text, name) for name, text in written.texts.items()}
    assert [suite.baseline for suite in loaded.values()] == ["grouped_mm", "pytorch", "expert_loop"]
    script = loaded["mine.toml"].script
    assert script is not None
    assert [(each.suite, each.calls) for each in script.elsewhere] == [
        ("mine-attention.toml", 4),
        ("mine-moe-expert-loop.toml", 4),
    ]


def test_steps_and_forward_passes_are_told_apart() -> None:
    group = replace(GROUP, gradients=True, calls=4, seconds=0.4, backward_calls=3, backward_seconds=0.9)
    written = suites([Recording(10.0, (group,))], SOURCE, "x")
    by_operation = {part.operation: part for part in written.parts}
    step, forward = by_operation["attention_training_step"], by_operation["attention"]
    assert (step.calls, forward.calls) == (3, 1)
    assert step.mean_seconds == pytest.approx(0.3 + 0.9)
    assert forward.mean_seconds == pytest.approx(0.1)


def test_a_text_that_grows_becomes_few_cases_of_neighbouring_lengths() -> None:
    growing = tuple(attention(length, calls=2, seconds=length / 1e3) for length in range(64, 256))
    (text,) = suites([Recording(100.0, growing)], SOURCE, "x", most_cases=6).texts.values()
    suite = parse_suite(text, "x")
    lengths = sorted(shape.seqlen_k for shape in suite.shapes)  # type: ignore[attr-defined]
    assert len(lengths) == 4
    for low, length in zip((64, 91, 128, 182), lengths, strict=True):
        assert low <= length <= low * math.sqrt(2)
    assert "# stands for calls of 64 to 90" in text
    # With room for all of them they stay apart.
    (text,) = suites([Recording(100.0, growing)], SOURCE, "x", most_cases=200).texts.values()
    assert len(parse_suite(text, "x").shapes) == 192


def test_each_run_has_its_own_seconds_and_spread_is_of_single_calls() -> None:
    first = Recording(10.0, (replace(GROUP, calls=2, seconds=4.0, squares=1.0 + 9.0),))
    second = Recording(11.0, (replace(GROUP, calls=2, seconds=4.0, squares=1.0 + 9.0),))
    absent = Recording(12.0, ())
    (part,) = suites([first, second, absent], SOURCE, "x").parts
    assert part.seconds == (4.0, 4.0, 0.0)
    assert part.calls == 2
    assert part.spread == pytest.approx(1.0 / 2.0)


def test_calls_on_another_device_stay() -> None:
    other = replace(GROUP, device="cuda", seconds=4.0)
    (text,) = suites([Recording(10.0, (GROUP, other))], SOURCE, "x").texts.values()
    script = parse_suite(text, "x").script
    assert script is not None
    assert script.device == "cuda"
    assert [each.reason for each in script.unchanged] == ["on cpu, while most of the script is on cuda"]


def test_notes_say_what_was_not_seen() -> None:
    recording = Recording(
        10.0, (replace(GROUP, note="odd strides"),), 0.1, traced=2, in_cuda_graphs=3, overlapped=True
    )
    notes = " ".join(suites([recording], SOURCE, "x").notes)
    for words in (
        "2 calls were traced by torch.compile",
        "3 calls went into CUDA graphs",
        "several threads overlapped",
        "The script ran once",
        "4 calls had odd strides",
        "Recording took 1 % of the script's time",
    ):
        assert words in notes
