"""The table of checks, and each probe on machines made of files in a temporary folder."""

from __future__ import annotations

import dataclasses
import os
import re
import stat
import sys
from pathlib import Path

import pytest

from cudadent42.base.errors import UsageError
from cudadent42.model.device_names import parse_device
from cudadent42.model.records import Check, MachineReport, Status
from cudadent42.preflight import fix, gpu, gpu_probe, host, ncu_install, python, toolchain
from cudadent42.preflight.definitions import Context, Definition, Finding, Problem, template_fields
from cudadent42.preflight.gpu_probe import NO_GPU, Gpu, GpuProbe, Monitor
from cudadent42.preflight.ncu_install import Permission
from cudadent42.preflight.runner import chosen_device, inspect
from cudadent42.preflight.table import DEFINITIONS
from cudadent42.preflight.text import lines

H200 = Gpu("NVIDIA H200", "9.0", 150 << 30, 132)
QUIET = Monitor("580.95.05", (), 1980, 1980, 35, 700.0, ())
WORKING = GpuProbe(1, "loaded", 0, "", "13.0", (H200,), (QUIET,))


def context(probe: GpuProbe = NO_GPU, device: str = "auto", output: Path = Path("runs")) -> Context:
    return Context(device, output, probe)


def check(name: str, where: Context) -> Check:
    definition = next(definition for definition in DEFINITIONS if definition.name == name)
    return definition.check(definition.probe(where))


# ---------------------------------------------------------------- the table


def test_names_are_unique() -> None:
    names = [definition.name for definition in DEFINITIONS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.name)
def test_every_problem_has_a_cause_and_one_command(definition: Definition) -> None:
    keys = [problem.key for problem in definition.problems]
    assert len(keys) == len(set(keys))
    for problem in definition.problems:
        assert problem.cause
        assert problem.fix
        assert "\n" not in problem.fix
        assert problem.status in (Status.WARN, Status.FAIL)


def test_texts_are_filled_from_the_finding() -> None:
    problem = Problem("bad", Status.FAIL, "{what} is bad", "mend {what} --at {where}")
    assert template_fields(problem) == {"what", "where"}
    definition = Definition("x", "for this test", lambda _: Finding(""), (problem,))
    shown = definition.check(Finding("seen", "bad", {"what": "it", "where": "home"}))
    assert shown == Check("x", Status.FAIL, "seen", "it is bad", "mend it --at home")


def test_this_machine() -> None:
    report = inspect(context())
    assert [item.name for item in report.checks] == [definition.name for definition in DEFINITIONS]
    assert report.facts["python"] == ".".join(map(str, sys.version_info[:3]))
    shown = lines(report)
    assert shown[-2] == report.summary
    assert re.fullmatch(r"torch=\S+ cuda=\S+ dev=.+", report.summary)
    assert (shown[-1] == "Preflight OK") == report.ready
    assert not any("\x1b" in line for line in shown)


@pytest.mark.parametrize("text", ["gpu", "cuda:", "cuda:x", "cpu:0", "", "cuda:0; rm"])
def test_devices_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="expected auto, cpu, cuda or cuda:N"):
        parse_device(text)


@pytest.mark.parametrize(
    ("device", "probe", "chosen"),
    [
        ("auto", NO_GPU, "cpu"),
        ("auto", WORKING, "cuda:0"),
        ("cpu", WORKING, "cpu"),
        ("cuda", WORKING, "cuda:0"),
        ("cuda:3", WORKING, "cuda:3"),
    ],
)
def test_device_chosen(device: str, probe: GpuProbe, chosen: str) -> None:
    assert chosen_device(context(probe, parse_device(device))) == chosen


# ---------------------------------------------------------------- Python and packages


def test_floors_are_those_of_pyproject() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    declared = text.split("\ndependencies = [")[1].split("]")[0] + text.split("\nlab = [")[1].split("]")[0]
    for package in (python.TORCH, *python.PACKAGES):
        floor = re.search(rf'"{package.name}>=([\d.]+)', declared)
        assert floor is not None, package.name
        assert tuple(map(int, floor[1].split("."))) == package.minimum, package.name
    assert f'requires-python = ">={".".join(map(str, python.MIN_PYTHON))}"' in text


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("2.13.0+cpu", (2, 13, 0)), ("2.7.1+cu128", (2, 7, 1)), ("3.0rc1", (3, 0)), ("", ())],
)
def test_release_numbers(version: str, numbers: tuple[int, ...]) -> None:
    assert python.release(version) == numbers


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = dataclasses.replace(python.PACKAGES[1], name="no-such-package-42")
    monkeypatch.setattr(python, "PACKAGES", (absent,))
    result = check("packages", context())
    assert result.status is Status.FAIL
    assert "no-such-package-42" in result.cause
    assert result.fix.startswith(f"{sys.executable} -m pip install 'no-such-package-42>=")


