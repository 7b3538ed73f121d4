"""Processes of tests that are forked: every test is run once, and reported as pytest alone would report it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from forked_tests import cut_between_files

HERE = Path(__file__).parent
CONFTEST = f"""
import sys
sys.path.append({str(HERE)!r})
from forked_tests import take_over


def pytest_configure(config):
    take_over(config)
"""
WITHOUT_TORCH = """
from types import SimpleNamespace
sys.modules["torch"] = SimpleNamespace(get_num_threads=lambda: 1, set_num_threads=lambda count: None)
"""
"""Whose import is a second and a half of a processor. All that is asked of it there is its threads."""
TESTS = """
import os, warnings
from pathlib import Path
import pytest

ENDS = Path(__file__).parent / "ends"


@pytest.fixture(scope="module", autouse=True)
def module():
    yield
    with ENDS.open("a") as ends:
        ends.write(f"{os.getpid()}\\n")


@pytest.mark.parametrize("number", range(60))
def test_many(number, tmp_path):
    (tmp_path / "a_file").write_text("")
    print("what", number, "printed")
    assert number != 37


@pytest.mark.skip(reason="skipped for a reason")
def test_skipped():
    pass


@pytest.mark.xfail
def test_expected_to_fail():
    assert False


def test_warns():
    warnings.warn("a warning of a test")


def test_fixture_that_is_not_there(nothing_of_this_name):
    pass
"""
ENDS_WITHIN = """
import os, signal
import pytest


@pytest.mark.parametrize("number", range(20))
def test_beside(number):
    pass


def test_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def test_exits():
    os._exit(0)
"""

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or Path("/dev/nvidiactl").exists(), reason="xdist does it here"
)


def run(folder: Path, text: str, *options: str, torch: bool = False) -> str:
    (folder / "conftest.py").write_text(CONFTEST + ("" if torch else WITHOUT_TORCH))
    (folder / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-ra", "-n", "3", *options, "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_outcomes_output_and_warnings_are_reported(tmp_path: Path) -> None:
    text = run(tmp_path, TESTS, torch=True)
    assert "created: 3/3 workers" not in text  # xdist's
    assert re.search(r"1 failed, 60 passed, 1 skipped, 1 xfailed, 1 warning, 1 error in", text), text
    assert "FAILED test_it.py::test_many[37]" in text
    assert "what 37 printed" in text
    assert "what 36 printed" not in text
    assert "skipped for a reason" in text
    assert "UserWarning: a warning of a test" in text
    assert "fixture 'nothing_of_this_name' not found" in text
    ends = (tmp_path / "ends").read_text().split()
    assert 1 <= len(ends) == len(set(ends)) <= 3  # each process that used the fixture took it down


def test_one_that_ends_within_a_test_is_a_failure_of_that_test_alone(tmp_path: Path) -> None:
    text = run(tmp_path, ENDS_WITHIN)
    assert re.search(r"2 failed, 20 passed in", text), text
    assert "The process of this test ended within it, by signal SIGKILL." in text
    assert "The process of this test ended within it, with exit code 0." in text


def test_the_first_failure_ends_all(tmp_path: Path) -> None:
    text = run(tmp_path, TESTS.replace("range(60)", "range(2000)"), "-x")
    assert "stopping after 1 failures" in text
    passed = re.search(r"(\d+) passed", text)
    assert passed is None or int(passed[1]) < 1900


@pytest.mark.parametrize(
    ("files", "middle", "cut"),
    [
        ("aaabbbbb", 4, 3),
        ("aaaaabbb", 4, 5),
        ("aaaabbbb", 4, 4),
        ("aabbbbbb", 4, 2),
        ("abbbbbbb", 4, 4),  # further off than a quarter
        ("aabbbccc", 4, 5),
        ("aaaaaaaa", 4, 4),
        ("ab", 1, 1),
        ("a", 0, 0),
        ("", 0, 0),
    ],
)
def test_a_share_ends_with_a_file_if_one_ends_nearby(files: str, middle: int, cut: int) -> None:
    assert cut_between_files([Path(name) for name in files], middle) == cut


MODULES = """
import os, time
from pathlib import Path
import pytest

MADE = Path("made")


@pytest.fixture(scope="module", autouse=True)
def _made():
    with MADE.open("a") as made:
        made.write(f"{Path(__file__).name} {os.getpid()}\\n")
    while len({line.split()[1] for line in MADE.read_text().splitlines()}) < 3:
        time.sleep(0.001)  # nobody takes from a process that has not begun


@pytest.mark.parametrize("number", range(COUNT))
def test_many(number):
    pass
"""


def test_each_process_begins_with_whole_files(tmp_path: Path) -> None:
    """Six files for three processes, though a third of the tests does not end with one."""
    for number, count in enumerate((320, 300, 280, 310, 290, 300)):
        (tmp_path / f"test_{number}.py").write_text(MODULES.replace("COUNT", str(count)))
    text = run(tmp_path, "def test_fails():\n    assert False\n")
    assert "1 failed, 1800 passed" in text
    made = [line.split() for line in (tmp_path / "made").read_text().splitlines()]
    first = {process: name for name, process in reversed(made)}
    assert set(first.values()) == {"test_0.py", "test_2.py", "test_4.py"}
