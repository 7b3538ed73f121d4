"""Finding Nsight Compute, its permission, its command line, and reading what it wrote."""

from __future__ import annotations

import ast
import math
import stat
import sys
from pathlib import Path

import pytest

from cudadent42.preflight import ncu_install
from cudadent42.preflight.ncu_install import Permission
from cudadent42.profiles.metrics import light_set
from cudadent42.stages.profile import ncu

CSV = """==PROF== Disconnected
"ID","Kernel Name","Block Size","gpu__time_duration.sum","launch__grid_size","dram__bytes_read.sum"
"","","","us","","Mbyte"
"0","attention_hopper","(384, 1, 1)","2,752.512","132","nan"
"1","merge, all","(128, 1, 1)","3.5","64",""
"""


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# ---------------------------------------------------------------- where it is


def test_it_is_found_where_installers_put_it_the_newest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert ncu_install.find(tmp_path) is None
    program(tmp_path / "opt/nvidia/nsight-compute/2023.3.1/ncu", "exit 0")
    newest = program(tmp_path / "opt/nvidia/nsight-compute/2025.3.1/ncu", "exit 0")
    program(tmp_path / "usr/local/cuda-12.4/bin/ncu", "exit 0")
    assert ncu_install.find(tmp_path) == newest


def test_the_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = program(tmp_path / "bin/ncu", "exit 0")
    program(tmp_path / "opt/nvidia/nsight-compute/2025.3.1/ncu", "exit 0")
    monkeypatch.setenv("PATH", str(named.parent))
    assert ncu_install.find(tmp_path) == named


def test_its_version_is_read(tmp_path: Path) -> None:
    path = program(
        tmp_path / "ncu",
        "echo 'NVIDIA (R) Nsight Compute Command Line Profiler'\necho 'Version 2025.3.1.0 (build 36398880)'",
    )
    assert ncu_install.tool(path).version == (2025, 3, 1)


@pytest.mark.parametrize("text", ["exit 1", "echo no version"])
def test_a_version_that_it_does_not_say_is_unknown(tmp_path: Path, text: str) -> None:
    assert ncu_install.tool(program(tmp_path / "ncu", text)).version_text == "unknown version"


# ---------------------------------------------------------------- whether it may


@pytest.mark.parametrize(
    ("parameter", "capabilities", "expected"),
    [
        ("RmProfilingAdminOnly: 1", "0000000000000000", Permission.CLOSED),
        ("RmProfilingAdminOnly: 1", "000001ffffffffff", Permission.OPEN),
        ("RmProfilingAdminOnly: 1", "0000000000200000", Permission.OPEN),
        ("RmProfilingAdminOnly: 1", "00000000a80425fb", Permission.CLOSED),
        ("RmProfilingAdminOnly: 0", "0000000000000000", Permission.OPEN),
        ("Another: 1", "0000000000000000", Permission.UNKNOWN),
    ],
)
def test_whether_the_counters_are_open(
    tmp_path: Path, parameter: str, capabilities: str, expected: Permission
) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/params").write_text(f"ResmanDebugLevel: 1\n{parameter}\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text(f"Name:\tx\nCapEff:\t{capabilities}\n")
    assert ncu_install.permission(tmp_path) is expected


def test_without_a_driver_nothing_is_known_of_the_counters(tmp_path: Path) -> None:
    assert ncu_install.permission(tmp_path) is Permission.UNKNOWN


def test_a_container_has_a_remedy_of_its_own(tmp_path: Path) -> None:
    assert "NVreg_RestrictProfilingToAdminUsers=0" in ncu_install.remedy(tmp_path)
    (tmp_path / ".dockerenv").touch()
    assert "SYS_ADMIN" in ncu_install.remedy(tmp_path)


# ---------------------------------------------------------------- running it


def arguments(tmp_path: Path, **options: bool | str) -> list[str]:
    wanted = {"full": False, "cold": False, **options}
    return ncu.command(Path("ncu"), tmp_path / "r.ncu-rep", ["python", "t.py"], **wanted)  # type: ignore[arg-type]


def test_the_clocks_are_left_alone(tmp_path: Path) -> None:
    line = " ".join(arguments(tmp_path))
    assert "--clock-control none" in line
    assert "--cache-control none" in line
    assert "--profile-from-start off" in line
    assert "--set" not in line
    assert line.endswith("python t.py")


def test_the_full_set_and_a_kernel_on_request(tmp_path: Path) -> None:
    line = " ".join(arguments(tmp_path, full=True, cold=True, kernel="attention.*"))
    assert "--set full" in line
    assert "--cache-control all" in line
    assert "--kernel-name regex:attention.*" in line


