"""A cloud for tests: a ``gcloud`` that stands for the real one, and a real sshd that is each of its instances."""

from __future__ import annotations

import getpass
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from sshd import Server, serve

from cudadent42.remote.providers.gce import lease, reach, starting
from cudadent42.remote.providers.gce.specification import Specification, load

HERE = Path(__file__).parent
MESSAGES = HERE / "messages"
BENCH = "gce://my-project/us-central1-a/bench"

MINIMAL = {
    "project": "my-project",
    "zones": ["us-central1-a", "us-west1-b"],
    "machine_type": "g2-standard-8",
    "image_family": "common-cu129-ubuntu-2204-nvidia-580",
    "image_project": "deeplearning-platform-release",
    "max_run_minutes": 60,
    "rate": "gcp-l4",
}

FAKE_PYTHON = """#!/bin/sh
# Stands for a Python with the lab there: the module's name and "run" first, as job.sh calls it.
output=$5
mkdir -p "$output"
shift 5
for argument; do printf '%s\\n' "$argument"; done >"$output/arguments"
echo "on standard output"
line=0
while [ "$line" -lt "${LINES_OF_IT:-3}" ]; do
    line=$((line + 1))
    echo "line $line" >&2
    echo "$line" >>"$output/samples.csv"
    sleep "${PAUSE:-0}"
done
exit "${CODE:-0}"
"""

FAKE_SUDO = """#!/bin/sh
# Takes what it is asked for down, and does nothing: the machine is the one that the tests are on.
echo "$*" >>"%s"
[ ! -e "%s.refuses" ]
"""


def there(after: timedelta = timedelta(0)) -> str:
    """Now, or so long after, as the provider writes it."""
    return (datetime.now(timezone(timedelta(hours=-8))) + after).isoformat(timespec="milliseconds")


def message(name: str) -> str:
    """What the real tool was seen to print."""
    return (MESSAGES / f"{name}.txt").read_text().rstrip("\n")


@dataclass(frozen=True)
class Cloud:
    folder: Path
    server: Server

    @property
    def state(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads((self.folder / "state.json").read_text())
        return parsed

    def change(self, **parts: Any) -> None:
        (self.folder / "state.json").write_text(json.dumps({**self.state, **parts}))

    def add(self, address: str = BENCH, **parts: Any) -> None:
        """An instance, stopped where ``parts`` say nothing else."""
        instance = {
            "id": "4711",
            "status": "TERMINATED",
            "metadata": {"items": [{"key": "enable-guest-attributes", "value": "TRUE"}]},
            "machineType": "https://compute/projects/p/zones/z/machineTypes/n1-standard-4",
            "creationTimestamp": "2026-10-01T01:02:03.456-07:00",
            "lastStopTimestamp": "2026-10-02T01:02:03.456-07:00",
            "lastStartTimestamp": there()
            if parts.get("status") == "RUNNING"
            else "2026-10-01T01:02:04.567-07:00",
            **parts,
        }
        self.change(instances={**self.state["instances"], address.removeprefix("gce://"): instance})

    def status(self, address: str = BENCH) -> str | None:
        instance = self.state["instances"].get(address.removeprefix("gce://"))
        return instance and instance["status"]

    def names(self) -> list[str]:
        return list(self.state["instances"])

    def fails(self, verb: str, name: str, zone: str | None = None, times: int = 1, **more: Any) -> None:
        """Let the next calls of ``verb`` fail with a recorded message, or with ``name`` where there is no such.

        ``until`` names what they wait for: ``goes_on`` of the same name.
        """
        text = message(name) if (MESSAGES / f"{name}.txt").exists() else name
        failure = {"verb": verb, "zone": zone, "times": times, "message": text, **more}
        self.change(failures=[*self.state["failures"], failure])

    def goes_on(self, name: str) -> None:
        (self.folder / name).touch()

    def refuses(self, times: int) -> None:
        """Let the next attempts to connect fail, as while a machine boots."""
        self.change(ssh={**self.state["ssh"], "refuse": times})

    def takes_away(self, address: str = BENCH, gone: bool = False, kind: str = "preempted") -> None:
        """The provider takes an instance away in the middle of what it does."""
        key = address.removeprefix("gce://")
        instances = self.state["instances"]
        if gone:
            del instances[key]
        else:
            instances[key] |= {"status": "TERMINATED", "lastStopTimestamp": there()}
        operation = {
            "operationType": f"compute.instances.{kind}",
            "targetLink": _link(key),
            "insertTime": datetime.now(timezone.utc).isoformat(),
            "user": "system",
        }
        self.change(instances=instances, operations=[operation, *self.state["operations"]])
        self.server.cut()
        self.server.process.terminate()
        self.server.process.wait()

    def starts_again(
        self,
        address: str = BENCH,
        after: timedelta = timedelta(0),
        user: str = "colleague@example.org",
        kind: str = "start",
        **parts: Any,
    ) -> None:
        """Somebody stops an instance and starts it again, so long from now; ``kind``: or the provider does."""
        key = address.removeprefix("gce://")
        instances = self.state["instances"]
        stopped, started = there(after), there(after + timedelta(minutes=1))
        instances[key] |= {
            "status": "RUNNING",
            "lastStopTimestamp": stopped,
            "lastStartTimestamp": started,
            **parts,
        }
        operation = {
            "operationType": kind,
            "targetLink": _link(key),
            "insertTime": started,
            "user": user if kind == "start" else "system",
        }
        self.change(instances=instances, operations=[operation, *self.state["operations"]])

    def calls(self, *verb: str) -> list[list[str]]:
        """The arguments of each call that begins with ``verb``."""
        return [call["argv"] for call in self._calls() if call["argv"][: len(verb)] == list(verb)]

    def on_record(self, *verb: str) -> list[int]:
        """How many starts were on record at each call that begins with ``verb``."""
        return [call["on_record"] for call in self._calls() if call["argv"][: len(verb)] == list(verb)]

    def _calls(self) -> list[dict[str, Any]]:
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def sudo(self) -> list[str]:
        """What was asked of ``sudo`` there."""
        path = self.folder / "sudo.log"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line != "-n true"]  # the watchdog's question whether there is sudo

    def python(self, **variables: str) -> str:
        """A Python there that stands for one with the lab."""
        path = self.folder / "fake-python"
        setting = "".join(f"{name}={value}\n" for name, value in variables.items())
        path.write_text(FAKE_PYTHON.replace("#!/bin/sh\n", f"#!/bin/sh\n{setting}"))
        path.chmod(0o755)
        return str(path)


