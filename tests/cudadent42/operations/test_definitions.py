"""Both operations through suites, run folders and reports, which know them only by their definitions."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cudadent42.base.errors import UsageError
from cudadent42.base.serialise import dumps, loads
from cudadent42.decisions.compare import compare
from cudadent42.model.records import MachineReport, Plan, Sample
from cudadent42.operations import definition, names
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.operations.cuda_kernels import kernels as cuda_kernels
from cudadent42.operations.moe.activations import ACTIVATIONS
from cudadent42.operations.moe.case import MoeCase
from cudadent42.plan import Choices, make_plan
from cudadent42.registry import registry
from cudadent42.runs import run_folder
from cudadent42.stages import report
from cudadent42.stages.report import markdown
from cudadent42.stages.report.rivals import rivals
from cudadent42.stages.report.view import View
from cudadent42.suites.loader import load_suite, parse_suite
from flashmoe_science.cuda.device import GPUS

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
CASE = MoeCase("layer", "bf16", 16, 2048, 768, 128, 8)
PLAN = Plan(
    "unit",
    "cpu",
    (CASE,),
    "grouped_mm",
    ("cudadent42", "grouped_mm", "expert_loop"),
    repeats=3,
    warmup=0,
    seed=7,
)
NINE = "implementation,dtype,batch_size,seq_len,hidden_dim,num_heads,latency_ms,throughput_tokens_per_sec,memory_mb"


def sample(implementation: str, block: int, latency_ms: float) -> Sample:
    return Sample(CASE.id, implementation, block, 0, latency_ms, 8, 1.5, 1.25)


def samples() -> list[Sample]:
    latencies = {"grouped_mm": 4.0, "grouped_mm_control": 4.0, "cudadent42": 2.0, "expert_loop": 3.0}
    return [sample(name, block, ms) for block in range(3) for name, ms in latencies.items()]


ATTENTION_CASE = AttentionCase("prompt", "fp16", 1, 8, 8, 512, 512, 80, causal=True)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    ("case", "own"), [(CASE, "moe_"), (ATTENTION_CASE, "attention_")], ids=["experts", "attention"]
)
def test_a_race_builds_the_kernels_of_its_cases(case: AttentionCase | MoeCase, own: str) -> None:
    """Of all that the library has: a version of it knows no operations."""
    kernels = cuda_kernels(("sm_80", "sm_90"))
    operation = "moe" if isinstance(case, MoeCase) else "attention"
    needed = definition(operation).needed(kernels, (case,))
    assert {kernel.function for kernel in needed} >= {f"{own}portable", f"{own}hopper"}
    assert all(kernel.function.startswith(own) for kernel in needed)
    dtypes = {kernel.macros.get("ELEMENT_BF16") for kernel in needed} - {None}
    assert dtypes == {1 if case.dtype == "bf16" else 0}
    assert len(needed) < len(definition(operation).cuda_kernels(("sm_80", "sm_90"))) / 2
    assert not any(kernel.function.startswith("attention_backward") for kernel in needed)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    with run_folder.RunWriter(
        path, PLAN, MachineReport((), "dev=X", {}), None, ["cudadent42", "run"]
    ) as writer:
        for each in samples():
            writer.append_sample(each)
        writer.write_results(compare(PLAN, samples(), {}, {}))
    return path


@pytest.mark.parametrize("operation", names())
def test_columns_begin_with_the_nine_and_hold_the_common(operation: str) -> None:
    columns = definition(operation).columns
    assert ",".join(columns[:9]) == NINE
    assert len(set(columns)) == len(columns)
    assert set(run_folder.COMMON_COLUMNS) <= set(columns)


@pytest.mark.parametrize("case", [CASE, AttentionCase("a", "fp16", 2, 4, 2, 32, 48, 64)])
def test_every_column_has_one_source(case: AttentionCase | MoeCase) -> None:
    operation_definition = definition(case.operation)
    assert set(operation_definition.cells(case)) == set(operation_definition.columns) - set(
        run_folder.COMMON_COLUMNS
    )


def test_samples_of_a_layer_in_the_nine_columns(folder: Path) -> None:
    with (folder / run_folder.SAMPLES).open() as file:
        row = next(csv.DictReader(file))
    assert (row["batch_size"], row["seq_len"], row["hidden_dim"], row["num_heads"]) == (
        "1",
        "16",
        "2048",
        "128",
    )
    assert (row["intermediate_dim"], row["top_k"], row["activation"]) == ("768", "8", "silu")
    assert float(row["throughput_tokens_per_sec"]) == pytest.approx(16 / 4e-3)


def test_a_run_of_layers_is_read_back(folder: Path) -> None:
    read = run_folder.load_run(folder)
    assert read.plan == PLAN
    assert read.plan.operation == "moe"
    assert read.samples == tuple(samples())


def test_a_record_of_before_biases_and_layouts_is_of_a_case_without() -> None:
    written = json.loads(dumps(PLAN))
    for case in written["cases"]:
        del case["bias"], case["w13_layout"]
    assert loads(Plan, json.dumps(written)) == PLAN


def test_a_case_is_told_by_its_fields() -> None:
    mixed = (AttentionCase("a", "fp16", 2, 4, 2, 32, 48, 64), CASE)
    for case in mixed:
        plan = Plan("p", "cpu", (case,), "x", ("x",), 1, 0, 0)
        assert loads(Plan, dumps(plan)) == plan


def test_committed_runs_load() -> None:
    """Also those that lie together in one folder. A profile's has no samples: it was not timed."""
    folders = [path.parent for path in RESULTS.rglob("manifest.json")]
    assert any(path.parent != RESULTS for path in folders)
    for path in folders:
        read = run_folder.load_run(path)
        assert bool(read.samples) != (path / "profile.json").exists()
        assert {sample.case for sample in read.samples} <= {case.id for case in read.plan.cases}


