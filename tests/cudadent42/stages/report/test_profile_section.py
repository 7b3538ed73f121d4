"""The report's section about a profile, from counters recorded on an H200."""

from __future__ import annotations

import json
import math
import re
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from cudadent42.base.errors import UsageError
from cudadent42.profiles import Profile, diagnose, store
from cudadent42.profiles.metrics import RawMetric, read_counters
from cudadent42.profiles.records import Ablation, Launch, Source
from cudadent42.stages import report
from cudadent42.stages.report import html, keys, markdown, sections
from cudadent42.stages.report.view import Profiled
from flashmoe_science.jit.records import Resources

RESULTS = Path(__file__).resolve().parents[4] / "benchmarks/results"


def profile(name: str) -> Profile:
    document = json.loads((RESULTS / "2026-11-21-h200-profiles/profiles.json").read_text())
    subject = next(one for one in document["subjects"] if one["name"] == name)
    raw = {key: RawMetric(value, unit) for key, (value, unit) in subject["metrics"].items()}
    counted = read_counters(subject["kernel"], raw)
    return Profile(
        schema_version=1,
        case="<tile>/bf16",
        implementation=name,
        device="cuda:0",
        device_name="NVIDIA H200",
        architecture="sm_90",
        kernel=subject["kernel"],
        source=Source.COUNTERS,
        flops=subject["flops"],
        bytes_min=subject["bytes_min"],
        dtype="bf16",
        latency_ms=math.nan,
        metrics=counted.values,
        peaks=document["peaks"],
    )


@pytest.fixture(autouse=True)
def _this_section_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others, and their pictures, have tests of their own."""
    this = tuple(section for section in sections.SECTIONS if section.name == "profile")
    assert this
    for module in (html, markdown):
        monkeypatch.setattr(module, "SECTIONS", this)


def folder(path: Path, name: str) -> Path:
    shutil.copytree(RESULTS / "2026-11-20-h200-small-call", path)
    its_profile = profile(name)
    store.write(path, its_profile, diagnose(its_profile))
    return path


def pictures(page: str) -> dict[str, ElementTree.Element]:
    """The section's pictures by the title that a screen reader says."""
    section = page[page.index('aria-labelledby="h-profile"') :]
    section = section[: section.index("</section>")]
    elements = [
        ElementTree.fromstring(text) for text in re.findall(r"<svg .*?</svg>", section, flags=re.DOTALL)
    ]
    return {title.text or "": one for one in elements if (title := one.find("title")) is not None}


def test_the_causes_and_pictures_are_shown(tmp_path: Path) -> None:
    page = report.write(folder(tmp_path / "run", "unswizzled")).html.read_text()
    assert "Shared-memory bank conflicts" in page
    assert "&lt;tile&gt;/bf16" in page
    assert "<tile>" not in page
    assert {"Roofline of the profiled kernel", "What warps wait for, by share of their time"} <= set(
        pictures(page)
    )


def test_a_symptom_is_not_shown_as_a_cause(tmp_path: Path) -> None:
    pages = report.write(folder(tmp_path / "run", "serialised"))
    for page in (pages.html, pages.markdown):
        assert "measured, a symptom" in page.read_text()
    path = folder(tmp_path / "far", "chase")
    far = replace(profile("chase"), source=Source.MODEL, metrics={"multiprocessors": 132.0}, latency_ms=0.8)
    store.write(path, far, diagnose(far))
    assert "inferred, cause not known" in report.write(path).html.read_text()


def test_both_marks_of_the_roofline_have_a_key() -> None:
    counted = profile("unswizzled")
    labels = [entry.label for entry in keys.profile_key(Profiled(counted, diagnose(counted), None))]
    assert labels == ["unswizzled", "by the bytes that memory moved"]
    without = replace(counted, metrics={})
    assert len(keys.profile_key(Profiled(without, diagnose(without), None))) == 1


