"""``docs/environment.md`` names every variable that the code reads, and none that it does not."""

from __future__ import annotations

import re
from pathlib import Path

from cudadent42.runs.run_folder import _RECORDED_VARIABLES

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/environment.md").read_text(encoding="utf-8")
SCRIPTS = (
    ROOT / "run.sh",
    ROOT / "test.sh",
    *(ROOT / "scripts").glob("*.sh"),
    *(ROOT / "tools").glob("*.sh"),
)
READ = re.compile(r"""environ(?:\.get\(|\.setdefault\(|\[)\s*"([A-Z0-9_]+)\"""")
NAMED = re.compile(r"""VARIABLE(?:: \w+)? = "([A-Z0-9_]+)\"""")
OURS = re.compile(r"\b(?:CUDADENT42|FLASHMOE)_[A-Z_0-9]+\b")


def read_by_the_code() -> set[str]:
    names = set(_RECORDED_VARIABLES)
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        names.update(READ.findall(text), NAMED.findall(text))
    for path in SCRIPTS:
        names.update(re.findall(r"\$\{?((?:CUDADENT42|FLASHMOE)_[A-Z_]+)", path.read_text(encoding="utf-8")))
    return names


def test_every_variable_that_is_read_stands_on_the_page() -> None:
    missing = {name for name in read_by_the_code() if f"`{name}`" not in PAGE}
    assert not missing


def test_the_page_names_no_variable_of_ours_that_nothing_reads() -> None:
    assert set(OURS.findall(PAGE)) <= read_by_the_code()


def test_a_run_records_every_variable_that_chooses_kernels() -> None:
    choose = {
        name
        for path in (ROOT / "src/flashmoe_science").rglob("*.py")
        for name in re.findall(r"""OVERRIDE_VARIABLE = "([A-Z0-9_]+)\"""", path.read_text(encoding="utf-8"))
    }
    assert "FLASHMOE_MOE_BACKWARD" in choose
    assert choose <= set(_RECORDED_VARIABLES)
