"""DDP, FSDP2 and DTensors in two processes: the results and gradients of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = Path(__file__).with_name("two_processes.py")
CHECKS = (
    "ddp",
    "fsdp",
    "sharded_attention",
    "sharded_experts",
    "sharded_expert_gradients",
    "compiled_sharded_attention",
)


def run_both(device: str, checks: str, folder: Path) -> None:
    """Raise with what a process said unless both end well."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "src"),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(folder / "store"), device, checks],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
@pytest.mark.parametrize("check", CHECKS)
def test_two_processes_on_the_cpu(check: str, tmp_path: Path) -> None:
    run_both("cpu", check, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
def test_two_gpus(check: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run_both("cuda", check, tmp_path)
