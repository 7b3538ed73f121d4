"""Whole models in the README and in docs/models.md: their numbers are those of the run folders that the pages name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CASES = [
    *(f"llama-prefill-{tokens}" for tokens in (2048, 8192, 32768, 98304)),
    "llama-training-8192",
    *(f"qwen-prefill-{tokens}" for tokens in (512, 4096, 16384)),
    "qwen-few-1",
    "qwen-few-16",
    "qwen-few-1-compiled",
    "qwen-few-16-compiled",
]
"""In the order of both pages."""


def measured(page: str) -> list[dict[str, Any]]:
    """Each case, of the newest run folder that the page names and that has it."""
    names = set(re.findall(r"benchmarks/results/([\w-]+-h200-models[\w-]*)", page))
    runs = [
        json.loads((ROOT / "benchmarks" / "results" / name / "models.json").read_text(encoding="utf-8"))
        for name in names
    ]
    newest = {
        case["case"]: case for run in sorted(runs, key=lambda run: run["date"]) for case in run["cases"]
    }
    return [newest[name] for name in CASES]


def rows_of(page: str, header: str) -> list[list[str]]:
    """The cells of the rows below a table's header."""
    table = page.partition(header)[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[1:]]


def test_the_readme_leads_with_what_was_measured() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = rows_of(page, "| model, 8 layers | tokens | its time over ours |")
    shown = [number for row in rows for number in row[2].split(" / ")]
    assert shown == [f"{case['ratio']['ratio']:.2f}×" for case in measured(page)]


def test_the_page_about_models_has_every_ratio_with_its_interval_and_rival() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    rows = rows_of(page, "| case | the library's best setting | its time over ours | 95 % interval |")
    shown = [(re.sub("`", "", row[1]).lower(), *row[2:]) for row in rows]
    assert shown == [
        (
            case["library"].removeprefix("sdpa "),
            f"{case['ratio']['ratio']:.3f}",
            f"{case['ratio']['ci_low']:.3f} to {case['ratio']['ci_high']:.3f}",
        )
        for case in measured(page)
    ]
