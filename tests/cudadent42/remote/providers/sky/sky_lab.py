"""A stand-in for ``sky`` that does what the real one does to one machine: copies the files, sets the idle limit, runs
the task there, over a real sshd, and writes the alias for ssh. Its words, exit codes and files are those of 0.14.1."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sshd import Server

from cudadent42.remote.core import record
from cudadent42.remote.core.protection import ANY_TERMS
from cudadent42.remote.core.run import Ended, Returned, RunRequest
from cudadent42.remote.flows import pipeline
from cudadent42.remote.providers.sky import provider as sky
from cudadent42.remote.providers.sky.spec import Spec
from cudadent42.runs import starts

STAND_IN = """#!{python}
import json, os, pathlib, shutil, subprocess, sys
folder, config, port, journal = pathlib.Path({folder!r}), pathlib.Path({config!r}), {port}, pathlib.Path({journal!r})
table, aliases = folder / "clusters", folder / "aliases"
clusters = json.loads(table.read_text()) if table.exists() else {{}}

def keep():
    table.write_text(json.dumps(clusters))

def forget_alias(name):
    (aliases / name).unlink(missing_ok=True)

with (folder / ("asked" if sys.argv[1] == "status" else "calls")).open("a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1] in ("down", "stop"):
    name = sys.argv[-1]
    if (folder / f"{{sys.argv[1]}}-fails").exists():
        # As 0.14.1 does it: on standard output, and with exit code 0.
        print(f"Terminating cluster {{name}}...failed. \\nReason: RuntimeError: the cloud says no.")
        print("Cluster(s) failed. See details above.")
        sys.exit(0)
    if name not in clusters:
        print("Cluster(s) not found (tip: see `sky status`).")
    elif sys.argv[1] == "down":
        del clusters[name]
    else:
        clusters[name].update(status="STOPPED", autostop=-1, to_down=False)
    keep()
    forget_alias(name)
    sys.exit(0)
if sys.argv[1] == "status":
    if (folder / "status-fails").exists():
        sys.exit("sky: error: the API server does not answer")
    said = folder / "status"
    around = folder / "around"
    print(around.read_text() if around.exists() else "", end="")
    print(said.read_text() if said.exists() else json.dumps([*clusters.values()], indent=2))
    sys.exit(0)
shutil.copy(journal, folder / "journal-at-launch")
words = dict(word.partition("=")[::2] for word in sys.argv if word.startswith("--"))
cluster = words["--cluster"]
if (folder / "says").exists():
    print((folder / "says").read_text())
    sys.exit(1)
clusters[cluster] = dict(
    name=cluster, status="UP", autostop=-1, to_down=False, cluster_hash="0", nodes=1, workspace="default"
)
keep()
# After SSHConfigHelper of 0.14.1: a file each, included at the top of the configuration, and the checks switched off.
aliases.mkdir(exist_ok=True)
(aliases / cluster).write_text(
    f"Host {{cluster}}\\n  HostName 127.0.0.1\\n  StrictHostKeyChecking no\\n"
    f"  UserKnownHostsFile=/dev/null\\n  GlobalKnownHostsFile=/dev/null\\n  Port {{port}}\\n"
)
include = f"Include {{aliases}}/*\\nMatch all\\n"
if include not in config.read_text():
    config.write_text(include + config.read_text())
task = json.loads(pathlib.Path(sys.argv[-1]).read_text())

def there(command, **options):
    return subprocess.run(["ssh", cluster, command], **options)

for target, source in task["file_mounts"].items():
    path, content = target.removeprefix("~/"), pathlib.Path(source).read_bytes()
    there(f"cd && mkdir -p {{path.rpartition('/')[0]}} && cat >{{path}}", input=content, check=True)
if (folder / "files-fail").exists():
    sys.exit("sky.exceptions.CommandError: Failed to sync files")
clusters[cluster].update(autostop=int(words["--idle-minutes-to-autostop"]), to_down="--down" in words)
keep()
exports = "".join(f"export {{name}}={{value}}\\n" for name, value in task["envs"].items())
run = subprocess.Popen(
    ["ssh", cluster, "bash -s"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
)
run.stdin.write((exports + task["run"]).encode())
run.stdin.close()
for line in run.stdout:
    if not (folder / "silent").exists():
        print(f"(task, pid=1) {{line.decode()}}", end="", flush=True)
code = run.wait()
if (folder / "gone-after").exists():
    del clusters[cluster]
    keep()
    forget_alias(cluster)
if (folder / "killed-after").exists():
    os.kill(os.getpid(), 9)
if (folder / "log-lost").exists():
    sys.exit("the log could not be followed")
sys.exit(100 if code else 0)
"""

BOOTSTRAP = """#!/bin/sh
# In the place of the real one: an environment whose Python keeps what it was called with.
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
mkdir -p "$root/.venv/bin"
cp "$root/python" "$root/.venv/bin/python" && chmod 755 "$root/.venv/bin/python"
case $* in *--no-preflight*) exit 0 ;; esac
echo 'Preflight OK'
"""

PYTHON = """#!/bin/sh
output=$5
mkdir -p "$output"
shift 5
for argument; do printf '%s\\n' "$argument"; done >"$output/arguments"
echo "$CUDADENT42_RATE" >"$output/rate"
echo "measuring" >&2
echo "the result"
"""

SPEC = Spec("c42-l4", "gcp-l4", {"accelerators": "L4:1"}, idle_minutes=7)


@dataclass(frozen=True)
class Sky:
    """What it is to do, and to fail at, are files in its folder."""

    folder: Path
    output: Path
    said: list[str]
    server: Server

    def will(self, *words: str) -> None:
        for word in words:
            (self.folder / word).write_text("")

    def calls(self) -> list[list[str]]:
        """What SkyPilot was told to do; what it was asked is beside."""
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]

    def ended(self, spec: Spec = SPEC, arguments: tuple[str, ...] = ("--suite=small",)) -> Ended:
        def show(line: bytes) -> None:
            self.said.append(line.decode())

        return self.launched(sky.kept_start(spec), spec, arguments, show)

    def launched(
        self,
        kept: str | None,
        spec: Spec = SPEC,
        arguments: tuple[str, ...] = ("--suite=small",),
        show: Callable[[bytes], None] = lambda line: None,
    ) -> Ended:
        """``kept``: what SkyPilot was asked before."""
        request = RunRequest(device="cpu", arguments=arguments, output=self.output)
        return pipeline.carry_out(sky.Wanted(spec, kept), request, ANY_TERMS, self.said.append, show)

    def attach(self) -> Ended:
        return pipeline.attach(record.find(None), ANY_TERMS, self.said.append, lambda chunk: None)

    def run(self, spec: Spec = SPEC, arguments: tuple[str, ...] = ("--suite=small",)) -> Returned:
        return self.ended(spec, arguments).returned


def says(cloud: Sky, status: str | None, around: str = "") -> None:
    """What SkyPilot knows of the machine from now on; None for one that is not there."""
    other = {"name": "somebody-elses", "status": "UP", "autostop": -1, "to_down": False, "owner": None}
    clusters = {"somebody-elses": other}
    if status is not None:
        clusters[SPEC.cluster] = {**other, "name": SPEC.cluster, "status": status}
    (cloud.folder / "clusters").write_text(json.dumps(clusters))
    (cloud.folder / "around").write_text(around)


def only_start() -> starts.MachineStart:
    (start,) = starts.load()
    return start
