"""Random calls and random damage, for minutes or until so many are done, with their seeds and counts in a run folder.

    .venv/bin/python tools/harden.py --minutes 10
    .venv/bin/python tools/harden.py --calls 10000 --entries 10000 --fuzz 2000 --jobs 16 --output-dir FOLDER

What runs: the CPU kernels built with AddressSanitizer and UndefinedBehaviorSanitizer for every instruction set that
this CPU has, under random calls; damaged entries of the compile cache; and every program ``tests/hard/fuzz_*.py``. A
program takes a first seed and a count (the kernels' also the library), uses one seed for each attempt, prints
``{"done": COUNT}`` as its last line and exits with 0 if nothing was found. It prints ``seed N`` to standard error
before each attempt.

Exit code 0 if nothing was found, 1 if something was, 2 if it cannot run. docs/hardening.md says what the parts promise.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HARD = ROOT / "tests" / "hard"
sys.path.insert(0, str(ROOT / "src"))

from flashmoe_science.jit import host  # noqa: E402

CHUNK = {"kernel": 100, "entries": 200, "fuzz": 50}
CHUNK_TIMEOUT_S = 600
SEEDS_APART = 1_000_000
"""Between the first seeds of a program's shares: more than a share's attempts."""
LAB = ("torch", "numpy", "typer", "rich", "jinja2", "sqlalchemy")
SANITIZERS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")

ASAN_OPTIONS = "detect_leaks=0:detect_stack_use_after_return=0"
"""Python leaks. And with g++ 13.3 a store of an AVX-512 register to a function's own array faulted, as where it looks
for use after return its frames may lie on less than the 64 bytes that such a store wants (GCC bug 110027)."""


@dataclass(frozen=True)
class Kernel:
    """A source of kernels/cpu, what it is built with, and the program that calls it."""

    source: str
    program: str
    macros: tuple[str, ...] = ()
    only: host.InstructionSet | None = None
    """The one that the macros are for; None: every one."""
    further_features: Callable[[host.InstructionSet], tuple[str, ...]] | None = None
    """What the code takes besides the instruction set: not built where there is nothing."""


def _by_loops(source: str, program: str, *macros: str) -> Kernel:
    """The code for the matrix unit: the sanitizers do not see what its own instructions read and write."""
    return Kernel(source, program, ("-DEMULATE_AMX=1", *macros), host.InstructionSet.AVX512_BF16)


KERNELS = {
    "attention_forward": Kernel("attention_forward.cpp", "random_attention_calls.py"),
    "attention_forward matrix unit": _by_loops("attention_forward.cpp", "random_attention_calls.py"),
    "attention_backward": Kernel("attention_backward.cpp", "random_backward_calls.py"),
    "attention_backward matrix unit": _by_loops("attention_backward.cpp", "random_backward_calls.py"),
    "attention_varlen": Kernel("attention_varlen.cpp", "random_varlen_calls.py"),
    "attention_varlen matrix unit": _by_loops("attention_varlen.cpp", "random_varlen_calls.py"),
    "paged_append": Kernel("paged_append.cpp", "random_append_calls.py"),
    "moe_forward": Kernel("moe_forward.cpp", "random_moe_calls.py"),
    "moe_forward matrix unit": _by_loops("moe_forward.cpp", "random_moe_calls.py"),
    "moe_forward int8": Kernel("moe_forward.cpp", "random_moe_calls.py", ("-DWEIGHT_BITS=8",)),
    "moe_forward int8 matrix unit": _by_loops("moe_forward.cpp", "random_moe_calls.py", "-DWEIGHT_BITS=8"),
    "moe_forward int4": Kernel("moe_forward.cpp", "random_moe_calls.py", ("-DWEIGHT_BITS=4",)),
    "moe_forward int4 matrix unit": _by_loops("moe_forward.cpp", "random_moe_calls.py", "-DWEIGHT_BITS=4"),
    "moe_forward int4 byte products": Kernel(
        "moe_forward.cpp",
        "random_moe_calls.py",
        ("-DWEIGHT_BITS=4",),
        further_features=host.integer_dot_products,
    ),
    "moe_backward": Kernel("moe_backward.cpp", "random_moe_backward_calls.py"),
    "moe_backward matrix unit": _by_loops("moe_backward.cpp", "random_moe_backward_calls.py"),
    "topk_routing": Kernel("topk_routing.cpp", "random_topk_routing_calls.py"),
    "topk_routing_backward": Kernel("topk_routing_backward.cpp", "random_topk_routing_backward_calls.py"),
}
"""By what is shown. A library's name begins with it, and says to the program what it was built for."""


class CannotRunError(Exception):
    """Something that the machine lacks."""


