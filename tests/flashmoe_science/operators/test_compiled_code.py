"""PyTorch's cache of compiled code: another version of the operators is not handed what one before it compiled."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from flashmoe_science import flash_attention
from flashmoe_science.operators import compiled_code

PACKAGE = Path(compiled_code.__file__).parents[1]

# Nothing but the operators: inductor has no kernel of its own to compile.
GRADIENT = """
import json, threading, torch
from torch._dynamo.utils import counters
import flashmoe_science.operators

operator = torch.ops.flashmoe_science.flash_attention_forward
results = []

def differentiate():
    torch.manual_seed(1)
    query, key, value = torch.randn(3, 1, 2, 8, 32).requires_grad_().unbind()
    for function in (operator, torch.compile(operator, fullgraph=True)):
        output, _ = function(query, key, value)
        results.append(torch.autograd.grad(output, query, torch.ones_like(output))[0].sum().item())

thread = threading.Thread(target=differentiate)
thread.start()
thread.join()
print(json.dumps({"eager": results[0], "compiled": results[1], "hits": counters["aot_autograd"]["autograd_cache_hit"]}))
"""


def gradient(source: Path, cache: Path) -> dict[str, float]:
    """Eager and compiled, by the package in ``source``, in a process and a thread of their own."""
    done = subprocess.run(
        [sys.executable, "-c", GRADIENT],
        env={**os.environ, "PYTHONPATH": str(source), "TORCHINDUCTOR_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
def test_another_versions_backward_pass_is_not_taken_from_the_cache(tmp_path: Path) -> None:
    """The version after halves the gradient of the query."""
    shutil.copytree(PACKAGE, tmp_path / "after" / PACKAGE.name)
    module = tmp_path / "after" / PACKAGE.name / "operators" / "attention.py"
    rule = "return *gradients, None, None\n"
    assert rule in module.read_text()
    module.write_text(
        module.read_text().replace(rule, "return gradients[0] / 2, *gradients[1:], None, None\n")
    )

    cache = tmp_path / "cache"
    first, again = (gradient(PACKAGE.parent, cache) for _ in range(2))
    assert (first["hits"], again["hits"]) == (0, 1), "the same version finds what it compiled"
    after = gradient(tmp_path / "after", cache)
    assert after["eager"] != pytest.approx(first["eager"])
    assert after["compiled"] == pytest.approx(after["eager"])


def test_compiling_adds_the_version_to_a_tag_of_the_users_in_every_thread() -> None:
    config = torch.compiler.config

    def tags() -> list[str]:
        tensors = torch.randn(3, 1, 2, 8, 32).unbind()
        seen = []
        for tag in ("", "mine"):
            torch.compiler.reset()
            with config.patch(cache_key_tag=tag):
                torch.compile(flash_attention, backend="aot_eager", fullgraph=True)(*tensors)
                seen.append(config.cache_key_tag)
        return seen

    expected = [compiled_code.version(), f"mine;{compiled_code.version()}"]
    assert tags() == expected
    elsewhere: list[str] = []
    thread = threading.Thread(target=lambda: elsewhere.extend(tags()))
    thread.start()
    thread.join()
    assert elsewhere == expected
