"""The NVIDIA driver, the GPU, torch's use of it, and what else uses it."""

from __future__ import annotations

import importlib

from cudadent42.model.records import Status
from cudadent42.preflight.definitions import THIS_PYTHON, Context, Definition, Fact, Finding, Problem
from cudadent42.preflight.gpu_probe import GpuProbe, Monitor

MIN_DRIVER_CUDA = 12
MIN_CAPABILITY = (7, 5)
BF16_CAPABILITY = (8, 0)
_INIT_PROBLEMS = {100: "no-device", 802: "not-initialised", 803: "mismatch"}  # CUresult
_TORCH_INDEX = "https://download.pytorch.org/whl/"
_NOT_NEEDED = "none, and a CPU run needs none"


def _driver(context: Context) -> Finding:
    gpu = context.gpu
    if not context.wants_gpu:
        return Finding(_NOT_NEEDED if not gpu.present else "not needed on a CPU", skipped=True)
    values = {"folder": gpu.libcuda, "code": gpu.init_code, "name": gpu.init_name, "cuda": gpu.driver_cuda}
    facts: dict[str, Fact] = {"driver_cuda": gpu.driver_cuda or None}
    if gpu.monitors:
        facts["driver_version"] = gpu.monitors[0].driver_version
    if gpu.timed_out:
        return Finding("cuInit did not return within 20 s", "hang", values, facts)
    if gpu.libcuda != "loaded":
        if not gpu.present:
            return Finding("no NVIDIA GPU found", "no-gpu", values, facts)
        if gpu.libcuda == "missing":
            return Finding("GPU found, libcuda.so.1 not", "no-driver", values, facts)
        return Finding(
            f"libcuda.so.1 in {gpu.libcuda}, which the loader does not search", "off-path", values, facts
        )
    if gpu.init_code != 0:
        problem = _INIT_PROBLEMS.get(gpu.init_code or 0, "init")
        return Finding(f"cuInit: {gpu.init_name}", problem, values, facts)
    old = int(gpu.driver_cuda.split(".")[0]) < MIN_DRIVER_CUDA
    version = f"{gpu.monitors[0].driver_version}, " if gpu.monitors else ""
    return Finding(f"{version}serves CUDA {gpu.driver_cuda}", "old" if old else None, values, facts)


def _gpu(context: Context) -> Finding:
    probe = context.gpu
    if not context.wants_gpu or not probe.usable:
        return Finding("not needed on a CPU" if not context.wants_gpu else "needs the driver", skipped=True)
    count = len(probe.gpus)
    if context.gpu_index >= count:
        values = {"index": context.gpu_index, "count": count}
        return Finding(f"{count} visible", "no-such-index", values)
    gpu = probe.gpus[context.gpu_index]
    facts: dict[str, Fact] = {
        "gpu_name": gpu.name,
        "gpu_count": count,
        "gpu_compute_capability": gpu.compute_capability,
        "gpu_memory_bytes": gpu.memory_bytes,
        "gpu_multiprocessors": gpu.multiprocessors,
    }
    detail = f"{gpu.name}, compute capability {gpu.compute_capability}, {gpu.memory_bytes / 2**30:.0f} GiB"
    if count > 1:
        detail += f" (device {context.gpu_index} of {count})"
    major, minor = map(int, gpu.compute_capability.split("."))
    problem = None
    if (major, minor) < BF16_CAPABILITY:
        problem = "fp16-only" if (major, minor) >= MIN_CAPABILITY else "too-old"
    return Finding(detail, problem, {"name": gpu.name, "capability": gpu.compute_capability}, facts)


def _torch_cuda(context: Context) -> Finding:
    if not context.wants_gpu or not context.gpu.usable:
        return Finding("not needed on a CPU" if not context.wants_gpu else "needs the driver", skipped=True)
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError):
        return Finding("needs torch", skipped=True)
    values = {
        "python": THIS_PYTHON,
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": context.gpu.driver_cuda,
    }
    if torch.version.cuda is None:
        return Finding(f"torch {torch.__version__} is built without CUDA", "cpu-build", values)
    if not torch.cuda.is_available():
        return Finding(f"torch for CUDA {torch.version.cuda} sees no GPU", "unseen", values)
    return Finding(f"torch for CUDA {torch.version.cuda} sees {torch.cuda.device_count()}")


def _monitor(context: Context) -> Monitor | None:
    monitors = context.gpu.monitors or ()
    return monitors[context.gpu_index] if context.gpu_index < len(monitors) else None


def _why_unwatched(probe: GpuProbe) -> str:
    return "nvidia-ml-py does not answer; pip install nvidia-ml-py" if probe.usable else "needs the driver"


def _gpu_users(context: Context) -> Finding:
    if not context.wants_gpu:
        return Finding("not needed on a CPU", skipped=True)
    monitor = _monitor(context)
    if monitor is None:
        return Finding(_why_unwatched(context.gpu), skipped=True)
    pids = ", ".join(map(str, monitor.pids))
    if not monitor.pids:
        return Finding("no other process")
    return Finding(f"processes {pids}", "shared", {"pids": pids.replace(" ", ""), "count": len(monitor.pids)})


