"""The audit on a GPU: who is faster is confirmed, whichever timer the run had; who cheats is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import lab
import pytest

from cudadent42.audit.stage import Audited, audit
from cudadent42.decisions.claims import why_missed
from cudadent42.decisions.compare import compare
from cudadent42.model.events import Event
from cudadent42.model.integrity import Breach, Confirmation, Grade, Way
from cudadent42.model.records import Plan, Results, TimerKind
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.worker.parent import Worker
from cudadent42.worker.stages import run_stage

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

BASELINE = "pytorch_math"
"""Which writes out all scores, so whoever does not is faster many times over."""

CASE = AttentionCase("small", "fp16", 2, 8, 8, 1024, 1024, 64)

CANDIDATES = """
import threading

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


def faster(query, key, value, *, causal, softmax_scale):
    '''Honest.'''
    return work(query, key, value, causal, softmax_scale)


def waits(query, key, value, *, causal, softmax_scale):
    '''Honest, and in no graph: it waits for the GPU.'''
    output = work(query, key, value, causal, softmax_scale)
    torch.cuda.current_stream().synchronize()
    return output


def as_slow(query, key, value, *, causal, softmax_scale):
    '''Not faster than the baseline, whatever a run said.'''
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=softmax_scale
        )


def kept_by_pointer(query, key, value, *, causal, softmax_scale):
    where = query.data_ptr(), key.data_ptr(), query.shape, causal
    if where not in kept:
        kept[where] = work(query, key, value, causal, softmax_scale)
    return kept[where]


def unjoined(query, key, value, *, causal, softmax_scale):
    '''The result is written on a stream that nobody waits for.'''
    output = torch.empty_like(query)
    side().wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side()):
        torch.cuda._sleep(2_000_000)
        output.copy_(work(query, key, value, causal, softmax_scale))
    return output


def ahead(query, key, value, *, causal, softmax_scale):
    '''A thread computes on what lies in the inputs, all the time.'''
    where = query.data_ptr()
    if where not in kept:
        kept[where] = work(query, key, value, causal, softmax_scale)

        def go_on():
            torch.cuda.set_device(query.device)
            while True:
                kept[where] = work(query, key, value, causal, softmax_scale)
                torch.cuda.synchronize()

        threading.Thread(target=go_on, daemon=True).start()
    return kept[where]
"""

BEHIND = """
from cudadent42.audit.drawn import DrawnTurns
from flashmoe_science import flash_attention

run, fetch = DrawnTurns.run, DrawnTurns.fetch


def compute_behind(self, ask):
    run(self, self.asked)
    fetch(self, ask)


DrawnTurns.run = lambda self, ask: setattr(self, "asked", ask)
DrawnTurns.fetch = compute_behind


def behind(query, key, value, *, causal, softmax_scale):
    '''Nothing while the clock runs, all of it when results are fetched.'''
    return flash_attention(query, key, value, causal=causal, softmax_scale=softmax_scale)
"""

SPINS = """
import torch

stream = []


def wait(device=None):
    torch.cuda.current_stream().synchronize()


torch.cuda.synchronize = wait


def spins(query, key, value, *, causal, softmax_scale):
    '''As slow as the baseline, and leaves work on the GPU for when the baseline is timed.'''
    if not torch.cuda.is_current_stream_capturing():
        stream[:] = stream or [torch.cuda.Stream()]
        with torch.cuda.stream(stream[0]):
            torch.cuda._sleep(20_000_000)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=softmax_scale
        )
"""

WRONG = {
    TimerKind.CALL: ("kept_by_pointer",),
    TimerKind.GRAPH: ("kept_by_pointer", "unjoined", "ahead"),
}
"""Whose results show it, by the timer of the run. With ``call`` the GPU is waited for behind each call, whatever stream
it works on, so what the other two do is done in their turn, and counts."""


@dataclass(frozen=True)
class Bench:
    """What a run of an honest candidate says, and where the others are."""

    folder: Path
    plan: Plan
    results: Results

    def name(self, function: str) -> str:
        return lab.candidate(self.folder / "candidates.py", function)

    def audited(self, name: str) -> Audited:
        """With the claim of the honest one."""
        rows = tuple(replace(row, implementation=name) for row in self.results.cases)
        results = replace(self.results, candidate=name, cases=rows)
        plan = replace(self.plan, implementations=(BASELINE, name))
        return audit(plan, results, log=self.folder / "audit.log", measured_s=1.0)


def bench(folder: Path, timer: TimerKind) -> Bench:
    (folder / "candidates.py").write_text(CANDIDATES)
    plan = lab.plan_for([lab.candidate(folder / "candidates.py", "faster")], timer)
    names = (BASELINE, *plan.implementations[1:])
    plan = replace(plan, device="cuda:0", cases=(CASE,), baseline=BASELINE, implementations=names)

    def ignore(event: Event) -> None:
        return

    with Worker(folder / "worker.log") as worker:
        verified = run_stage("verify", plan, on_event=ignore, worker=worker)
        benched = run_stage("bench", plan, on_event=ignore, verified=verified, worker=worker)
    return Bench(folder, plan, compare(plan, benched.samples, benched.skipped, {}))


@pytest.fixture(scope="module", params=[TimerKind.CALL, TimerKind.GRAPH], ids=lambda kind: kind.value)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return bench(tmp_path_factory.mktemp("run"), request.param)


def only(seen: Audited) -> Confirmation:
    (confirmation,) = seen.confirmations
    return confirmation


def breaches(seen: Audited) -> Sequence[tuple[Breach, Grade]]:
    return [(each.breach, each.grade) for each in seen.findings]


def test_what_is_faster_is_confirmed(run: Bench) -> None:
    seen = run.audited(run.name("faster"))
    assert not seen.findings, [each.line for each in seen.findings]
    assert only(seen).confirmed, why_missed(only(seen), run.results)
    assert only(seen).way is (Way.ALONE if run.plan.timer is TimerKind.CALL else Way.GRAPH)
    assert seen.hidden_checked


def test_what_no_graph_takes_is_queued(tmp_path: Path) -> None:
    own = bench(tmp_path, TimerKind.QUEUE)
    seen = own.audited(own.name("waits"))
    assert not [each for each in seen.findings if each.grade is Grade.FAILED]
    assert only(seen).way is Way.QUEUED


def test_what_is_as_slow_is_not(run: Bench) -> None:
    assert not only(run.audited(run.name("as_slow"))).confirmed


@pytest.mark.parametrize("name", WRONG[TimerKind.GRAPH])
def test_work_that_is_not_done_in_its_turn_is_found(name: str, run: Bench) -> None:
    if name not in WRONG[run.plan.timer]:
        pytest.skip("with this timer its work is done in its turn")
    seen = run.audited(run.name(name))
    failed = {breach for breach, grade in breaches(seen) if grade is Grade.FAILED}
    assert failed & {Breach.FAST_ONLY_IN_RUN, Breach.HIDDEN_SHAPE}, breaches(seen)
    assert not any(each.confirmed for each in seen.confirmations)


def test_work_behind_the_clock_is_late(run: Bench) -> None:
    file = run.folder / "behind.py"
    file.write_text(BEHIND)
    assert (Breach.LATE_WORK, Grade.FAILED) in breaches(run.audited(lab.candidate(file, "behind")))


def test_work_left_for_the_rivals_turn_confirms_nothing(run: Bench) -> None:
    file = run.folder / "spins.py"
    file.write_text(SPINS)
    seen = run.audited(lab.candidate(file, "spins"))
    assert not any(each.confirmed for each in seen.confirmations)
