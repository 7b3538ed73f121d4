"""Kernels in files of this machine, raced by workers that a real sshd reaches, in a home of their own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import cudadent42, finished, started
from sshd import Server

from cudadent42.scaffold import Kind, create
from cudadent42.tune import journal as events
from cudadent42.tune.journal import read

pytestmark = pytest.mark.slow

SUITE = """
name = "unit"
dtypes = ["fp32"]
baseline = "pytorch"
implementations = ["pytorch", "cudadent42"]
repeats = 8
warmup = 1
case = [{ name = "one", batch = 1, num_heads = 1, seqlen = 16, head_dim = 8 }]
"""

MINE = """
from helper import seen


def attention(query, key, value, *, causal, softmax_scale):
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    if not causal:
        return (scores.softmax(-1) @ value.float()).to(query.dtype)
    scores = scores.masked_fill(~seen(scores), float("-inf"))
    output = scores.softmax(-1) @ value.float()
    rows, columns = scores.shape[-2:]
    output[..., : max(0, rows - columns), :] = 0
    return output.to(query.dtype)
"""

HELPER = """
import torch


def seen(scores):
    rows, columns = scores.shape[-2:]
    return torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
"""


@pytest.fixture
def project(server: Server, tmp_path: Path) -> Path:
    """A folder outside of any checkout, and the machine ``there``."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "suite.toml").write_text(SUITE)
    create("k", Kind.CPU, folder)
    source = folder / "k/k.cpp"
    source.write_text(f'#include "parts/more.h"\n{source.read_text()}')
    (folder / "k/parts").mkdir()
    (folder / "k/parts/more.h").write_text("#define MORE 1\n")
    kernel = folder / "k/k.toml"
    kernel.write_text(kernel.read_text() + "\n[[configuration]]\nmacros = { COST = 1 }\n")
    added = cudadent42("remote", "add", "there", server.address, "--python", sys.executable, cwd=folder)
    assert added.returncode == 0, added.stderr
    return folder


def words(*arguments: str) -> tuple[str, ...]:
    return (*arguments, "--device", "cpu", "--ignore-preflight", "--fleet", "ssh:there", "--json")


def lab(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return cudadent42(*words(*arguments), cwd=folder)


def nothing_is_left(server: Server) -> bool:
    names = {path.name for path in (server.folder / "home/cudadent42-remote/jobs").rglob("*")}
    return not names


def test_a_run_of_files_names_their_digests(project: Path, server: Server) -> None:
    (project / "mine.py").write_text(MINE)
    (project / "helper.py").write_text(HELPER)
    files = ["k/k.toml", f"{project}/mine.py:attention"]
    done = lab(
        project,
        *("run", "--suite", "./suite.toml", "--implementations", ",".join(["pytorch", *files])),
        *("--timer", "cpu", "--output-dir", "here"),
    )
    assert done.returncode in (0, 7, 8), done.stderr  # whoever else works on this machine
    verified = json.loads((project / "here/verify.json").read_text())
    assert {case["implementation"] for case in verified["cases"]} >= set(files)
    assert not verified["skipped"]
    (measured,) = json.loads((project / "here/machines.json").read_text())["measured"]
    assert measured["files"].keys() == {"k/k.toml", f"{project}/mine.py"}
    assert all(len(digest) == 64 for digest in measured["files"].values())
    assert nothing_is_left(server)


def test_two_folders_are_compared_elsewhere(project: Path, server: Server) -> None:
    for name in ("old", "new"):
        (project / name).mkdir()
        (project / name / "mine.py").write_text(MINE)
        (project / name / "helper.py").write_text(HELPER)
    (project / "new/mine.py").write_text(f"{MINE}# newer\n")
    done = lab(
        project,
        *("compare", "./old", "./new", "--implementation", "mine.py:attention", "--suite", "./suite.toml"),
        *("--timer", "cpu", "--output-dir", "here"),
    )
    assert done.returncode in (0, 7, 8), done.stderr
    manifest = json.loads((project / "here/manifest.json").read_text())
    assert len(manifest["plan"]["versions"]) == 2
    samples = (project / "here/samples.csv").read_text()
    assert all(name in samples for name in manifest["plan"]["versions"])
    assert nothing_is_left(server)


def test_a_tuning_of_a_kernel_in_a_file_goes_on_with_the_same_files(project: Path, server: Server) -> None:
    (project / "space.toml").write_text(
        'schema_version = 1\nname = "s"\nkernel = "k/k.toml"\n[space]\nCOST = [2, 3, 4]\n'
    )
    source = project / "k/k.cpp"
    source.write_text(f"{source.read_text()}\nint cudadent42_cost() {{ return COST; }}\n")  # no two alike
    # Nothing is to be confirmed.
    asked = ("tune", "run", "space.toml", "--suite", "./suite.toml", "--timer", "cpu", "--rungs", "4,6")
    asked = (*asked, "--margin", "900 %", "--output-dir", "tuning")
    process = started(*words(*asked), cwd=project)
    journal = project / "tuning/journal.jsonl"
    while process.poll() is None and not (journal.exists() and '"job-returned"' in journal.read_text()):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    finished(process)
    (sent,) = (each.event for each in read(project / "tuning")[1] if isinstance(each.event, events.Sent))
    assert sent.files.keys() == {"default", "COST=2", "COST=3", "COST=4"}
    assert len(set(sent.files.values())) == 4
    (project / "k/parts/more.h").write_text("#define MORE 2\n")
    refused = lab(project, *asked)
    assert refused.returncode == 2, refused.stderr
    assert "put the former back, or begin another tuning with --output-dir" in refused.stderr
    (project / "k/parts/more.h").write_text("#define MORE 1\n")
    done = lab(project, *asked)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["finished"]
    assert nothing_is_left(server)
