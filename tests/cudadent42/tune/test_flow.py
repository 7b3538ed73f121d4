"""A tuning of a real kernel on this CPU, from the space to the table: compiled, verified, raced and confirmed by the
lab's own worker. By a clock of the tests' own, so that no other work on the machine decides anything."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cudadent42.base.errors import UsageError
from cudadent42.base.files import write_json
from cudadent42.base.observer import Quiet
from cudadent42.base.processor import cpu_name
from cudadent42.model.records import TimerKind
from cudadent42.native import specification
from cudadent42.native.tuned import tuned_for
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.plan import Choices
from cudadent42.runs.run_folder import RunStatus, load_run
from cudadent42.scaffold import Kind, create
from cudadent42.tune import installing
from cudadent42.tune.coordinator import Limits
from cudadent42.tune.flow import go_on
from cudadent42.tune.journal import FILES, Device, Search, TuningJournal
from cudadent42.tune.opening import Opened, Request, open_tuning, reopen
from cudadent42.tune.report.page import PAGE
from cudadent42.tune.space import DEFAULT
from cudadent42.tune.wanted import Wanted
from flashmoe_science.tuned.lookup import PACKAGE_FOLDER, refresh

SUITE = """
name = "unit"
dtypes = ["fp32"]
repeats = 12
warmup = 1
case = [
    { name = "one", batch = 1, num_heads = 1, seqlen = 16, head_dim = 8 },
    { name = "two", batch = 1, num_heads = 1, seqlen = 32, head_dim = 8 },
]
"""

SPACE = """
schema_version = 1
name = "planted"
kernel = "k/k.toml"
where = "COST != 104 or WRONG == 0"
regions = ["seqlen_q", "seqlen_k"]

[space]
COST = [94, 100, 104]
WRONG = [0, 1]
UNUSED = [0, 1]
"""


@pytest.fixture
def request_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Request:
    """A kernel whose arms differ in a clock's ``COST``; one macro makes it wrong, one changes nothing."""
    paths = (Path(__file__).parents[3] / "src", Path(__file__).parent / "own_clock")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    refresh()
    create("k", Kind.CPU, tmp_path)
    source = tmp_path / "k/k.cpp"
    text = source.read_text().replace("(float)(sum[d] / weights)", "(float)(sum[d] / weights) + WRONG")
    source.write_text(text + "\nCUDADENT42_EXPORT int cost(void) { return COST; }\n")
    kernel = tmp_path / "k/k.toml"
    kernel.write_text(
        kernel.read_text() + "\n[[configuration]]\nmacros = { COST = 100, WRONG = 0, UNUSED = 0 }\n"
    )
    (tmp_path / "suite.toml").write_text(SUITE)
    (tmp_path / "space.toml").write_text(SPACE)
    return Request(
        space=tmp_path / "space.toml",
        choices=Choices(suite=str(tmp_path / "suite.toml"), timer=TimerKind.CPU),
        device="cpu",
        folder=tmp_path / "tuning",
        rungs=(6, 12),
        ignore_preflight=True,
    )


def opened(request: Request) -> Opened:
    return open_tuning(request, Quiet())


@pytest.mark.slow
def test_a_planted_arm_is_installed_and_arms_of_equal_code_are_not(
    request_of: Request, tmp_path: Path
) -> None:
    state = go_on(opened(request_of), Limits(), Quiet(), audits=False)
    assert state.finished
    one = state.cases["one/fp32"]
    planted = "COST=94, WRONG=0, UNUSED=0"
    assert {each.arm for each in state.winners} == {planted}
    assert one.pruned["COST=94, WRONG=0, UNUSED=1"] == f"the same machine code as {planted}"
    assert one.pruned["COST=100, WRONG=0, UNUSED=0"] == "the same machine code as default"
    assert "verification" in one.out["COST=94, WRONG=1, UNUSED=0"]
    for winner in state.winners:
        assert winner.ratio == pytest.approx(100 / 94, rel=0.01)
        run = load_run(tmp_path / "tuning" / winner.run)
        assert run.manifest.status is RunStatus.FINISHED
        assert run.manifest.environment["FLASHMOE_TUNED"] == "off"
        assert run.plan.baseline == str(tmp_path / "k/k.toml")
    assert "FLASHMOE_TUNED" not in os.environ
    seeds = {load_run(path).plan.seed for path in (tmp_path / "tuning/races").iterdir()}
    assert len(seeds) == len(list((tmp_path / "tuning/races").iterdir()))

    page = (tmp_path / "tuning" / PAGE).read_text()
    assert "Faster than the default in 2 of 2 cases" in page
    assert page.count("<svg") == 5
    assert "seqlen_q 16 to 32" in page

    # Once more: nothing is left to do.
    again = go_on(reopen(tmp_path / "tuning", Quiet(), ignore_preflight=True), Limits(), Quiet())
    assert again.arm_blocks == state.arm_blocks

    table = installing.install_tuning(tmp_path / "tuning", package=False)
    assert [(entry.region.between, entry.settings["COST"]) for entry in table.entries] == [
        ({"seqlen_q": (16, 32), "seqlen_k": (16, 32)}, 94)
    ]
    own = [each.problem for each in installing.check() if not each.table.startswith(str(PACKAGE_FOLDER))]
    assert own == [""]
    kernel = specification.load(tmp_path / "k/k.toml")

    def cost(seqlen: int, head_dim: int = 8) -> int:
        case = AttentionCase("any", "fp32", 1, 1, 1, seqlen, seqlen, head_dim)
        chosen = tuned_for(kernel, case, cpu_name(), 0).find("fp32", head_dim, None)
        assert chosen is not None
        return chosen.macros["COST"]

    assert [cost(16), cost(24), cost(32), cost(33), cost(15), cost(24, 16)] == [94, 94, 94, 100, 100, 100]
    # Another kernel under the same name is not configured by it.
    source = tmp_path / "k/k.cpp"
    source.write_text(source.read_text() + "\n// changed\n")
    refresh()
    with pytest.warns(RuntimeWarning, match="tuned for other sources of file:k"):
        assert cost(24) == 100
    with pytest.raises(UsageError, match="the kernel changed since"):
        reopen(tmp_path / "tuning", Quiet())


