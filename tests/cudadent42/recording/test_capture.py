"""`cudadent42 capture` from its command line to the run that predicts, with scripts as users have them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from recorded_scripts import BLOCKS, EXITS, NOTHING, QUANTIZED, RAISES, SERVE, TRAIN

from cudadent42.suites.loader import Suite, load_suite

ROOT = Path(__file__).resolve().parents[3]


def lab(*words: object, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cudadent42", *map(str, words)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )


def capture(
    source: str, folder: Path, *words: object, code: int = 0, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(source, encoding="utf-8")
    done = lab("capture", *options, "script.py", *words, folder=folder)
    assert done.returncode == code, done.stderr
    return done


def calls_of(suite: Suite) -> dict[str, int]:
    assert suite.script is not None
    return {times.case: times.calls for times in suite.script.calls}


def test_a_training_script_becomes_suites_that_run(tmp_path: Path) -> None:
    done = capture(TRAIN, tmp_path, 3, "--json", "--help")
    assert done.stdout == "trained ['3', '--json', '--help']\n"
    suites = {path.name: load_suite(str(path)) for path in tmp_path.glob("*.toml")}
    assert suites.keys() == {"captured.toml", "captured-attention.toml"}
    by_operation = {suite.operation: suite for suite in suites.values()}
    step = by_operation["attention_training_step"]
    assert calls_of(step) == {"b2-h4-s24-d16-causal/fp32": 3}
    (case,) = step.shapes
    # As the packed projection lays them out: rows of 3 * 64 entries.
    strides = (24 * 192, 16, 192)
    assert (case.query_strides, case.key_strides, case.value_strides) == (strides,) * 3  # type: ignore[attr-defined]
    forward = by_operation["attention"]
    assert calls_of(forward) == {"b2-h4-s24-d16/fp32": 3}
    for suite in suites.values():
        script = suite.script
        assert script is not None
        assert script.command == ("script.py", "3", "--json", "--help")
        assert [(each.reason, each.calls) for each in script.unchanged] == [("dropout", 3)]
        assert [each.suite for each in script.elsewhere] == list(suites.keys() - {f"{suite.name}.toml"})
        every = (*script.calls, *script.unchanged, *script.elsewhere)
        assert 0 < sum(each.seconds[0] for each in every) < script.seconds[0]
    assert "stays: dropout" in done.stderr


def test_the_run_of_a_suite_predicts_and_a_replay_checks_it(tmp_path: Path) -> None:
    capture(TRAIN, tmp_path, 2, options=("--runs", "2"))
    run = ("run", "--suite", "captured.toml", "--device", "cpu", "--repeats", "2", "--warmup", "0")
    done = lab(
        *run, "--ignore-preflight", "--timer", "cpu", "--output-dir", "folder", "--json", folder=tmp_path
    )
    document = json.loads(done.stdout)
    # Two blocks allow no verdict, so no ratio either; the section says what is missing.
    assert document["results"]["prediction"]["speedup"] == 1.0
    assert list(document["results"]["prediction"]["left_out"].values()) == ["too few blocks"]
    replay = lab("capture", "--replay", "folder", "--pairs", "1", "script.py", "2", folder=tmp_path)
    assert replay.returncode == 0, replay.stderr
    written = json.loads((tmp_path / "folder" / "replay.json").read_text(encoding="utf-8"))
    assert len(written["seconds"]) == len(written["seconds_with_kernels"]) == 1
    assert "was off by" in replay.stderr
    assert "So few pairs have no interval" in " ".join(replay.stderr.split())
    assert "Run both ways 1 time" in (tmp_path / "folder" / "report.md").read_text(encoding="utf-8")
    another = lab("capture", "--replay", "folder", "script.py", "3", folder=tmp_path)
    assert another.returncode == 2
    assert "expected the same command to replay" in another.stderr


def test_experts_threads_and_what_is_ours_already(tmp_path: Path) -> None:
    capture(SERVE, tmp_path, options=("--cases", "4"))
    suites = {path.name: load_suite(str(path)) for path in tmp_path.glob("*.toml")}
    by_operation = {suite.operation: suite for suite in suites.values()}
    experts = by_operation["moe"].script
    assert experts is not None
    assert [(each.case, each.calls, each.ours) for each in experts.calls] == [
        ("t8-h32-i32-2of4/fp32", 40, True)
    ]
    attention = by_operation["attention"].script
    assert attention is not None
    assert len(attention.calls) <= 4
    # 40 of the growing text, 15 of threads, and two that are ours.
    counted = sum(each.calls for each in attention.calls)
    assert counted + sum(each.calls for each in attention.unchanged) == 57
    assert sum(each.calls for each in attention.calls if each.ours) == 2
    growing = [shape for shape in by_operation["attention"].shapes if shape.softmax_scale == 0.5]  # type: ignore[attr-defined]
    assert growing
    assert {shape.seqlen_q for shape in growing} == {1}  # type: ignore[attr-defined]
    assert {shape.key_strides[1:] for shape in growing} == {(2048, 32)}  # type: ignore[attr-defined]
    assert "stands for calls of" in (tmp_path / f"{by_operation['attention'].name}.toml").read_text()


@pytest.mark.parametrize(("source", "code", "says"), [(RAISES, 1, "ValueError: on purpose"), (EXITS, 17, "")])
def test_a_script_that_fails_leaves_its_suite_and_its_code(
    source: str, code: int, says: str, tmp_path: Path
) -> None:
    done = capture(source, tmp_path, 2, code=code)
    assert says in done.stderr
    assert f"the script ended with exit code {code}; what it did until then is recorded" in done.stderr
    assert sum(calls_of(load_suite(str(tmp_path / "captured.toml"))).values()) == 2


def test_one_document_where_it_was_asked_for(tmp_path: Path) -> None:
    done = capture(TRAIN, tmp_path, 1, options=("--json",))
    document = json.loads(done.stdout)
    assert document["exit_code"] == 0
    assert len(document["suites"]) == 2
    assert sum(each["calls"] for each in document["calls"]) == 3
    assert "trained ['1']" in done.stderr


def test_blocks_say_what_counts(tmp_path: Path) -> None:
    capture(BLOCKS, tmp_path)
    assert calls_of(load_suite(str(tmp_path / "captured.toml"))) == {"b1-h2-s16-d32/fp32": 3}
    assert not (tmp_path / "elsewhere.toml").exists()


def test_blocks_alone_write_a_suite(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(BLOCKS, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=environment, check=True)
    suite = load_suite(str(tmp_path / "elsewhere.toml"))
    assert calls_of(suite) == {"b1-h2-s16-d32/fp32": 1}  # the last block's: each writes its own
    assert suite.script is not None
    assert suite.script.command == ()


def test_nothing_to_race(tmp_path: Path) -> None:
    done = capture(NOTHING, tmp_path)
    assert "none of these calls can be raced, so there is no suite" in done.stderr
    assert list(tmp_path.glob("*.toml")) == []


def test_quantized_experts_are_seen_and_have_no_case(tmp_path: Path) -> None:
    done = capture(QUANTIZED, tmp_path)
    assert "experts, 3 × 64 × 32, 1 of 2" in done.stdout + done.stderr
    assert "quantised weights, which a suite cannot have" in done.stdout + done.stderr
    assert list(tmp_path.glob("*.toml")) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere.py",), "there is no script nowhere.py"),
        (("-m",), "expected the name of a module"),
        (("--output", "suite.json", "x.py"), "expected a name that ends in .toml"),
        (("--output", "nowhere/suite.toml", "x.py"), "there is no folder nowhere"),
    ],
)
def test_what_cannot_be_recorded_is_said_before_anything_runs(
    words: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    done = lab("capture", *words, folder=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_script_that_leaves_nothing_says_so(tmp_path: Path) -> None:
    done = capture("import os\nos._exit(5)\n", tmp_path, code=5)
    assert "the script left no recording" in done.stderr


def test_a_module_is_a_script_too(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(TRAIN, encoding="utf-8")
    done = lab("capture", "-m", "package", "1", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "captured.toml").exists()


def test_importing_the_lab_stays_cheap() -> None:
    program = "import sys, cudadent42; print(sorted({'torch', 'numpy'} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


EXAMPLES = [
    # Two layers, two steps, once with PyTorch's attention and once with ours.
    ("train_gpt.py", ("--steps", "2", "--length", "32"), {"attention_training_step": (8, 4)}, ()),
    # One step for the comparison and ten that are timed, of each.
    ("own_module.py", ("--length", "128"), {"attention_training_step": (22, 11)}, ()),
    # Four layers; a warm-up of two tokens and three more, of each: a prompt and the tokens behind it.
    ("serve_qwen3_moe.py", ("--tokens", "3"), {"attention": (40, 20), "moe": (40, 20)}, ("transformers",)),
]


@pytest.mark.parametrize(
    ("script", "words", "counts", "packages"), EXAMPLES, ids=[each[0] for each in EXAMPLES]
)
def test_the_examples_counts_are_what_they_do(
    script: str,
    words: tuple[str, ...],
    counts: dict[str, tuple[int, int]],
    packages: tuple[str, ...],
    tmp_path: Path,
) -> None:
    """All calls of each operation, and how many of them are ours."""
    for package in packages:
        pytest.importorskip(package)
    done = lab("capture", ROOT / "examples" / script, *words, folder=tmp_path)
    if "DeviceError" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    recorded = {}
    for path in tmp_path.glob("*.toml"):
        suite = load_suite(str(path))
        assert suite.script is not None
        assert suite.script.unchanged == ()
        recorded[suite.operation] = (
            sum(each.calls for each in suite.script.calls),
            sum(each.calls for each in suite.script.calls if each.ours),
        )
    assert recorded == counts
