"""Every cheat that is documented of agents and competitors, and some of our own: each is caught, by name.

The files of ``cheats`` say where each comes from; the number is that of the list in docs/defences.md. What a candidate
does in its own process is seen there; what can only be seen from outside is in test_audit.py. No test depends on a
timing: it is the evidence that is looked at.
"""

from __future__ import annotations

from pathlib import Path

import lab
import pytest

from cudadent42.model.integrity import Breach, Grade
from cudadent42.model.records import Scope
from cudadent42.worker.parent import Worker
from cudadent42.worker.stages import run_stage

HARMLESS_TO_OTHERS = {
    "kept_by_pointer": Breach.KEPT_RESULT,
    "kept_by_identity": Breach.KEPT_RESULT,
    "reference_found": Breach.WRONG_WHILE_TIMED,
    "garbage_between": Breach.WRONG_WHILE_TIMED,
    "evaluator_recognised": Breach.WRONG_WHILE_TIMED,
    "seed_learnt": Breach.WRONG_WHILE_TIMED,
    "thread_fills_later": Breach.LATE_WORK,
    "fallback": Breach.ANOTHER_NAME,
    "fallback_in_a_thread": Breach.ANOTHER_NAME,
}
"""Those that leave the process as it was, so that one worker can have them all."""

FAIL_VERIFICATION = {
    "lazy_tensor": "a subclass of Tensor that may compute when it is read",
    "freed_memory": "entries wrong",
    "uninitialised": "entries wrong",
    "input_passed_through": "over the bound",
    "lower_precision": "over the bound",
    "inputs_changed": "over the bound",
}
"""Of these the words of verification say what is wrong."""

CHANGE_THE_PROCESS = {
    "clock_patched": (Breach.REPLACED_FUNCTION, "time.perf_counter_ns"),
    "reading_patched": (Breach.REPLACED_FUNCTION, "cudadent42.timing.timers.Reading"),
    "judge_patched": (Breach.REPLACED_FUNCTION, "cudadent42.stages.verify.judge"),
    "code_exchanged": (Breach.REPLACED_FUNCTION, "cudadent42.correctness.norms.error_norms"),
    "modules_exchanged": (Breach.REPLACED_FUNCTION, "sys.modules['cudadent42.correctness.truth']"),
    "bound_raised": (Breach.REPLACED_FUNCTION, "ERROR_FACTOR"),
    "baseline_replaced": (Breach.REPLACED_FUNCTION, "torch.nn.functional.scaled_dot_product_attention"),
    "baseline_wrapped": (Breach.REPLACED_FUNCTION, "implementations.ALL[0].prepare"),
    "operator_overridden": (Breach.REPLACED_FUNCTION, "_scaled_dot_product_flash_attention_for_cpu"),
    "mode_pushed": (Breach.REPLACED_FUNCTION, "stack of function and dispatch modes"),
    "threads_lowered": (Breach.LEFT_SETTINGS, "torch.set_num_threads"),
    "inputs_zeroed": (Breach.CHANGED_INPUTS, "not those that were written"),
    "reference_spoiled": (Breach.WRONG_WHILE_TIMED, "nan"),
    "spinning_thread": (Breach.BACKGROUND_WORK, "thread"),
    "spinning_children": (Breach.BACKGROUND_WORK, "process"),
    "answers_ahead": (Breach.BACKGROUND_WORK, "thread"),
    "spins_after_leaving": (Breach.BACKGROUND_WORK, "left the worker's tree"),
    "sibling_spins": (Breach.BACKGROUND_WORK, "left the worker's tree"),
    "orphans_work": (Breach.BACKGROUND_WORK, "have ended"),
    "pool_lowered": (Breach.LEFT_SETTINGS, "niceness 19"),
    "pool_born_low": (Breach.LEFT_SETTINGS, "scheduling 3"),
    "tracer_left_on": (Breach.LEFT_SETTINGS, "sys.settrace"),
    "alarm_left_on": (Breach.LEFT_SETTINGS, "signal.setitimer"),
    "tracer_says_equal": (Breach.LEFT_SETTINGS, "sys.settrace"),
    "collector_calls_back": (Breach.LEFT_SETTINGS, "gc.callbacks"),
    "speculation_left_off": (Breach.LEFT_SETTINGS, "huge pages"),
    "kernel_timer_left": (Breach.LEFT_SETTINGS, "timer_create"),
    "allocator_slowed": (Breach.LEFT_SETTINGS, "mallopt"),
    "constant_rewritten": (Breach.REPLACED_FUNCTION, "ERROR_FACTOR"),
    "machine_code_patched": (Breach.REPLACED_FUNCTION, "libc"),
    "rounding_left_changed": (Breach.LEFT_SETTINGS, "rounding of the processor"),
    "environment_of_the_rival": (Breach.LEFT_SETTINGS, "os.environ FLASHMOE_CPU_ISA"),
    "inputs_reclassed": (Breach.CHANGED_INPUTS, "is a Slow now"),
    "inputs_moved": (Breach.CHANGED_INPUTS, "other memory, strides or gradients"),
    "precision_lowered_between": (Breach.WRONG_WHILE_TIMED, "rms error"),
    "builtins_patched": (Breach.REPLACED_FUNCTION, "random.Random.choice"),
    "rival_patched": (Breach.REPLACED_FUNCTION, "flashmoe_science.flash_attention"),
}

