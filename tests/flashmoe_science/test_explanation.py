"""Which kernel a call takes, and why not another: on this CPU, and on GPUs that are not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashmoe_science
from flashmoe_science import InputError, explain, flash_attention, fused_moe
from flashmoe_science.cuda.attention import KernelKind
from flashmoe_science.cuda.device import GPUS
from flashmoe_science.cuda.moe import MoeKind
from flashmoe_science.explanation import Explanation
from flashmoe_science.jit import host


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLASHMOE_CUDA_KERNEL", "FLASHMOE_MOE_KERNEL", host.INSTRUCTION_SET_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def attention(rows: int, keys: int, dtype: torch.dtype = torch.bfloat16, device: str = "meta") -> Any:
    query = torch.empty(2, 16, rows, 128, dtype=dtype, device=device)
    key = torch.empty(2, 16, keys, 128, dtype=dtype, device=device)
    return query, key, key


def experts(tokens: int, dtype: torch.dtype = torch.bfloat16, device: str = "meta") -> Any:
    return (
        torch.empty(tokens, 256, dtype=dtype, device=device),
        torch.empty(8, 256, 256, dtype=dtype, device=device),
        torch.empty(8, 256, 128, dtype=dtype, device=device),
        torch.empty(tokens, 2, device=device),
        torch.zeros(tokens, 2, dtype=torch.int32, device=device),
    )


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(("rows", "keys"), [(1, 4096), (64, 64), (4096, 4096), (4096, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_every_other_kernel_of_attention_has_its_reason(gpu: str, rows: int, keys: int, causal: bool) -> None:
    explained = explain(flash_attention, *attention(rows, keys, torch.float16), causal=causal, gpu=gpu)
    kernels = [explained.kernel, *(name for name, _ in explained.others)]
    assert sorted(kernels) == sorted(kind.value for kind in KernelKind)
    assert explained.reason
    assert all(reason for _, reason in explained.others)
    assert explained.configuration is not None


@pytest.mark.parametrize("gpu", [name for name in GPUS if name != "T4"])
@pytest.mark.parametrize("tokens", [1, 64, 4096])
def test_every_other_way_through_experts_has_its_reason(gpu: str, tokens: int) -> None:
    explained = explain(fused_moe, *experts(tokens), gpu=gpu)
    assert {explained.kernel, *(name for name, _ in explained.others)} == {kind.value for kind in MoeKind}
    assert all(reason for _, reason in explained.others)


def test_the_reasons_are_those_of_the_call() -> None:
    long = explain(flash_attention, *attention(4096, 4096), gpu="h200")
    assert long.kernel == "hopper"
    assert "taller tiles" in dict(long.others)["small"]
    assert "hopper is preferred" in dict(long.others)["portable"]
    assert (
        "the GPU is sm_80"
        in dict(explain(flash_attention, *attention(4096, 4096), gpu="A100").others)["hopper"]
    )
    negative = explain(flash_attention, *attention(4096, 4096), softmax_scale=-1.0, gpu="H200")
    assert negative.kernel == "portable"
    assert dict(negative.others)["hopper"].startswith("softmax_scale is -1")


def test_what_the_environment_asks_for_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMOE_CUDA_KERNEL", "portable")
    explained = explain(flash_attention, *attention(4096, 4096), gpu="H200")
    assert explained.kernel == "portable"
    assert {reason for _, reason in explained.others} == {"FLASHMOE_CUDA_KERNEL asks for another"}


@pytest.mark.parametrize(
    ("function", "given", "kernel"),
    [(flash_attention, attention, "attention_forward"), (fused_moe, experts, "moe_forward")],
)
def test_on_a_cpu_it_is_the_instruction_set(
    function: Any, given: Any, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = (
        attention(4, 4, torch.float32, "cpu") if given is attention else experts(4, torch.float32, "cpu")
    )
    explained = explain(function, *tensors)
    best = host.available_instruction_sets()[0]
    assert (explained.device, explained.kernel, explained.configuration) == ("cpu", kernel, best.value)
    assert len(explained.others) == len(host.InstructionSet) - 1
    monkeypatch.setenv(host.INSTRUCTION_SET_VARIABLE, "portable")
    assert explain(function, *tensors).configuration == "portable"


@pytest.mark.parametrize("granted", [True, False])
@pytest.mark.parametrize("given", [attention, experts])
def test_the_matrix_unit_is_named_where_it_is_taken(
    given: Any, granted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = frozenset(host.InstructionSet.AMX.features)
    monkeypatch.setattr(host, "cpu_features", lambda: features)
    monkeypatch.setattr(host, "amx_is_granted", lambda: granted)
    monkeypatch.setattr(host, "_compiler_takes", lambda flags: True)
    function = flash_attention if given is attention else fused_moe

    def explained(dtype: torch.dtype) -> Explanation:
        tensors = attention(4, 4, dtype, "cpu") if given is attention else experts(4, dtype, "cpu")
        return explain(function, *tensors)

    if granted:
        assert explained(torch.bfloat16).configuration == "amx"
        assert "with its matrix unit" in explained(torch.bfloat16).reason
        assert "without its matrix unit" in explained(torch.float16).reason
        if given is attention:  # its dimensions go there in steps of 32
            odd = tuple(tensor[..., :40] for tensor in attention(4, 4, torch.bfloat16, "cpu"))
            assert "without its matrix unit" in explain(flash_attention, *odd).reason
        return
    assert explained(torch.bfloat16).configuration == "avx512"
    assert "matrix unit" not in explained(torch.bfloat16).reason
    assert "the operating system's leave" in dict(explained(torch.bfloat16).others)["amx"]


def test_it_reads_as_a_few_lines() -> None:
    lines = str(explain(flash_attention, *attention(4096, 4096), gpu="H200")).splitlines()
    assert lines[0].startswith("flash_attention on sm_90 with 132 multiprocessors: hopper, ")
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("function", "tensors", "options", "message"),
    [
        (torch.add, attention(4, 4), {}, "nothing to explain about 'add'"),
        (flash_attention, attention(4, 4)[:2], {}, "flash_attention cannot be called so: missing"),
        (flash_attention, attention(4, 4), {"gpu": "H900"}, "gpu is 'H900'; expected one of T4, A100"),
        (flash_attention, attention(4, 4), {}, "the tensors are on meta"),
        (flash_attention, attention(4, 4, torch.float32), {"gpu": "H200"}, "take float16 and bfloat16"),
        (flash_attention, attention(4, 4), {"causal": 2, "gpu": "H200"}, "causal is 2"),
        (fused_moe, experts(4), {"activation": "relu", "gpu": "H200"}, "activation is 'relu'"),
    ],
)
def test_bad_input_says_what_was_wrong(function: Any, tensors: Any, options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        explain(function, *tensors, **options)


def test_dir_shows_the_public_names_alone() -> None:
    assert dir(flashmoe_science) == sorted(flashmoe_science.__all__)


@pytest.mark.parametrize(
    ("gpu", "tokens", "told"), [("H200", 1 << 20, False), ("A100", 64, False), ("A100", 1 << 20, True)]
)
def test_what_computes_gradients_is_told_where_it_is_no_kernel(gpu: str, tokens: int, told: bool) -> None:
    assert explain(fused_moe, *experts(4, torch.float32, "cpu")).gradients is None
    text = str(explain(fused_moe, *experts(tokens), gpu=gpu)).splitlines()[-1]
    assert text.startswith("  gradients: PyTorch's operations") is told
    reasons = (
        "not hopper: it needs sm_90, and the GPU is sm_80; not portable: PyTorch's operations are faster"
    )
    assert (reasons in text) is told
