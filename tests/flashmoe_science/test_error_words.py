"""What the kernels' errors say, word by word; ``./test.sh --update-snapshots`` writes it again."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flashmoe_science as ours
from flashmoe_science.errors import DeviceError, InputError
from flashmoe_science.jit import host
from module_graph import files_of, nodes_of

ROOT = Path(__file__).resolve().parents[2]


def attention(*shape: int, **changes: Any) -> torch.Tensor:
    """A call with one query of another shape, or of other keys, values and options."""
    query = torch.zeros(shape or (1, 2, 8, 32), dtype=changes.pop("dtype", torch.float32))
    key, value = (changes.pop(name, torch.zeros(1, 2, 8, 32)) for name in ("key", "value"))
    return ours.flash_attention(query, key, value, **changes)


def experts(**changes: Any) -> torch.Tensor:
    given = {
        "hidden_states": torch.zeros(5, 32),
        "w13": torch.zeros(4, 64, 32),
        "w2": torch.zeros(4, 32, 32),
        "topk_weights": torch.zeros(5, 2),
        "topk_ids": torch.zeros(5, 2, dtype=torch.int64),
    } | changes
    return ours.fused_moe(**given)


def varlen(**changes: Any) -> torch.Tensor:
    starts = torch.tensor([0, 3, 8], dtype=torch.int32)
    given = {"cu_seqlens_q": starts, "max_seqlen_q": 5, "max_seqlen_k": 5} | changes
    return ours.attention_varlen(*(torch.zeros(8, 2, 32) for _ in range(3)), **given)


CALLS: dict[str, Callable[[], object]] = {
    "three-dimensions": lambda: attention(2, 8, 32),
    "another-head-dim": lambda: attention(1, 2, 8, 64),
    "odd-head-dim": lambda: attention(
        1, 2, 8, 36, key=torch.zeros(1, 2, 8, 36), value=torch.zeros(1, 2, 8, 36)
    ),
    "heads-that-share-unevenly": lambda: attention(1, 3, 8, 32),
    "another-dtype": lambda: attention(dtype=torch.bfloat16),
    "float64": lambda: ours.flash_attention(
        *(torch.zeros(1, 2, 8, 32, dtype=torch.float64) for _ in range(3))
    ),
    "no-tensor": lambda: attention(key=[1.0]),
    "another-device": lambda: ours.flash_attention(
        *(torch.zeros(1, 2, 8, 32, device="meta") for _ in range(3))
    ),
    "transposed": lambda: attention(value=torch.zeros(1, 2, 32, 8).transpose(2, 3)),
    "scale": lambda: attention(softmax_scale=float("nan")),
    "sinks-of-16-bits": lambda: attention(sinks=torch.zeros(2, dtype=torch.bfloat16)),
    "unknown-activation": lambda: experts(activation="silo"),
    "rows-of-w13": lambda: experts(w13=torch.zeros(4, 32, 32)),
    "float-ids": lambda: experts(topk_ids=torch.zeros(5, 2)),
    "too-many-experts": lambda: ours.topk_routing(torch.zeros(5, 4), 9),
    "packed-keys-without-starts": varlen,
    "starts-of-int64": lambda: varlen(
        cu_seqlens_q=torch.tensor([0, 3, 8]), cu_seqlens_k=torch.tensor([0, 3, 8])
    ),
    "unknown-gpu": lambda: ours.explain(ours.flash_attention, *(torch.zeros(1, 2, 8, 32),) * 3, gpu="H300"),
}


@pytest.mark.parametrize("name", CALLS)
def test_error_of_a_call(name: str, snapshot: Callable[[str, str], None]) -> None:
    with pytest.raises((InputError, DeviceError)) as error:
        CALLS[name]()
    snapshot(f"kernels/{name}", f"{type(error.value).__name__}: {error.value}\n")


@pytest.mark.parametrize(("variable", "text"), [("CXX", "no-such-compiler"), ("FLASHMOE_CPU_ISA", "sse")])
def test_error_of_a_variable(
    variable: str, text: str, snapshot: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    ask = {"CXX": host.find_compiler.__wrapped__, "FLASHMOE_CPU_ISA": host.choose_instruction_set}[variable]
    with pytest.raises((InputError, DeviceError)) as error:
        ask()
    snapshot(f"kernels/{variable}", f"{type(error.value).__name__}: {error.value}\n")


def texts() -> Iterator[str]:
    """All that the package can say; a space is where it puts in a value."""
    for path in files_of("flashmoe_science").values():
        for node in nodes_of(path):
            if isinstance(node, ast.JoinedStr):
                yield "".join(
                    str(part.value) if isinstance(part, ast.Constant) else " " for part in node.values
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def documented() -> list[str]:
    page = (ROOT / "docs/kernels/jit.md").read_text(encoding="utf-8")
    table = page.partition("## Errors, and what to do")[2].partition("\n## ")[0]
    return [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")][2:]


@pytest.mark.parametrize("message", documented())
def test_a_documented_message_is_one_that_the_package_says(message: str) -> None:
    """But for what it puts in: ``...``, versions and architectures."""
    fixed = [part for part in re.split(r"\s*(?:\.\.\.|\S*\d\S*)\s*", message) if re.search(r"\w{3}", part)]
    assert fixed
    assert any(all(part.strip(" (:") in text for part in fixed) for text in texts()), fixed
