"""What the documentation says is so: links lead somewhere, the example passes, the README quotes its run."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import pytest

from cudadent42.base.errors import UsageError
from cudadent42.cost import advise, rates
from cudadent42.model.records import Comparison, Verdict
from cudadent42.native import specification
from cudadent42.plan import Choices, make_plan
from cudadent42.registry import registry
from cudadent42.stages.verify import verify

ROOT = Path(__file__).parent.parent
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")})


def anchors(page: Path) -> set[str]:
    """Identities that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        target_path = (page.parent / path) if path else page
        assert target_path.exists(), target
        if anchor:
            assert anchor in anchors(target_path), target


@pytest.mark.parametrize(
    ("file", "function", "suite", "case"),
    [("my_attention", "attention", "default", "tiny"), ("my_experts", "experts", "moe", "fine-4")],
)
def test_plug_in_of_the_guide_passes_verification(
    file: str, function: str, suite: str, case: str, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "your-own-kernel.md").read_text(encoding="utf-8")
    source = re.search(rf"```python\n(# {file}\.py.*?)```", page, re.DOTALL)
    assert source
    path = tmp_path / f"{file}.py"
    path.write_text(source[1], encoding="utf-8")
    name = f"{path}:{function}"
    choices = Choices(suite=suite, implementations=(name,), cases=(case,), dtypes=("bf16",))
    report = verify(make_plan(choices, "cpu", registry), emit=lambda event: None)
    judged = [each for each in report.cases if each.implementation == name]
    assert len(judged) > 10
    assert [each.detail for each in judged if not each.passed] == []


def test_kernel_file_of_the_guide_says_what_it_means(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "your-own-kernel.md").read_text(encoding="utf-8")
    source = re.search(r"```toml\n(schema_version.*?)```", page, re.DOTALL)
    assert source
    (tmp_path / "my-kernel.cu").touch()
    kernel = specification.parse(source[1], tmp_path / "my-kernel.toml")
    hopper, other = kernel.configurations
    assert kernel.find("bf16", 64, "sm_90") is hopper
    assert kernel.find("bf16", 128, "sm_90") is other
    assert kernel.find("bf16", 64, "sm_75") is None
    assert hopper.compiled_for("sm_90") == "sm_90a"


def test_advice_of_the_guide_is_what_comes_out() -> None:
    page = (ROOT / "docs" / "cost.md").read_text(encoding="utf-8")
    shown = re.search(r"```text\n(keep: .*?)```", page, re.DOTALL)
    assert shown
    table = rates.load(ROOT / "no" / "table" / "of" / "the" / "user")
    advice = advise(table.get("gcp-l4"), table.engineer, 60.0, table.restart)
    assert shown[1].splitlines() == list(advice.lines())


README_SHAPES = "print(tuple(output.shape), tuple(lse.shape))"
OUTPUT_SHAPE = "print(tuple(output.shape))"