def run(tmp_path: Path, text: str, timeout_s: float = 20.0) -> None:
    report = tmp_path / "r.ncu-rep"
    path = program(tmp_path / "ncu", text.replace("REPORT", str(report)))
    ncu.run([str(path)], report, timeout_s=timeout_s, log=tmp_path / "ncu.log")


def test_a_report_is_made(tmp_path: Path) -> None:
    run(tmp_path, "touch REPORT; echo '==PROF== Report: REPORT'")
    assert "==PROF==" in (tmp_path / "ncu.log").read_text()


def test_denied_counters_come_with_the_remedy(tmp_path: Path) -> None:
    text = "echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission'; exit 1"
    with pytest.raises(ncu.CountersDeniedError, match=r"SYS_ADMIN|NVreg_Restrict"):
        run(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo '==ERROR== The application crashed'; exit 1", "The application crashed"),
        ("echo '==WARNING== No kernels were profiled.'", "launched no kernel"),
        ("echo '==ERROR== Failed to initialize the profiler: LibraryNotLoaded'; exit 1", "does not let the"),
        ("exit 3", "it printed nothing"),
    ],
)
def test_why_nothing_was_profiled(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ncu.ProfilerFailedError, match=message):
        run(tmp_path, text)


def test_it_does_not_run_for_ever(tmp_path: Path) -> None:
    with pytest.raises(ncu.ProfilerFailedError, match="still running after"):
        run(tmp_path, "exec sleep 30", timeout_s=0.3)


# ---------------------------------------------------------------- reading


def test_a_csv_is_read_with_units(tmp_path: Path) -> None:
    first, second = ncu.read_csv(CSV)
    assert first.kernel == "attention_hopper"
    assert first.metrics["gpu__time_duration.sum"].value == 2752.512
    assert first.metrics["gpu__time_duration.sum"].unit == "us"
    assert math.isnan(first.metrics["dram__bytes_read.sum"].value)
    assert second.kernel == "merge, all"
    assert math.isnan(second.metrics["dram__bytes_read.sum"].value)
    assert "Block Size" not in first.metrics


@pytest.mark.parametrize("text", ["", "==ERROR== nothing\n", "a,b\n1,2\n"])
def test_what_is_no_table_of_kernels_is_refused(text: str) -> None:
    with pytest.raises(ncu.ProfilerFailedError):
        ncu.read_csv(text)


INTERFACE = """
class _Metric:
    def __init__(self, value, unit): self._value, self._unit = value, unit
    def value(self): return self._value
    def unit(self): return self._unit

class _Action:
    def name(self): return "attention_hopper"
    def metric_by_name(self, name):
        return {
            "gpu__time_duration.sum": _Metric(2752512.0, "ns"),
            "dram__bytes_read.sum": _Metric(float("nan"), "byte"),
            "launch__grid_size": _Metric(132, None),
        }.get(name)

class _Range:
    def num_actions(self): return 1
    def action_by_idx(self, index): return _Action()

class _Context:
    def num_ranges(self): return 1
    def range_by_idx(self, index): return _Range()

def load_report(path):
    open(path).close()
    return _Context()
"""


def installed(tmp_path: Path, interface: str) -> Path:
    """An installation whose command exports a CSV, and whose Python interface is this."""
    folder = tmp_path / "extras/python"
    folder.mkdir(parents=True)
    (folder / "ncu_report.py").write_text(interface)
    (tmp_path / "export.csv").write_text(CSV)
    return program(tmp_path / "ncu", f"cat {tmp_path / 'export.csv'}")


def test_the_python_interface_is_preferred(tmp_path: Path) -> None:
    path = installed(tmp_path, INTERFACE)
    report = tmp_path / "r.ncu-rep"
    report.touch()
    (launch,) = ncu.read(path, report)
    assert launch.metrics["gpu__time_duration.sum"].value == 2752512.0
    assert math.isnan(launch.metrics["dram__bytes_read.sum"].value)
    assert launch.metrics["launch__grid_size"].unit == ""
    assert set(launch.metrics) <= set(light_set())


@pytest.mark.parametrize(
    "broken",
    ["raise ImportError('another Python')", "import os\nos.abort()", "print('[')\nimport sys\nsys.exit(0)"],
)
def test_the_csv_export_is_read_where_the_interface_fails(tmp_path: Path, broken: str) -> None:
    path = installed(tmp_path, broken)
    assert [launch.kernel for launch in ncu.read(path, tmp_path / "r.ncu-rep")] == [
        "attention_hopper",
        "merge, all",
    ]


def test_the_reader_loads_nothing_but_the_standard_library() -> None:
    """PyTorch's libraries beside the interface's end the process."""
    tree = ast.parse(Path(ncu.__file__).with_name("ncu_reader.py").read_text())
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert modules <= {*sys.stdlib_module_names, "__future__"}
