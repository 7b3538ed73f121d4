"""Lists of the keys that a mask shows: the kernel's source run on the CPU, the operator, and the kernel on a GPU."""

from __future__ import annotations

import ctypes

import pytest
import torch
from compiled_for import each_architecture
from emulated import NEEDS_COMPILER, compile_emulation

from flashmoe_science import InputError
from flashmoe_science.cuda import key_lists
from flashmoe_science.jit.limits import LIMITS
from flashmoe_science.jit.nvrtc import compile_kernel
from flashmoe_science.operators.key_lists import KEY_LISTS
from flashmoe_science.takeover.key_lists import lists_of

GUARD = 16
MASKS = {
    "one key": (1, 1, 1, 1.0),
    "a prompt": (1, 16, 16, 0.5),
    "a step over a cache": (3, 1, 100, 0.7),
    "several steps of a block": (2, 3, 4500, 0.3),
    "nothing is seen": (2, 2, 40, 0.0),
    "all is seen": (1, 2, 4096, 1.0),
    "more keys than few": (1, 1, 17000, 0.5),
}
LAYOUTS = ("contiguous", "shared by queries", "every second key")


def mask_of(name: str, layout: str, device: str = "cpu") -> torch.Tensor:
    batch, seqlen_q, seqlen_k, density = MASKS[name]
    generator = torch.Generator().manual_seed(seqlen_k)
    if layout == "shared by queries":
        made = torch.rand(batch, 1, seqlen_k, generator=generator) < density
        return made.to(device).expand(batch, seqlen_q, seqlen_k)
    if layout == "every second key":
        return (torch.rand(batch, seqlen_q, 2 * seqlen_k, generator=generator) < density).to(device)[..., ::2]
    return (torch.rand(batch, seqlen_q, seqlen_k, generator=generator) < density).to(device)


def exact(seen: torch.Tensor, pitch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, seqlen_q, seqlen_k = seen.shape
    rows = batch * seqlen_q
    keys = torch.zeros(rows, seqlen_k, dtype=torch.int32)
    counts = torch.zeros(rows, dtype=torch.int32)
    for row in range(rows):
        shown = seen[row // seqlen_q, row % seqlen_q].cpu().nonzero()[:, 0] + row // seqlen_q * pitch
        keys[row, : len(shown)] = shown
        counts[row] = len(shown)
    return keys, counts, torch.arange(rows + 1, dtype=torch.int32)


def emulate(seen: torch.Tensor, pitch: int) -> tuple[torch.Tensor, ...]:
    batch, seqlen_q, seqlen_k = seen.shape
    rows = batch * seqlen_q
    results = [
        torch.full((size + GUARD,), -7, dtype=torch.int32) for size in (rows * seqlen_k, rows, rows + 1)
    ]
    arguments = ctypes.create_string_buffer(key_lists.ARGUMENT_BYTES)
    key_lists.write_arguments(arguments, seen, pitch)
    key_lists._ADDRESSES.pack_into(arguments, 0, seen.data_ptr(), *(each.data_ptr() for each in results))
    compile_emulation(key_lists.kernel(seqlen_k, "sm_90"), "KeyListsParameters").run(arguments, rows)
    for each in results:
        assert (each[-GUARD:] == -7).all()
    keys, counts, starts = (each[:-GUARD] for each in results)
    return keys.view(rows, seqlen_k), counts, starts


@NEEDS_COMPILER
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MASKS)
def test_the_emulated_kernel(name: str, layout: str) -> None:
    seen = mask_of(name, layout)
    pitch = seen.shape[2] + 3
    for mine, right in zip(emulate(seen, pitch), exact(seen, pitch), strict=True):
        assert torch.equal(mine, right)


@pytest.mark.parametrize("name", MASKS)
def test_the_operator_on_the_cpu(name: str) -> None:
    seen = mask_of(name, "contiguous")
    for mine, right in zip(KEY_LISTS(seen, 5), exact(seen, 5), strict=True):
        assert torch.equal(mine, right)
        assert mine.is_contiguous()


def test_the_operator_passes_pytorchs_checks() -> None:
    torch.library.opcheck(KEY_LISTS, (mask_of("a step over a cache", "contiguous"), 7))


@pytest.mark.parametrize(
    "seen", [torch.ones(2, 3, dtype=torch.bool), torch.ones(1, 2, 3), torch.ones(1, 0, 3) > 0]
)
def test_what_is_no_mask_is_refused(seen: torch.Tensor) -> None:
    with pytest.raises(InputError, match="expected booleans"):
        KEY_LISTS(seen, 1)


def test_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(key_lists.OVERRIDE_VARIABLE, raising=False)
    assert not key_lists.is_asked_for()
    monkeypatch.setenv(key_lists.OVERRIDE_VARIABLE, "fused")
    assert key_lists.is_asked_for()
    monkeypatch.setenv(key_lists.OVERRIDE_VARIABLE, "other")
    with pytest.raises(InputError, match="expected one of composed, fused"):
        key_lists.is_asked_for()


@each_architecture(tuple(LIMITS))
def test_it_compiles_for_every_architecture(architecture: str, nvrtc: None) -> None:
    for seqlen_k in (16, 1 << 16):
        resources = compile_kernel(key_lists.kernel(seqlen_k, architecture)).resources
        assert resources is not None
        assert resources.spill_store_bytes == resources.stack_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MASKS)
def test_on_a_gpu(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice: the second call is like the last. As masks are given, too."""
    seen = mask_of(name, layout, "cuda")
    pitch = seen.shape[2] + 3
    for _ in range(2):
        for mine, right in zip(key_lists.key_lists(seen, pitch), exact(seen, pitch), strict=True):
            assert torch.equal(mine.cpu(), right)
    monkeypatch.setenv(key_lists.OVERRIDE_VARIABLE, "fused")
    lists = lists_of(seen[:, None], seen.shape[0], seen.shape[1], pitch)
    assert torch.equal(lists.keys.cpu(), exact(seen, pitch)[0])
