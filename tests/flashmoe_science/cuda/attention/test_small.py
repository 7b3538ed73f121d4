"""The small-shape kernel without a GPU: which calls take it, that it compiles, and that it computes attention.

For the last, the kernel's own source is compiled as C++ against headers (../emulation) that give its few
primitives (matrix product, shuffles, transposition, messages between blocks) as CPU code with one thread per
CUDA thread.
"""

from __future__ import annotations

import ctypes
import dataclasses

import pytest
import torch
from compiled_for import each_architecture
from emulated import NEEDS_COMPILER, compile_clusters
from hypothesis import given
from hypothesis import strategies as st

from flashmoe_science.configs.attention import small as configs
from flashmoe_science.configs.attention.small import SmallConfiguration
from flashmoe_science.cuda.attention import KernelKind, Problem, select, small
from flashmoe_science.cuda.device import Device
from flashmoe_science.errors import InputError
from flashmoe_science.jit.limits import LIMITS
from flashmoe_science.jit.nvrtc import compile_kernel
from problems import H200
from problems import contiguous as problem

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90")


@pytest.mark.parametrize(
    ("seqlen_k", "head_dim", "message"),
    [
        (33, 64, "seqlen_k is 33; expected at most 32"),
        (32, 128, "head_dim is 128; expected 64 for"),
        (32, 56, "head_dim is 56; expected 64 for"),
    ],
)
def test_a_choice_for_another_problem_is_refused(seqlen_k: int, head_dim: int, message: str) -> None:
    few = problem(1, 1, 1, 8, 32)
    configuration = small.configuration_for(few, H200)
    small.check(few, configuration)
    with pytest.raises(InputError, match=message):
        small.plan(problem(1, 1, 1, 8, seqlen_k, head_dim), configuration, H200)


@given(
    batch=st.integers(1, 300),
    kv_heads=st.integers(1, 64),
    group=st.integers(1, 16),
    seqlen_q=st.integers(1, 5000),
    seqlen_k=st.integers(0, 100_000),
    head_dim=st.integers(1, 32).map(lambda n: 8 * n),
    architecture=st.sampled_from(sorted(LIMITS)),
    multiprocessors=st.integers(1, 200),
)
def test_what_is_chosen_can_do_it(
    batch: int,
    kv_heads: int,
    group: int,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    architecture: str,
    multiprocessors: int,
) -> None:
    call = problem(batch, group * kv_heads, kv_heads, seqlen_q, seqlen_k, head_dim, dtype=torch.float16)
    device = Device(0, architecture, multiprocessors, 1 << 22)
    taken = small.configuration_for(call, device)
    assert dataclasses.replace(taken, splits=min(taken.splits, 2)) in configs.all_configurations(architecture)
    assert taken.head_dim == head_dim or (taken.padded and taken.head_dim > head_dim)
    assert taken.keys_per_pass >= seqlen_k or not taken.single_pass
    assert taken.cluster == 1 or architecture in configs.CLUSTERED
    if taken.splits > 1:
        assert small.arrival_counters(call, taken) <= configs.MOST_ARRIVALS
        assert taken.keys_per_pass // taken.key_tiles <= seqlen_k, "a warp without keys"
        assert not taken.single_pass
    assert taken.dependent == (architecture in configs.CLUSTERED)
    choice = small.choose(call, device)
    assert choice is None or choice.configuration == taken
    row_blocks = -(-seqlen_q * group // taken.rows)
    if row_blocks <= 2:
        assert choice is not None


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "length", "rows", "cluster"),
    [
        (1, 1, 32, 8, 1),
        (1, 1, 64, 8, 1),
        (1, 1, 128, 8, 4),
        (1, 1, 256, 8, 2),
        (1, 1, 512, 32, 4),
        (2, 4, 128, 8, 1),
    ],
)
def test_short_sequences_are_held_in_registers(
    batch: int, heads: int, length: int, rows: int, cluster: int, causal: bool
) -> None:
    choice = select(problem(batch, heads, heads, length, length, causal=causal), H200)
    assert choice.kernel is KernelKind.SMALL
    assert choice.configuration.single_pass
    assert choice.configuration.rows == (16 if causal and rows == 32 else rows)
    assert choice.configuration.cluster == cluster