@dataclass
class Job:
    """One program, and how far it has come."""

    name: str
    program: Path
    chunk: int
    wanted: int
    library: Path | None = None
    preload: str = ""
    first_seed: int = 0
    done: int = 0
    seconds: float = 0.0
    failures: list[dict[str, object]] = field(default_factory=list)

    def advance(self) -> None:
        """Run the next seeds. After a failure, those after the one that failed are next."""
        seed = self.first_seed + self.done + len(self.failures)
        command = [sys.executable, str(self.program), str(seed), str(self.chunk)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "FLASHMOE_QUIET": "1"}
        if self.library is not None:
            command.append(str(self.library))
            environment |= {"LD_PRELOAD": self.preload, "ASAN_OPTIONS": ASAN_OPTIONS}
        start = time.monotonic()
        try:
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=CHUNK_TIMEOUT_S,
            )
            status, out, err = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired as expired:
            status, out = -1, ""
            err = (expired.stderr or b"").decode(
                errors="replace"
            ) + f"\nstill running after {CHUNK_TIMEOUT_S} s"
        self.seconds += time.monotonic() - start
        if status == -signal.SIGINT:  # Ctrl-C reaches programs too: none of their attempts failed
            return
        if status == 0 and out.strip():
            self.done += int(json.loads(out.strip().splitlines()[-1])["done"])
            return
        seeds = [line.split()[1] for line in err.splitlines() if line.startswith("seed ")]
        failed = int(seeds[-1]) if seeds else seed
        self.done += failed - seed
        self.failures.append({"seed": failed, "exit_status": status, "output": err[-4000:]})

    def record(self) -> dict[str, object]:
        return {
            "name": self.name,
            "program": str(self.program.relative_to(ROOT)),
            "first_seed": self.first_seed,
            "done": self.done,
            "seconds": round(self.seconds, 1),
            "failures": self.failures,
        }


@dataclass(frozen=True)
class Target:
    """What a kernel is built for: an instruction set of this CPU, or what stands for one."""

    name: str
    instruction_set: host.InstructionSet
    macros: tuple[str, ...] = ()


def targets() -> list[Target]:
    """The instruction sets of this CPU. Where it has AVX-512 without bf16, AVX-512 computes what that would."""
    able = host.available_instruction_sets()
    wide, of_pairs = host.InstructionSet.AVX512, host.InstructionSet.AVX512_BF16
    emulated = Target(of_pairs.value, wide, ("-DEMULATE_BF16=1",))
    return [
        *(Target(each.value, each) for each in able),
        *([emulated] if wide in able and of_pairs not in able else []),
    ]


