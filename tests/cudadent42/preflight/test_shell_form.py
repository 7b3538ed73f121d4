"""The shell form of preflight: current, the same words as the Python form, and each failure of the record caught."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cudadent42.model.records import Status
from cudadent42.preflight.definitions import Definition, Problem, template_fields
from cudadent42.preflight.shell_form import COMMAND, emit
from cudadent42.preflight.table import DEFINITIONS

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tools" / "preflight.sh"
PROBES = ROOT / "src/cudadent42/preflight/shell"
TOOLS = [
    "awk",
    "cat",
    "cut",
    "df",
    "dirname",
    "env",
    "find",
    "grep",
    "head",
    "id",
    "ls",
    "nproc",
    "readlink",
    "rm",
    "mktemp",
    "sed",
    "sh",
    "timeout",
    "tr",
    "uname",
    "wc",
]


def run(
    path: Path, *arguments: str, script: Path = SCRIPT, **changes: str
) -> subprocess.CompletedProcess[str]:
    """The script with nothing on PATH but ``path``."""
    shell = shutil.which("dash") or "/bin/sh"
    environment = {"PATH": str(path), "HOME": str(path.parent), "NO_COLOR": "1"} | changes
    return subprocess.run([shell, str(script), *arguments], env=environment, capture_output=True, text=True)


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A PATH with a system's basic tools: no Python, no compiler, no nvcc, no driver."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS:
        (folder / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The script in a checkout of its own, without a .venv, in a folder whose name has a space."""
    folder = tmp_path / "a checkout" / "tools"
    folder.mkdir(parents=True)
    return Path(shutil.copy(SCRIPT, folder / SCRIPT.name))


def add(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def line(output: str, check: str) -> str:
    """The lines of one check."""
    match = re.search(rf"^(?:ok|warn|fail|skip) +{re.escape(check)} .*(?:\n {{8,}}.*)*", output, re.MULTILINE)
    assert match, output
    return match[0]


def test_the_script_in_the_repository_is_current() -> None:
    assert SCRIPT.read_text() == emit(), f"stale: {COMMAND} > tools/preflight.sh"


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.name)
def test_a_probe_names_problems_and_values_that_exist(definition: Definition) -> None:
    text = (PROBES / f"{definition.name}.sh").read_text()
    problems = {problem.key: problem for problem in definition.problems}
    named = set(re.findall(r"\bproblem=([\w-]+)", text))
    assert named <= set(problems)
    for key in named:
        for field in template_fields(problems[key]):
            assert f"v_{field}" in text or field == "python", (key, field)


def test_every_text_survives_the_shells_quoting(tmp_path: Path) -> None:
    from cudadent42.preflight import shell_form

    hostile = Problem(
        "x", Status.FAIL, 'a "quote" $(touch bad) `touch bad` \\ {value}', "export PATH={value}:$PATH"
    )
    script = (
        f"v_value='1 2'\ncause={shell_form._quoted(hostile.cause)}\nfix={shell_form._quoted(hostile.fix)}\n"
    )
    script += 'printf \'%s\\n\' "$cause" "$fix"\n'
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == 'a "quote" $(touch bad) `touch bad` \\ 1 2\nexport PATH=1 2:$PATH\n'
    assert not (tmp_path / "bad").exists()


def test_this_machine_is_ready_by_both_forms(bare: Path) -> None:
    (bare / "python3").symlink_to(sys.executable)
    compiler = shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler on PATH")
    done = run(bare, CXX=compiler)
    assert "\nPreflight OK\n" in done.stdout + "\n" or "packages" in done.stdout
    assert re.search(r"^torch=\S+ cuda=\S+ dev=.+$", done.stdout, re.MULTILINE)


def test_no_python(bare: Path, project: Path) -> None:
    done = run(bare, script=project)
    assert done.returncode == 4
    assert "sudo apt-get install python3 python3-venv" in line(done.stdout, "python")
    assert "skip" in line(done.stdout, "torch")
    assert done.stdout.splitlines()[-1].startswith("Preflight failed: python")