@pytest.mark.parametrize(
    ("call", "cluster", "splits"),
    [
        # As measured: benchmarks/results/2026-11-21-h200-decode-split.
        (problem(1, 32, 8, 1, 2048, 128), 16, 1),
        (problem(1, 32, 8, 1, 4096, 128), 2, 8),
        (problem(1, 32, 8, 1, 32768, 128), 2, 8),
        (problem(1, 32, 8, 1, 131072, 64), 2, 8),
        (problem(1, 32, 8, 1, 8192, 256), 2, 16),
        (problem(2, 32, 8, 1, 2048, 128), 6, 1),
        (problem(2, 32, 8, 1, 32768, 128), 1, 8),
        (problem(3, 32, 8, 1, 32768, 128), 1, 5),
        (problem(4, 32, 8, 1, 32768, 128), 1, 4),
        (problem(5, 32, 8, 1, 32768, 128), 1, 3),
        (problem(6, 32, 8, 1, 32768, 128), 1, 5),
        (problem(8, 32, 8, 1, 4096, 128), 2, 1),
        (problem(64, 32, 8, 1, 4096, 128), 1, 1),
        (problem(1, 8, 1, 1, 2048, 128), 16, 1),
        (problem(1, 8, 1, 1, 8192, 128), 4, 16),
        (problem(1, 8, 1, 1, 131072, 128), 4, 30),
        (problem(4, 8, 1, 1, 32768, 128), 2, 16),
        (problem(1, 64, 8, 2, 8192, 128), 2, 16),
        # With more rows the warps of a block have more to combine.
        (problem(1, 1, 1, 1024, 1024, 128), 2, 1),
        (problem(1, 1, 1, 512, 512, 256), 2, 1),
        (problem(1, 32, 8, 8, 1024, 128, True), 6, 1),
        (problem(1, 32, 8, 16, 1024, 128, True), 6, 1),
        (problem(1, 2, 2, 768, 768, 128), 2, 1),
        (problem(1, 32, 8, 16, 16384, 128, True), 2, 4),
        (problem(4, 32, 8, 4, 16384, 128, True), 2, 4),
        (problem(1, 8, 8, 1, 600), 5, 1),
        (problem(1, 8, 8, 1, 2400), 16, 1),
        (problem(1, 8, 8, 1, 16384), 2, 8),
        (problem(4, 8, 8, 1, 16384), 1, 4),
    ],
)
def test_decode_fills_the_gpu(call: Problem, cluster: int, splits: int) -> None:
    choice = select(call, H200)
    assert choice.kernel is KernelKind.SMALL
    assert (choice.configuration.cluster, choice.configuration.splits) == (cluster, splits)
    assert choice.configuration.threads <= (128 if cluster == 16 else 256)
    assert ("splits of the grid" in choice.reason) == (splits > 1)


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_86", "sm_89"])
def test_without_clusters_long_keys_are_split_over_the_grid(architecture: str) -> None:
    device = dataclasses.replace(H200, architecture=architecture, multiprocessors=108)
    call = problem(1, 32, 8, 1, 32768, 128, dtype=torch.float16)
    assert small.configuration_for(call, device).splits == 13
    assert small.configuration_for(dataclasses.replace(call, seqlen_k=250), device).splits == 1
    many = problem(32, 32, 8, 1, 32768, 128, dtype=torch.float16)
    assert small.configuration_for(many, device).splits == 1


def test_more_counters_than_a_stream_has_are_refused() -> None:
    call = problem(64, 32, 8, 1, 4096, 128)
    configuration = SmallConfiguration(128, True, 1, 8, 1, splits=2)
    with pytest.raises(InputError, match=r"needs 4096 counters .* expected at most 1024: choose one split"):
        small.check(call, configuration)


@pytest.mark.parametrize(
    ("call", "kernel"),
    [
        (problem(1, 1, 1, 2048, 2048), KernelKind.SMALL),
        (problem(1, 1, 1, 1024, 1024, 128), KernelKind.SMALL),
        (problem(1, 1, 1, 512, 512, 256), KernelKind.SMALL),
        (problem(2, 8, 8, 128, 128), KernelKind.SMALL),
        (problem(1, 32, 8, 16, 4096, 128, True), KernelKind.SMALL),
        (problem(256, 8, 8, 16, 64), KernelKind.SMALL),
        (problem(8, 8, 8, 128, 128), KernelKind.PORTABLE),
        (problem(2, 4, 4, 512, 512), KernelKind.HOPPER),
        (problem(16, 8, 8, 128, 128), KernelKind.HOPPER),
        (problem(4, 8, 8, 128, 128, 128), KernelKind.HOPPER),
        (problem(1, 32, 8, 64, 4096, 128, True), KernelKind.SMALL),
        (problem(4, 8, 8, 128, 128), KernelKind.SMALL),
        (problem(1, 8, 8, 384, 384), KernelKind.SMALL),
        (problem(1, 16, 16, 256, 256), KernelKind.PORTABLE),
        (problem(1, 4, 4, 1024, 1024), KernelKind.HOPPER),
        (problem(4, 16, 16, 2048, 2048), KernelKind.HOPPER),
        (problem(1, 1, 1, 4096, 4096, 128), KernelKind.HOPPER),
    ],
    ids=lambda value: value.value if isinstance(value, KernelKind) else None,
)
def test_each_kernel_takes_what_it_was_measured_to_be_best_at(call: Problem, kernel: KernelKind) -> None:
    assert select(call, H200).kernel is kernel


