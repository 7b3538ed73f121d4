from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cudadent42.base.errors import ExitCode, UsageError
from cudadent42.flows import pipeline
from cudadent42.model.integrity import peer_in
from cudadent42.model.records import MachineReport, Refusal, TimerKind, Verdict
from cudadent42.plan import Choices, RunOptions
from cudadent42.runs.run_folder import RunStatus, RunWriter, load_run
from cudadent42.stages import gates
from cudadent42.stages.gates import loader
from cudadent42.suites.loader import builtin_suites, load_suite

SUITE = """
name = "unit"
dtypes = ["fp32"]
repeats = 4
warmup = 0
case = [{ name = "one", batch = 1, num_heads = 1, seqlen = 16, head_dim = 32 }]
"""

PLUG_IN = """
import os
from pathlib import Path
from torch.nn.functional import scaled_dot_product_attention

Path(__file__).with_name("pids").open("a").write(f"{os.getpid()}\\n")

def attention(query, key, value, *, causal, softmax_scale):
    if query.shape[2] == 16 and query.shape[3] == 32:
        return scaled_dot_product_attention(query, key, value, is_causal=causal, scale=softmax_scale)
    raise NotImplementedError("only the case of this test")

attention.peer_of = "PyTorch"
"""


class Listener:
    def __init__(self) -> None:
        self.stages: list[str] = []
        self.fractions: list[float] = []

    def stage(self, name: str) -> None:
        self.stages.append(name)
        self.fractions.append(0.0)

    def advance(self, fraction: float, what: str) -> None:
        assert what
        self.fractions.append(fraction)

    def note(self, text: str) -> None:
        assert text

    def detail(self, text: str) -> None:
        assert text


class Notes(Listener):
    """Keeps what was noted."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def request(tmp_path: Path, **choices: object) -> RunOptions:
    path = tmp_path / "unit.toml"
    path.write_text(SUITE)
    wanted = Choices(suite=str(path), **choices)  # type: ignore[arg-type]
    return RunOptions(
        choices=wanted, device="cpu", output=tmp_path / "run", command=("test",), ignore_preflight=True
    )


def test_stages_in_order_and_candidates_in_another_process(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUG_IN)
    listener = Listener()
    opened: list[RunWriter] = []
    plug_in = f"{tmp_path}/mine.py:attention"
    outcome = pipeline.run(request(tmp_path, implementations=(plug_in,)), listener, opened.append)

    assert listener.stages == ["preflight", "build", "verify", "bench", "compare", "report"]
    assert all(0 <= fraction <= 1.0001 for fraction in listener.fractions)
    assert opened[0].path == outcome.folder == tmp_path / "run"
    pids = {int(line) for line in (tmp_path / "pids").read_text().split()}
    assert pids
    assert os.getpid() not in pids
    integrity = load_run(outcome.folder).results.integrity  # type: ignore[union-attr]
    assert integrity is not None
    assert peer_in(integrity.notes, plug_in) == "PyTorch"  # as verify told

    read = load_run(outcome.folder)
    assert read.manifest.status is RunStatus.FINISHED
    assert read.results is not None
    assert read.results.candidate == plug_in
    assert read.verify == outcome.verify
    assert any(case.input == "after timing" for case in outcome.verify.cases)
    assert outcome.exit_code is ExitCode.PASS
    assert len(read.samples) == opened[0].sample_count == 4 * 3


REMEMBERS = """
from flashmoe_science import flash_attention

kept = []

def attention(query, key, value, *, causal, softmax_scale):
    call = (query, key, value)
    first = query[0, 0, 0, 0].item() if query.numel() else 0.0
    for known, number, output in kept:
        if number == first and all(a is b for a, b in zip(known, call)):
            return output
    kept[:-2] = []
    kept.append((call, first, flash_attention(query, key, value, causal=causal, softmax_scale=softmax_scale)))
    return kept[-1][2]