def sanitized_libraries(folder: Path, at_once: int) -> tuple[str, list[tuple[str, Kernel, Path]]]:
    """The sanitizer's runtime, and each kernel for each instruction set of this CPU with a name for both.

    `at_once` compilers run at a time.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise CannotRunError("g++ was not found; its sanitizers are what this needs: install it")
    runtime = sanitizer_runtime(compiler)
    flags = [flag for flag in host.COMMON_FLAGS if flag != "-O3"]
    sources = ROOT / "src" / "flashmoe_science" / "kernels" / "cpu"
    builds = [
        (name, kernel, target)
        for name, kernel in KERNELS.items()
        for target in targets()
        if (kernel.only is None or kernel.only.value == target.name)
        and (kernel.further_features is None or kernel.further_features(target.instruction_set))
    ]

    def build(each: tuple[str, Kernel, Target]) -> tuple[str, Kernel, Path]:
        name, kernel, target = each
        library = folder / f"{name}-{target.name}.so"
        taken = target.instruction_set
        further = () if kernel.further_features is None else kernel.further_features(taken)
        macros = (*kernel.macros, *target.macros)
        options = (*flags, *SANITIZERS, *macros, *taken.flags, *host.feature_flags(further))
        _output(compiler, *options, str(sources / kernel.source), "-o", str(library))
        return f"{name} {target.name}", kernel, library

    with ThreadPoolExecutor(at_once) as pool:
        return runtime, list(pool.map(build, builds))


def sanitizer_runtime(compiler: str) -> str:
    """The library of AddressSanitizer, to be loaded before all others."""
    runtime = _output(compiler, "-print-file-name=libasan.so")
    if not Path(runtime).is_absolute():
        raise CannotRunError("g++ has no AddressSanitizer runtime; install libasan")
    return runtime


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise CannotRunError(f"{command[0]} was not found; install it") from error
    if done.returncode:
        raise CannotRunError(f"{command[0]} failed: {done.stderr[-500:].strip()}")
    return done.stdout.strip()


def jobs(folder: Path, arguments: argparse.Namespace) -> list[Job]:
    """All of them. Calls are shared among the kernels and their instruction sets, each at least its share.

    What is no kernel's is cut into as many jobs as run at a time, with seeds far apart.
    """
    runtime, libraries = sanitized_libraries(folder, arguments.jobs)
    share = -(-arguments.calls // len(libraries))
    made = []
    for name, kernel, library in libraries:
        made.append(Job(name, HARD / kernel.program, CHUNK["kernel"], share, library, runtime))
    made += shares(
        "damaged cache entries",
        HARD / "damaged_entries.py",
        CHUNK["entries"],
        arguments.entries,
        arguments.jobs,
    )
    for program in sorted(HARD.glob("fuzz_*.py")):
        made += shares(
            program.stem, program, CHUNK["fuzz"], max(arguments.fuzz, CHUNK["fuzz"]), arguments.jobs
        )
    return [dataclasses.replace(job, first_seed=arguments.seed + job.first_seed) for job in made]


def shares(name: str, program: Path, chunk: int, wanted: int, most: int) -> list[Job]:
    """Jobs that come to `wanted` attempts together: at most `most`, none of less than a chunk."""
    number = max(1, min(most, wanted // chunk))
    if number == 1:
        return [Job(name, program, chunk, wanted)]
    share = -(-wanted // number)
    return [
        Job(f"{name}, share {1 + each}", program, chunk, share, first_seed=each * SEEDS_APART)
        for each in range(number)
    ]


def run(made: Sequence[Job], at_once: int, end: float, report: Callable[[Job], None]) -> None:
    """Bring every job to what is wanted of it and to `end` on the monotonic clock, a chunk of each by turns."""
    waiting, lock = deque(made), threading.Lock()
    stopped = threading.Event()

    def work() -> None:
        while not stopped.is_set():
            with lock:
                if not waiting:
                    return
                job = waiting.popleft()
            if job.done >= job.wanted and time.monotonic() >= end:
                continue
            job.advance()
            with lock:
                waiting.append(job)
                report(job)

    with ThreadPoolExecutor(at_once) as pool:
        try:
            for each in [pool.submit(work) for _ in range(at_once)]:
                each.result()
        finally:
            stopped.set()


def check_packages() -> None:
    """The fuzzers of the lab run in this Python. Raises CannotRunError where it lacks what they import."""
    missing = [name for name in LAB if importlib.util.find_spec(name) is None]
    if missing:
        raise CannotRunError(
            f"{sys.executable} lacks {', '.join(missing)}; use .venv/bin/python, which ./test.sh makes"
        )


def manifest(arguments: argparse.Namespace) -> dict[str, object]:
    git = ["git", "-C", str(ROOT)]
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "revision": _output(*git, "rev-parse", "HEAD"),
        # A copy of a revision that was committed anew has the same trees.
        "source_tree": _output(*git, "rev-parse", "HEAD:src"),
        "changed_source": bool(_output(*git, "status", "--porcelain", "--", "src", "tests/hard", "tools")),
        "machine": platform.machine(),
        "instruction_sets": [each.value for each in host.available_instruction_sets()],
        "python": platform.python_version(),
        "compiler": _output("g++", "--version").splitlines()[0],
        "sanitizers": list(SANITIZERS),
        "minutes": arguments.minutes,
        "seed": arguments.seed,
        "calls": arguments.calls,
        "entries": arguments.entries,
        "fuzz": arguments.fuzz,
        "jobs": arguments.jobs,
    }


def write(folder: Path, about: dict[str, object], made: list[Job]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "provenance.json").write_text(json.dumps(about, indent=1) + "\n")
    results = {
        "kernel_calls": sum(job.done for job in made if job.library is not None),
        "damaged_entries": sum(job.done for job in made if job.program.name == "damaged_entries.py"),
        "failures": sum(len(job.failures) for job in made),
        "jobs": [job.record() for job in made],
    }
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=0.0, help="go on at least this long")
    parser.add_argument(
        "--calls", type=int, default=0, help="go on until at least this many calls of kernels"
    )
    parser.add_argument(
        "--entries", type=int, default=0, help="go on until at least this many damaged entries"
    )
    parser.add_argument(
        "--fuzz",
        type=int,
        default=0,
        help="go on until at least this many attempts of each program fuzz_*.py",
    )
    parser.add_argument("--jobs", type=int, default=1, help="programs that run at a time (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed of every program")
    parser.add_argument("--output-dir", type=Path, default=Path("hardening"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            check_packages()
            about = manifest(arguments)
            made = jobs(Path(folder), arguments)
        except CannotRunError as error:
            print(f"harden: {error}", file=sys.stderr)
            return 2

        def report(job: Job) -> None:
            state = f"{len(job.failures)} FAILED" if job.failures else "0 failed"
            print(f"{job.name}: {job.done} done, {state}", flush=True)
            write(arguments.output_dir, about, made)

        try:
            run(made, arguments.jobs, time.monotonic() + 60 * arguments.minutes, report)
        except KeyboardInterrupt:
            print("interrupted; what was done is kept", file=sys.stderr)
        write(arguments.output_dir, about, made)
    failures = sum(len(job.failures) for job in made)
    print(f"{sum(job.done for job in made)} attempts, {failures} failures; {arguments.output_dir}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
