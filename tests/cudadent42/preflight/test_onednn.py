"""What oneDNN says about itself."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import bare_torch
from cudadent42.preflight import onednn


def test_the_log_s_line_of_the_instruction_set_is_read() -> None:
    log = (
        "onednn_verbose,v1,info,cpu,runtime:OpenMP,nthr:2\n"
        "onednn_verbose,v1,info,cpu,isa:Intel AVX2\n"
        "onednn_verbose,v1,info,gpu,runtime:none\n"
    )
    assert onednn.isa_of(log) == "Intel AVX2"
    assert onednn.isa_of("dnnl_verbose,info,cpu,isa:Intel SSE4.1\n") == "Intel SSE4.1"
    assert onednn.isa_of("") is None
    assert onednn.isa_of("1.0\n") is None


def forked(command: list[str], env: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of what asks oneDNN, which reads its variables at its first call."""
    program, option, text = command
    assert (program, option) == (sys.executable, "-c")
    return bare_torch.run(text, env)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
@pytest.mark.parametrize("name", onednn.LIMITS)
def test_onednn_names_what_it_is_held_to(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the run's variables, whichever of their names it used, and not by this shell's."""
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this CPU has no AVX2")
    for other in onednn.LIMITS:
        monkeypatch.setenv(other, "SSE41")
    if name != onednn.LIMIT:
        monkeypatch.setattr(subprocess, "run", forked)
    assert onednn.instructions({name: "AVX2"}) == "Intel AVX2"
    monkeypatch.setattr(subprocess, "run", forked)
    assert onednn.instructions({name: "SSE41"}) == "Intel SSE4.1"