def test_report_of_layers(folder: Path) -> None:
    report.write(folder)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Shape is tokens × hidden × intermediate, chosen of all experts." in page
    assert "16 × 2048 × 768, 8 of 128" in page
    text = markdown.render(View(run_folder.load_run(folder)))
    line = "Against the fastest other implementation of each case cudadent42 is at 1.50×"
    assert line in text
    assert line in page


def test_rivals_are_the_fastest_of_each_cell() -> None:
    summary = rivals(compare(PLAN, samples(), {}, {}))
    assert summary is not None
    assert summary.geomean == pytest.approx(1.5)
    assert (summary.closest.cell, summary.closest.implementation) == (CASE.id, "expert_loop")
    baseline_only = compare(PLAN, [s for s in samples() if s.implementation != "expert_loop"], {}, {})
    assert rivals(baseline_only) is None


@pytest.mark.parametrize("name", ["cudadent42_recompute", "cudadent42[portable]", "cudadent42[avx2]"])
def test_variants_of_the_candidate_are_no_rivals_of_it(name: str) -> None:
    """Otherwise the fastest form of one's own would stand as the fastest other implementation."""
    own = [sample(name, block, 1.0) for block in range(3)]
    plan = replace(PLAN, implementations=(*PLAN.implementations, name))
    summary = rivals(compare(plan, [*samples(), *own], {}, {}))
    assert summary is not None
    assert summary.closest.implementation == "expert_loop"
    alone = [s for s in samples() if s.implementation != "expert_loop"] + own
    assert rivals(compare(plan, alone, {}, {})) is None


def test_a_baseline_of_the_candidates_own_is_a_rival() -> None:
    plan = replace(
        PLAN, baseline="cudadent42_16bit", implementations=("cudadent42", "cudadent42_16bit", "expert_loop")
    )
    latencies = {
        "cudadent42_16bit": 2.5,
        "cudadent42_16bit_control": 2.5,
        "cudadent42": 2.0,
        "expert_loop": 3.0,
    }
    timed = [sample(name, block, ms) for block in range(3) for name, ms in latencies.items()]
    summary = rivals(compare(plan, timed, {}, {}))
    assert summary is not None
    assert summary.closest.implementation == "cudadent42_16bit"


