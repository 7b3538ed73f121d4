#!/usr/bin/env python3
"""sbatch, squeue and scancel as their manuals describe them, on one machine: called by one of these names.

``sbatch --parsable --array=0-N`` reads a script from standard input, prints the job's number, and starts each element
as a process with ``SLURM_ARRAY_TASK_ID``; ``--output`` has ``%A`` and ``%a``. ``squeue`` prints a line for each element
that runs, and knows a job that has ended for no longer than Slurm does. ``scancel`` ends elements with SIGTERM.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

STATE = Path(os.environ["SLURM_STAND_IN"])


def alive(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def sbatch(words: list[str]) -> int:
    options = dict(word.removeprefix("--").partition("=")[::2] for word in words)
    unknown = options.keys() - {"parsable", "array", "partition", "job-name", "output", "requeue", "gres"}
    if unknown:
        print(f"sbatch: unrecognized option '--{unknown.pop()}'", file=sys.stderr)
        return 1
    if options["partition"] != "debug":
        print(
            "sbatch: error: invalid partition specified: " + options["partition"] + "\n"
            "sbatch: error: Batch job submission failed: Invalid partition name specified",
            file=sys.stderr,
        )
        return 1
    script = sys.stdin.read()
    if not script.startswith("#!"):
        print("sbatch: error: This does not look like a batch script.", file=sys.stderr)
        return 1
    job = 41 + len(list(STATE.glob("*.json")))
    first, last = map(int, options["array"].split("-"))
    (STATE / f"{job}.sh").write_text(script)
    elements = {}
    for element in range(first, last + 1):
        with open(options["output"].replace("%A", str(job)).replace("%a", str(element)), "wb") as log:
            process = subprocess.Popen(
                ["/bin/sh", str(STATE / f"{job}.sh")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "SLURM_ARRAY_JOB_ID": str(job), "SLURM_ARRAY_TASK_ID": str(element)},
            )
        elements[element] = process.pid
    (STATE / f"{job}.json").write_text(json.dumps(elements))
    print(job)
    return 0


def elements_of(jobs: list[str]) -> list[tuple[str, str, int]]:
    return [
        (job, element, number)
        for job in jobs
        for element, number in json.loads((STATE / f"{job}.json").read_text()).items()
        if alive(number)
    ]


def squeue(words: list[str]) -> int:
    jobs = words[words.index("--jobs") + 1].split(",")
    running = elements_of(jobs)
    if not running:
        print("slurm_load_jobs error: Invalid job id specified", file=sys.stderr)
        return 1
    for job, element, _ in running:
        print(f"{job}_{element} debug cudadent42 me R 0:01 1 here")
    return 0


def scancel(words: list[str]) -> int:
    for _, _, number in elements_of(words):
        os.killpg(number, signal.SIGTERM)
    return 0


if __name__ == "__main__":
    sys.exit({"sbatch": sbatch, "squeue": squeue, "scancel": scancel}[Path(sys.argv[0]).name](sys.argv[1:]))