def test_an_old_python(bare: Path, project: Path) -> None:
    add(bare, "python3", 'case "$*" in *version_info*) exit 1 ;; *platform*) echo 3.8.10 ;; esac')
    done = run(bare, script=project)
    assert done.returncode == 4
    assert "Python 3.8.10 is too old" in line(done.stdout, "python")


def test_no_pip_and_no_torch_and_no_network(bare: Path, project: Path) -> None:
    """The cloud image of the record: a Python, and nothing with it."""
    # -S -I: no site-packages, so neither torch nor pip; ensurepip is taken away as Debian does.
    add(
        bare,
        "python3",
        f'case "$*" in *ensurepip*|*"import pip"*) exit 1 ;; esac\nexec "{sys.executable}" -S -I "$@"',
    )
    done = run(bare, script=project, PIP_INDEX_URL="http://127.0.0.1:9/simple")
    assert done.returncode == 4
    assert "fix: tools/bootstrap.sh" in line(done.stdout, "pip")
    assert line(done.stdout, "torch").startswith("fail")
    assert "cannot be reached" in line(done.stdout, "network")
    assert done.stdout.splitlines()[-1] == "Preflight failed: pip, packages, torch, network, compiler"


def test_a_fix_can_be_copied_wherever_python_is(bare: Path, tmp_path: Path) -> None:
    """Both forms name the Python that lacks something, as one word for a shell."""
    root = tmp_path / "it's a $(touch bad) checkout"
    for folder in ("tools", ".venv/bin"):
        (root / folder).mkdir(parents=True)
    python = root / ".venv/bin/python"
    python.symlink_to(sys.executable)
    script = Path(shutil.copy(SCRIPT, root / "tools"))
    in_shell = run(bare, script=script, PYTHONNOUSERSITE="1", PIP_INDEX_URL="http://127.0.0.1:9/simple")
    in_python = subprocess.run(
        [str(python), "-S", "-m", "cudadent42", "preflight"],
        env=os.environ
        | {"PYTHONPATH": str(ROOT / "src"), "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    for told in (in_shell.stdout, in_python.stdout):
        fix = line(told, "torch").partition("fix: ")[2].splitlines()[0]
        assert shlex.split(fix) == [str(python), "-m", "pip", "install", "torch>=2.10"]


def test_cuda_off_the_path_and_wrong_headers(bare: Path, project: Path, tmp_path: Path) -> None:
    toolkit = tmp_path / "cuda-12.8"
    (toolkit / "bin").mkdir(parents=True)
    add(toolkit / "bin", "nvcc", 'echo "Cuda compilation tools, release 12.8, V12.8.61"')
    stale = tmp_path / "stale"
    stale.mkdir()
    (stale / "cuda.h").write_text("#define CUDA_VERSION 11050\n")
    done = run(bare, "--device", "cuda", script=project, CUDA_HOME=str(toolkit), CPATH=str(stale))
    assert f"fix: export PATH={toolkit}/bin:$PATH" in line(done.stdout, "nvcc")
    headers = line(done.stdout, "cuda-headers")
    assert headers.startswith("warn")
    assert "of CUDA 11.5 and nvcc of 12.8" in headers


def test_a_gpu_that_was_asked_for_and_is_not_there(bare: Path, project: Path) -> None:
    if list(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has a GPU")
    done = run(bare, "--device", "cuda", script=project)
    assert "this machine has no NVIDIA GPU" in line(done.stdout, "driver")
    assert "driver" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("built_for", "said", "last"),
    [
        ("None", "torch 2.11.0 is a CPU build", "torch=2.11.0 cuda=none dev=NVIDIA L4"),
        ("'13.0'", "serves up to 12.8", "torch=2.11.0 cuda=13.0 dev=NVIDIA L4"),
        ("'12.9'", "", "torch=2.11.0 cuda=12.9 dev=NVIDIA L4"),
    ],
)
def test_torch_for_another_cuda_than_the_driver(
    bare: Path, project: Path, tmp_path: Path, built_for: str, said: str, last: str
) -> None:
    """With a GPU on the bus, a driver and a torch that are made here; PyPI's wheels have no +cu130 in their name."""
    torch, driver, bus = tmp_path / "site/torch", tmp_path / "driver", tmp_path / "bus"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (torch / "version.py").write_text(f"__version__ = '2.11.0'\ncuda = {built_for}\n")
    driver.mkdir()
    (driver / "libcuda.so.1").touch()
    (bus / "gpu").mkdir(parents=True)
    (bus / "gpu/vendor").write_text("0x10de\n")
    (bus / "gpu/class").write_text("0x030200\n")
    add(bare, "python3", f'PYTHONPATH="{torch.parent}" exec "{sys.executable}" "$@"')
    answers = (
        '*compute_cap*) echo "NVIDIA L4, 8.9" ;; *driver_version*) echo 570.86 ;; *name*) echo "NVIDIA L4" ;;'
    )
    add(bare, "nvidia-smi", f'case "$*" in {answers} "") echo "CUDA Version: 12.8" ;; esac')
    command = f"mount --bind '{bus}' /sys/bus/pci/devices && PATH='{bare}' exec sh '{project}' --device cuda"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver), "NO_COLOR": "1"}
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command], env=environment, capture_output=True, text=True
    )
    if not done.stdout:
        pytest.skip(f"no mounts here: {done.stderr.strip()}")
    shown = line(done.stdout, "torch-cuda")
    assert shown.startswith("fail" if said else "ok")
    assert said in shown
    assert last in done.stdout.splitlines()