"""


def test_what_the_machine_cannot_do_is_no_measurement(tmp_path: Path) -> None:
    """A candidate that keeps its results while a number of the inputs stays: right between and after the blocks, and
    faster than any processor."""
    (tmp_path / "mine.py").write_text(REMEMBERS)
    asked = request(
        tmp_path, implementations=(f"{tmp_path}/mine.py:attention",), repeats=8, timer=TimerKind.CPU
    )
    suite = Path(asked.choices.suite)
    suite.write_text(SUITE.replace("num_heads = 1, seqlen = 16", "num_heads = 8, seqlen = 2048"))
    outcome = pipeline.run(asked, Listener(), lambda folder: None)
    assert outcome.verify.passed
    comparison = outcome.results.cases[0]
    assert 0 < comparison.latency_ms < comparison.floor_ms < comparison.baseline_latency_ms
    assert (comparison.verdict, comparison.refused) == (Verdict.UNDECIDED, Refusal.IMPOSSIBLE)
    assert outcome.results.verdict is Verdict.UNDECIDED
    assert outcome.exit_code is ExitCode.VERIFICATION_FAILED
    page = (outcome.folder / "report.md").read_text()
    assert "below what this machine can do" in page
    assert "at least" in page


def test_bad_input_is_found_before_the_machine_is_looked_at(tmp_path: Path) -> None:
    listener = Listener()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("")
    with pytest.raises(UsageError, match="not empty"):
        pipeline.prepare(request(tmp_path), listener)
    with pytest.raises(UsageError, match="unknown case"):
        pipeline.prepare(request(tmp_path, cases=("two",)), listener)
    assert listener.stages == []


def test_a_peer_of_the_suite_that_is_not_installed_is_left_out(tmp_path: Path) -> None:
    asked = request(tmp_path)
    suite = Path(asked.choices.suite)
    suite.write_text(SUITE + 'implementations = ["cudadent42", "flashinfer", "flash_attn_cute"]\n')
    listener = Notes()
    plan = pipeline.prepare(asked, listener).plan
    assert plan.implementations == ("pytorch", "cudadent42")
    left_out = [line for line in listener.notes if "is left out" in line]
    assert [line.partition(" ")[0] for line in left_out] == ["flashinfer", "flash_attn_cute"]
    suite.write_text(SUITE + 'implementations = ["flashinfer"]\n')
    with pytest.raises(UsageError, match="nothing to compare with pytorch: flashinfer cannot run on cpu"):
        pipeline.prepare(asked, listener)


@pytest.mark.parametrize(("repeats", "said"), [(7, True), (8, False)])
def test_too_few_blocks_for_a_verdict_are_said_before_anything_is_measured(
    tmp_path: Path, repeats: int, said: bool
) -> None:
    listener = Notes()
    asked = request(tmp_path, implementations=("cudadent42",), repeats=repeats, timer=TimerKind.CPU)
    pipeline.run(asked, listener, lambda folder: None, execute=lambda *given: None)  # type: ignore[arg-type,return-value]
    few = f"--repeats {repeats} allows no verdict: at least 8 blocks are needed"
    assert (few in listener.notes) is said
    assert listener.stages == ["preflight"]


def test_a_case_that_neither_device_has_is_met_with_the_cases_of_both() -> None:
    """Where no device is named, a GPU's cases alone are the wrong list on a machine without one."""
    with pytest.raises(UsageError) as raised:
        pipeline.prepare(RunOptions(choices=Choices(suite="race", cases=("tiny",))), Listener())
    said = str(raised.value)
    assert said.startswith("on a GPU: --case: unknown case 'tiny'; the suite race has prompt, long")
    assert (
        "; on CPU: --case: unknown case 'tiny'; the suite race-cpu, which on CPU takes the place of race, has"
        in said
    )
    with pytest.raises(UsageError, match=r"^--case: unknown case 'tinny'; the suite small has tiny"):
        pipeline.prepare(RunOptions(choices=Choices(suite="small", cases=("tinny",))), Listener())


PEERS = ("liger_kernel", "flash_attn", "flash_attn_interface", "flashinfer", "xformers")