def test_what_does_not_fit_the_kernels_integers_is_declined() -> None:
    call = problem(1, 1, 1, 4, 64)
    assert small.choose(call, H200) is not None
    wide = dataclasses.replace(call, key_strides=(0, 0, 1 << 31))
    assert small.choose(wide, H200) is None
    assert small.choose(dataclasses.replace(call, batch=1 << 16), H200) is None
    assert small.choose(call, dataclasses.replace(H200, architecture="sm_75")) is None  # bfloat16


def assert_builds(configuration: SmallConfiguration, architecture: str) -> None:
    dtype = torch.float16 if architecture == "sm_75" else torch.bfloat16
    build = compile_kernel(small.kernel(configuration, dtype, architecture))
    assert build.resources is not None
    assert build.resources.blocks_per_sm >= 1


@each_architecture(ARCHITECTURES)
@pytest.mark.parametrize("head_dim", configs.HEAD_DIMS)
@pytest.mark.usefixtures("nvrtc")
def test_the_largest_kernels_compile_without_spills(architecture: str, head_dim: int) -> None:
    of_this = [c for c in configs.all_configurations(architecture) if c.head_dim == head_dim]
    largest = max(of_this, key=lambda c: (not c.single_pass, c.row_tiles, c.key_tiles, c.cluster))
    assert_builds(largest, architecture)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.usefixtures("nvrtc")
def test_all_kernels_compile_without_spills(architecture: str) -> None:
    for configuration in configs.all_configurations(architecture):
        assert_builds(configuration, architecture)


def emulated(configuration: SmallConfiguration, dtype: torch.dtype) -> ctypes.CDLL:
    return compile_clusters(small.kernel(configuration, dtype, "sm_90"))


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    if causal:
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v, scores.logsumexp(-1)


BF16, FP16 = torch.bfloat16, torch.float16


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("call", "configuration"),
    [
        (problem(1, 2, 2, 16, 64, 64), SmallConfiguration(64, False, 1, 4, 1, single_pass=True)),
        (problem(1, 1, 1, 20, 200, 64, True, FP16), SmallConfiguration(64, False, 2, 2, 2, 4, True)),
        (problem(1, 1, 1, 20, 7, 64, True, FP16), SmallConfiguration(64, False, 1, 2, 1, 1, True)),
        (problem(1, 6, 2, 5, 37, 64, True, BF16), SmallConfiguration(64, True, 2, 3, 1, 2, True)),
        (problem(1, 1, 1, 9, 100, 40, True, BF16), SmallConfiguration(64, True, 1, 2, 1)),
        (problem(1, 1, 1, 5, 0, 64, False, BF16), SmallConfiguration(64, False, 1, 2, 1, 1, True)),
        (problem(1, 1, 1, 9, 150, 64, False, BF16), SmallConfiguration(64, False, 1, 2, 1, 8)),
        (problem(1, 1, 1, 3, 300, 72, False, BF16), SmallConfiguration(128, True, 1, 1, 1, 16)),
        (problem(1, 1, 1, 3, 270, 200, True, FP16), SmallConfiguration(256, True, 1, 1, 1, 16)),
    ],
)
def test_emulated(call: Problem, configuration: SmallConfiguration) -> None:
    tensors = random_tensors(call)
    output, lse = emulate(call, configuration, tensors, emulated(configuration, call.dtype))
    assert_exact(output, lse, tensors, call)


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("call", "configuration"),
    [
        (problem(2, 4, 2, 1, 200, 64), SmallConfiguration(64, True, 1, 2, 1, splits=3)),
        (problem(1, 6, 2, 5, 333, 72, True, FP16), SmallConfiguration(128, True, 1, 2, 2, splits=9)),
        (problem(1, 6, 2, 5, 333, 128, True, BF16), SmallConfiguration(128, True, 2, 4, 1, 2, splits=2)),
        (problem(1, 3, 1, 9, 30, 64, True, BF16), SmallConfiguration(64, True, 1, 1, 1, splits=11)),
        (problem(1, 1, 1, 12, 5, 64, True, BF16), SmallConfiguration(64, True, 1, 2, 1, splits=2)),
        (problem(1, 8, 1, 1, 300, 200, False, FP16), SmallConfiguration(256, True, 1, 4, 1, splits=4)),
        (problem(1, 2, 1, 1, 300, 64, False, FP16), SmallConfiguration(64, True, 1, 2, 1, 8, splits=2)),
    ],
)
def test_emulated_splits(call: Problem, configuration: SmallConfiguration) -> None:
    tensors = random_tensors(call)
    library = emulated(configuration, call.dtype)
    output, lse = emulate(call, configuration, tensors, library)
    assert_exact(output, lse, tensors, call)
    again, lse_again = emulate(call, configuration, tensors, library, last_first=True)
    assert torch.equal(output, again)
    assert torch.equal(lse, lse_again)