@pytest.mark.usefixtures("warm_texts")
@pytest.mark.parametrize(
    ("page", "begins", "ends", "expected"),
    [
        ("README.md", "import torch", README_SHAPES, "(1, 16, 2048, 64) (1, 16, 2048)\n"),
        ("README.md", "import torch\nfrom flashmoe_science import fused_moe", OUTPUT_SHAPE, "(16, 512)\n"),
        ("docs/moe.md", "import torch", OUTPUT_SHAPE, "(16, 512)\n"),
    ],
)
def test_examples_run(page: str, begins: str, ends: str, expected: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    source = re.search(rf"```python\n({begins}.*?)```", text, re.DOTALL)
    assert source
    done = subprocess.run(
        [sys.executable, "-c", f"{source[1]}{ends}"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    if "DeviceError" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.stdout == expected, done.stderr


@pytest.mark.usefixtures("warm_texts")
def test_the_ways_into_a_model_run() -> None:
    """Every block of the page, one after the other in one process."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers")
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 6
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if "DeviceError" in done.stderr or "has no register_flash_attention_impl" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "1 scaled_dot_product_attention taken"
    assert "attention of LlamaForCausalLM: taken" in done.stdout


def test_readme_quotes_its_run_folder() -> None:
    tool = load(ROOT / "tools" / "update_readme.py")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    folders = re.findall(r"!\[[^\]]*\]\((benchmarks/results/[^)]+)/speedup\.svg\)", readme)
    if not folders:
        pytest.skip("the README shows no run yet; tools/update_readme.py puts one there")
    assert tool.replace_section(readme, tool.section(folders)) == readme


def test_a_run_that_held_only_our_kernel_to_avx2_is_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = load(ROOT / "tools" / "update_readme.py")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    shutil.copytree(ROOT / "benchmarks/results/2026-11-20-cpu-fp32", tmp_path / "run")
    assert "| AMD EPYC | AVX512-BF16 |" in tool.section(["run"])
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    manifest["environment"] = {"FLASHMOE_CPU_ISA": "avx2"}
    (tmp_path / "run/manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        UsageError, match="held our kernel to avx2 and PyTorch to nothing; set ATEN_CPU_CAPABILITY"
    ):
        tool.section(["run"])
    manifest["environment"] |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    (tmp_path / "run/manifest.json").write_text(json.dumps(manifest))
    assert "| AMD EPYC | AVX2, held to it |" in tool.section(["run"])


def test_a_result_that_is_no_claim_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = load(ROOT / "tools" / "update_readme.py")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    shutil.copytree(ROOT / "benchmarks/results/2026-11-20-cpu-fp32", tmp_path / "run")
    assert "no claim" not in tool.section(["run"])  # it is older than audits
    results = json.loads((tmp_path / "run/results.json").read_text())
    results |= {"claim_allowed": False, "claim_reason": "the audit was too noisy to tell"}
    (tmp_path / "run/results.json").write_text(json.dumps(results))
    assert "Its audit allows no claim yet" in tool.section(["run"])


def test_the_result_says_how_it_was_timed_and_what_disturbed_it() -> None:
    tool = load(ROOT / "tools" / "update_readme.py")
    shown = tool.section(["benchmarks/results/2026-11-20-h200-hopper"])
    assert (
        "Timed: GPU time alone, by graph replay. 678 of 720 paired blocks were flagged as disturbed (power cap)."
        in shown
    )


def test_the_tutorial_s_pictures_are_those_of_its_run() -> None:
    """By their words and numbers: where a mark lies depends on matplotlib's version by a tenth of a pixel."""
    tool = load(ROOT / "tools" / "update_pictures.py")
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    assert f"../{tool.RUN.relative_to(ROOT).as_posix()}" in page
    drawn = tool.pictures()
    assert sorted(re.findall(r"\]\(pictures/([^)]+)\)", page)) == sorted(drawn)
    assert sorted(path.name for path in tool.FOLDER.iterdir()) == sorted(drawn)
    for name, picture in drawn.items():
        kept = (tool.FOLDER / name).read_text(encoding="utf-8")
        assert words_of(kept) == words_of(picture), "run tools/update_pictures.py"


def words_of(picture: str) -> list[str]:
    words = [text for text in ElementTree.fromstring(picture).itertext() if text.strip()]
    assert len(words) > 5
    return words


def test_every_file_of_the_benchmarks_is_named_in_their_page() -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    files = [path.name for path in (ROOT / "benchmarks").glob("*.py")]
    assert len(files) > 30
    assert [name for name in sorted(files) if f"`{name}`" not in page] == []


def test_figures_are_those_of_the_run_folders() -> None:
    tool = load(ROOT / "tools" / "update_figures.py")
    page = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
    assert tool.updated(page) == page, "run tools/update_figures.py"


def test_figures_of_rivals_take_the_fastest_of_each_cell() -> None:
    tool = load(ROOT / "tools" / "figure_readers.py")

    def timed(name: str, implementation: str, latency_ms: float) -> Comparison:
        return Comparison(name, "bf16", implementation, "base", 1, 1, 1, Verdict.EQUAL, latency_ms, 1, 25)

    def against_base(name: str) -> list[float]:
        return tool.ratios_to_best([timed(name, "ours", 2.0)], [], ["base"])

    assert against_base("short") == pytest.approx([0.5]), "the baseline is a rival too"
    ours = [timed("short", "ours", 2.0), timed("long", "ours", 10.0)]
    others = [timed("short", "a", 4.0), timed("short", "b", 3.0), timed("long", "a", 8.0)]
    assert tool.ratios_to_best(ours, others, ["a"]) == pytest.approx([2.0, 0.8])
    with pytest.raises(UsageError, match="b was not timed on long"):
        tool.ratios_to_best(ours, others, ["a", "b"])
    others.append(timed("long", "b", 20.0))
    assert tool.ratios_to_best(ours, others, ["a", "b"]) == pytest.approx([1.5, 0.8])


def test_a_figure_of_decoding_is_the_median_of_its_processes(tmp_path: Path) -> None:
    """Not the best of them, nor of another instruction set."""
    tool = load(ROOT / "tools" / "figure_readers.py")
    for name, value in {"avx2": 0.9, "avx2-2": 0.7, "avx2-3": 0.8, "avx512": 0.95}.items():
        (tmp_path / name).mkdir()
        ways = {"dense": {"share_of_median_reading": value}}
        (tmp_path / name / "decode.json").write_text(json.dumps({"dtypes": {"bf16": {"ways": ways}}}))
    assert tool.decode_share("avx2", "bf16")(tmp_path) == 0.8
    assert tool.decode_share("avx512", "bf16")(tmp_path) == 0.95


def test_figures_table_says_what_is_missing_and_what_falls_short(tmp_path: Path) -> None:
    tool = load(ROOT / "tools" / "update_figures.py")
    rows = load(ROOT / "tools" / "figure_rows.py")
    bounds = (rows.Bound("cold", 30, rows.unit("s")), rows.Bound("warm", 20, rows.unit("ms")))
    row = rows.Row("a call", "cpu-figures", bounds, lambda folder: (31.0, 19.0))
    asked = "| a call | cold ≤ 30 s, warm ≤ 20 ms |"
    (tmp_path / "2026-01-01-other-cpu-figures").mkdir()
    assert tool.line(row, tmp_path) == f"{asked} {tool.NOTHING_YET} | |"
    for name in ("2026-02-03-cpu-figures", "2026-01-31-cpu-figures"):
        (tmp_path / name).mkdir()
    link = "[2026-02-03-cpu-figures](../benchmarks/results/2026-02-03-cpu-figures)"
    assert tool.line(row, tmp_path) == f"{asked} cold 31 s (**not reached**), warm 19 ms | {link} |"


def test_figures_table_says_whose_audit_allows_no_claim() -> None:
    tool = load(ROOT / "tools" / "update_figures.py")
    refused, allowed, no_run = (
        ROOT / "benchmarks" / "results" / name
        for name in ("2026-11-23-cpu-avx2", "2026-11-23-cpu-default", "2026-11-23-cpu-peak")
    )
    assert "and no claim" in (refused / "report.md").read_text(encoding="utf-8")
    assert tool.claim(refused) == ", whose audit allows no claim"
    assert [tool.claim(folder) for folder in (allowed, no_run)] == ["", ""]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module
