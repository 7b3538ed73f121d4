"""Processes that are forked from a warm interpreter have what they would have had, begun afresh."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import warm_process
import warm_programs
import warm_python
from flashmoe_science.jit import host
from flashmoe_science.jit.host import InstructionSet

ENTER = [sys.executable, "-m", "cudadent42.sandbox.enter", "{}", "-1"]
WORKER = [sys.executable, "-X", "faulthandler", "-P", "-m", "cudadent42.worker.child", "4", "5"]


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("said", "threads"), [("1", 1), ("3", 3), ("", 2), ("0", 2), ("many", 2)])
@pytest.mark.usefixtures("_threads")
def test_a_process_has_as_many_threads_as_its_environment_says(
    said: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_python, "_threads_at_the_start", 2)
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    torch.set_num_threads(5)
    warm_python._take_threads()
    assert torch.get_num_threads() == threads


def test_what_is_confined_is_forked_unless_it_is_to_be_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_programs, "executes_in_sandboxes", False)
    assert warm_programs.program([*ENTER, *WORKER], "/") == [*ENTER, *WORKER][1:]
    asks_what_there_is = [*ENTER[:-1], "7"]
    assert warm_programs.program(asks_what_there_is, "/") is None
    warm_programs.execute_in_sandboxes()
    assert warm_programs.program([*ENTER, *WORKER], "/") is None
    assert warm_programs.program(WORKER, "/") == WORKER[1:]


TEXT = """
import __main__, os, sys
print(sys.argv, repr(sys.path[0]), __name__, __main__.TOLD, os.environ["MARK"], "torch" in sys.modules)
raise SystemExit(3)
"""


@pytest.mark.usefixtures("warm_texts")
def test_a_text_that_is_forked_is_the_main_program(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "TOLD = 7" + TEXT, "word", "-m"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"MARK": "mine"}, capture_output=True, text=True, check=False
    )
    assert done.stdout == "['-c', 'word', '-m'] '' __main__ 7 mine True\n", done.stderr
    assert done.returncode == 3


@pytest.mark.usefixtures("warm_texts")
def test_a_process_that_is_forked_compiles_as_its_asker_does() -> None:
    """Or each kernel of a lesser instruction set would be compiled twice."""
    text = "from flashmoe_science.jit.host import InstructionSet\nprint([each.flags for each in InstructionSet])\n"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == f"{[each.flags for each in InstructionSet]}\n"
    assert ("-O1" in done.stdout) == warm_programs.compiles_quickly


def test_a_text_is_executed_elsewhere() -> None:
    assert warm_programs.program([sys.executable, "-c", "pass"], "/") is None


def test_what_names_transformers_has_a_server_by_what_that_reads() -> None:
    environment = {"HF_HUB_OFFLINE": "1", "HOME": "/"}
    assert warm_programs.read_by_models(["-c", "import json"], "/", environment) is None
    assert warm_programs.read_by_models(["-m", "cudadent42"], "/", environment) is None
    said = warm_programs.read_by_models(["-c", "import transformers"], "/", environment)
    assert said == (("HF_HUB_OFFLINE", "1"),)


@pytest.mark.usefixtures("fresh_processes")
def test_processes_are_fresh_where_a_test_asks_for_it() -> None:
    assert subprocess.Popen is warm_python.FreshPopen


def test_processes_are_warm_in_all_other_tests_and_have_homes_of_their_own() -> None:
    assert subprocess.Popen is warm_python.WarmPopen
    assert not warm_programs.forks_texts
    for variable in ("XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        assert Path(os.environ[variable]).is_dir()
        assert Path(os.environ[variable]).parent.name.startswith("homes-")


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_a_process_with_another_compiler_asks_for_it() -> None:
    host.find_compiler.cache_clear()
    host.find_compiler()
    warm_process.forget_the_compiler(dict(os.environ))
    assert host.find_compiler.cache_info().currsize == 1
    warm_process.forget_the_compiler({**os.environ, "CXX": "/no/such/compiler"})
    assert host.find_compiler.cache_info().currsize == 0