def test_a_tuning_goes_on_on_its_own_device_alone(request_of: Request, tmp_path: Path) -> None:
    """A folder may be taken along to another machine: blocks of two kinds of device say nothing together."""
    begun = opened(request_of)
    with TuningJournal(begun.folder, begun.setup):
        pass
    assert reopen(begun.folder, Quiet(), ignore_preflight=True).setup == begun.setup
    write_json(begun.folder / FILES.setup, replace(begun.setup, device=Device("another CPU")))
    with pytest.raises(
        UsageError, match=f"is of another CPU, and this machine has {re.escape(cpu_name())}; go on"
    ):
        reopen(begun.folder, Quiet(), ignore_preflight=True)


def test_where_nothing_is_faster_nothing_is_installed(request_of: Request, tmp_path: Path) -> None:
    space = tmp_path / "space.toml"
    space.write_text(space.read_text().replace("[94, 100, 104]", "[100, 104]"))
    state = go_on(opened(request_of), Limits(), Quiet(), audits=False)
    assert state.finished
    assert all(case.leader == DEFAULT for case in state.cases.values())
    with pytest.raises(UsageError, match="nothing to install"):
        installing.install_tuning(tmp_path / "tuning", package=False)


def test_a_job_of_wrong_arms_alone_leaves_the_default_where_it_is(
    request_of: Request, tmp_path: Path
) -> None:
    space = tmp_path / "space.toml"
    space.write_text(SPACE.replace("[94, 100, 104]", "[100]").replace("UNUSED = [0, 1]\n", ""))
    (tmp_path / "suite.toml").write_text(SUITE.replace('    { name = "two"', "    # "))
    state = go_on(opened(request_of), Limits(), Quiet(), audits=False)
    (case,) = state.cases.values()
    assert set(case.out) == {"COST=100, WRONG=1"}
    assert case.alive == (DEFAULT,)
    assert case.settled is not None
    assert case.settled.reason == "no other arm is left"


@pytest.mark.slow
def test_a_search_confirms_the_best_of_a_real_kernel(request_of: Request, tmp_path: Path) -> None:
    """Of 256 configurations, some tens are compiled, verified and raced."""
    pytest.importorskip("optuna")
    source = tmp_path / "k/k.cpp"
    source.write_text(source.read_text().replace("return COST;", "return COST + 100 * FAR_A + FAR_B;"))
    kernel = tmp_path / "k/k.toml"
    kernel.write_text(kernel.read_text().replace("COST = 100,", "COST = 60, FAR_A = 6, FAR_B = 2,"))
    far = ", ".join(map(str, range(-5, 11)))
    space = (
        SPACE.split("where")[0]
        + f"[space]\nFAR_A = [{far}]\nFAR_B = [-3, -2, -1, 0, 1, 2, 3, 4]\nWRONG = [0, 1]\n"
    )
    (tmp_path / "space.toml").write_text(space)
    (tmp_path / "suite.toml").write_text(SUITE.replace('    { name = "two"', "    # "))
    begun = opened(replace(request_of, wanted=Wanted.OPTUNA))
    begun = replace(begun, setup=replace(begun.setup, search=Search(round=6, rounds=4)))
    state = go_on(begun, Limits(), Quiet(), audits=False)
    assert state.finished
    assert len(state.setup.arms) == 25
    (winner,) = state.winners
    settings = state.setup.settings[winner.arm]
    assert settings["WRONG"] == 0
    cost = 60 + int(settings["FAR_A"]) ** 2 + int(settings["FAR_B"]) ** 2
    assert cost <= 65
    assert winner.ratio == pytest.approx(100 / cost, rel=0.01)
    assert "proposed in 4 rounds" in (tmp_path / "tuning" / PAGE).read_text()
    # The same command goes on with what it was begun with, and nothing is left to do.
    again = go_on(reopen(tmp_path / "tuning", Quiet(), ignore_preflight=True), Limits(), Quiet())
    assert again.arm_blocks == state.arm_blocks
    assert again.setup == state.setup
    table = installing.install_tuning(tmp_path / "tuning", package=False)
    assert [entry.settings for entry in table.entries] == [settings]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_named_where_preflight_is_ignored(tmp_path: Path) -> None:
    space = tmp_path / "space.toml"
    space.write_text(
        'schema_version = 1\nname = "s"\nkernel = "cudadent42[portable]"\n[space]\nblock_n = [32]\n'
    )
    request = Request(
        space=space,
        choices=Choices(suite="small"),
        device="cuda:0",
        folder=tmp_path / "tuning",
        ignore_preflight=True,
    )
    with pytest.raises(UsageError, match="no CUDA device for cuda:0"):
        open_tuning(request, Quiet())
