"""What the markers mean: a test that needs a GPU, the network or patience is skipped unless asked for."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# By default OpenMP's threads spin for each other, and several processes of tests share a machine: six times the
# processor time. libgomp reads it when it is loaded, so before anything imports torch: a folder's conftest.py does so
# before any hook is called. Tests' processes inherit it.
os.environ["OMP_WAIT_POLICY"] = "passive"

from cudadent42.base.git import REPOSITORY_VARIABLES

# For the modules beside this one: in importlib's import mode a test's folder is not on the path.
sys.path.append(str(Path(__file__).parent))

import warm_programs
from brief_timing import be_brief
from dearest import Dearest
from forked_tests import take_over
from gpu_turns import gpu_turn, turnstiles
from own_revision import ask_once
from quick_kernels import compile_lesser_ones_quickly
from warm_programs import SOURCE, execute_in_sandboxes
from warm_python import FreshPopen, WarmPopen

QUICK_EXAMPLES = 30
"""Of a property, where it does not say how many. With ``--slow`` as many as Hypothesis takes by default, 100."""


def pytest_configure(config: pytest.Config) -> None:
    # Processes of tests find this lab, also where it is installed: only then are they forked from one that has it.
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(SOURCE) not in path:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(SOURCE), *filter(None, path)])
    # The runs of tests do not belong into the ledger of whoever starts them; those about the ledger name their own.
    os.environ["CUDADENT42_LEDGER"] = "none"
    take_over(config)
    if config.getoption("--slow"):
        execute_in_sandboxes()
    elif not os.environ.get("FLASHMOE_CPU_ISA"):
        warm_programs.compiles_quickly = True
    if count := config.getoption("--dearest"):
        config.pluginmanager.register(Dearest(count))
    # In a hook of git, tests that make repositories would make their commits in the one that the hook is of.
    for name in REPOSITORY_VARIABLES:
        os.environ.pop(name, None)
    # How long an example takes decides nothing: other tests, and whatever else runs here, use the same processors.
    unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("slow", unhurried)
    settings.register_profile("quick", unhurried, max_examples=QUICK_EXAMPLES)
    settings.load_profile("slow" if config.getoption("--slow") else "quick")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--net", action="store_true", help="also run the tests that need the network")
    parser.addoption(
        "--update-snapshots", action="store_true", help="write the texts under tests/snapshots again"
    )
    parser.addoption(
        "--dearest", type=int, metavar="N", help="name the N files and tests that took most processor time"
    )
    parser.addoption("--slow", action="store_true", help="also run the tests that take more than ten seconds")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for name in ("net", "slow"):
            if item.get_closest_marker(name) and not config.getoption(f"--{name}"):
                item.add_marker(pytest.mark.skip(reason=f"{name} test: give --{name} to run it"))
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU that torch can use"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[object]:
    """A race on a GPU that tests of other processes use shows their work, so those marked `alone` wait for the others.
    The wait is outside of what pytest-timeout counts."""
    try:
        if item.get_closest_marker("gpu") is None or not _has_gpu():
            return (yield)
        with gpu_turn(turnstiles(), alone=item.get_closest_marker("alone") is not None):
            return (yield)
    finally:
        if nextitem is None or nextitem.path != item.path:
            _set_aside()


def _set_aside() -> None:
    """What is left after a file of tests stays: modules, caches, what pytest keeps of each test. Every look for garbage
    would go through it again, half a second in a process that has worked for minutes, and each run of the lab's
    measures memory behind such a look."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Modules and tests stay until the end. To look through them again and again while they come takes a third of the
    time to collect them, and at every collection of garbage later a seventh of all time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # with what little garbage there is: to look for it takes half a second
    # Tests that draw pages and trace models make many objects. At 700, the default, a sixth of their time is looks for
    # garbage, and Hypothesis is told of each.
    gc.set_threshold(10_000)


@pytest.fixture(autouse=True, scope="session")
def _surroundings() -> Iterator[None]:
    """What all tests find, those that fixtures of any scope start too. One fixture, and it asks for no other: each is a
    twentieth of what pytest does for a test.

    Settings and counts of the user who runs the tests are neither read nor changed. The lab's processes begin with what
    they would import. What the lab does for its clocks alone is brief, as in processes that are forked.
    """
    with (
        tempfile.TemporaryDirectory(prefix="homes-", ignore_cleanup_errors=True) as homes,
        pytest.MonkeyPatch.context() as patch,
    ):
        for variable in ("XDG_CONFIG_HOME", "XDG_STATE_HOME"):
            home = Path(homes, variable.lower())
            home.mkdir()
            patch.setenv(variable, str(home))
        if warm_programs.compiles_quickly:
            compile_lesser_ones_quickly(patch.setattr)
        patch.setattr(subprocess, "Popen", WarmPopen)
        be_brief(patch.setattr)
        ask_once(patch.setattr)
        yield


@pytest.fixture
def fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests about what an interpreter does: their processes are not forked from one that runs."""
    monkeypatch.setattr(subprocess, "Popen", FreshPopen)


@pytest.fixture
def warm_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests whose programs, ``python -c``, may be forked from an interpreter that has imported the lab."""
    monkeypatch.setattr(warm_programs, "forks_texts", True)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """PyTorch on one thread, for tests of many small tensors: handing them to a second takes a third of the time."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def nvrtc() -> None:
    """For tests that compile CUDA. The bindings come with the package; the compiler that they load may not be there."""
    from flashmoe_science.errors import DeviceError
    from flashmoe_science.jit.nvrtc import nvrtc_version

    try:
        nvrtc_version()
    except DeviceError as error:
        pytest.skip(str(error))


SNAPSHOTS = Path(__file__).parent / "snapshots"


@pytest.fixture
def snapshot(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``snapshot(name, text)``: the text is that of ``tests/snapshots/<name>.txt``; a change of words is seen."""

    def check(name: str, text: str) -> None:
        path = SNAPSHOTS / f"{name}.txt"
        if request.config.getoption("--update-snapshots"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        kept = path.read_text(encoding="utf-8") if path.exists() else ""
        assert text == kept, f"the words of {name} changed; ./test.sh --update-snapshots writes them again"

    return check


@functools.cache
def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
