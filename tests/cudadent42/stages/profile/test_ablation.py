"""Kernels without a part of their work: on a CPU for real, what cannot be left out, and the race itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from cudadent42.operations import numerics
from cudadent42.operations.attention import parts
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.operations.interface import WHOLE, Parts
from cudadent42.operations.moe.case import MoeCase
from cudadent42.profiles.records import Ablation
from cudadent42.stages.profile import ablation
from cudadent42.timing.timers import ClockTimer, Reading
from flashmoe_science import flash_attention
from flashmoe_science.configs.ablation import Ablation as Part
from flashmoe_science.cpu import attention
from flashmoe_science.errors import BuildError

Call = Callable[[], torch.Tensor]


def case(seqlen: int = 160, causal: bool = True) -> AttentionCase:
    return AttentionCase("x", "fp32", 1, 2, 2, seqlen, seqlen, 32, causal)


def tensors(of: AttentionCase) -> tuple[torch.Tensor, ...]:
    (inputs,) = numerics(of).input_sets(of, 0, 1, "cpu")
    return tuple(inputs.tensors)


class Scripted:
    """A timer that finds what it is told: calls of the same name always take the same time."""

    def __init__(self, times_ms: dict[str, float]) -> None:
        self.times_ms, self.inner = times_ms, []

    def calibrate(self, calls: Sequence[Call], inner: int | None = None) -> Callable[[], Reading]:
        (call,) = calls
        self.inner.append(inner)
        output = call()
        return lambda: Reading(self.times_ms[call.__name__], 4, output, 0)


def test_the_whole_kernel_gives_the_right_result() -> None:
    query, key, value = tensors(case())
    whole = attention.without(Part.NONE, query, key, value, causal=True)()
    assert torch.equal(whole, flash_attention(query, key, value, causal=True))


@pytest.mark.slow
def test_each_part_is_left_out_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles the kernel three times more."""
    # Tests beside it may take its processors.
    monkeypatch.setattr("cudadent42.timing.quiet.waited_s", lambda: 0.0)
    of = case()
    query, key, value = tensors(of)
    whole = flash_attention(query, key, value, causal=True)
    for part in (Part.EXPONENTIALS, Part.MASK, Part.LOADS):
        output = attention.without(part, query, key, value, causal=True)()
        assert not torch.allclose(output, whole, atol=1e-2), part
    (inputs,) = numerics(of).input_sets(of, 0, 1, "cpu")
    ablations, why_not = ablation.ablate(of, inputs, ClockTimer(None), 0)
    assert [one.part for one in ablations] == ["exponentials", "mask", "loads"]
    assert why_not == ""
    assert all(one.saved_low <= one.saved <= one.saved_high for one in ablations)


def _race(
    monkeypatch: pytest.MonkeyPatch, times_ms: dict[Part, float]
) -> tuple[tuple[Ablation, ...], Scripted]:
    def variant(part: Part) -> Call:
        def call() -> torch.Tensor:
            return torch.zeros(1)

        call.__name__ = part.name
        return call

    variants = Parts({part.name.lower(): variant(part) for part in times_ms})
    monkeypatch.setattr(parts, "_on_cpu", lambda case, inputs: variants)
    timer = Scripted({part.name: time for part, time in times_ms.items()})
    (inputs,) = numerics(case()).input_sets(case(), 0, 1, "cpu")
    return ablation.ablate(case(), inputs, timer, 0)[0], timer


def test_what_goes_away_is_the_part_s_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {Part.NONE: 4.0, Part.EXPONENTIALS: 3.0, Part.LOADS: 4.0}
    (exponentials, loads), timer = _race(monkeypatch, times)
    assert (exponentials.part, loads.part) == ("exponentials", "loads")
    assert exponentials.saved == pytest.approx(0.25)
    assert loads.saved == pytest.approx(0.0)
    assert (exponentials.baseline_ms, exponentials.latency_ms) == (4.0, 3.0)
    # All by as many calls as suit the whole kernel.
    assert timer.inner == [None, 4, 4, 4]


def test_slow_calls_are_raced_in_fewer_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[float] = []

    class Counting(Scripted):
        def calibrate(self, calls: Sequence[Call], inner: int | None = None) -> Callable[[], Reading]:
            plain = super().calibrate(calls, inner)

            def counted() -> Reading:
                read.append(0.0)
                return plain()

            return counted

    calls = {WHOLE: lambda: torch.zeros(1), "loads": lambda: torch.zeros(1)}
    for call, part in zip(calls.values(), calls, strict=True):
        call.__name__ = part
    blocks = ablation._blocks(calls, Counting(dict.fromkeys(calls, 60_000.0)), 0, quiet=False)
    assert blocks.taken == len(blocks.readings) == 5
    assert all(block.keys() == calls.keys() for block in blocks.readings)
    assert len(read) == 1 + 2 * 5


def test_one_row_has_no_mask_to_leave_out() -> None:
    of = AttentionCase("x", "fp32", 1, 1, 1, 1, 64, 32, True)
    assert Part.MASK not in parts._parts(of.causal and of.seqlen_q > 1)


def test_what_has_no_parts_says_so() -> None:
    of = MoeCase("x", "bf16", 4, 16, 16, 2, 1, "silu")
    ablations, why_not = ablation.ablate(of, object(), ClockTimer(None), 0)
    assert ablations == ()
    assert "cannot be left out for" in why_not


def test_a_variant_that_does_not_build_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(case: object, inputs: object) -> None:
        raise BuildError("no compiler", "")

    monkeypatch.setattr(parts, "_on_cpu", broken)
    (inputs,) = numerics(case()).input_sets(case(), 0, 1, "cpu")
    assert ablation.ablate(case(), inputs, ClockTimer(None), 0) == (
        (),
        "a kernel with a part left out does not build: no compiler",
    )


@pytest.mark.parametrize("missing", ["NONE", "LOADS"])
def test_a_part_that_does_not_build_is_said_and_the_others_are_raced(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """But without the whole kernel there is nothing to compare with."""

    def variant(name: str) -> Call:
        def call() -> torch.Tensor:
            if name == missing:
                raise BuildError("it spills 8 bytes\nand more", "")
            return torch.zeros(1)

        call.__name__ = name
        return call

    names = ("NONE", "EXPONENTIALS", "LOADS")
    variants = Parts({name.lower(): variant(name) for name in names})
    monkeypatch.setattr(parts, "_on_cpu", lambda case, inputs: variants)
    (inputs,) = numerics(case()).input_sets(case(), 0, 1, "cpu")
    ablations, note = ablation.ablate(case(), inputs, Scripted(dict.fromkeys(names, 4.0)), 0)
    if missing == "NONE":
        assert (ablations, note) == ((), "the kernel does not build: it spills 8 bytes")
    else:
        assert [one.part for one in ablations] == ["exponentials"]
        assert note == "the kernel without loads does not build: it spills 8 bytes"
