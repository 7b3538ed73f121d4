"""`attention_varlen` by its steady state on CUDA: the driver's function launches the emulated kernel."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import emulated_decode
import emulated_decode_hopper
import numpy as np
import pytest
import torch
from emulated import NEEDS_COMPILER, compile_emulation
from emulated_launches import EmulatedMap
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode
from varlen_cases import Call, Shape, bounds, forget_calls, packed, paged
from varlen_reference import assert_as_exact_as_pytorch

from flashmoe_science import attention_varlen
from flashmoe_science.alike import dense_matcher, never
from flashmoe_science.configs.attention import decode as configs
from flashmoe_science.cuda import launch as launching
from flashmoe_science.cuda import steady, tickets
from flashmoe_science.cuda.tickets import TicketPool
from flashmoe_science.cuda.varlen import decode, decode_calls, decode_hopper, decode_workspace, key_maps
from flashmoe_science.cuda.varlen.select import OVERRIDE_VARIABLE as KERNEL_VARIABLE
from flashmoe_science.errors import InputError
from flashmoe_science.varlen import launch
from flashmoe_science.varlen.arguments import Inputs
from problems import H200

prepare = importlib.import_module("flashmoe_science.cuda.varlen.prepare")
pytestmark = NEEDS_COMPILER

SHAPE = Shape((1, 1, 1), (300, 0, 129), heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16)


class Subclass(torch.Tensor):
    pass


DRIVER = ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_void_p,) * 4)
CAPTURES = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))


class Gpu:
    """Runs what is launched on the CPU, and says which stream is current."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream, self.capturing, self.launches, self.in_python, self.made = 7, False, 0, 0, 0
        self._kernels: list[ctypes.CDLL] = []
        self.entry = DRIVER(self._launch)
        self.asked = CAPTURES(self._is_capturing)
        driver = SimpleNamespace(cuLaunchKernelEx=self.entry, cuStreamIsCapturing=self.asked)
        for module in (launching, steady):
            monkeypatch.setattr(module, "library", lambda: driver)
        for module in (decode, decode_hopper):
            monkeypatch.setattr(module, "load", self._load)
        monkeypatch.setattr(key_maps, "TensorMap", EmulatedMap)
        monkeypatch.setattr(decode_hopper, "address_offset", lambda: 0)
        pool = TicketPool(torch.zeros(configs.MOST_ARRIVALS * 8, dtype=torch.int32), configs.MOST_ARRIVALS)
        for module in (decode, decode_hopper):
            monkeypatch.setattr(module, "decode_arrival_pool", lambda device: pool)
        monkeypatch.setattr(decode_calls, "cuda_allocator", lambda: launch.allocate_on_cpu)
        monkeypatch.setattr(decode_workspace, "_workspaces", decode_workspace._Workspaces())
        for module in (decode, decode_calls, decode_hopper, steady):
            monkeypatch.setattr(module, "raw_stream", lambda device: self.stream)
        monkeypatch.setattr(steady, "current_stream", lambda: None)
        for module in (decode, decode_calls, decode_hopper, tickets):
            monkeypatch.setattr(module, "is_capturing", lambda: self.capturing)
        device = dataclasses.replace(H200, multiprocessors=4)
        monkeypatch.setattr(prepare, "device_of", lambda index: device)
        monkeypatch.setattr(prepare, "make_context_current", lambda index: None)
        monkeypatch.setattr(prepare, "current_device", lambda: 0)
        backend = SimpleNamespace(
            prepare=lambda problem, _: prepare.prepare(problem, SimpleNamespace(index=0))
        )
        monkeypatch.setitem(launch._BACKENDS, "cpu", backend)
        repeat = decode_calls.repeat_of

        def counted(*arguments: Any) -> Any:
            made = repeat(*arguments)
            self.made += 1

            def call(*tensors: Any) -> None:
                self.in_python += 1
                made.call(*tensors)

            return dataclasses.replace(made, call=call)

        monkeypatch.setattr(decode_calls, "repeat_of", counted)

    def _load(self, compiled: Any, *_: object, **options: object) -> ctypes.c_void_p:
        parameters = "HopperParameters" if compiled.function == "attention_decode_hopper" else "Parameters"
        self._kernels.append(compile_emulation(compiled, parameters))
        return ctypes.c_void_p(len(self._kernels))

    def _is_capturing(self, stream: int | None, status: Any) -> int:
        assert stream == self.stream
        status[0] = int(self.capturing)
        return 0

    def _launch(self, config: int, function: int, arguments: int, extra: int | None) -> int:
        made = launching._LaunchConfig.from_address(config)
        assert made.stream == self.stream
        self.launches += 1
        buffer = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))[0]
        self._kernels[function - 1].run(ctypes.c_void_p(buffer), made.grid[0])
        return 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    if dense_matcher(torch.zeros(1)) is never:
        pytest.skip("this torch has no TensorGuards, or others than ours")
    forget_calls(monkeypatch)
    monkeypatch.setenv(steady.OVERRIDE_VARIABLE, "native")
    steady._method.cache_clear()
    yield Gpu(monkeypatch)
    steady._method.cache_clear()


