from __future__ import annotations

import re
from dataclasses import replace

from cudadent42.runs.run_folder import RunFolder, RunStatus
from cudadent42.stages.report import markdown
from cudadent42.stages.report.view import View


def render(run: RunFolder) -> str:
    return markdown.render(View(run))


def table_rows(text: str) -> list[list[str]]:
    """Cells of every table row, split at the bars that separate cells."""
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in text.splitlines()
        if line.startswith("|") and not line.startswith("| ---")
    ]


def test_verdict_first_then_every_case(run: RunFolder) -> None:
    text = render(run)
    assert text.startswith("### ✅ cudadent42 is faster than pytorch: ")
    cases = [row for row in table_rows(text) if len(row) == 7 and row[1] in ("fp16", "bf16")]
    assert len(cases) == 24
    first = run.results.cases[0]  # type: ignore[union-attr]
    assert cases[0][4] == f"**{first.speedup:.2f}×**"
    assert "Cases: 24 faster." in text
    assert "38 of 38 checks passed" in text
    assert "cudadent42 run --output-dir 'runs/a b'" in text


def test_details_are_folded_and_closed(run: RunFolder) -> None:
    text = render(run)
    assert text.count("<details>") == text.count("</details>") == 5
    assert text.index("Machine and versions") > text.index("| case |")


def test_hostile_names_stay_text(make) -> None:  # type: ignore[no-untyped-def]
    evil = (
        "<script>alert(1)</script>",
        "a|b",
        "@everyone",
        "`x`",
        "[a](http://b)",
        "**c**",
        "two\nlines",
        "$e$",
    )
    run = make(names=evil, implementations=("pytorch", "x|y"))
    text = render(run)
    assert "<script>" not in text
    assert "@everyone" not in text
    assert "[a](" not in text
    rows = [row for row in table_rows(text) if len(row) == 7 and row[1] in ("fp16", "bf16")]
    assert len(rows) == 2 * len(evil)
    assert rows[1][0] == "a&#124;b"


def test_unfinished_run(run: RunFolder) -> None:
    manifest = replace(run.manifest, status=RunStatus.INTERRUPTED)
    text = render(replace(run, manifest=manifest, results=None))
    assert text.startswith("### ⚠️ No result")
    assert "> ⚠️ **The run was interrupted**" in text
    assert "not compared: the run ended before it was compared; 75 samples kept" in text


def test_all_implementations_stand_in_one_matrix(make) -> None:  # type: ignore[no-untyped-def]
    text = render(make(implementations=("pytorch", "cudadent42", "flash_attn")))
    rows = [row for row in table_rows(text) if len(row) == 3]
    assert rows[0] == ["speed-up over pytorch", "cudadent42", "flash\\_attn"]
    assert len(rows) == 1 + 24 + 2
    assert rows[-2][0] == "**geometric mean**"
    assert rows[-1][0] == "**cudadent42 over it**"


def test_resources_of_gpu_kernels(make) -> None:  # type: ignore[no-untyped-def]
    text = render(make(device="cuda:0"))
    assert "| kernel | registers | spills | shared memory |" in text
    assert "attention\\_forward\\[dtype=fp16, head\\_dim=64\\] | 168 | 0 B" in text
