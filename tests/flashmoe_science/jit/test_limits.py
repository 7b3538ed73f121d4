from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoe_science.errors import BuildError, DeviceError
from flashmoe_science.jit import limits

ARCHITECTURES = st.sampled_from(sorted(limits.LIMITS))


@pytest.mark.parametrize(
    ("architecture", "threads", "registers", "shared", "blocks", "fraction"),
    [
        # Figures of NVIDIA's occupancy calculator.
        ("sm_90", 128, 255, 49152, 2, 8 / 64),
        ("sm_90", 128, 168, 0, 3, 12 / 64),
        ("sm_90", 384, 168, 196608, 1, 12 / 64),
        ("sm_80", 128, 255, 65536, 2, 8 / 64),
        ("sm_86", 128, 128, 49152, 2, 8 / 48),
        ("sm_75", 256, 64, 32768, 2, 16 / 32),
        ("sm_90", 1024, 32, 0, 2, 1.0),
        ("sm_90", 32, 16, 0, 32, 0.5),
    ],
)
def test_occupancy(
    architecture: str, threads: int, registers: int, shared: int, blocks: int, fraction: float
) -> None:
    occupancy = limits.occupancy(architecture, threads, registers, shared)
    assert (occupancy.blocks_per_sm, occupancy.fraction) == (blocks, pytest.approx(fraction))


@given(ARCHITECTURES, st.integers(1, 1024), st.integers(1, 255), st.integers(0, 300_000))
def test_occupancy_stays_within_the_limits(
    architecture: str, threads: int, registers: int, shared: int
) -> None:
    occupancy = limits.occupancy(architecture, threads, registers, shared)
    limit = limits.limits(architecture)
    assert 0 <= occupancy.fraction <= 1
    assert occupancy.blocks_per_sm * threads <= limit.threads_per_sm
    assert occupancy.blocks_per_sm * threads * registers <= 65536
    assert occupancy.blocks_per_sm * shared <= limit.shared_per_sm
    if shared > limit.shared_per_block:
        assert occupancy.blocks_per_sm == 0


@given(ARCHITECTURES, st.integers(1, 512), st.integers(1, 254), st.integers(0, 100_000))
def test_needing_less_never_fits_fewer_blocks(
    architecture: str, threads: int, registers: int, shared: int
) -> None:
    fits = limits.occupancy(architecture, threads, registers, shared).blocks_per_sm
    assert limits.occupancy(architecture, threads, registers + 1, shared).blocks_per_sm <= fits
    assert limits.occupancy(architecture, threads, registers, shared + 1).blocks_per_sm <= fits


def test_a_block_that_is_too_big_is_refused_with_what_is_too_big() -> None:
    limits.check_block("kernel", "sm_86", 128, 99 * 1024)
    with pytest.raises(BuildError, match=r"kernel .*101,377 bytes of shared memory.* sm_86 has 101,376"):
        limits.check_block("kernel", "sm_86", 128, 99 * 1024 + 1)
    with pytest.raises(BuildError, match=r"2048 threads per block, and the most is 1024"):
        limits.check_block("kernel", "sm_90", 2048, 0)


def test_architecture_names() -> None:
    assert limits.base_architecture("sm_90a") == "sm_90"
    assert limits.device_architecture(9, 0) == "sm_90"
    assert limits.device_architecture(8, 8) == "sm_87"
    for unknown in ("sm_70", "90", "sm_90b", ""):
        with pytest.raises(DeviceError, match="unknown GPU architecture"):
            limits.base_architecture(unknown)
    with pytest.raises(DeviceError, match=r"compute capability 7.0 is not supported"):
        limits.device_architecture(7, 0)