def test_a_cache_that_cannot_be_written(bare: Path, project: Path) -> None:
    done = run(bare, script=project, FLASHMOE_CACHE_DIR="/proc/none/cache")
    assert "cannot write to /proc" in line(done.stdout, "cache")
    assert "export FLASHMOE_CACHE_DIR=$HOME/flashmoe-cache" in line(done.stdout, "cache")


def test_a_folder_that_cannot_be_written(bare: Path, tmp_path: Path) -> None:
    """On a file system mounted read-only, which stops root too."""
    mounted = tmp_path / "read-only"
    (mounted / "tools").mkdir(parents=True)
    command = f"mount -t tmpfs none {mounted} && mkdir {mounted}/tools && cp {SCRIPT} {mounted}/tools/ && "
    command += f"mount -o remount,ro {mounted} && PATH={bare} exec sh {mounted}/tools/preflight.sh"
    done = subprocess.run(["unshare", "-m", "sh", "-c", command], capture_output=True, text=True)
    if not done.stdout:
        pytest.skip(f"no mounts here: {done.stderr.strip()}")
    assert "cannot be written, and the run folder goes there" in line(done.stdout, "disk")


def test_a_full_disk(bare: Path, tmp_path: Path) -> None:
    mounted = tmp_path / "small"
    mounted.mkdir()
    command = f"mount -t tmpfs -o size=1m none {mounted} && mkdir {mounted}/tools && cp {SCRIPT} {mounted}/tools/ && "
    command += f"PATH={bare} exec sh {mounted}/tools/preflight.sh"
    done = subprocess.run(["unshare", "-m", "sh", "-c", command], capture_output=True, text=True)
    if not done.stdout:
        pytest.skip(f"no mounts here: {done.stderr.strip()}")
    assert "less than 100 MB is free" in line(done.stdout, "disk")


@pytest.mark.parametrize(
    "arguments", [("--device", "tpu"), ("--device", "cuda:x"), ("--fast",), ("--device",)]
)
def test_wrong_usage(bare: Path, arguments: tuple[str, ...]) -> None:
    done = run(bare, *arguments)
    assert done.returncode == 2
    assert "expected" in done.stderr


def test_it_changes_nothing(bare: Path, project: Path) -> None:
    before = sorted(os.listdir(project.parent.parent)), sorted(os.listdir(bare.parent))
    run(bare, script=project)
    assert (sorted(os.listdir(project.parent.parent)), sorted(os.listdir(bare.parent))) == before