def test_a_gpu_package_is_not_asked_for_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = python.Package("no-such-package-42", (1,), gpu_only=True)
    monkeypatch.setattr(python, "PACKAGES", (absent,))
    assert check("packages", context()).status is Status.OK
    assert check("packages", context(WORKING)).status is Status.FAIL


# ---------------------------------------------------------------- host


def test_a_disk_that_cannot_be_written(tmp_path: Path) -> None:
    result = check("disk", context(output=Path("/proc/here/run")))
    assert result.status is Status.FAIL
    assert str(tmp_path) in check("disk", context(output=tmp_path / "a" / "b")).detail


@pytest.mark.parametrize(
    ("available", "status"), [(1 << 29, Status.FAIL), (2 << 30, Status.WARN), (8 << 30, Status.OK)]
)
def test_memory(monkeypatch: pytest.MonkeyPatch, available: int, status: Status) -> None:
    monkeypatch.setattr(host, "available_memory", lambda: available)
    assert check("memory", context()).status is status


def test_busy_cores_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    assert check("cores", context()).status is Status.WARN
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert check("cores", context()).status is Status.OK


def test_a_processor_without_avx2_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        host, "_cpuinfo", lambda: {"model name": "Intel(R) Old(TM) CPU @ 2GHz", "flags": "sse"}
    )
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    result = check("cpu", context())
    assert result.status is Status.WARN
    assert result.detail.startswith("Intel Old,")


