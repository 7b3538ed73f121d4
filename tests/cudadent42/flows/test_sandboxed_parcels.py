"""Kernels that were sent to this machine, loaded in a sandbox."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cudadent42.base import parcels
from cudadent42.base.errors import MachineNotReadyError
from cudadent42.fleet.cargo import Cargo
from cudadent42.flows.sandboxing import candidates_of, untrusted
from cudadent42.model.records import Plan, Version
from cudadent42.model.sandbox import Protection
from cudadent42.native.build import _environment
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.sandbox.launch import FOLDER

PROGRAM = """
import sys
from cudadent42.model.implementations import plug_in_file
from cudadent42.model.records import Version
from cudadent42.versions.sources import checked_folder_of

print(plug_in_file(sys.argv[1]).read_text(), end="")
print((checked_folder_of(Version("there", "", sys.argv[2])) / "mine.py").read_text(), end="")
"""


def test_what_was_sent_is_found_and_checked_in_a_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = AttentionCase("c", "fp32", 1, 1, 1, 8, 8, 8)
    kernel = tmp_path / "mine.py"
    kernel.write_text("# as it was sent\n")
    name = f"{kernel}:attention"
    plan = Plan("unit", "cpu", (case,), "pytorch", ("pytorch", name), repeats=4, warmup=0, seed=1)
    cargo = Cargo()
    (parcel,) = cargo.of(plan)
    root = parcels.make(tmp_path / "parcels")
    parcels.place(parcel, cargo.packed(parcel), root)
    monkeypatch.setenv(parcels.FOLDER_VARIABLE, str(root))
    kernel.unlink()  # another machine
    version = Version("there", "", parcel.digest)
    files, versions = candidates_of(replace(plan, versions={"v": version}))
    accepted = tuple(Protection)
    try:
        with untrusted("cpu", files, accepted, versions=versions) as sandbox:
            done = subprocess.run(
                sandbox.command([sys.executable, "-c", PROGRAM, name, parcel.digest]),
                env=sandbox.environment(_environment()),
                cwd=FOLDER,
                capture_output=True,
                text=True,
                check=False,
            )
    except MachineNotReadyError as error:
        pytest.skip(f"no sandbox here: {error}")
    assert done.stdout == "# as it was sent\n" * 2, done.stderr
