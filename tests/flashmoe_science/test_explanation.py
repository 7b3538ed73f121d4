"""Which kernel a call takes, and why not another: on this CPU, and on GPUs that are not there."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import flashmoe_science
from flashmoe_science import (
    DeviceError,
    InputError,
    attention_varlen,
    explain,
    flash_attention,
    fused_moe,
    topk_routing,
)
from flashmoe_science.cuda.attention import KernelKind
from flashmoe_science.cuda.device import GPUS
from flashmoe_science.cuda.moe import MoeKind
from flashmoe_science.cuda.varlen import VarlenKernel
from flashmoe_science.explanation import Explanation
from flashmoe_science.jit import host


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = ("FLASHMOE_CUDA_KERNEL", "FLASHMOE_CUDA_VARLEN", "FLASHMOE_MOE_KERNEL")
    for name in (*variables, host.INSTRUCTION_SET_VARIABLE):
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


def sequences(
    queries: int, dtype: torch.dtype = torch.bfloat16, device: str = "meta", cache: torch.dtype | None = None
) -> dict[str, Any]:
    """Arguments of `attention_varlen`: 8 sequences over pages of 16."""
    keys = torch.empty(64, 16, 4, 128, dtype=cache or dtype, device=device)

    def int32(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int32, device=device)

    return {
        "query": torch.empty(8 * queries, 16, 128, dtype=dtype, device=device),
        "key": keys,
        "value": keys,
        "cu_seqlens_q": int32(9),
        "max_seqlen_q": queries,
        "max_seqlen_k": 128,
        "block_table": int32(8, 8),
        "seqused_k": int32(8),
    }


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


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("queries", [1, 16, 4096])
def test_every_other_kernel_of_sequences_has_its_reason(gpu: str, queries: int) -> None:
    given = sequences(queries, torch.float16)
    if gpu == "T4" and queries > 1:
        with pytest.raises(DeviceError, match="portable: it needs sm_80 or later, and the GPU is sm_75"):
            explain(attention_varlen, gpu=gpu, **given)
        return
    explained = explain(attention_varlen, gpu=gpu, **given)
    kernels = [explained.kernel, *(name for name, _ in explained.others)]
    assert sorted(kernels) == sorted(kind.value for kind in VarlenKernel)
    assert explained.kernel == (
        "decode" if queries == 1 else "hopper" if gpu in ("H100", "H200") else "portable"
    )
    assert explained.reason
    assert all(reason for _, reason in explained.others)
    assert explained.configuration.head_dim == 128


def test_a_cache_of_fp8_is_widened_for_prompts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    step, prompt = (
        explain(attention_varlen, gpu="H200", **sequences(queries, cache=torch.float8_e4m3fn))
        for queries in (1, 512)
    )
    assert step.kernel == "decode"
    assert {reason for _, reason in step.others} == {"it reads no cache of FP8"}
    assert prompt.kernel == "hopper"
    assert prompt.reason.endswith("over a copy of the cache in 16 bits")
    assert dict(prompt.others)["decode"].startswith("it is for few queries")
    monkeypatch.setenv("FLASHMOE_CUDA_VARLEN", "portable")
    asked = explain(attention_varlen, gpu="H200", **sequences(512))
    assert asked.kernel == "portable"
    assert {reason for _, reason in asked.others} == {"FLASHMOE_CUDA_VARLEN asks for another"}
    on_cpu = explain(attention_varlen, **sequences(1, device="cpu", cache=torch.float8_e4m3fn))
    assert on_cpu.reason.endswith("with a copy of the keys in float32")


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("experts", [8, 60, 256, 1024])
def test_a_routers_choice_has_one_kernel(gpu: str, experts: int) -> None:
    explained = explain(topk_routing, torch.empty(5, experts, device="meta"), 4, gpu=gpu)
    assert (explained.kernel, explained.others) == ("topk_routing", ())
    assert explained.configuration.experts >= experts
    assert str(explained).splitlines()[-1] == "  gradients: PyTorch's operations"


def test_what_can_be_explained_is_what_the_words_say() -> None:
    with pytest.raises(InputError) as refused:
        explain(torch.add)
    names = re.findall(r"\w+", str(refused.value).partition("expected ")[2].replace(" or ", " "))
    assert names == sorted(("flash_attention", "attention_varlen", "fused_moe", "topk_routing"))
    described = str(explain.__doc__).partition("function:")[2].partition("tensors, options:")[0]
    assert set(re.findall(r"`(\w+)`", described)) == set(names)


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

    of_sequences = explain(attention_varlen, **sequences(1, device="cpu")).reason
    assert ("with its matrix unit" in of_sequences) is granted
    assert "matrix unit" not in explain(topk_routing, torch.randn(2, 8), 2).reason
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
        (attention_varlen, (), sequences(1) | {"max_seqlen_q": -1, "gpu": "H200"}, "max_seqlen_q is -1"),
        (attention_varlen, (), sequences(1), "the tensors are on meta"),
        (topk_routing, (torch.empty(2, 8), 9), {}, "k is 9 but logits has 8 experts"),
        (topk_routing, (torch.empty(2, 2048), 9), {"gpu": "L4"}, "takes at most 1024"),
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


@pytest.mark.parametrize(
    "options", [{"window": (9, -1)}, {"softcap": 5.0}, {"sinks": torch.zeros(16)}], ids=str
)
@pytest.mark.parametrize(("rows", "kernel"), [(300, VarlenKernel.HOPPER), (1, VarlenKernel.DECODE)])
def test_attention_with_options_takes_the_kernels_of_sequences(
    rows: int, kernel: VarlenKernel, options: dict[str, Any]
) -> None:
    given = {
        name: each.to("meta") if isinstance(each, torch.Tensor) else each for name, each in options.items()
    }
    explained = explain(flash_attention, *attention(rows, 400), causal=True, gpu="H200", **given)
    assert explained.kernel == kernel.value
    assert len(explained.others) == len(VarlenKernel) - 1
    assert explain(flash_attention, *attention(rows, 400), gpu="A100", **given).kernel in (
        "decode",
        "portable",
    )


def test_attention_with_options_of_tensors_that_are_no_sequences() -> None:
    query, key, value = attention(300, 400)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    explained = explain(flash_attention, query, key, value[:, :1].expand_as(value), window=(9, 9), gpu="H200")
    assert explained.kernel == "portable"
    query, key, value = attention(300, 401)
    rows_first = key.transpose(1, 2).contiguous().transpose(1, 2)
    explained = explain(flash_attention, query, rows_first, rows_first, window=(9, 9), gpu="H200")
    assert explained.kernel == "portable"
    assert {reason for _, reason in explained.others} == {
        "it reads sequences, as which these tensors cannot be seen"
    }


def test_attention_with_options_on_this_cpu() -> None:
    tensors = attention(30, 40, torch.float32, "cpu")
    assert explain(flash_attention, *tensors, window=(3, 3)).kernel == "attention_varlen"
    assert explain(flash_attention, *tensors, window=(-1, -1)).kernel == "attention_forward"
    with pytest.raises(InputError, match="softcap is -1"):
        explain(flash_attention, *tensors, softcap=-1.0)
