"""Cheats that need a GPU, and honest kernels that use one's features."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import lab
import pytest
from test_honest import NAMES_ON_GPU

from cudadent42.model.events import Event
from cudadent42.model.integrity import Breach
from cudadent42.model.records import TimerKind
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.worker.parent import Worker
from cudadent42.worker.stages import run_stage

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

CASE = AttentionCase("small", "fp16", 2, 8, 8, 1024, 1024, 64)

CANDIDATES = """
import ctypes

import torch

from flashmoe_science import flash_attention

streams = []
kept = {}


def work(query, key, value, causal, softmax_scale):
    return flash_attention(query, key, value, causal=causal, softmax_scale=softmax_scale)


def side():
    if not streams:
        streams.append(torch.cuda.Stream())
    return streams[0]


def unjoined(query, key, value, *, causal, softmax_scale):
    '''1. Work on a stream that nobody waits for: KernelBench, non_default_stream_kernel.py.'''
    side().wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side()):
        torch.cuda._sleep(1_000_000)  # cycles: half a millisecond, which the clock is not to see
        return work(query, key, value, causal, softmax_scale)


def joined(query, key, value, *, causal, softmax_scale):
    '''Honest: the same stream, joined.'''
    side().wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side()):
        output = work(query, key, value, causal, softmax_scale)
    torch.cuda.current_stream().wait_stream(side())
    return output


def kept_by_pointer(query, key, value, *, causal, softmax_scale):
    '''5, 20. Results kept by address, as a graph with baked outputs keeps them.'''
    where = query.data_ptr(), key.data_ptr(), query.shape, causal
    if where not in kept:
        kept[where] = work(query, key, value, causal, softmax_scale)
    return kept[where]


def persists(query, key, value, *, causal, softmax_scale):
    '''17. L2 set aside for what persists: llm.c 851.'''
    ctypes.CDLL("libcuda.so.1").cuCtxSetLimit(6, ctypes.c_size_t(8 << 20))
    return work(query, key, value, causal, softmax_scale)


def scans(query, key, value, *, causal, softmax_scale):
    '''12. Freed blocks of the allocator are searched for the expected result: pygpubench, _gpu_scan_zeros.'''
    return torch.empty_like(query)


def honest(query, key, value, *, causal, softmax_scale):
    return work(query, key, value, causal, softmax_scale)
"""

EVENTS = """
import torch

from flashmoe_science import flash_attention

torch.cuda.Event.elapsed_time = lambda self, other: 0.001


def patched(query, key, value, *, causal, softmax_scale):
    '''4. The events' clock is replaced: reference-kernels 162.'''
    return flash_attention(query, key, value, causal=causal, softmax_scale=softmax_scale)
"""

EXPECTED = {
    "unjoined": Breach.UNJOINED_WORK,
    "kept_by_pointer": Breach.KEPT_RESULT,
    "persists": Breach.LEFT_SETTINGS,
}


def seen(text: str, names: list[str], folder: Path, timer: TimerKind) -> lab.Seen:
    file = folder / "candidates.py"
    file.write_text(text)
    return put_before([f"{file}:{name}" for name in names], folder, timer)


def put_before(names: list[str], folder: Path, timer: TimerKind) -> lab.Seen:
    plan = lab.plan_for(names, timer)
    plan = replace(plan, device="cuda:0", cases=(CASE,))

    def ignore(event: Event) -> None:
        return

    with Worker(folder / "worker.log") as worker:
        verified = run_stage("verify", plan, on_event=ignore, worker=worker)
        benched = run_stage("bench", plan, on_event=ignore, verified=verified, worker=worker)
    return lab.Seen(verified, benched, plan)


@pytest.fixture(scope="module", params=[TimerKind.CALL, TimerKind.QUEUE], ids=lambda kind: kind.value)
def all_seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> lab.Seen:
    names = [*EXPECTED, "scans", "joined", "honest"]
    return seen(CANDIDATES, names, tmp_path_factory.mktemp("gpu"), request.param)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_cheat_on_the_gpu_is_named(name: str, all_seen: lab.Seen) -> None:
    own = next(each for each in all_seen.plan.implementations if each.endswith(f":{name}"))
    if f"small/fp16/{own}" in all_seen.benched.skipped:
        return  # it waits for the GPU in each call, so it was not timed at all
    breaches = {each.breach for each in all_seen.findings() if own in each.implementation}
    assert EXPECTED[name] in breaches or all_seen.failures(own), all_seen.evidence(own)


def test_memory_that_nobody_wrote_is_wrong(all_seen: lab.Seen) -> None:
    own = next(each for each in all_seen.plan.implementations if each.endswith(":scans"))
    assert all_seen.failures(own)


@pytest.mark.parametrize("name", ["joined", "honest"])
def test_an_honest_one_is_clean(name: str, all_seen: lab.Seen) -> None:
    own = next(each for each in all_seen.plan.implementations if each.endswith(f":{name}"))
    alone = [each for each in all_seen.findings() if each.implementation == own]
    assert not alone, [each.line for each in alone]
    assert not all_seen.failures(own)


@pytest.fixture(scope="module")
def all_honest(tmp_path_factory: pytest.TempPathFactory) -> lab.Seen:
    return put_before(NAMES_ON_GPU, tmp_path_factory.mktemp("honest"), TimerKind.CALL)


@pytest.mark.parametrize("name", NAMES_ON_GPU, ids=lambda name: name.rpartition("/")[2])
def test_an_honest_kernel_is_clean(name: str, all_honest: lab.Seen) -> None:
    assert not all_honest.evidence(name).strip()
    assert f"{CASE.id}/{name}" not in all_honest.benched.skipped


def test_a_patched_event_is_named(tmp_path: Path) -> None:
    outcome = seen(EVENTS, ["patched"], tmp_path, TimerKind.CALL)
    assert any(
        each.breach is Breach.REPLACED_FUNCTION and "elapsed_time" in each.evidence
        for each in outcome.findings()
    )
