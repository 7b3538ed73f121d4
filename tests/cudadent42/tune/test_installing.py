"""What `tune install` and `tune check` say of kernels whose sources changed since they were tuned."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from simulated import Simulated, setup

from cudadent42.base.errors import UsageError
from cudadent42.base.observer import Quiet
from cudadent42.base.processor import cpu_name
from cudadent42.native import specification
from cudadent42.native.tuned import sources_digest
from cudadent42.scaffold import Kind, create
from cudadent42.tune import table
from cudadent42.tune.coordinator import Coordinator, Limits
from cudadent42.tune.installing import check, install_tuning
from cudadent42.tune.journal import Device, Setup, TuningJournal, read
from cudadent42.tune.space import DEFAULT
from cudadent42.tune.state import fold
from flashmoe_science.tuned.lookup import PACKAGE_FOLDER, refresh, user_folder


def tuned(folder: Path, about: Setup) -> Path:
    """A tuning in which a configuration is confirmed to be faster."""
    with TuningJournal(folder, about) as journal:
        assert Coordinator(folder, journal, about, Limits(), Quiet()).run(Simulated({"BLOCK=1": 0.1})).winners
    return folder


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The source of a kernel in a file of its own, which is tuned in ``t``."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    refresh()
    create("k", Kind.CPU, tmp_path)
    kernel = tmp_path / "k/k.toml"
    arms = {DEFAULT: str(kernel)}
    for number in range(4):
        arm = tmp_path / f"arms/arm-{number}.toml"
        arm.parent.mkdir(parents=True, exist_ok=True)
        arm.write_text(kernel.read_text().replace('source = "', f'source = "{kernel.parent}/'))
        arms[f"BLOCK={number}"] = str(arm)
    about = replace(
        setup(arms=4),
        kernel="file:k",
        kernel_digest=sources_digest(specification.load(kernel)),
        device=Device(cpu_name()),
        arms=arms,
    )
    tuned(tmp_path / "t", about)
    return tmp_path / "k/k.cpp"


def problems() -> list[str]:
    return [each.problem for each in check() if not each.table.startswith(str(PACKAGE_FOLDER))]


def test_a_tuning_of_former_sources_is_not_installed(own: Path, tmp_path: Path) -> None:
    """Its entries would be ignored by every call, and would take the place of those for the sources of now."""
    former = own.read_text()
    own.write_text(f"{former}// changed\n")
    with pytest.raises(UsageError, match="the sources of file:k changed since it was tuned"):
        install_tuning(tmp_path / "t", package=False)
    folder = user_folder()
    assert folder is not None
    assert not folder.exists()
    own.write_text(former)
    assert len(install_tuning(tmp_path / "t", package=False).entries) == 1


def test_a_table_for_former_sources_of_a_kernel_in_a_file_is_called_so(own: Path, tmp_path: Path) -> None:
    install_tuning(tmp_path / "t", package=False)
    assert problems() == [""]
    former = own.read_text()
    own.write_text(f"{former}// changed\n")
    assert problems() == ["tuned for other sources of the kernel; tune it again"]
    own.write_text(former)
    assert problems() == [""]
    # A kernel whose own file lies elsewhere is not found: what is here is whole.
    (own.parent / "k.toml").rename(tmp_path / "elsewhere.toml")
    assert problems() == [""]


def test_a_tuning_of_former_sources_of_the_library_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    about = replace(setup(arms=4), kernel="attention.small", kernel_digest="a" * 64)
    with pytest.raises(UsageError, match=r"the sources of attention\.small changed since it was tuned"):
        install_tuning(tuned(tmp_path / "t", about), package=False)


def test_a_folder_of_tables_that_cannot_be_written_is_named(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What to do about it is another thing than for a tuning's folder."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    with pytest.raises(
        UsageError, match=r"cannot write a table to .*: Not a directory; .* set XDG_CONFIG_HOME"
    ):
        install_tuning(tmp_path / "t", package=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = user_folder()
    assert folder is not None
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    state = fold(*read(tmp_path / "t"))
    monkeypatch.setattr("cudadent42.base.files.os.fsync", Mock(side_effect=full))
    with pytest.raises(UsageError, match="No space left") as error:
        table.install(state, tmp_path / "t", folder)
    assert "--output-dir" not in str(error.value)
    assert not list(folder.glob("*.toml"))