def _link(key: str) -> str:
    project, zone, name = key.split("/")
    return f"https://www.googleapis.com/compute/v1/projects/{project}/zones/{zone}/instances/{name}"


@contextmanager
def open_cloud(keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    folder, there, home = tmp_path / "cloud", tmp_path / "tools-there", tmp_path / "home-here"
    for made in (folder, there, home / ".ssh"):
        made.mkdir(parents=True)
    write_tool(there / "sudo", FAKE_SUDO % (folder / "sudo.log", folder / "sudo"))
    for name in ("crontab", "shutdown", "poweroff", "systemctl"):
        write_tool(there / name, f'#!/bin/sh\necho "{name} $*" >>"{folder}/unasked.log"\nexit 1\n')
    with serve(keys, tmp_path, monkeypatch, there) as server:
        opened = Cloud(folder, server)
        (folder / "state.json").write_text("{}")
        opened.change(
            instances={},
            operations=[],
            failures=[],
            ssh={
                "port": server.port,
                "keys": str(keys),
                "known_hosts": str(home / ".ssh/google_compute_known_hosts"),
                "user": getpass.getuser(),
            },
        )
        write_tool(
            tmp_path / "tools/gcloud",
            # It needs nothing of the environment's packages.
            f'#!/bin/sh\nexec "{sys.executable}" -I -S "{HERE}/gcloud_standin.py" "$@"\n',
        )
        # An instance's sshd is on the usual port; the tests' is not. Nothing of a user's own hosts is trusted.
        (tmp_path / "ssh_config").write_text(
            f"Port {server.port}\nIdentitiesOnly yes\nUserKnownHostsFile /dev/null\n"
        )
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.setenv("STANDIN", str(folder))
        for module, name in (
            (reach, "_PAUSE_S"),
            (starting, "_DRIVER_PAUSE_S"),
            (lease, "_STOPPING_PAUSE_S"),
        ):
            monkeypatch.setattr(module, name, 0.05)
        _check_sudo(tmp_path, keys, server, there)
        yield opened


def write_tool(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def _check_sudo(tmp_path: Path, keys: Path, server: Server, there: Path) -> None:
    """Who comes in must not find a real sudo: policies ask it for a shutdown, and this machine is not rented."""
    (tmp_path / "first_hosts").write_text(f"compute.0 {(keys / 'host.pub').read_text()}")
    done = subprocess.run(
        [
            *("ssh", "-i", str(keys / "user"), "-o", "HostKeyAlias=compute.0"),
            *("-o", f"UserKnownHostsFile={tmp_path}/first_hosts", "127.0.0.1", "command -v sudo"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.stdout.strip() != str(there / "sudo"):
        pytest.skip(f"sshd here does not take a PATH for who comes in: {done.stdout}{done.stderr}")


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{key}" = {_toml(item)}' for key, item in value.items()) + "}"
    if isinstance(value, str):
        return (
            '"' + "".join(f"\\u{ord(c):04x}" if c in '"\\' or not c.isprintable() else c for c in value) + '"'
        )
    return str(value)


def read_specification(folder: Path, **changes: object) -> Specification:
    """A specification with ``changes``; None leaves a key out."""
    path = folder / "machine.toml"
    values = {key: value for key, value in {**MINIMAL, **changes}.items() if value is not None}
    path.write_text("".join(f"{key} = {_toml(value)}\n" for key, value in values.items()))
    return load(path)
