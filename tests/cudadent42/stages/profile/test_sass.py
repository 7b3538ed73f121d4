"""Counting machine instructions: of a listing, and of kernels compiled here and taken apart by nvdisasm."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from cudadent42.stages.profile import sass
from flashmoe_science.jit.nvrtc import CudaKernel, compile_kernel

FAULTS = Path(__file__).resolve().parents[4] / "benchmarks/faults"
MACROS = {"ELEMENT_BF16": 1, "NATIVE_CP_ASYNC": 1, "MMA_K": 16}

LISTING = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/              @!P0 LDG.E R5, desc[UR4][R2.64+0x40] ;
        /*0030*/                   LDGSTS.E.BYPASS.LTC128B.128 [R9], desc[UR8][R2.64] ;
        /*0040*/             @!UP1 LDS.64 R4, [R3] ;
        /*0050*/                   STG.E.U16 desc[UR4][R2.64], R5 ;
        /*0060*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0070*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0080*/               @P2 MUFU.EX2 R7, R7 ;
        /*0090*/                   STL [R1], R5 ;
        /*00a0*/                   LDL.LU R5, [R1] ;
        /*00b0*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0 ;
        /*00c0*/                   NOP ;
.L_x_1:
        /*00d0*/                   BRA `(.L_x_1);
"""


def test_a_listing_is_counted_by_kind() -> None:
    counts = sass.count_text(LISTING)
    assert counts["load_128"] == 2
    assert counts["load_32"] == 1
    assert counts["shared_load_64"] == 1
    assert counts["store_16"] == 1
    assert counts["wgmma"] == counts["mma_sync"] == counts["special"] == 1
    assert counts["local_loads"] == counts["local_stores"] == 1
    assert counts["register_moves"] == 1
    assert counts["total"] == 13  # not the NOP


def compiled(name: str, threads: int, shared_bytes: int = 0, **macros: int) -> dict[str, int]:
    kernel = CudaKernel(
        f"{name}.cu", name, "sm_90a", {**MACROS, **macros}, threads, shared_bytes, directory=FAULTS
    )
    return counted(kernel)


def counted(kernel: CudaKernel) -> dict[str, int]:
    if sass.find() is None:
        pytest.skip("nvdisasm is not installed")
    counts = sass.count(compile_kernel(kernel, allow_defects=True).artifact)
    assert counts is not None
    return counts


@pytest.mark.usefixtures("nvrtc")
def test_narrow_and_wide_loads_are_told_apart() -> None:
    narrow, wide = compiled("copy", 256, WIDE=0), compiled("copy", 256, WIDE=1)
    assert (narrow["load_32"], narrow.get("load_128", 0)) == (1, 0)
    assert (wide.get("load_32", 0), wide["load_128"]) == (0, 4)


@pytest.mark.usefixtures("nvrtc")
def test_spills_are_seen_in_the_code() -> None:
    spilled, whole = compiled("accumulate", 256, BLOCKS=8), compiled("accumulate", 256, BLOCKS=2)
    assert spilled["local_loads"] > 50
    assert whole["local_loads"] == whole["local_stores"] == 0


@pytest.mark.usefixtures("nvrtc")
def test_the_tensor_path_is_seen_in_the_code() -> None:
    import torch

    from flashmoe_science.configs.attention import hopper as configs
    from flashmoe_science.cuda.attention import hopper

    tile = next(one for one in configs.all_configurations() if one.head_dim == 128)
    counts = counted(hopper.kernel(tile, torch.bfloat16))
    assert counts["wgmma"] > 0
    assert counts["register_moves"] > 0
    product = compiled("tile_product", 128, 3 * 16384, SWIZZLED=1, STAGES=3)
    assert product["mma_sync"] > 0
    assert product["wgmma"] == 0


@pytest.mark.usefixtures("nvrtc")
def test_a_part_that_is_left_out_is_gone_from_the_code() -> None:
    import torch

    from flashmoe_science.configs.ablation import Ablation
    from flashmoe_science.configs.attention import hopper as configs
    from flashmoe_science.cuda.attention import hopper

    tile = next(one for one in configs.all_configurations() if one.head_dim == 64 and one.causal)
    whole = hopper.kernel(tile, torch.bfloat16)
    assert "ABLATE" not in whole.macros
    without = hopper.kernel(dataclasses.replace(tile, ablation=Ablation.EXPONENTIALS), torch.bfloat16)
    assert counted(without)["special"] < counted(whole)["special"] / 2
    unmasked = hopper.kernel(dataclasses.replace(tile, ablation=Ablation.MASK), torch.bfloat16)
    assert counted(unmasked)["total"] < counted(whole)["total"]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.usefixtures("nvrtc")
def test_a_part_that_is_left_out_of_the_portable_kernel_is_gone_from_the_code(overlap: bool) -> None:
    import torch

    from flashmoe_science.configs.ablation import Ablation
    from flashmoe_science.configs.attention import portable as configs
    from flashmoe_science.cuda.attention import portable

    tiles = configs.all_configurations("sm_90")
    tile = next(one for one in tiles if one.head_dim == 64 and one.overlap is overlap)
    whole = portable.kernel(tile, torch.bfloat16, "sm_90")
    assert "ABLATE" not in whole.macros
    by_ablation = {
        part: counted(portable.kernel(dataclasses.replace(tile, ablation=part), torch.bfloat16, "sm_90"))
        for part in Ablation
    }
    assert by_ablation[Ablation.NONE] == counted(whole)
    assert by_ablation[Ablation.EXPONENTIALS]["special"] < by_ablation[Ablation.NONE]["special"] / 2
    assert by_ablation[Ablation.MASK]["total"] < by_ablation[Ablation.NONE]["total"]
    products = {counts["mma_sync"] for counts in by_ablation.values()}
    assert len(products) == 1 or not overlap


@pytest.mark.usefixtures("nvrtc")
def test_a_part_that_is_left_out_of_a_backward_kernel_is_gone_from_the_code() -> None:
    import torch

    from flashmoe_science.configs.ablation import Ablation
    from flashmoe_science.configs.attention.backward_hopper import HopperBackward
    from flashmoe_science.cuda.attention.gradients import hopper

    tile = HopperBackward(128, True, converts=True)
    whole = hopper.main_kernel(tile, torch.bfloat16)
    assert "ABLATE" not in whole.macros
    by_ablation = {
        part: counted(hopper.main_kernel(dataclasses.replace(tile, ablation=part), torch.bfloat16))
        for part in Ablation
    }
    assert by_ablation[Ablation.NONE] == counted(whole)
    assert by_ablation[Ablation.EXPONENTIALS]["special"] < by_ablation[Ablation.NONE]["special"] / 2
    assert by_ablation[Ablation.SUMS]["total"] < by_ablation[Ablation.NONE]["total"]
    assert len({counts["wgmma"] for counts in by_ablation.values()}) == 1


def test_a_file_that_is_no_cubin_is_not_counted(tmp_path: Path) -> None:
    (tmp_path / "x.cubin").write_bytes(b"not a cubin")
    assert sass.count(tmp_path / "x.cubin") is None
