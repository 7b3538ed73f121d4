"""tools/harden.py finds what is wrong, says which seed shows it, and goes on behind it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

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
    program = harden.HARD / harden.KERNELS["attention_forward"]
    job = harden.Job("broken", program, chunk=50, wanted=50, library=library, preload=runtime)
    job.advance()
    assert "heap-buffer-overflow" in job.failures[0]["output"]
    assert json.loads(json.dumps(job.record()))["failures"]
