from __future__ import annotations

import os
import py_compile
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from cudadent42.base import parcels
from cudadent42.base.errors import UsageError
from cudadent42.fleet.cargo import Cargo
from cudadent42.model.implementations import is_plug_in, why_not
from cudadent42.model.records import Plan
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.operations.attention.inputs import random_inputs
from cudadent42.operations.attention.reference import attention_float64
from cudadent42.registry import MOST_PEER_CHARACTERS, get, load, registry
from cudadent42.suites.loader import load_suite

ATTENTION = "attention"
FIXED_NAMES = [
    "pytorch",
    "cudadent42",
    "pytorch_flash",
    "pytorch_cudnn",
    "pytorch_efficient",
    "pytorch_math",
    "flash_attn",
    "flash_attn_3",
    "flash_attn_cute",
    "flashinfer",
    "xformers",
]


def test_registry_has_the_promised_names() -> None:
    assert set(FIXED_NAMES) <= set(registry(ATTENTION))
    assert all(name == item.name and item.description for name, item in registry(ATTENTION).items())


@pytest.mark.parametrize("characters", [MOST_PEER_CHARACTERS, MOST_PEER_CHARACTERS + 1])
def test_the_name_of_a_peer_has_a_limit(tmp_path: Path, characters: int) -> None:
    """It stands in the sentence that may be quoted."""
    file = tmp_path / "mine.py"
    file.write_text(f"def attention():\n    pass\n\nattention.peer_of = {'x' * characters!r}\n")
    name = f"{file}:attention"
    if characters <= MOST_PEER_CHARACTERS:
        assert load(name, ATTENTION).peer == "x" * characters
        return
    with pytest.raises(
        UsageError, match=r"peer_of has 41 characters; expected a name of at most 40$"
    ) as caught:
        load(name, ATTENTION)
    assert "\n" not in str(caught.value)


def test_the_name_of_a_published_ones_peer_has_the_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    published = replace(get("pytorch", ATTENTION), name="theirs", peer="x" * (MOST_PEER_CHARACTERS + 1))
    point = Mock(**{"load.return_value": published})
    monkeypatch.setattr("cudadent42.base.extensions.points", lambda group: (point,))
    with pytest.raises(UsageError, match=r"^theirs: peer_of has 41 characters"):
        registry(ATTENTION)


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(
        UsageError, match=r"unknown implementation 'pytorhc' of attention; expected one of pytorch, "
    ):
        get("pytorhc", ATTENTION)


def test_listing_needs_no_torch() -> None:
    code = (
        "import sys; from cudadent42.registry import registry; from cudadent42.operations import names; "
        "[registry(each) for each in names()]; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    "name", ["pytorch_cudnn", "pytorch_efficient", "flash_attn", "flashinfer", "xformers"]
)
def test_gpu_only_ones_say_so(name: str) -> None:
    assert "not on cpu" in str(why_not(get(name, ATTENTION), "cpu"))


def test_missing_peer_gives_the_reason() -> None:
    if "flash_attn" in sys.modules:
        pytest.skip("flash_attn is installed")
    reason = get("flash_attn", ATTENTION).unavailable("cuda:0")
    assert reason == "flash_attn is not installed; pip install flash-attn"


def test_flash_attention_3_is_called_in_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its wheel's module, played by SDPA: (batch, seq, heads, head_dim), the softmax scale, and a causal mask."""

    def flash_attn_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
    ) -> torch.Tensor:
        of_heads = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(
            *of_heads, is_causal=causal, scale=softmax_scale
        ).transpose(1, 2)

    module = types.ModuleType("flash_attn_interface")
    module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    case = AttentionCase("c", "fp32", 2, 3, 3, 20, 20, 16, True)
    inputs = random_inputs(case, 0, 0, "cpu")
    rival = get("flash_attn_3", ATTENTION)
    assert rival.unavailable("cuda:0") is None
    expected = get("pytorch", ATTENTION).prepare(case, inputs)()
    torch.testing.assert_close(rival.prepare(case, inputs)(), expected)


def test_the_suite_for_hopper_races_all_three_rivals() -> None:
    assert {"pytorch_cudnn", "flash_attn_3", "flash_attn_cute"} <= set(load_suite("hopper").implementations)