def _gpu_clocks(context: Context) -> Finding:
    if not context.wants_gpu:
        return Finding("not needed on a CPU", skipped=True)
    monitor = _monitor(context)
    if monitor is None:
        return Finding(_why_unwatched(context.gpu), skipped=True)
    facts: dict[str, Fact] = {
        "gpu_sm_clock_mhz": monitor.sm_clock_mhz,
        "gpu_max_sm_clock_mhz": monitor.max_sm_clock_mhz,
        "gpu_temperature_c": monitor.temperature_c,
        "gpu_power_limit_w": monitor.power_limit_w,
    }
    detail = f"SM {monitor.sm_clock_mhz} of {monitor.max_sm_clock_mhz} MHz, {monitor.temperature_c} °C"
    reasons = ", ".join(monitor.throttle)
    return Finding(detail, "throttled" if reasons else None, {"reasons": reasons}, facts)


DEFINITIONS = (
    Definition(
        "driver",
        "loads and runs CUDA kernels",
        _driver,
        (
            Problem(
                "no-gpu",
                Status.FAIL,
                "a CUDA device was asked for and this machine has no NVIDIA GPU",
                "cudadent42 run --device cpu",
            ),
            Problem(
                "no-driver",
                Status.FAIL,
                "there is an NVIDIA GPU but no driver library (libcuda.so.1)",
                "sudo ubuntu-drivers install --gpgpu && sudo reboot",
            ),
            Problem(
                "off-path",
                Status.FAIL,
                "libcuda.so.1 is in {folder}, which the loader does not search",
                "export LD_LIBRARY_PATH={folder}:$LD_LIBRARY_PATH",
            ),
            Problem(
                "hang",
                Status.FAIL,
                "the driver does not answer; the GPU has most likely fallen off the bus or is being reset",
                "sudo dmesg | grep -i -e nvrm -e xid | tail -n 5",
            ),
            Problem(
                "no-device",
                Status.FAIL,
                "the driver runs but shows no device; CUDA_VISIBLE_DEVICES may hide it",
                "unset CUDA_VISIBLE_DEVICES",
            ),
            Problem(
                "not-initialised",
                Status.FAIL,
                "the system is not yet initialised: on NVSwitch machines the fabric manager must run",
                "sudo systemctl start nvidia-fabricmanager",
            ),
            Problem(
                "mismatch",
                Status.FAIL,
                "the driver's library and kernel module differ in version, as after an unattended upgrade",
                "sudo reboot",
            ),
            Problem(
                "init",
                Status.FAIL,
                "the driver failed to start: {name} ({code})",
                "sudo dmesg | grep -i nvrm | tail -n 5",
            ),
            Problem(
                "old",
                Status.FAIL,
                "the driver serves CUDA {cuda}; 12.0 or newer is needed (R525)",
                "sudo ubuntu-drivers install --gpgpu && sudo reboot",
            ),
        ),
    ),
    Definition(
        "gpu",
        "runs the kernels",
        _gpu,
        (
            Problem(
                "no-such-index",
                Status.FAIL,
                "device cuda:{index} was asked for and {count} are visible, numbered from 0",
                "cudadent42 run --device cuda:0",
            ),
            Problem(
                "too-old",
                Status.FAIL,
                "{name} has compute capability {capability}; 7.5 (Turing) or newer is needed",
                "cudadent42 run --device cpu",
            ),
            Problem(
                "fp16-only",
                Status.WARN,
                "{name} has compute capability {capability}: no bf16 kernel runs there, so its cases are skipped",
                "cudadent42 run --dtype fp16",
            ),
        ),
    ),
    Definition(
        "torch-cuda",
        "the baseline on the GPU",
        _torch_cuda,
        (
            Problem(
                "cpu-build",
                Status.FAIL,
                "there is a GPU, but torch {version} is a CPU build",
                "{python} -m pip install --force-reinstall torch --index-url " + _TORCH_INDEX + "cu130",
            ),
            Problem(
                "unseen",
                Status.FAIL,
                "torch is built for CUDA {cuda} and the driver serves up to {driver}; it cannot use the GPU",
                "{python} -m pip install --force-reinstall torch --index-url " + _TORCH_INDEX + "cu126",
            ),
        ),
    ),
    Definition(
        "gpu-users",
        "timing wants the GPU to itself",
        _gpu_users,
        (
            Problem(
                "shared",
                Status.WARN,
                "{count} other processes use the GPU, so timings will be spread",
                "ps -o pid,user,etime,args -p {pids}",
            ),
        ),
    ),
    Definition(
        "gpu-clocks",
        "timing wants steady clocks",
        _gpu_clocks,
        (
            Problem(
                "throttled",
                Status.WARN,
                "the clocks are held down: {reasons}",
                "nvidia-smi --query --display=PERFORMANCE,TEMPERATURE,POWER",
            ),
        ),
    ),
)