@NEEDS_COMPILER
@pytest.mark.parametrize("head_dim", [128, 256])
def test_emulated_infinity_in_the_last_dimension_of_a_key(head_dim: int) -> None:
    call = problem(1, 1, 1, 9, 37, 80)
    tensors = random_tensors(call)
    tensors[0][..., 79] = tensors[0][..., 79].abs() + 0.1
    tensors[1][:, :, 11, 79] = -torch.inf
    configuration = SmallConfiguration(head_dim, True, 1, 2, 1)
    output, lse = emulate(call, configuration, tensors, emulated(configuration, call.dtype))
    assert_exact(output, lse, tensors, call)


@NEEDS_COMPILER
@pytest.mark.parametrize("seqlen_k", [17, 33])
@pytest.mark.parametrize("single_pass", [False, True])
def test_emulated_infinity_in_the_last_value(seqlen_k: int, single_pass: bool) -> None:
    call = problem(1, 1, 1, 9, seqlen_k)
    tensors = random_tensors(call)
    tensors[2][:, :, -1] = torch.inf
    configuration = SmallConfiguration(64, False, 1, 2, 2, single_pass=single_pass)
    output, lse = emulate(call, configuration, tensors, emulated(configuration, call.dtype))
    assert output.isposinf().all()
    assert_exact(output, lse, tensors, call)


def random_tensors(call: Problem) -> list[torch.Tensor]:
    """Query, keys and values; NaN beyond the last row and column show a read past the end."""
    torch.manual_seed(0)
    key_shape = (call.batch, call.num_kv_heads, call.seqlen_k, call.head_dim)
    tensors = []
    for shape in ((call.batch, call.num_heads, call.seqlen_q, call.head_dim), key_shape, key_shape):
        padded = torch.full((*shape[:2], shape[2] + 2, shape[3] + 8), torch.nan, dtype=call.dtype)
        padded[:, :, :-2, :-8] = torch.randn(shape)
        tensors.append(padded[:, :, :-2, :-8])
    return tensors


def emulate(
    call: Problem,
    configuration: SmallConfiguration,
    tensors: list[torch.Tensor],
    library: ctypes.CDLL,
    *,
    last_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp.

    Args:
        library: of `emulated`.
        last_first: of the blocks of one key/value head.
    """
    query_shape = tensors[0].shape
    output = torch.full(query_shape, torch.nan, dtype=call.dtype)
    lse = torch.full(query_shape[:3], torch.nan)
    query_strides, key_strides, value_strides = (tuple(x.stride()[:3]) for x in tensors)
    laid_out = dataclasses.replace(
        call, query_strides=query_strides, key_strides=key_strides, value_strides=value_strides
    )
    arguments = ctypes.create_string_buffer(256)
    small.write_arguments(arguments, laid_out)
    small.write_split_arguments(arguments, laid_out, configuration)
    addresses = (ctypes.c_uint64 * 5).from_buffer(arguments)
    addresses[:] = [x.data_ptr() for x in (*tensors, output, lse)]
    partials = torch.full((small.workspace_floats(call, configuration),), torch.nan)
    arrivals = torch.zeros(small.arrival_counters(call, configuration), dtype=torch.int32)
    small.write_split_addresses(arguments, partials.data_ptr(), arrivals.data_ptr())

    rows = call.seqlen_q * (call.num_heads // call.num_kv_heads)
    blocks = -(-rows // configuration.rows) * configuration.splits * configuration.cluster
    library.run(arguments, blocks, call.num_kv_heads, call.batch, int(last_first))
    assert not arrivals.any(), "the counters are not as the next launch must find them"
    return output, lse


def assert_exact(output: torch.Tensor, lse: torch.Tensor, tensors: list[torch.Tensor], call: Problem) -> None:
    exact, exact_lse = reference(*tensors, call.causal)
    resolution = torch.finfo(call.dtype).eps
    torch.testing.assert_close(output.double(), exact, rtol=2 * resolution, atol=2 * resolution)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-4)