@pytest.mark.parametrize("name", ["pytorch", "pytorch_flash", "pytorch_math"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(40, 40), (20, 50), (50, 20), (1, 9), (7, 0), (0, 7)])
@pytest.mark.parametrize("causal", [False, True])
def test_pytorch_follows_this_projects_conventions(
    name: str, heads: tuple[int, int], seqlen_q: int, seqlen_k: int, causal: bool
) -> None:
    """Bottom-right masks, zeros for rows without keys, grouped heads."""
    case = AttentionCase("c", "fp32", 2, *heads, seqlen_q, seqlen_k, 16, causal)
    inputs = random_inputs(case, 0, 0, "cpu")
    implementation = get(name, ATTENTION)
    with implementation.context():
        result = implementation.prepare(case, inputs)()
    torch.testing.assert_close(result.double(), attention_float64(inputs, causal), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- plug-ins


def test_plug_in_names() -> None:
    assert is_plug_in("a/b.py:f")
    assert not is_plug_in("pytorch")


def test_missing_file() -> None:
    with pytest.raises(UsageError, match="no file"):
        load("nowhere/kernel.py:attention", ATTENTION)


def test_missing_callable(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text("attention = 3\n")
    with pytest.raises(UsageError, match="no callable 'attention'"):
        load(f"{tmp_path}/kernel.py:attention", ATTENTION)


def test_file_that_fails_on_import(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text("raise RuntimeError('no GPU here')\n")
    with pytest.raises(UsageError, match="failed on import: RuntimeError: no GPU here"):
        load(f"{tmp_path}/kernel.py:attention", ATTENTION)


def test_two_files_of_one_name_stay_apart(tmp_path: Path) -> None:
    case = AttentionCase("c", "fp32", 1, 1, 1, 2, 2, 8)
    inputs = random_inputs(case, 0, 0, "cpu")
    for folder, factor in (("a", 2), ("b", 3)):
        (tmp_path / folder).mkdir()
        text = f"def attention(q, k, v, *, causal, softmax_scale): return q * {factor}\n"
        (tmp_path / folder / "kernel.py").write_text(text)
    results = [
        load(f"{tmp_path}/{folder}/kernel.py:attention", ATTENTION).prepare(case, inputs)() for folder in "ab"
    ]
    assert torch.equal(results[0] * 3, results[1] * 2)


def test_what_was_sent_is_loaded_from_its_source_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytecode is not in the digest; who is loaded first could leave some for who is raced next."""
    mine, helper = tmp_path / "mine.py", tmp_path / "a_module_beside_it.py"
    mine.write_text(
        "import a_module_beside_it\ndef attention(q, *_, **__): return a_module_beside_it.FACTOR * q * 2\n"
    )
    helper.write_text("FACTOR = 3\n")
    case = AttentionCase("c", "fp32", 1, 1, 1, 2, 2, 8)
    name = f"{mine}:attention"
    cargo = Cargo()
    (parcel,) = cargo.of(Plan("unit", "cpu", (case,), "pytorch", ("pytorch", name), 4, 0, seed=1))
    root = parcels.make(tmp_path / "parcels")
    monkeypatch.setenv(parcels.FOLDER_VARIABLE, str(root))
    parcels.place(parcel, cargo.packed(parcel), root)
    for path in (root / "trees" / parcel.digest).iterdir():
        sent, source = path.stat(), path.read_text()
        path.write_text(source.replace("3", "9").replace("2", "9"))  # as long, and as old
        os.utime(path, ns=(sent.st_atime_ns, sent.st_mtime_ns))
        py_compile.compile(str(path))
        path.write_text(source)
        os.utime(path, ns=(sent.st_atime_ns, sent.st_mtime_ns))
    for name_of_list in ("path", "path_hooks"):
        monkeypatch.setattr(sys, name_of_list, list(getattr(sys, name_of_list)))
    inputs = random_inputs(case, 0, 0, "cpu")
    try:
        result = load(name, ATTENTION).prepare(case, inputs)()
    finally:
        sys.modules.pop(helper.stem, None)
    assert torch.equal(result, 6 * inputs.query)
