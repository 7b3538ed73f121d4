"""A result says which instructions it was made with on a CPU, and what of a call was timed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cudadent42.model.records import BuildReport, TimerKind
from cudadent42.runs.run_folder import RunFolder
from cudadent42.stages.report import markdown
from cudadent42.stages.report.view import View
from flashmoe_science.jit.records import KernelBuild, Recipe


def with_environment(run: RunFolder, **environment: str) -> RunFolder:
    return on_processor(run, "avx2 fma f16c avx512f", **environment)


def on_processor(run: RunFolder, features: str, **environment: str) -> RunFolder:
    machine = replace(run.machine, facts={**run.machine.facts, "cpu_features": features})
    manifest = replace(run.manifest, machine=machine, environment=environment, build=None)
    return replace(run, manifest=manifest)


@pytest.mark.parametrize(
    ("features", "words"),
    [
        ("avx2 fma f16c", "with AVX2"),
        ("avx2 fma f16c avx512f", "with AVX-512"),
        ("avx2 fma f16c avx512f avx512_bf16", "with AVX512-BF16"),
        ("avx2 fma f16c avx512f avx512_bf16 amx_bf16", "with AMX"),
    ],
)
def test_a_result_names_the_instruction_set_of_the_processor(
    small: RunFolder, features: str, words: str
) -> None:
    """As of a folder that keeps no build."""
    assert View(on_processor(small, features)).subline.endswith(words)


@pytest.mark.parametrize(
    ("compiled", "words"),
    [
        (("x86_64:avx512_bf16+avx2+avx512f+avx512_bf16",), " with AVX512-BF16"),
        (("x86_64:avx2+avx2+fma+f16c", "x86_64:avx512+avx2+avx512f+avx512_vnni"), " with AVX-512"),
        (("x86_64:portable",), "Xeon"),
    ],
)
def test_a_result_names_what_was_compiled_where_that_is_less(
    small: RunFolder, compiled: tuple[str, ...], words: str
) -> None:
    """As by a compiler that knows no AMX."""
    run = on_processor(small, "avx2 fma f16c avx512f avx512_bf16 amx_bf16")
    recipe = Recipe("attention_forward", "host", "", {}, "g++", "10", (), {})
    built = [
        KernelBuild(replace(recipe, architecture=each), "", Path("x.so"), 1, 1.0, False, "")
        for each in compiled
    ]
    machine = replace(run.machine, summary="dev=Xeon")
    run = replace(run, manifest=replace(run.manifest, build=BuildReport(tuple(built)), machine=machine))
    assert View(run).device_words.endswith(words)


@pytest.mark.parametrize(("named", "words"), [("avx2", "AVX2"), ("avx512_bf16", "AVX512-BF16")])
def test_a_result_names_the_one_that_the_run_was_held_to(small: RunFolder, named: str, words: str) -> None:
    view = View(with_environment(small, FLASHMOE_CPU_ISA=named))
    assert view.subline.endswith(f", held to {words}")
    assert view.instruction_set == "AVX-512"


@pytest.mark.parametrize(
    ("timer", "words"),
    [
        (TimerKind.CALL, ""),
        (TimerKind.CPU, "Timed: processor time on one thread"),
        (TimerKind.GRAPH, "Timed: GPU time alone, by graph replay"),
        (TimerKind.QUEUE, "Timed: GPU time alone, of calls launched ahead"),
    ],
)
def test_what_is_less_than_the_whole_call_is_said_below_the_headline(
    small: RunFolder, timer: TimerKind, words: str
) -> None:
    plan = replace(small.plan, timer=timer)
    run = replace(small, manifest=replace(small.manifest, plan=plan))
    assert View(run).what_is_timed == words
    summary = markdown.render(View(run)).partition("\n## ")[0]
    assert ("Timed: " in summary) == bool(words)
    assert words in summary