def attend(call: Call, **options: Any) -> Any:
    return attention_varlen(**call, **{**bounds(SHAPE), **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", ["query", "key", "value", "sinks", "alibi_slopes", "out"])
def test_a_negative_bit_is_seen_in_calls_like_earlier_ones(gpu: Gpu, name: str, recorded: bool) -> None:
    layer = paged(SHAPE, 16) | {"sinks": torch.randn(4), "alibi_slopes": torch.rand(4)}
    out = torch.empty(3, 4, 64, dtype=torch.bfloat16)
    given = {**layer, "out": out}
    negative = {**given, name: torch._neg_view(given[name])}
    with torch.set_grad_enabled(recorded):
        expected = attend({**negative, name: negative[name].resolve_neg()}).clone()
        for _ in range(3):
            attend(given)
        torch.testing.assert_close(attend(negative).resolve_neg(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["paged", "packed", "sinks and slopes"])
@pytest.mark.parametrize("own_output", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
def test_layers_of_a_step(gpu: Gpu, kind: str, own_output: bool, return_lse: bool) -> None:
    layers = [packed(SHAPE, seed) if kind == "packed" else paged(SHAPE, 16, seed) for seed in range(5)]
    for layer in layers:
        if kind == "sinks and slopes":
            layer |= {"sinks": torch.randn(4), "alibi_slopes": torch.rand(3, 4)}
        out = torch.full((3, 4, 64), torch.nan, dtype=torch.bfloat16) if own_output else None
        results = attend(layer, out=out, return_lse=return_lse)
        output, lse = results if return_lse else (results, None)
        assert out is None or output is out
        assert_as_exact_as_pytorch(output, lse, layer, **bounds(SHAPE))
    assert gpu.launches == 5
    assert gpu.in_python == 0


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("way", ["native", "python"])
@pytest.mark.parametrize("own_output", [False, True])
def test_layers_of_a_step_by_the_hopper_kernel(
    gpu: Gpu, own_output: bool, way: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their caches begin elsewhere, and tensor maps say so, or with pages of 1 addresses."""
    monkeypatch.setenv(KERNEL_VARIABLE, "decode_hopper")
    monkeypatch.setenv(steady.OVERRIDE_VARIABLE, way)
    steady._method.cache_clear()
    layers = [paged(SHAPE, page_size, seed) for seed in range(4)]
    for layer in 2 * layers:
        layer["sinks"] = torch.randn(4)
        out = torch.full((3, 4, 64), torch.nan, dtype=torch.bfloat16) if own_output else None
        result = attend(layer, out=out)
        assert_as_exact_as_pytorch(result, None, layer, **bounds(SHAPE))
    assert gpu.launches == 8
    assert gpu.made == 1
    assert (gpu.in_python > 0) == (way == "python")


@pytest.mark.parametrize("kernel", ["decode", "decode_hopper"])
def test_pieces_are_as_long_as_split_keys(gpu: Gpu, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits depend on where a sequence is cut, and on nothing else."""
    monkeypatch.setenv(KERNEL_VARIABLE, kernel)
    shape = Shape((2, 2), (1500, 700), heads=8, kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    call, most = paged(shape, 16), tuple(bounds(shape).values())
    for split_keys in (256, 512):
        out, lse = attention_varlen(**call, **bounds(shape), split_keys=split_keys, return_lse=True)
        asked = emulated_decode.options(split_keys=split_keys)
        if kernel == "decode":
            by_itself = emulated_decode.run_on_cpu(call, asked, most, 7)
        else:
            by_itself = emulated_decode_hopper.attend(call, asked, most, monkeypatch, 7)
        assert torch.equal(out, by_itself[0])
        assert torch.equal(lse, by_itself[1])
    assert gpu.launches == 4, "sequences of one token have a launch of their own"


def test_longer_keys_are_no_other_call_and_no_wrong_ones_are_taken(gpu: Gpu) -> None:
    layer = paged(SHAPE, 16)
    for most in (300, 301, 302, configs.SHORT):
        attend(layer, max_seqlen_k=most)
    assert (gpu.launches, gpu.in_python) == (4, 0)
    with pytest.raises(InputError, match="max_seqlen_k is -1"):
        attend(layer, max_seqlen_k=-1)


def test_longer_keys_that_another_kernel_is_for_are_another_call(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, asked = paged(SHAPE, 16), list[int]()
    choose = configs.cluster_for

    def cluster_for(architecture: str, sets: int, most_keys: int, multiprocessors: int) -> int:
        asked.append(most_keys)
        return choose("sm_80", sets, most_keys, multiprocessors)

    monkeypatch.setattr(configs, "cluster_for", cluster_for)
    for most in (configs.SHORT, 600, configs.SHORT + 1, 5000, configs.SHORT):
        attend(layer, max_seqlen_k=most)
    assert asked == [configs.SHORT, configs.SHORT + 1]
    assert gpu.launches == 5


def test_streams_captures_and_kinds_in_turn(gpu: Gpu) -> None:
    layer, sinks, out = paged(SHAPE, 16), torch.randn(4), torch.empty(3, 4, 64, dtype=torch.bfloat16)
    expected, with_sinks = attend(layer), attend(layer, sinks=sinks)
    for turn in range(12):
        gpu.stream, gpu.capturing = 7 + turn // 3 % 2, turn % 5 == 4
        assert torch.equal(attend(layer), expected)
        assert torch.equal(attend(layer, sinks=sinks), with_sinks)
        assert torch.equal(attend(layer, out=out), expected)
        assert torch.equal(attend(layer), expected)
    assert gpu.launches == 50
    assert gpu.in_python < 48, "not all"


def test_kinds_of_layers_in_turn_are_all_known(gpu: Gpu) -> None:
    layer, sinks, out = paged(SHAPE, 16), torch.randn(4), torch.empty(3, 4, 64, dtype=torch.bfloat16)
    kinds: list[dict[str, Any]] = [
        {},
        {"sinks": sinks},
        {"out": out},
        {"window": (64, 0)},
        {"return_lse": True},
        {"softmax_scale": 0.25},
    ]
    first = [attend(layer, **options) for options in kinds]
    first[2] = first[2].clone()
    for _ in range(3):
        for options, expected in zip(kinds, first, strict=True):
            computed = {name: value * 1.0 for name, value in options.items() if name == "softmax_scale"}
            results = attend(layer, **options | computed)
            assert all(map(torch.equal, results, expected))
    assert (gpu.launches, gpu.in_python) == (24, 0)


BATCHES = [
    dataclasses.replace(SHAPE, queries=(1,) * size, keys=(300, 17, 129, 5)[:size]) for size in (3, 2, 4)
]


def test_batches_of_several_sizes_in_turn_are_all_known(gpu: Gpu) -> None:
    layers = [paged(shape, 16) for shape in BATCHES]
    first = [attend(layer) for layer in layers]
    for turn in (0, 1, 2, 2, 1, 0, 1, 2, 0):
        assert torch.equal(attend(layers[turn]), first[turn])
    assert (gpu.launches, gpu.in_python, gpu.made) == (12, 0, 3)


def test_what_was_made_ready_is_not_again_where_python_makes_calls(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "repeated_call", lambda kind, target: None)
    layers = [paged(shape, 16) for shape in BATCHES]
    first = [attend(layer) for layer in layers]
    for turn in (0, 0, 1, 1, 2, 2, 0, 0):
        assert torch.equal(attend(layers[turn]), first[turn])
    assert (gpu.launches, gpu.in_python, gpu.made) == (11, 4, 3)


def test_what_was_made_ready_is_again_where_tensors_are_others_of_the_same_shape(gpu: Gpu) -> None:
    layer, other = paged(SHAPE, 16), paged(dataclasses.replace(SHAPE, dtype=torch.float16), 16)
    first = attend(layer), attend(other)
    for _ in range(2):
        assert torch.equal(attend(layer), first[0])
        assert torch.equal(attend(other), first[1])
        with torch.inference_mode():
            assert torch.equal(attend({name: tensor.clone() for name, tensor in layer.items()}), first[0])
    assert gpu.launches == 8
    assert gpu.made >= 3


def test_a_flag_of_numpy_is_a_call_of_its_own(gpu: Gpu) -> None:
    layer = paged(SHAPE, 16)
    for causal in (True, np.True_, np.True_, np.True_):
        attend(layer, causal=causal)
    assert (gpu.launches, gpu.in_python, gpu.made) == (4, 0, 2)


def test_only_so_many_calls_are_kept(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_MAX_MADE", 2)
    layers = [paged(shape, 16) for shape in BATCHES]
    for layer in layers:
        attend(layer)
    assert len(launch.of_thread.made) == 2
    assert [shapes[2][0] for shapes in launch.of_thread.made] == [2, 4]


def test_a_call_that_the_function_forgot_is_known_again_after_python_made_it(gpu: Gpu) -> None:
    layer = paged(SHAPE, 16)
    expected = attend(layer)
    launch.of_thread.steady = steady.KnownCalls(len(Inputs._fields))
    for _ in range(3):
        assert torch.equal(attend(layer), expected)
    assert (gpu.launches, gpu.in_python) == (4, 1)


def test_where_somebody_watches_calls_are_not_made_alone(gpu: Gpu) -> None:
    layer = paged(SHAPE, 16)
    expected = attend(layer)
    for query in (layer["query"], layer["query"].as_subclass(Subclass)):
        before = gpu.launches
        with FlopCounterMode(display=False):
            assert torch.equal(attend(layer | {"query": query}), expected)
        with forward_ad.dual_level():
            assert torch.equal(attend(layer | {"query": query}), expected)
            dual = forward_ad.make_dual(query, torch.ones_like(query))
            with pytest.raises(InputError, match="forward-mode"):
                attend(layer | {"query": dual})
        assert torch.equal(attend(layer | {"query": query}), expected)
        assert gpu.launches == before + 3


def test_threads_know_calls_of_their_own(gpu: Gpu) -> None:
    layer = paged(SHAPE, 16)
    expected, attempts = attend(layer), [launch.of_thread.steady.attempt]

    def call() -> None:
        assert launch.of_thread.steady.attempt is None
        for _ in range(3):
            assert torch.equal(attend(layer), expected)
        attempts.append(launch.of_thread.steady.attempt)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(call).result()
    assert len(set(attempts)) == 2
    assert None not in attempts
    assert (gpu.launches, gpu.in_python) == (4, 0)


def test_a_tensor_that_begins_anywhere_is_refused(gpu: Gpu) -> None:
    layer = paged(SHAPE, 16)
    for _ in range(3):
        attend(layer)
    layer["query"] = torch.zeros(3 * 256 + 1, dtype=torch.bfloat16)[1:].view(3, 4, 64)
    with pytest.raises(InputError, match=r"pass a \.clone"):
        attend(layer)


def test_parameters_that_require_gradients_are_refused_where_it_is_recorded(gpu: Gpu) -> None:
    layer, sinks = paged(SHAPE, 16), torch.nn.Parameter(torch.randn(4))
    with torch.no_grad():
        results = [attend(layer, sinks=sinks) for _ in range(3)]
    assert torch.equal(results[0], results[2])
    with pytest.raises(InputError, match="requires a gradient"):
        attend(layer, sinks=sinks)
