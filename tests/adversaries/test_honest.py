"""Honest kernels end without suspicion, whatever habits they have."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import audits
import lab
import pytest

FILE = lab.FOLDER / "honest" / "ordinary.py"
FUNCTIONS = [
    node.name
    for node in ast.parse(FILE.read_text()).body
    if isinstance(node, ast.FunctionDef) and [each.arg for each in node.args.kwonlyargs]
]
AT_IMPORT = sorted(path.stem for path in (lab.FOLDER / "honest").glob("*_at_import.py"))
BUILT_IN = ("cudadent42", "pytorch_flash", "pytorch_math")
NAMES = [
    *(lab.candidate(FILE, name) for name in FUNCTIONS),
    *(lab.candidate(lab.FOLDER / "honest" / f"{name}.py") for name in AT_IMPORT),
    *BUILT_IN,
]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def test_there_are_as_many_as_promised() -> None:
    assert len(NAMES) >= 30


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> lab.Seen:
    return lab.put_before(NAMES, tmp_path_factory.mktemp("honest") / "worker.log")


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.rpartition("/")[2])
def test_an_honest_kernel_is_clean(name: str, seen: lab.Seen) -> None:
    assert not seen.breaches(name), seen.evidence(name)
    assert not seen.failures(name)
    assert f"{lab.CASE.id}/{name}" not in seen.benched.skipped


def test_settings_of_their_own_are_kept_apart(seen: lab.Seen) -> None:
    notes = "\n".join(seen.benched.kept_apart)
    for name, words in (
        ("no_flash_at_import", "flash_sdp True -> False"),
        ("lower_matmul_at_import", "medium"),
    ):
        assert any(name in line and words in line for line in notes.splitlines()), notes


@pytest.mark.parametrize(
    "function", ["one_output_for_each_shape", "a_thread_that_waits", "keeps_scratch_memory"]
)
def test_an_honest_kernel_is_clean_in_the_audit(function: str, tmp_path: Path) -> None:
    name = lab.candidate(FILE, function)
    audit = audits.audited(name, tmp_path / "audit.log", results=audits.claim(name, 0.2, 0.15), sealed=True)
    assert not audit.findings, [each.line for each in audit.findings]
    assert not audit.why_not
    assert audit.hidden_checked == 6
    assert [each.calls_checked for each in audit.confirmations] == [4]
