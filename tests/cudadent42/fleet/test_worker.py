"""What a worker asks of the machine that it is on, and what it says of it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cudadent42.base.errors import UsageError
from cudadent42.fleet import worker
from cudadent42.fleet.perform import worker_of_races
from cudadent42.fleet.worker import device_of_ones_own, identify, pauses
from cudadent42.model.records import MachineReport
from cudadent42.preflight.definitions import Context
from cudadent42.preflight.gpu import DEFINITIONS
from cudadent42.preflight.gpu_probe import Gpu, GpuProbe, Monitor
from cudadent42.worker.parent import Worker
from flashmoe_science.tuned.lookup import SWITCH_VARIABLE


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of locks, which is not there yet."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"cudadent42-{os.getuid()}"


def test_a_device_is_locked_in_a_folder_of_one_s_own(locks: Path) -> None:
    with device_of_ones_own("unit"):
        assert locks.stat().st_mode & 0o077 == 0
        assert len(list(locks.iterdir())) == 1
    with device_of_ones_own("unit"):
        pass


def test_a_folder_that_others_write_to_holds_no_lock(locks: Path) -> None:
    locks.mkdir()
    locks.chmod(0o777)
    with pytest.raises(UsageError, match="only you can write to"), device_of_ones_own("unit"):
        pass


def test_a_link_is_not_followed(locks: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    locks.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="only you can write to"), device_of_ones_own("unit"):
        pass
    assert list((tmp_path / "elsewhere").iterdir()) == []


def host_with(uuids: tuple[str, ...], driver: str = "580.95.05") -> GpuProbe:
    gpus = tuple(Gpu("NVIDIA H200", "9.0", 150 << 30, 132, uuid) for uuid in uuids)
    monitors = tuple(Monitor(driver, (), 1980, 1980, 30, 700.0, ()) for _ in uuids)
    return GpuProbe(len(uuids), "loaded", 0, "", "13.0", gpus, monitors)


def looked_at(context: Context) -> MachineReport:
    """By the checks of GPUs, without those that want torch with CUDA here."""
    findings = [each.probe(context) for each in DEFINITIONS if each.name != "torch-cuda"]
    return MachineReport((), "", {name: fact for each in findings for name, fact in each.facts.items()})


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[GpuProbe], None]:
    """Put this process on a host with such GPUs."""

    def put(probe: GpuProbe) -> None:
        monkeypatch.setattr(worker, "gather", lambda device, output: Context(device, output, probe))
        monkeypatch.setattr(worker, "inspect", looked_at)

    return put


def test_two_gpus_of_a_host_are_two_whatever_each_process_sees(on: Callable[[GpuProbe], None]) -> None:
    """Slurm and Ray show each worker its own GPU alone, which is then ``cuda:0`` to all of them."""
    units = []
    for uuid in ("GPU-1", "GPU-2"):
        on(host_with((uuid,)))
        units.append(identify("cuda:0", "").worker.unit)
    on(host_with(("GPU-1", "GPU-2")))
    assert units == [identify(f"cuda:{index}", "").worker.unit for index in (0, 1)] == ["GPU-1", "GPU-2"]


def test_a_worker_says_which_driver_it_has(on: Callable[[GpuProbe], None]) -> None:
    on(host_with(("GPU-1",), driver="570.1"))
    assert identify("cuda:0", "").worker.driver == "570.1"


def test_a_gpu_without_an_identity_is_its_host_s(on: Callable[[GpuProbe], None]) -> None:
    on(host_with(("", "")))
    assert identify("cuda:1", "").worker.unit.endswith("/cuda-1")


def test_a_worker_looks_soon_for_a_task_and_seldom_where_there_is_none() -> None:
    slept = list(itertools.islice(pauses(), 12))
    assert slept[0] <= 0.02
    assert all(0.25 <= each <= 0.5 for each in slept[6:])
    assert next(pauses()) <= 0.02


def test_what_races_is_begun_before_a_race_and_asks_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str | None] = []
    monkeypatch.delenv(SWITCH_VARIABLE, raising=False)
    monkeypatch.setattr(Worker, "start", lambda self: begun.append(os.environ.get(SWITCH_VARIABLE)))
    worker_of_races(tmp_path / "log")
    assert begun == ["off"]
    assert SWITCH_VARIABLE not in os.environ
