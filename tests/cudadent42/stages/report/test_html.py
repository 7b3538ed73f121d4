"""The page's structure, read as a browser reads it."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path
from unittest.mock import patch

import pytest

from cudadent42.base.errors import UsageError
from cudadent42.model.records import ErrorNorms, VerifiedCase, VerifyReport
from cudadent42.runs.run_folder import RunFolder, RunStatus
from cudadent42.stages import report
from cudadent42.stages.report import html
from cudadent42.stages.report.view import View

VOID = {"meta", "link", "br", "img", "input", "hr", "col", "source"}
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</style><b>",
    "$x^{",
    "{{ 7*7 }}",
    "a&b",
    "\x1b[31mred",
    "line\nbreak",
    "\u202edetrever",
    "x" * 300,
    "日本語",
    "#0a0b01",
)


@dataclass
class Page(HTMLParser):
    """What a parsed page holds."""

    tags: Counter[str] = field(default_factory=Counter)
    attributes: list[tuple[str, str, str]] = field(default_factory=list)
    """(tag, name, value)"""
    text: list[str] = field(default_factory=list)
    tables: dict[str, list[list[str]]] = field(default_factory=dict)
    """Cell texts by table id."""
    headings: list[tuple[str, str]] = field(default_factory=list)
    unbalanced: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._open: list[str] = []
        self._table = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self._table = dict(attrs).get("id") or f"table-{len(self.tables)}"
            self.tables[self._table] = []
        elif tag == "tr":
            self.tables[self._table].append([])
        elif tag in ("td", "th"):
            self.tables[self._table][-1].append("")
        elif re.fullmatch("h[1-6]", tag):
            self.headings.append((tag, ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            return
        self.text.append(data)
        if any(tag in self._open for tag in ("td", "th")):
            self.tables[self._table][-1][-1] += data
        if self._open and re.fullmatch("h[1-6]", self._open[-1]) and self.headings:
            level, words = self.headings[-1]
            self.headings[-1] = (level, words + data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())

    def values(self, name: str) -> list[str]:
        return [value for _, attribute, value in self.attributes if attribute == name]

    def row(self, table: str, first: str) -> list[str]:
        return next(row for row in self.tables[table] if row and row[0] == first)


def parse(run: RunFolder, *sections: str) -> Page:
    """The run's page; where sections are named, with these alone: to draw the pictures of all takes half a second."""
    shown = [each for each in html.SECTIONS if each.name in sections or not sections]
    assert len(shown) == len(sections) or not sections
    with patch.object(html, "SECTIONS", shown):
        return read(html.render(View(run)))


def read(text: str) -> Page:
    page = Page()
    page.feed(text)
    page.close()
    assert not page.unbalanced
    return page


@pytest.fixture(scope="module")
def text(default_run: RunFolder) -> str:
    """The page of the default run: drawing it takes most of a second of a processor."""
    return html.render(View(default_run))


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return read(text)


def test_refers_to_nothing_outside_itself(text: str, page: Page) -> None:
    for tag, name, value in page.attributes:
        if name in ("src", "href", "xlink:href", "srcset", "action", "data", "poster"):
            assert value.startswith(("#", "data:,")), (tag, name, value)
    assert "url(" not in re.sub(r"url\(#[\w-]+\)", "", text)
    assert "@import" not in text
    assert page.tags["script"] == page.tags["iframe"] == page.tags["img"] == page.tags["object"] == 0


def test_every_case_is_in_the_table_with_its_numbers(default_run: RunFolder, page: Page) -> None:
    rows = [row for row in page.tables["cases"][1:] if len(row) > 1]
    assert len(rows) == len(default_run.plan.cases) == 24
    first = default_run.results.cases[0]  # type: ignore[union-attr]
    row = page.row("cases", "tiny")
    assert row[1] == "1 × 1 × 32 × 64"
    assert row[2] == f"{first.speedup:.2f}×"
    assert row[3] == f"{first.ci_low:.2f} to {first.ci_high:.2f}"
    assert "faster" in row[4]


def test_identities_are_unique_and_references_resolve(small: RunFolder) -> None:
    page = parse(small)
    ids = Counter(page.values("id"))
    assert [name for name, count in ids.items() if count > 1] == []
    for name in ("aria-labelledby", "aria-describedby"):
        for value in page.values(name):
            assert set(value.split()) <= set(ids), value
    for value in page.values("href"):
        if value.startswith("#"):
            assert value[1:] in ids