THREADS = {"pool_lowered": "2", "pool_born_low": "2"}
"""Of PyTorch's, where they are what the cheat is about."""

BASELINES = {"rival_patched": "cudadent42"}
"""Where it is not PyTorch."""

QUICK = (
    *("reading_patched", "baseline_wrapped", "operator_overridden", "threads_lowered", "inputs_zeroed"),
    *("inputs_moved", "alarm_left_on", "rival_patched"),
)
"""One of each kind. The others take a worker each, seconds of importing PyTorch."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> lab.Seen:
    names = [lab.cheat(name) for name in (*HARMLESS_TO_OTHERS, *FAIL_VERIFICATION)]
    return lab.put_before(names, tmp_path_factory.mktemp("cheats") / "worker.log")


@pytest.mark.parametrize("name", HARMLESS_TO_OTHERS)
def test_a_result_that_was_not_computed_while_it_was_timed(name: str, seen: lab.Seen) -> None:
    assert HARMLESS_TO_OTHERS[name] in seen.breaches(lab.cheat(name)), seen.evidence(lab.cheat(name))


@pytest.mark.parametrize("name", FAIL_VERIFICATION)
def test_a_result_that_is_wrong(name: str, seen: lab.Seen) -> None:
    assert FAIL_VERIFICATION[name] in seen.failures(lab.cheat(name))


def test_the_baseline_beside_them_is_not_blamed(seen: lab.Seen) -> None:
    assert not seen.failures("pytorch")
    assert not seen.breaches("pytorch")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CHANGE_THE_PROCESS],
)
def test_a_process_that_is_not_what_it_was(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", THREADS.get(name, "1"))
    breach, words = CHANGE_THE_PROCESS[name]
    baseline = BASELINES.get(name, "pytorch")
    seen = lab.put_before([lab.cheat(name)], tmp_path / "worker.log", baseline=baseline)
    named = [each for each in seen.findings() if each.breach is breach]
    assert named, seen.evidence(lab.cheat(name))
    assert any(words in each.evidence for each in named)
    assert all(each.implementation == lab.cheat(name) for each in named)
    assert all(len(each.line) < 400 for each in named)


@pytest.mark.slow
def test_a_thread_that_rests_only_while_it_is_looked_for(tmp_path: Path) -> None:
    """Whether it gets a processor in the few milliseconds of a look is the machine's to say, so it is tried until it
    does: only the time limit of a test ends that."""
    name = lab.cheat("probe_dodged")
    while not (findings := lab.put_before([name], tmp_path / "worker.log").findings()):
        continue
    assert {each.breach for each in findings} == {Breach.BACKGROUND_WORK}
    assert "rested while the lab waited" in findings[0].evidence


@pytest.mark.slow
def test_autocast_loosens_nobodys_bound(tmp_path: Path) -> None:
    """A setting is kept apart: PyTorch's error is what it is without."""
    name = lab.cheat("autocast_left_on")
    seen = lab.put_before([name], tmp_path / "worker.log")
    assert "over the bound" in seen.failures(name)
    assert not seen.failures("pytorch")


def test_latencies_that_are_longer_than_what_passed(tmp_path: Path) -> None:
    """Whatever a candidate does to what its process measures, this process has a clock of its own."""
    name = lab.cheat("latencies_added")
    seen = lab.put_before([name], tmp_path / "worker.log")
    (finding,) = (each for each in seen.findings() if each.breach is Breach.CLOCKS_DISAGREE)
    assert (finding.implementation, finding.grade) == (name, Grade.FAILED)
    assert "by the worker's clock" in finding.evidence


def test_a_stage_that_ends_before_its_outputs_were_verified(tmp_path: Path) -> None:
    name = lab.cheat("stage_ended_early")
    seen = lab.put_before([name], tmp_path / "worker.log")
    assert "the stage ended before its outputs were verified" in seen.failures(name)
    assert not seen.failures("pytorch")


ENDS_VERIFYING = """
import gc
import sys

from flashmoe_science import flash_attention


def attention(query, key, value, *, causal, softmax_scale):
    channel = next(each for each in gc.get_objects() if type(each).__name__ == "_Channel")
    channel.emit(sys.modules["cudadent42.model.events"].StageDone("verify"))
    return flash_attention(query, key, value, causal=causal, softmax_scale=softmax_scale)
"""


def test_a_stage_of_adversarial_inputs_alone_that_ends_before_they_were_judged(tmp_path: Path) -> None:
    """A tuning verifies them by themselves, once for many cases."""
    (tmp_path / "cheat.py").write_text(ENDS_VERIFYING)
    name = lab.candidate(tmp_path / "cheat.py")
    plan = lab.plan_for([name, "cudadent42"])
    with Worker(tmp_path / "worker.log") as worker:
        seen = run_stage("verify", plan, on_event=lambda event: None, worker=worker, scope=Scope.COMMON)
    assert {each.implementation for each in seen.cases if not each.passed} == {name}
    assert "the stage ended before its outputs were verified" in seen.cases[-1].detail