@pytest.mark.parametrize(
    ("granted", "features"),
    [
        (True, ("avx512f", "avx512_vnni", "amx_bf16", "amx_fp16")),
        (False, ("avx512f", "avx512_vnni")),
    ],
    ids=str,
)
def test_a_matrix_unit_that_is_refused_is_none(
    granted: bool, features: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in some containers, where /proc/cpuinfo names it all the same."""
    monkeypatch.setattr(
        host,
        "_cpuinfo",
        lambda: {"model name": "Xeon", "flags": "avx512_vnni avx512f amx_tile amx_bf16 amx_fp16"},
    )
    monkeypatch.setattr(host, "amx_is_granted", lambda: granted)
    assert host.cpu_features() == features
    assert check("cpu", context()).detail.startswith(f"Xeon, {' '.join(features)}")


# ---------------------------------------------------------------- what compiles


def test_nvcc_off_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("9.2", "12.8", "12.10"):
        folder = tmp_path / f"cuda-{version}" / "bin"
        folder.mkdir(parents=True)
        nvcc = folder / "nvcc"
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.1'\n")
        nvcc.chmod(0o755)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    newest = str(tmp_path / "cuda-12.10/bin/nvcc")
    assert toolchain.find_nvcc(tmp_path) == newest

    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda-12.8"))
    monkeypatch.setenv("PATH", "/usr/bin-is-not-here")
    result = check("nvcc", context(WORKING))
    assert result.status is Status.WARN
    assert result.detail.startswith("12.8 at ")
    assert result.fix == f"export PATH={tmp_path}/cuda-12.8/bin:$PATH"
    assert check("nvcc", context()).status is Status.SKIP

    monkeypatch.setenv("PATH", str(tmp_path / "cuda-12.8/bin"))
    assert check("nvcc", context(WORKING)).status is Status.OK


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    toolchain.find_compiler.cache_clear()
    monkeypatch.setenv("CXX", "/no/such/compiler")
    result = check("compiler", context())
    assert result.status is Status.FAIL
    assert "/no/such/compiler" in result.cause
    assert check("compiler", context(WORKING)).status is Status.WARN
    toolchain.find_compiler.cache_clear()


def test_a_cache_that_others_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv(toolchain.DIRECTORY_VARIABLE, str(folder))
    result = check("cache", context())
    assert result.status is Status.FAIL
    assert result.fix.endswith("-m cudadent42 cache clear")
    planted = folder / ("ab" * 32 + ".so")
    planted.write_bytes(b"planted")
    planted.with_suffix(".json").write_text("{}")
    (mended,) = fix.apply(MachineReport((result,), "", {}), context())
    assert "only you can write to" in mended
    assert list(folder.iterdir()) == []
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert check("cache", context()).status is Status.OK


def test_an_open_folder_that_is_not_the_caches_alone_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    (folder / "thesis.tex").write_text("")
    monkeypatch.setenv(toolchain.DIRECTORY_VARIABLE, str(folder))
    (left,) = fix.apply(MachineReport((check("cache", context()),), "", {}), context())
    assert "holds what is not the compile cache's ('thesis.tex')" in left
    assert (folder / "thesis.tex").exists()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777


def test_a_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(toolchain.DIRECTORY_VARIABLE, str(tmp_path / "file" / "cache"))
    result = check("cache", context())
    assert result.status is Status.FAIL
    assert "cannot be made" in result.cause
    assert not stat.S_ISDIR((tmp_path / "file").stat().st_mode)


# ---------------------------------------------------------------- GPU


def broken(**changes: object) -> GpuProbe:
    probe = GpuProbe(1, "loaded", None, "", "", (), None)
    return dataclasses.replace(probe, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("probe", "cause", "fix"),
    [
        (broken(libcuda="missing"), "no driver library", "ubuntu-drivers"),
        (
            broken(libcuda="/usr/local/nvidia/lib64"),
            "does not search",
            "LD_LIBRARY_PATH=/usr/local/nvidia/lib64:",
        ),
        (broken(timed_out=True), "does not answer", "dmesg"),
        (broken(init_code=100, init_name="CUDA_ERROR_NO_DEVICE"), "hide", "unset CUDA_VISIBLE_DEVICES"),
        (broken(init_code=802), "fabric manager", "nvidia-fabricmanager"),
        (broken(init_code=803), "differ in version", "reboot"),
        (broken(init_code=999, init_name="CUDA_ERROR_UNKNOWN"), "CUDA_ERROR_UNKNOWN (999)", "dmesg"),
        (dataclasses.replace(WORKING, driver_cuda="11.4"), "serves CUDA 11.4", "ubuntu-drivers"),
    ],
)
def test_a_broken_driver_fails_with_its_own_cause(probe: GpuProbe, cause: str, fix: str) -> None:
    result = check("driver", context(probe))
    assert result.status is Status.FAIL
    assert cause in result.cause
    assert fix in result.fix
    assert check("driver", context(probe, "cpu")).status is Status.SKIP


def test_a_gpu_that_is_asked_for_and_not_there() -> None:
    result = check("driver", context(NO_GPU, "cuda"))
    assert (result.status, result.fix) == (Status.FAIL, "cudadent42 run --device cpu")


def test_a_working_gpu() -> None:
    assert check("driver", context(WORKING)).detail == "580.95.05, serves CUDA 13.0"
    assert check("gpu", context(WORKING)).detail == "NVIDIA H200, compute capability 9.0, 150 GiB"
    assert check("gpu-users", context(WORKING)).status is Status.OK
    assert check("gpu-clocks", context(WORKING)).status is Status.OK
    assert check("gpu", context(WORKING, "cuda:1")).cause.startswith("device cuda:1 was asked for and 1 ")
    turing = dataclasses.replace(WORKING, gpus=(Gpu("Tesla T4", "7.5", 16 << 30, 40),))
    result = check("gpu", context(turing))
    assert (result.status, result.fix) == (Status.WARN, "cudadent42 run --dtype fp16")
    volta = dataclasses.replace(WORKING, gpus=(Gpu("Tesla V100", "7.0", 16 << 30, 80),))
    result = check("gpu", context(volta))
    assert result.status is Status.FAIL
    assert "7.5 (Turing) or newer" in result.cause


def test_a_gpu_that_is_shared_or_slowed() -> None:
    monitor = dataclasses.replace(QUIET, pids=(12, 345), throttle=("power cap",))
    probe = dataclasses.replace(WORKING, monitors=(monitor,))
    users = check("gpu-users", context(probe))
    assert (users.status, users.fix) == (Status.WARN, "ps -o pid,user,etime,args -p 12,345")
    assert "power cap" in check("gpu-clocks", context(probe)).cause
    unwatched = dataclasses.replace(WORKING, monitors=None)
    assert check("gpu-users", context(unwatched)).status is Status.SKIP


def test_a_cpu_build_of_torch_beside_a_gpu() -> None:
    import torch

    result = check("torch-cuda", context(WORKING))
    if torch.version.cuda is None:
        assert result.status is Status.FAIL
        assert "is a CPU build" in result.cause
        assert "--force-reinstall torch" in result.fix
    else:
        assert result.status in (Status.OK, Status.FAIL)


def test_hardware_is_counted_from_the_bus(tmp_path: Path) -> None:
    for number, (vendor, kind) in enumerate(
        [("0x10de", "0x030200"), ("0x10de", "0x040300"), ("0x1002", "0x030000"), ("0x10de", "0x030000")]
    ):
        device = tmp_path / f"sys/bus/pci/devices/{number}"
        device.mkdir(parents=True)
        (device / "vendor").write_text(vendor + "\n")
        (device / "class").write_text(kind + "\n")
    assert gpu_probe.count_hardware(tmp_path) == 2
    (tmp_path / "dev").mkdir()
    for number in range(4):
        (tmp_path / f"dev/nvidia{number}").touch()
    (tmp_path / "dev/nvidiactl").touch()
    assert gpu_probe.count_hardware(tmp_path) == 4


def test_the_probe_survives_a_driver_that_kills_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for libcuda whose cuInit aborts, loaded by the real child process."""
    library = compile_driver(tmp_path, "#include <stdlib.h>\nint cuInit(unsigned flags) { abort(); }\n")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    monkeypatch.setattr(gpu_probe, "count_hardware", lambda: 1)
    result = gpu_probe.Pending().result()
    assert "signal 6" in result.init_name
    assert check("driver", context(result)).status is Status.FAIL


def test_the_probe_survives_a_driver_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = compile_driver(tmp_path, "#include <unistd.h>\nint cuInit(unsigned f) { for (;;) pause(); }\n")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    monkeypatch.setattr(gpu_probe, "count_hardware", lambda: 1)
    result = gpu_probe.Pending().result(timeout_s=2.0)
    assert result.timed_out
    assert check("driver", context(result)).fix.startswith("sudo dmesg")


def test_the_probe_reads_what_a_driver_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = compile_driver(
        tmp_path,
        """
        #include <string.h>
        int cuInit(unsigned flags) { return 0; }
        int cuDriverGetVersion(int *v) { *v = 12080; return 0; }
        int cuDeviceGetCount(int *n) { *n = 1; return 0; }
        int cuDeviceGet(int *d, int i) { *d = i; return 0; }
        int cuDeviceGetName(char *s, int n, int d) { strncpy(s, "Toy GPU", n); return 0; }
        int cuDeviceTotalMem_v2(unsigned long *b, int d) { *b = 8589934592UL; return 0; }
        int cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? 8 : a == 76 ? 9 : 58; return 0; }
        int cuDeviceGetUuid_v2(char *u, int d) { for (int i = 0; i < 16; ++i) u[i] = i; return 0; }
        """,
    )
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    monkeypatch.setattr(gpu_probe, "count_hardware", lambda: 1)
    result = gpu_probe.Pending().result()
    assert result.gpus == (Gpu("Toy GPU", "8.9", 8 << 30, 58, "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"),)
    assert result.driver_cuda == "12.8"
    assert gpu._gpu(context(result)).facts["gpu_name"] == "Toy GPU"


def compile_driver(folder: Path, source: str) -> Path:
    import shutil
    import subprocess

    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler to make a stand-in for the driver")
    (folder / "driver.c").write_text(source)
    library = folder / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", "-o", str(library), str(folder / "driver.c")]
    subprocess.run(command, check=True, capture_output=True)
    return library


# ---------------------------------------------------------------- performance counters


def profiler(folder: Path, version: str) -> None:
    path = folder / "ncu"
    path.write_text(f"#!/bin/sh\necho 'Version {version} (build 1)'\n")
    path.chmod(0o755)


def test_open_counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiler(tmp_path, "2025.3.1.0")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(ncu_install, "permission", lambda: Permission.OPEN)
    result = check("counters", context(WORKING))
    assert result.status is Status.OK
    assert result.detail == f"Nsight Compute 2025.3.1 at {tmp_path / 'ncu'}, counters open"
    assert check("counters", context(WORKING, "cpu")).status is Status.SKIP


@pytest.mark.parametrize(
    ("container", "fix"), [(False, "NVreg_RestrictProfilingToAdminUsers=0"), (True, "--cap-add=SYS_ADMIN")]
)
def test_closed_counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, container: bool, fix: str) -> None:
    profiler(tmp_path, "2025.3.1.0")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(ncu_install, "permission", lambda: Permission.CLOSED)
    monkeypatch.setattr(ncu_install, "in_container", lambda: container)
    result = check("counters", context(WORKING))
    assert result.status is Status.WARN
    assert "ERR_NVGPUCTRPERM" in result.cause
    assert fix in result.fix


def test_counters_of_which_nothing_is_known_are_not_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiler(tmp_path, "2025.3.1.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(ncu_install, "permission", lambda: Permission.UNKNOWN)
    result = check("counters", context(WORKING))
    assert result.status is Status.WARN
    assert result.detail.endswith("counters unknown")
    assert "does not say" in result.cause


def test_a_profiler_that_does_not_run_is_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiler(tmp_path, "2025.3.1.0")
    (tmp_path / "ncu").write_text("#!/bin/sh\nexit 127\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    result = check("counters", context(WORKING))
    assert (result.status, str(tmp_path / "ncu") in result.cause) == (Status.WARN, True)


def test_an_old_profiler_and_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if ncu_install.find() is None:
        result = check("counters", context(WORKING))
        assert (result.status, result.detail) == (Status.WARN, "no Nsight Compute")
    profiler(tmp_path, "2022.4.1.0")
    assert "2022.4.1 is older" in check("counters", context(WORKING)).cause