def test_accessible_structure(page: Page) -> None:
    assert [level for level, _ in page.headings].count("h1") == 1
    pictures = [value for tag, name, value in page.attributes if tag == "svg" and name == "role"]
    named = [value for tag, name, value in page.attributes if tag == "svg" and name == "aria-labelledby"]
    assert len(pictures) == len(named) >= 24 + 2 * 4
    scopes = [value for tag, name, value in page.attributes if tag == "th" and name == "scope"]
    assert len(scopes) == page.tags["th"]
    assert ("html", "lang", "en") in page.attributes


def test_states_verdict_noise_floor_verification_machine_and_command(
    default_run: RunFolder, page: Page
) -> None:
    words = page.words
    assert "cudadent42 is faster than pytorch: " in words
    assert "95 % interval" in words
    assert "Noise floor" in words
    assert "38 of 38 checks passed: 24 on random inputs, 14 on adversarial ones." in words
    assert "torch=2.13.0 cuda=none dev=Example CPU 9000" in words
    assert "git checkout 0123456789abcdef0123456789abcdef01234567" in words
    assert "cudadent42 run --output-dir 'runs/a b'" in words
    assert "Power and energy." in words


def test_names_are_shown_as_they_are_spelt_and_never_become_markup(make) -> None:  # type: ignore[no-untyped-def]
    run = make(
        names=HOSTILE, dtypes=("fp16",), implementations=("pytorch", "/somewhere/else/my<b>.py:attention")
    )
    page = parse(run)
    assert page.tags["script"] == page.tags["img"] == 0
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    names = {row[0] for row in page.tables["cases"] if row}
    assert {"<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "$x^{", "{{ 7*7 }}"} <= names
    assert "my<b>.py:attention is faster than pytorch" in page.words
    assert "/somewhere/else" not in page.words.replace(" ".join(run.manifest.command), "")
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", page.words)


def test_failed_verification_comes_first_and_names_the_case(small: RunFolder) -> None:
    assert small.verify is not None
    assert small.results is not None
    bad = small.verify.cases[2]
    assert bad.bound is not None
    error = ErrorNorms(bad.bound.max * 7, bad.bound.rms * 3, bad.bound.worst_row)
    failed = replace(bad, passed=False, error=error, detail="max error over the bound")
    checks = tuple(failed if check is bad else check for check in small.verify.cases)
    results = replace(
        small.results,
        cases=tuple(c for c in small.results.cases if f"{c.name}/{c.dtype}" != bad.case),
        skipped={f"{bad.case}/cudadent42": "failed verification: max error"},
    )
    page = parse(replace(small, verify=VerifyReport(checks), results=results), "cases", "verify")
    assert page.headings[0] == ("h1", "Verification failed: cudadent42 on 1 case")
    assert "large/fp16, cudadent42, random input: error is 7.00 times its bound" in page.words
    assert page.row("checks", "large/fp16")[3] == "failed"
    assert page.tables["checks"][1][3] == "failed"
    row = page.row("cases", "large")
    assert row[2] == "Not compared: failed verification: max error"
    assert "9 of 10 checks passed" in page.words


def test_outputs_of_timed_calls_are_counted_apart(small: RunFolder) -> None:
    assert small.verify is not None
    again = tuple(replace(check, input="after timing") for check in small.verify.cases[:3])
    page = parse(replace(small, verify=VerifyReport((*small.verify.cases, *again))), "verify")
    assert "3 on random inputs, 7 on adversarial ones, 3 on outputs of timed calls." in page.words


def test_baseline_checks_do_not_pad_the_count(small: RunFolder) -> None:
    assert small.verify is not None
    baseline = tuple(replace(check, implementation="pytorch") for check in small.verify.cases)
    page = parse(replace(small, verify=VerifyReport((*baseline, *small.verify.cases))), "verify")
    assert "10 of 10 checks passed" in page.words


@pytest.mark.parametrize("status", list(RunStatus))
def test_unfinished_run_says_what_is_missing(small: RunFolder, status: RunStatus) -> None:
    manifest = replace(small.manifest, status=status, ended=None, error="the disk is full")
    run = replace(small, manifest=manifest, results=None, samples=small.samples[:160])
    page = parse(run, "cases", "samples")
    assert page.headings[0][1].startswith("No result")
    assert "Missing: comparison." in page.words
    assert "Kept: 160 samples of 3 of 3 cases; 0 compared." in page.words
    assert "the disk is full" in page.words
    assert page.row("cases", "tiny")[2].endswith("compared; 75 samples kept")
    assert "The samples" in page.words


def test_run_that_only_has_a_manifest(small: RunFolder) -> None:
    manifest = replace(small.manifest, status=RunStatus.FAILED, build=None, revision=None)
    page = parse(replace(small, manifest=manifest, results=None, verify=None, samples=()))
    assert "Missing: build, verification, samples, comparison." in page.words
    assert "Nothing was verified." in page.words
    assert "This run recorded no kernel build." in page.words


def test_unverified_results_are_called_so(small: RunFolder) -> None:
    assert "These results were not verified" in parse(replace(small, verify=None), "verify").words


def test_not_a_number_is_shown_as_absent(small: RunFolder) -> None:
    nan = float("nan")
    assert small.results is not None
    cases = tuple(
        replace(c, speedup=nan, ci_low=nan, ci_high=nan, latency_ms=nan) for c in small.results.cases
    )
    samples = tuple(replace(s, latency_ms=nan) for s in small.samples)
    results = replace(
        small.results,
        cases=cases,
        control=(),
        peaks={},
        noise_floor=nan,
        speedup_geomean=nan,
        speedup_geomean_ci_low=nan,
        speedup_geomean_ci_high=nan,
    )
    page = parse(replace(small, results=results, samples=samples))
    assert page.row("cases", "tiny")[2] == "n/a"
    shown = [cell for row in page.tables["cases"] for cell in row]
    assert not [cell for cell in shown if re.search(r"\b(nan|inf)\b", cell)]
    assert "n/a" in page.headings[0][1]


def test_one_case_is_spoken_of_as_one(make) -> None:  # type: ignore[no-untyped-def]
    page = parse(make(names=("tiny",), dtypes=("bf16",)))
    assert "One case, 95 % interval" in page.words
    assert "of 1 case " in page.words
    assert "Slowest case" not in page.words


def test_all_implementations_stand_in_one_matrix(make) -> None:  # type: ignore[no-untyped-def]
    run = make(implementations=("pytorch", "cudadent42", "flash_attn", "flashinfer"))
    page = parse(run, "others")
    head, *rows, means, ratios = page.tables["others"]
    assert head == ["Case", "cudadent42", "flash_attn", "flashinfer"]
    assert [row[0] for row in rows] == [case.id for case in run.plan.cases]
    other = next(c for c in run.results.others if c.implementation == "flashinfer")
    assert page.row("others", f"{other.name}/{other.dtype}")[3].startswith(f"{other.speedup:.2f}×")
    of_it = [c.speedup for c in run.results.others if c.implementation == "flashinfer"]
    assert means[0] == "Geometric mean"
    assert means[3] == f"{statistics.geometric_mean(of_it):.2f}×"
    assert ratios[0] == "cudadent42 over it"
    assert page.row("latencies", run.plan.cases[0].id)[1].endswith("s")


def test_a_rival_that_was_not_timed_everywhere_says_so(make) -> None:  # type: ignore[no-untyped-def]
    run = make(implementations=("pytorch", "cudadent42", "flash_attn"), dtypes=("bf16",))
    page = parse(replace(run, results=replace(run.results, others=run.results.others[:5])), "others")
    *_, last, means, _ = page.tables["others"]
    assert last[2] == "not timed"
    assert means[2].endswith("5 of 12 cases")


def test_the_list_of_contents_leads_to_every_section(page: Page) -> None:
    sections = [value for tag, name, value in page.attributes if (tag, name) == ("h2", "id")]
    assert [value for tag, name, value in page.attributes if (tag, name) == ("a", "href")] == [
        f"#{name}" for name in sections
    ]
    assert len(sections) > 8


def test_gpu_run_shows_resources(make) -> None:  # type: ignore[no-untyped-def]
    page = parse(make(device="cuda:0", names=("tiny",)))
    kernel = page.tables["kernels"][1]
    assert kernel[0] == "attention_forward[dtype=fp16, head_dim=64]"
    assert kernel[5:] == ["168", "0 B", "165 kB", "384", "1", "19 %"]
    assert "The share of the machine's peak: no ceilings were measured." in page.words


def test_skipped_implementations_are_grouped_by_reason(small: RunFolder) -> None:
    assert small.results is not None
    skipped = {f"{case.id}/flash_attn": "flash_attn is not installed" for case in small.plan.cases}
    words = parse(replace(small, results=replace(small.results, skipped=skipped)), "not").words
    assert "flash_attn is not installed: tiny/fp16/flash_attn and 2 more" in words


@pytest.mark.slow
def test_a_hundred_cases_stay_a_small_page(make) -> None:  # type: ignore[no-untyped-def]
    run = make(names=tuple(f"case-{number}" for number in range(50)))
    text = html.render(View(run))
    page = Page()
    page.feed(text)
    assert len([row for row in page.tables["cases"] if len(row) > 2]) == 1 + 100
    assert len(text) < 500_000


def test_default_run_is_well_under_400_kb(text: str) -> None:
    assert len(text.encode()) < 250_000


def test_baseline_alone_is_not_a_failure(small: RunFolder) -> None:
    plan = replace(small.plan, implementations=("pytorch",))
    assert small.results is not None
    results = replace(small.results, candidate="pytorch", cases=())
    page = parse(replace(small, manifest=replace(small.manifest, plan=plan), results=results))
    assert page.headings[0][1] == "Only pytorch was measured, so there is nothing to compare"
    assert "did not finish" not in page.words
    assert "without a complete result" not in page.words


def test_nothing_timed_says_so(small: RunFolder) -> None:
    assert small.results is not None
    skipped = {case.id: "failed verification on large_logits/fp16: nan" for case in small.plan.cases}
    run = replace(small, results=replace(small.results, cases=(), skipped=skipped), samples=())
    page = parse(run, "cases")
    assert page.headings[0][1] == "No result: no case was timed"


def test_a_noisy_machine_is_called_so(small: RunFolder) -> None:
    assert small.results is not None
    noisy = replace(small.results, noise_floor=0.31)
    words = parse(replace(small, results=noisy), "control").words
    assert "the baseline against itself is off by up to 31 %" in words
    assert "is off by up to" not in parse(small, "control").words


def test_disturbed_blocks_get_a_column(small: RunFolder) -> None:
    assert small.results is not None
    first, *rest = small.results.cases
    results = replace(small.results, cases=(replace(first, flagged_blocks=3), *rest))
    page = parse(replace(small, results=results), "cases")
    assert page.row("cases", "tiny")[-1] == "3 of 25"
    assert "3 of 75 paired blocks saw a disturbance" in page.words
    assert "Flagged" not in parse(small, "cases").words


def test_samples_on_any_scale_are_drawn(small: RunFolder) -> None:
    """An interrupted machine gives outliers of a thousand times the median."""
    samples = tuple(
        replace(s, latency_ms=s.latency_ms * (1000 if s.block == 7 else 1)) for s in small.samples
    )
    words = parse(replace(small, samples=samples), "samples").words
    assert "1000×" in words


def test_control_far_from_one_is_drawn(small: RunFolder) -> None:
    """The interval of a control on a busy machine may reach three decades."""
    assert small.results is not None
    control = tuple(replace(c, speedup=0.4, ci_low=0.001, ci_high=21.0) for c in small.results.control)
    page = parse(replace(small, results=replace(small.results, control=control, noise_floor=1.6)), "control")
    assert any("control-wide" in name for name in page.values("aria-labelledby"))


def test_empty_checks_report(small: RunFolder) -> None:
    empty = VerifiedCase("empty/fp16", "cudadent42", "empty", None, None, None, True, "zeros")
    page = parse(replace(small, verify=VerifyReport((empty,))), "verify")
    assert "1 of 1 check passed: 0 on random inputs, 1 on adversarial ones." in page.words


def test_write_leaves_three_files_and_no_partial_ones(small: RunFolder) -> None:
    paths = report.write_run(small)
    assert sorted(path.name for path in small.path.iterdir()) == ["report.html", "report.md", "speedup.svg"]
    assert paths.html.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_write_without_results_makes_no_picture(small: RunFolder) -> None:
    assert report.write_run(replace(small, results=None)).speedup_svg is None
    assert not (small.path / "speedup.svg").exists()


def test_folder_that_cannot_be_written(small: RunFolder) -> None:
    missing = small.path / "gone"
    with pytest.raises(UsageError, match=r"cannot write .*report\.html"):
        report.write_run(replace(small, path=missing))


def test_write_of_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected a run folder"):
        report.write(tmp_path)


RESULTS = Path(__file__).parents[4] / "benchmarks" / "results"
COMMITTED = sorted(
    path for path in RESULTS.rglob("report.html") if not (path.parent / "tuning.json").exists()
)
"""Of runs: a tuning's looks otherwise."""


@pytest.mark.parametrize("path", COMMITTED, ids=[path.parent.name for path in COMMITTED])
def test_a_committed_report_looks_as_reports_do_now(path: Path) -> None:
    """Words of headers whole, a list of contents, rivals in a matrix; `cudadent42 report FOLDER` draws it again."""
    page = path.read_text(encoding="utf-8")
    headers = re.search(r"thead th\{[^}]*overflow-wrap:([a-z-]+)", page)
    assert headers is not None
    assert headers[1] == "break-word"
    assert '<nav class="contents"' in page
    assert "Other implementations" not in page
    assert "Other implementations" not in path.with_suffix(".md").read_text(encoding="utf-8")
