"""What this machine's processor reaches at most, measured."""

from __future__ import annotations

import pytest
import torch

from cudadent42.timing.cpu_peaks import measure_cpu_peaks, measure_reading, peaks_library
from flashmoe_science.errors import DeviceError
from flashmoe_science.jit import host
from flashmoe_science.jit.host import InstructionSet


def test_peaks_are_plausible() -> None:
    peaks = measure_cpu_peaks()
    assert 1 < peaks["fp32_gflops"] < 1e6
    assert 0.1 < peaks["copy_gbps"] < 1e5
    has_bf16 = host.choose_instruction_set() in (InstructionSet.AMX, InstructionSet.AVX512_BF16)
    assert ("bf16_gflops" in peaks) == has_bf16


@pytest.mark.parametrize("threads", [1, 3])
def test_a_rate_of_reading_is_plausible(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert 0.01 < measure_reading(torch.arange(1 << 20, dtype=torch.uint8)) < 1e5
    finally:
        torch.set_num_threads(before)


def test_an_unknown_instruction_set_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMOE_CPU_ISA", "mmx")
    peaks_library.cache_clear()  # another test may have loaded it
    with pytest.raises(DeviceError, match="mmx is not an instruction set"):
        measure_cpu_peaks()
