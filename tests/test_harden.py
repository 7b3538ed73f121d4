"""tools/harden.py finds what is wrong, says which seed shows it, and goes on behind it."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import random
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from flashmoe_science.jit import host

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def harden() -> ModuleType:
    specification = importlib.util.spec_from_file_location("harden", ROOT / "tools" / "harden.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["harden"] = module
    specification.loader.exec_module(module)
    return module


def test_a_failure_is_kept_with_its_seed_and_passed_over(harden: ModuleType, tmp_path: Path) -> None:
    program = tmp_path / "fuzz_probe.py"
    program.write_text(
        "import json, sys\n"
        "seed, count = map(int, sys.argv[1:3])\n"
        "for number in range(seed, seed + count):\n"
        "    print(f'seed {number}', file=sys.stderr, flush=True)\n"
        "    assert number != 7, 'seven'\n"
        "print(json.dumps({'done': count}))\n"
    )
    job = harden.Job("probe", program, chunk=5, wanted=12)
    while job.done < job.wanted:
        job.advance()
    assert [failure["seed"] for failure in job.failures] == [7]
    assert "seven" in job.failures[0]["output"]
    assert job.done == 12


def test_a_program_that_ctrl_c_ended_did_not_fail(harden: ModuleType, tmp_path: Path) -> None:
    """Programs that run at a time are waited for in threads, which Ctrl-C does not interrupt; it ends the programs."""
    program = tmp_path / "fuzz_probe.py"
    program.write_text(
        "import os, signal, sys\nprint('seed', sys.argv[1], file=sys.stderr)\n"
        # What a shell starts in the background ignores the signal.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\nos.kill(os.getpid(), signal.SIGINT)\n"
    )
    job = harden.Job("probe", program, chunk=2, wanted=2)
    job.advance()
    assert (job.done, job.failures) == (0, [])


def test_jobs_at_a_time_come_to_what_is_wanted_of_each(harden: ModuleType, tmp_path: Path) -> None:
    """Shares have seeds of their own, and together as many attempts as were asked for."""
    program = tmp_path / "fuzz_probe.py"
    program.write_text(
        "import json, pathlib, sys\n"
        "seed, count = map(int, sys.argv[1:3])\n"
        "for number in range(seed, seed + count):\n"
        f"    pathlib.Path({str(tmp_path)!r}, str(number)).touch(exist_ok=False)\n"
        "print(json.dumps({'done': count}))\n"
    )
    shares = harden.shares("probe", program, chunk=2, wanted=10, most=3)
    reported: list[str] = []
    harden.run(shares, 2, 0.0, lambda job: reported.append(job.name))
    assert [job.failures for job in shares] == [[], [], []]
    assert sum(job.done for job in shares) >= 10
    assert len([each for each in tmp_path.iterdir() if each.name.isdigit()]) == sum(
        job.done for job in shares
    )
    assert set(reported) == {"probe, share 1", "probe, share 2", "probe, share 3"}
    (alone,) = harden.shares("probe", program, chunk=50, wanted=50, most=3)
    assert alone.name == "probe"


@pytest.mark.usefixtures("fresh_processes")
def test_a_machine_that_lacks_something_is_told_what(tmp_path: Path) -> None:
    """In a line and with exit code 2: 1 would be a kernel's fault."""

    def run(*options: str, **environment: str) -> tuple[int, str]:
        command = [
            sys.executable,
            *options,
            str(ROOT / "tools" / "harden.py"),
            "--output-dir",
            str(tmp_path / "out"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
        return done.returncode, done.stderr

    assert run(PATH=str(tmp_path)) == (2, "harden: git was not found; install it\n")
    code, said = run("-S", PYTHONPATH="")  # without any package
    assert code == 2
    assert "lacks torch, numpy, typer, rich, jinja2, sqlalchemy; use .venv/bin/python" in said


STRUCTURE = re.compile(r"struct \w+Problem \{(.*?)\n\};", re.DOTALL)
FIELDS = re.compile(r"^ *(?:int64_t|double) ([^;]*);", re.MULTILINE)
HEADERS = {
    "moe_forward": "moe_job.h",
    "attention_forward": "problem.h",
    "attention_backward": "backward_problem.h",
    "attention_varlen": "varlen_problem.h",
    "topk_routing": "routing_rows.h",
    "topk_routing_backward": "routing_rows.h",
}


def test_every_kernel_is_called(harden: ModuleType) -> None:
    sources = {path.name for path in (ROOT / "src/flashmoe_science/kernels/cpu").glob("*.cpp")}
    assert {kernel.source for kernel in harden.KERNELS.values()} == sources


@pytest.mark.parametrize(
    ("able", "by_avx512"), [(["avx512_bf16", "avx512"], False), (["avx512"], True), (["portable"], False)]
)
def test_code_for_bf16_is_built_where_there_is_avx512(
    harden: ModuleType, able: list[str], by_avx512: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = tuple(map(host.InstructionSet, able))
    monkeypatch.setattr(host, "available_instruction_sets", lambda: sets)
    emulated = [target for target in harden.targets() if target.macros]
    assert len(harden.targets()) == len(able) + by_avx512
    assert [each.name for each in emulated] == ["avx512_bf16"] * by_avx512
    assert all(each.instruction_set is host.InstructionSet.AVX512 for each in emulated)


@pytest.mark.parametrize("name", [*HEADERS, "moe_backward"])
def test_the_programs_call_the_kernels_as_they_are(
    harden: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parameter or a field that a program lacks is memory that nobody wrote, and the counts prove nothing."""
    sources = ROOT / "src" / "flashmoe_science" / "kernels" / "cpu"
    kernel = harden.KERNELS[name]
    source, program = (sources / kernel.source).read_text(), (harden.HARD / kernel.program).read_text()
    prototype = re.search(rf"int flashmoe_{name}\((.*?)\) \{{", source, re.DOTALL)
    argument_types = re.search(r"argtypes = \[ctypes.c_void_p\] \* (\d+) \+ \[ctypes.c_int\]", program)
    assert prototype is not None
    assert argument_types is not None
    assert prototype[1].count(",") == int(argument_types[1])

    structure = STRUCTURE.search((sources / HEADERS.get(name, kernel.source)).read_text())
    assert structure is not None
    fields = [field for line in FIELDS.findall(structure[1]) for field in line.split(",")]
    lengths = [re.search(r"\[(\d+)\]", field) for field in fields]
    words = sum(int(length[1]) if length else 1 for length in lengths)
    monkeypatch.syspath_prepend(harden.HARD)
    names = runpy.run_path(str(harden.HARD / kernel.program))
    given = ctypes.sizeof(names["Problem"]) // 8 if "Problem" in names else len(names["PROBLEM"])
    assert given == words


@pytest.mark.parametrize("bits", [0, 8, 4])
def test_random_calls_of_experts_run(harden: ModuleType, tmp_path: Path, bits: int) -> None:
    """As the nightly script makes them, of a library without sanitizers."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    source = ROOT / "src" / "flashmoe_science" / "kernels" / "cpu" / "moe_forward.cpp"
    library = tmp_path / f"moe_forward{f' int{bits}' if bits else ''}-portable.so"
    flags = [flag for flag in host.COMMON_FLAGS if flag != "-O3"]
    subprocess.run(
        ["g++", *flags, "-O0", f"-DWEIGHT_BITS={bits}", str(source), "-o", str(library)], check=True
    )
    job = harden.Job("experts", harden.HARD / "random_moe_calls.py", chunk=10, wanted=10, library=library)
    job.advance()
    assert (job.done, job.failures) == (10, [])


@pytest.mark.slow
def test_a_write_past_a_tensor_is_found(harden: ModuleType, tmp_path: Path) -> None:
    """A kernel that writes one element too much, where the output is long enough to be worth it."""
    source = tmp_path / "attention_forward.cpp"
    source.write_text(
        "#include <stdint.h>\n"
        'extern "C" __attribute__((visibility("default"))) int flashmoe_attention_forward(\n'
        "    const int64_t* problem, const void*, const void*, const void*, char* out, float*, int) {\n"
        "    const int64_t size = problem[0] == 0 ? 4 : 2;\n"
        "    const int64_t *stride = problem + 16, shape[] = {problem[1], problem[2], problem[4]};\n"
        "    int64_t end = problem[6] * size;\n"
        "    for (int i = 0; i < 3; ++i) {\n"
        "        if (shape[i] == 0) return 0;\n"
        "        end += (shape[i] - 1) * stride[i];\n"
        "    }\n"
        "    if (shape[2] > 50) out[end] = 1;\n"
        "    return 0;\n"
        "}\n"
    )
    try:
        runtime = harden.sanitizer_runtime("g++")
    except harden.CannotRunError as error:
        pytest.skip(str(error))
    library = tmp_path / "attention_forward.so"
    command = ["g++", "-shared", "-fPIC", *harden.SANITIZERS, str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    program = harden.HARD / harden.KERNELS["attention_forward"].program
    job = harden.Job("broken", program, chunk=50, wanted=50, library=library, preload=runtime)
    job.advance()
    assert "heap-buffer-overflow" in job.failures[0]["output"]
    assert json.loads(json.dumps(job.record()))["failures"]


def test_what_an_entry_links_to_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of one attempt is there for the next: one that linked to /etc/passwd was written through, as root."""
    specification = importlib.util.spec_from_file_location("damaged", ROOT / "tests/hard/damaged_entries.py")
    assert specification is not None
    assert specification.loader is not None
    damaged = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(damaged)
    other = tmp_path / "of somebody else"
    other.write_text("whole")
    other.chmod(0o600)
    lock = tmp_path / "cache" / (damaged.recipe_key(damaged.RECIPE) + ".lock")
    for damage in dict.fromkeys(damaged.DAMAGES):
        monkeypatch.setattr(damaged, "DAMAGES", (damage,))
        for seed in range(4):
            lock.parent.mkdir(exist_ok=True)
            lock.unlink(missing_ok=True)
            lock.symlink_to(other)
            damaged.attempt(lock.parent, random.Random(seed))
        assert (other.read_text(), other.stat().st_mode & 0o777) == ("whole", 0o600), damage.__name__
