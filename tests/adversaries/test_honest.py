"""Honest kernels end without suspicion, whatever habits they have."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import audits
import lab
import pytest

from cudadent42.audit.race import BLOCKS
from cudadent42.audit.stage import Audited

FILE, FILE_ON_GPU = (lab.FOLDER / "honest" / f"{name}.py" for name in ("ordinary", "on_gpu"))


def functions_of(file: Path) -> list[str]:
    """Its implementations."""
    return [
        node.name
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.args.kwonlyargs
    ]


FUNCTIONS = functions_of(FILE)
AT_IMPORT = sorted(path.stem for path in (lab.FOLDER / "honest").glob("*_at_import.py"))
BUILT_IN = ("cudadent42", "pytorch_flash", "pytorch_math")
NAMES = [
    *(lab.candidate(FILE, name) for name in FUNCTIONS),
    *(lab.candidate(lab.FOLDER / "honest" / f"{name}.py") for name in (*AT_IMPORT, "says_whose_it_is")),
    *BUILT_IN,
]
FOR_A_CPU = ("an_operator_of_its_own", "by_way_of_numpy", "by_way_of_ctypes")
"""Which take addresses, or kernels, to be the host's."""
OWN_ON_GPU = [lab.candidate(FILE_ON_GPU, name) for name in functions_of(FILE_ON_GPU)]
NAMES_ON_GPU = [*OWN_ON_GPU, *(name for name in NAMES if not name.endswith(FOR_A_CPU)), "pytorch_cudnn"]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def test_there_are_as_many_as_promised() -> None:
    assert len(NAMES) >= 30
    assert len(NAMES_ON_GPU) >= 30


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> lab.Seen:
    return lab.put_before(NAMES, tmp_path_factory.mktemp("honest") / "worker.log")


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.rpartition("/")[2])
def test_an_honest_kernel_is_clean(name: str, seen: lab.Seen) -> None:
    assert not seen.breaches(name), seen.evidence(name)
    assert not seen.failures(name)
    assert f"{lab.CASE.id}/{name}" not in seen.benched.skipped


def test_settings_of_their_own_are_kept_apart(seen: lab.Seen) -> None:
    notes = "\n".join((*seen.verified.kept_apart, *seen.benched.kept_apart))
    for name, words in (
        ("no_flash_at_import", "flash_sdp True -> False"),
        ("lower_matmul_at_import", "medium"),
        ("says_whose_it_is", "runs the work of PyTorch, as it says itself"),
    ):
        assert any(name in line and words in line for line in notes.splitlines()), notes


IN_THE_AUDIT = [
    lab.candidate(FILE, function)
    for function in ("one_output_for_each_shape", "a_thread_that_waits", "keeps_scratch_memory")
]


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Audited:
    """One audit of them all."""
    log = tmp_path_factory.mktemp("honest-audit") / "audit.log"
    return audits.audited(IN_THE_AUDIT, log, results=audits.claim(IN_THE_AUDIT, 0.2, 0.15), sealed=True)


def test_honest_kernels_are_checked_on_every_hidden_shape(audit: Audited) -> None:
    assert not audit.why_not
    assert audit.hidden_checked == 6 * len(IN_THE_AUDIT)


@pytest.mark.parametrize("name", IN_THE_AUDIT, ids=lambda name: name.rpartition("/")[2])
def test_an_honest_kernel_is_clean_in_the_audit(name: str, audit: Audited) -> None:
    findings = [each for each in audit.findings if each.implementation == name]
    assert not findings, [each.line for each in findings]
    (confirmation,) = (each for each in audit.confirmations if each.implementation == name)
    # Two of each judged block, and the call with large values. A race that each of its first blocks confirms ends with
    # the first of two.
    assert confirmation.calls_checked == 1 + (4 if confirmation.blocks == BLOCKS else 2)