# ---------------------------------------------------------------- suites

LAYER = '[[case]]\nname = "one"\ntokens = 16\nhidden = 64\nintermediate = 32\nexperts = 8\ntop_k = 2\n'
HEAD = 'name = "x"\noperation = "moe"\n'


def test_a_suite_of_layers() -> None:
    suite = parse_suite(HEAD + LAYER, "here")
    assert suite.operation == "moe"
    assert suite.shapes == (MoeCase("one", "fp16", 16, 64, 32, 8, 2),)
    assert (suite.baseline, suite.implementations) == ("grouped_mm", ("grouped_mm", "cudadent42"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'name = "x"\noperation = "convolution"\n' + LAYER,
            "operation = 'convolution'; expected attention or attention_backward or attention_training_step or "
            "attention_varlen or moe",
        ),
        ('name = "x"\n' + LAYER, "unknown key 'tokens'"),
        (HEAD + LAYER.replace("top_k = 2", "top_k = 9"), "top_k = 9; expected a whole number from 1 to 8"),
        (HEAD + LAYER.replace("hidden = 64", "hidden = 60"), "hidden = 60; expected a multiple of 16"),
        (
            HEAD + LAYER + 'activation = "gelu_tahn"\n',
            "unknown activation 'gelu_tahn'.*did you mean 'gelu_tanh'",
        ),
        (HEAD + LAYER + "causal = true\n", r"case 1 \(one\): unknown key 'causal'"),
        (
            HEAD + LAYER + 'w13_layout = "interleave"\n',
            "unknown w13_layout 'interleave'; expected one of concat",
        ),
        (
            HEAD + LAYER + 'w13_layout = "interleaved"\nactivation = "silu_no_mul"\n',
            "silu_no_mul has no gate; leave it out",
        ),
        (HEAD + LAYER + "bias = 1\n", "true or false"),
    ],
)
def test_a_suite_that_is_wrong(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_suite(text, "here")


def test_the_moe_suite_has_the_layers_of_four_models() -> None:
    suite = load_suite("moe")
    sizes = {(c.hidden, c.intermediate, c.experts, c.top_k) for c in suite.shapes if isinstance(c, MoeCase)}
    assert sizes == {(2048, 768, 128, 8), (4096, 14336, 8, 2), (7168, 2048, 256, 8), (2880, 2880, 32, 4)}
    tokens = {case.name: case.tokens for case in suite.shapes}
    assert {"qwen3-30b-1", "qwen3-30b-16", "qwen3-30b-256", "qwen3-30b-4096", "qwen3-30b-32768"} <= set(
        tokens
    )
    assert {"mixtral-8x7b-64", "mixtral-8x7b-8192", "gpt-oss-20b-8", "gpt-oss-20b-2048"} <= set(tokens)
    assert all(name.endswith(f"-{count}") for name, count in tokens.items())
    implementations = registry("moe")
    assert set(suite.implementations) <= set(implementations)


def test_the_layer_of_gpt_oss_has_kernels_for_a_gpu_that_is_not_here() -> None:
    cases = [case for case in load_suite("moe").shapes if case.name.startswith("gpt-oss")]
    made = [definition("moe").configured("cudadent42", case, GPUS["H100"]) for case in cases]
    assert len(made) == 2
    # The activation is a macro of the first product; biases and the layout are arguments.
    swiglu_oai = 1 + ACTIVATIONS.index("swigluoai")
    for each in made:
        assert swiglu_oai in {kernel.macros.get("ACTIVATION") for kernel in each.kernels}


def test_a_processor_gets_the_suite_of_its_size() -> None:
    assert make_plan(Choices(suite="moe"), "cuda:0", registry).suite == "moe"
    small = make_plan(Choices(suite="moe"), "cpu", registry)
    assert small.suite == "moe-cpu"
    assert small.baseline == "expert_loop"
    assert math.fsum(case.flops for case in small.cases) < 1e11


def test_definitions_import_no_torch() -> None:
    code = (
        "import sys; from cudadent42.operations import definition, names; "
        "[definition(each) for each in names()]; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"