def test_rules_that_were_not_asked_are_said(tmp_path: Path) -> None:
    path = folder(tmp_path / "run", "unswizzled")
    whole = replace(profile("unswizzled"), launches=(Launch("tile", 1e-3, 132, 128, 64, 0),))
    metrics = {name: value for name, value in whole.metrics.items() if name != "shared_conflicts"}
    for its_profile, said in ((whole, False), (replace(whole, metrics=metrics), True)):
        store.write(path, its_profile, diagnose(its_profile))
        pages = report.write(path)
        for page in (pages.html, pages.markdown):
            matched = re.search(r"\b1 of \d+ rules were not asked: bank", page.read_text())
            assert (matched is not None) is said


def test_the_compiled_kernel_is_described(tmp_path: Path) -> None:
    path = folder(tmp_path / "run", "unswizzled")
    table = Resources(168, 0, 8, 0, 0, 230608, 384, 1, 0.19)
    for its_profile, said in (
        (
            replace(profile("unswizzled"), resources=table, instructions={"wgmma": 32, "mma_sync": 0}),
            "wgmma 32.",
        ),
        (replace(profile("unswizzled"), resources=table), "230,608 bytes of shared memory per block."),
    ):
        store.write(path, its_profile, diagnose(its_profile))
        page = report.write(path).html.read_text()
        assert "168 registers per thread, 8 bytes spilled" in page
        assert said in page
        assert "mma sync" not in page


def test_the_times_and_ablations_are_said(tmp_path: Path) -> None:
    path = folder(tmp_path / "run", "unswizzled")
    ablation = Ablation("loads", 2.0, 3.5, 0.4286, 0.42, 0.43)
    its_profile = replace(profile("unswizzled"), latency_ms=3.0, ablations=(ablation,))
    store.write(path, its_profile, diagnose(its_profile))
    pages = report.write(path)
    for page in (pages.html, pages.markdown):
        text = page.read_text()
        assert "Times of a call: " in text
        assert "Careful: these differ by" in text
        assert "loads 42.9%" in text


def test_the_stalls_are_said_in_words(tmp_path: Path) -> None:
    page = report.write(folder(tmp_path / "run", "unswizzled")).html.read_text()
    description = pictures(page)["What warps wait for, by share of their time"].find("desc")
    assert description is not None
    assert (description.text or "").startswith("shared memory, exp2 53 %; loads from memory and L2 27 %")


def test_an_earlier_profile_stands_beside_it(tmp_path: Path) -> None:
    before = folder(tmp_path / "before", "unswizzled")
    after = folder(tmp_path / "after", "product")
    alone = report.write(after).html.read_text()
    both = report.write(after, before=before).html.read_text()
    bars = "What warps wait for, by share of their time"
    assert len(list(pictures(both)[bars].iter("path"))) > len(list(pictures(alone)[bars].iter("path")))
    assert "x as fast" in both
    assert "x as fast" not in alone


def test_a_run_without_a_profile_has_no_section(tmp_path: Path) -> None:
    run = shutil.copytree(RESULTS / "2026-11-20-h200-small-call", tmp_path / "run")
    assert "h-profile" not in report.write(run).html.read_text()


def test_an_earlier_folder_must_have_a_profile(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", "product")
    with pytest.raises(UsageError, match="has no profile"):
        report.write(run, before=RESULTS / "2026-11-20-h200-small-call")


def test_a_folder_with_nothing_but_a_profile_is_no_failed_run(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", "unswizzled")
    for name in ("results.json", "verify.json", "samples.csv"):
        (run / name).unlink()
    paths = report.write(run)
    page = paths.html.read_text()
    assert "Profile of &lt;tile&gt;/bf16: shared-memory bank conflicts" in page
    assert "ended without" not in page
    assert 'id="cases"' not in page
    assert paths.speedup_svg is None


def test_the_causes_are_in_the_markdown(tmp_path: Path) -> None:
    text = report.write(folder(tmp_path / "run", "spilled")).markdown.read_text()
    assert "| Registers spilled to local memory | 97 % | measured |" in text
    assert "Next: Lower the blocks per multiprocessor" in text