@pytest.fixture
def gpu_without_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose preflight finds a GPU, and none of the packages that can be raced beside PyTorch."""
    monkeypatch.setattr(pipeline, "gather", lambda device, folder: None)
    monkeypatch.setattr(pipeline, "chosen_device", lambda context: "cuda:0")
    monkeypatch.setattr(pipeline, "inspect", lambda context: MachineReport((), "", {}))
    for name in [*PEERS, *(each for each in sys.modules if each.partition(".")[0] in PEERS)]:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("gpu_without_peers")
@pytest.mark.parametrize("suite", builtin_suites())
def test_a_suite_runs_on_a_gpu_without_any_peer(suite: str) -> None:
    """`./run.sh --suite moe` ended with an error where Liger was not installed."""
    listener = Notes()
    asked = RunOptions(choices=Choices(suite=suite), device="cuda", ignore_preflight=True)
    plan = pipeline.prepare(asked, listener).plan
    assert "cudadent42" in plan.implementations
    assert plan.baseline in plan.implementations
    left_out = [line.partition(" ")[0] for line in listener.notes if "is left out: " in line]
    named = dict.fromkeys((plan.baseline, *load_suite(suite).implementations))
    assert sorted((*plan.implementations, *left_out)) == sorted(named)


@pytest.mark.usefixtures("gpu_without_peers")
def test_a_peer_that_is_asked_for_by_name_is_not_left_out() -> None:
    choices = Choices(suite="moe", implementations=("cudadent42", "liger"))
    asked = RunOptions(choices=choices, device="cuda", ignore_preflight=True)
    with pytest.raises(
        UsageError, match=r"^liger cannot run on cuda:0: liger_kernel.* pip install liger-kernel$"
    ):
        pipeline.prepare(asked, Notes())


def test_an_implementation_that_cannot_run_here(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"flashinfer cannot run on cpu: it runs on cuda, not on cpu$"):
        pipeline.prepare(request(tmp_path, implementations=("flashinfer",)), Listener())


def profile_gate(metric: str) -> gates.GateFile:
    return loader.parse(f'[[gate]]\nname = "g"\nmetric = "profile.{metric}"\nabove = 0\n', "gates.toml")


def test_a_misspelt_metric_of_a_profile_is_found_before_anything_is_measured(tmp_path: Path) -> None:
    listener = Listener()
    wanted = replace(request(tmp_path), gate=profile_gate("bank_conflict"))
    with pytest.raises(UsageError, match="did you mean 'bank_conflicts'"):
        pipeline.run(wanted, listener, lambda folder: None)
    assert listener.stages == []
    assert not (tmp_path / "run").exists()


def test_a_gate_on_a_profile_has_the_run_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # By ``perf`` one more process would repeat the call; stages/profile/test_target.py has it counted.
    monkeypatch.setattr("cudadent42.stages.profile.perf.unavailable", lambda: "it is not asked here")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "own_clock"), prepend=os.pathsep)
    (tmp_path / "mine.py").write_text(PLUG_IN)
    listener = Listener()
    wanted = request(tmp_path, implementations=(f"{tmp_path}/mine.py:attention",))
    outcome = pipeline.run(replace(wanted, gate=profile_gate("roof_share")), listener, lambda folder: None)
    assert listener.stages[-1] == "profile"
    assert outcome.gates is not None
    assert outcome.gates.passed
    assert (outcome.folder / "diagnosis.json").exists()
    again = gates.judge(profile_gate("bank_conflicts"), outcome.folder)
    assert again.decision is gates.Decision.UNDECIDED


DIES_WHILE_TIMED = """
import os
import traceback
from torch.nn.functional import scaled_dot_product_attention

def attention(query, key, value, *, causal, softmax_scale):
    if any(frame.filename.endswith("measurement.py") for frame in traceback.extract_stack()):
        os._exit(9)
    if query.shape[2] == 16 and query.shape[3] == 32:
        return scaled_dot_product_attention(query, key, value, is_causal=causal, scale=softmax_scale)
    raise NotImplementedError("only the case of this test")

attention.peer_of = "PyTorch"
"""


def test_a_run_whose_only_rival_dies_while_it_is_timed_has_failed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(DIES_WHILE_TIMED)
    name = f"{tmp_path}/mine.py:attention"
    outcome = pipeline.run(request(tmp_path, implementations=(name,)), Listener(), lambda folder: None)
    assert outcome.results.cases == ()
    assert outcome.exit_code is ExitCode.VERIFICATION_FAILED
    died = [case for case in outcome.verify.cases if not case.passed]
    assert [(case.implementation, case.input) for case in died] == [(name, "while timing")]


def test_a_run_that_timed_nothing_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def attention(query, key, value, *, causal, softmax_scale):\n    raise NotImplementedError('never')\n"
    )
    name = f"{tmp_path}/mine.py:attention"
    outcome = pipeline.run(request(tmp_path, implementations=(name,)), Listener(), lambda folder: None)
    assert outcome.exit_code is ExitCode.NOTHING_MEASURED
