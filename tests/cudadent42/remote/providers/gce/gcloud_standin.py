"""Stands for ``gcloud``: instances in a JSON file, recorded messages in place of failures, ssh relayed to a real sshd.

The folder in $STANDIN has ``state.json``: {"instances": {"PROJECT/ZONE/NAME": description}, "operations": [...],
"failures": [{"verb", "zone", "times", "message", "after", "until"}], "ssh":
{"port", "keys", "known_hosts", "user", "refuse"}}.
Every call is appended to ``calls.jsonl``, with the number of starts that were on record then. What the real tool would
not take as an argument is refused here as well.

Tests call this some thousand times, and most of a call is the start of an interpreter: what only some calls need is
imported there.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
import time
from datetime import datetime, timedelta, timezone

FOLDER = os.environ["STANDIN"]
FLAGS = {
    "compute instances describe": "project zone quiet format",
    "compute instances start": "project zone quiet format",
    "compute instances stop": "project zone quiet format",
    "compute instances delete": "project zone quiet format",
    "compute instances create": "project zone quiet format machine-type image-family image-project boot-disk-size "
    "boot-disk-type accelerator max-run-duration instance-termination-action provisioning-model maintenance-policy "
    "network subnet service-account scopes labels metadata no-restart-on-failure no-service-account no-scopes "
    "no-address",
    "compute images describe-from-family": "project format",
    "compute project-info describe": "project format",
    "compute operations list": "project zones filter sort-by limit format",
    "compute ssh": "project zone quiet strict-host-key-checking tunnel-through-iap internal-ip dry-run command "
    "ssh-flag",
    "compute start-iap-tunnel": "project zone listen-on-stdin verbosity",
    "storage buckets describe": "format",
    "storage rsync": "recursive",
}


def main() -> int:
    on_record = read(f"{os.environ['XDG_STATE_HOME']}/cudadent42/machine-starts.jsonl").count('"requested"')
    with open(f"{FOLDER}/calls.jsonl", "a") as file:
        file.write(json.dumps({"argv": sys.argv[1:], "on_record": on_record}) + "\n")
    verb = next((verb for verb in FLAGS if " ".join(sys.argv[1:]).startswith(f"{verb} ")), None)
    if verb is None:
        return fail(f"ERROR: (gcloud) Invalid choice: {sys.argv[1:3]!r}", 2)
    words = sys.argv[1 + len(verb.split()) :]
    flags = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
    positional = [word for word in words if not word.startswith("--")]
    unknown = [word for word in flags if word not in FLAGS[verb].split()]
    if unknown or any(word.startswith("-") for word in positional):
        return fail(
            f"ERROR: (gcloud.{verb.replace(' ', '.')}) unrecognized arguments: {unknown or positional}", 2
        )
    failure = next_failure(verb, flags)
    if failure is not None:
        if "until" in failure:
            wait_for(f"{FOLDER}/{failure['until']}")
        if failure.get("after"):  # the operation went on although the tool failed
            COMMANDS[verb](positional, flags)
        return fail(failure["message"], failure.get("exit", 1))
    return COMMANDS[verb](positional, flags)


def wait_for(path: str) -> None:
    """Of a test that has failed nobody makes the file; its processes do not stay for ever."""
    for _ in range(45_000):
        if os.path.exists(path):
            return
        time.sleep(0.02)


def read(path: str) -> str:
    """The text there; none where there is no file."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


class State:
    """The state, for one change; calls take turns."""

    def __enter__(self) -> dict:
        self.lock = open(f"{FOLDER}/lock", "w")
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.content = json.loads(read(f"{FOLDER}/state.json"))
        return self.content

    def __exit__(self, *_: object) -> None:
        write(f"{FOLDER}/state.new", json.dumps(self.content, indent=1))
        os.replace(f"{FOLDER}/state.new", f"{FOLDER}/state.json")
        self.lock.close()


def next_failure(verb: str, flags: dict) -> dict | None:
    with State() as state:
        for failure in state["failures"]:
            fits = failure["verb"] == verb and failure.get("zone") in (None, flags.get("zone"))
            if fits and failure.get("times", 1) > 0:
                failure["times"] = failure.get("times", 1) - 1
                return failure
    return None


def fail(message: str, code: int = 1) -> int:
    print(message, file=sys.stderr)
    return code


def show(document: object) -> int:
    print(json.dumps(document))
    return 0


def key_of(positional: list, flags: dict) -> str:
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", positional[0]), positional
    return f"{flags['project']}/{flags['zone']}/{positional[0]}"


def missing(verb: str, key: str) -> int:
    project, zone, name = key.split("/")
    return fail(
        f"ERROR: (gcloud.compute.instances.{verb}) Could not fetch resource:\n"
        f" - The resource 'projects/{project}/zones/{zone}/instances/{name}' was not found"
    )


def describe(positional: list, flags: dict) -> int:
    with State() as state:
        instance = state["instances"].get(key_of(positional, flags))
    return missing("describe", key_of(positional, flags)) if instance is None else show(instance)


def now() -> str:
    """As the provider writes a time: RFC 3339, milliseconds, and the offset of the Pacific coast."""
    return datetime.now(timezone(timedelta(hours=-8))).isoformat(timespec="milliseconds")


def enter(state: dict, verb: str, key: str) -> None:
    """Put an operation of this user's on the provider's list."""
    project, zone, name = key.split("/")
    operation = {
        "operationType": verb,
        "targetLink": f"https://www.googleapis.com/compute/v1/projects/{project}/zones/{zone}/instances/{name}",
        "insertTime": now(),
        "user": "me@example.org",
    }
    state["operations"].insert(0, operation)


def change(verb: str, status: str | None, stamp: str = "") -> object:
    def carry_out(positional: list, flags: dict) -> int:
        key = key_of(positional, flags)
        with State() as state:
            if key not in state["instances"]:
                return missing(verb, key)
            enter(state, verb, key)
            if status is None:
                del state["instances"][key]
            elif state["instances"][key]["status"] != status:
                state["instances"][key] |= {"status": status, stamp: now()}
        return show([])

    return carry_out


def create(positional: list, flags: dict) -> int:
    key = key_of(positional, flags)
    pairs = {
        name: dict(pair.split("=", 1) for pair in flags[name].split(",")) for name in ("labels", "metadata")
    }
    with State() as state:
        assert key not in state["instances"], key
        number = str(9000 + len(state["operations"]) + len(state["instances"]))
        state["instances"][key] = {
            "id": number,
            "name": positional[0],
            "status": "RUNNING",
            "labels": pairs["labels"],
            "metadata": {"items": [{"key": key, "value": value} for key, value in pairs["metadata"].items()]},
            "machineType": f"zones/z/machineTypes/{flags['machine-type']}",
            "scheduling": {"provisioningModel": flags.get("provisioning-model", "STANDARD")},
            "disks": [{"type": "PERSISTENT"}],
            "creationTimestamp": now(),
            "lastStartTimestamp": now(),
        }
        enter(state, "insert", key)
        return show([state["instances"][key]])


def image(positional: list, flags: dict) -> int:
    return show({"family": positional[0], "name": f"{positional[0]}-v1"})


def project(positional: list, flags: dict) -> int:
    with State() as state:
        return show({"commonInstanceMetadata": {"items": state.get("project_metadata", [])}})


def operations(positional: list, flags: dict) -> int:
    with State() as state:
        return show(state["operations"])


def bucket(positional: list, flags: dict) -> int:
    return show({"name": positional[0]})


def rsync(positional: list, flags: dict) -> int:
    import shutil

    source, target = positional
    assert source == ".", source
    shutil.copytree(source, f"{FOLDER}/buckets/{target.removeprefix('gs://')}")
    return 0


def ssh(positional: list, flags: dict) -> int:
    """As the real one builds it: without --strict-host-key-checking it would take the first key that it sees."""
    key = key_of(positional, flags)
    with State() as state:
        instance, settings = state["instances"].get(key), state["ssh"]
        if instance is None:
            return missing("ssh", key)
        if settings.get("refuse", 0) > 0 and "dry-run" not in flags:
            settings["refuse"] -= 1
            return fail(
                "ssh: connect to host 127.0.0.1 port 22: Connection refused\n"
                "ERROR: (gcloud.compute.ssh) [/usr/bin/ssh] exited with return code [255].",
                255,
            )
        alias = f"compute.{instance['id']}"
        published = {item["key"]: item["value"] for item in instance.get("metadata", {}).get("items", [])}
        hosts = settings["known_hosts"]
        before = read(hosts)
        if published.get("enable-guest-attributes") == "TRUE" and alias not in before:
            kind, code = read(f"{settings['keys']}/{settings.get('host_key', 'host')}.pub").split()[:2]
            write(hosts, f"{before}{alias} {kind} {code}\n")
    if instance["status"] != "RUNNING":
        return fail(
            "ERROR: (gcloud.compute.ssh) Instance is not running\n"
            "ERROR: (gcloud.compute.ssh) [/usr/bin/ssh] exited with return code [255].",
            255,
        )
    strict = flags.get("strict-host-key-checking", "no")
    words = ["-i", f"{settings['keys']}/user"]
    for option in (
        "CheckHostIP=no",
        "HashKnownHosts=no",
        f"HostKeyAlias={alias}",
        "IdentitiesOnly=yes",
        f"StrictHostKeyChecking={strict}",
        f"UserKnownHostsFile={hosts}",
    ):
        words += ["-o", option]
    host = "127.0.0.1"
    if "tunnel-through-iap" in flags:
        at = f"--project={flags['project']} --zone={flags['zone']}"
        tunnel = (
            f"python3 /opt/google-cloud-sdk/lib/gcloud.py compute start-iap-tunnel '{positional[0]}' '%p'"
        )
        words += [
            "-o",
            f"ProxyCommand {tunnel} --listen-on-stdin {at} --verbosity=warning",
            "-o",
            "ProxyUseFdpass=no",
        ]
        host = alias
    words.append(f"{settings['user']}@{host}")
    if "dry-run" in flags:
        print(" ".join(f'"{word}"' if " " in word else word for word in ["/usr/bin/ssh", "-t", *words]))
        return 0
    words = [word.replace("python3 /opt/google-cloud-sdk/lib/gcloud.py", "gcloud") for word in words]
    command = ["ssh", "-T", flags["ssh-flag"], *words, "--", flags["command"]]
    code = os.waitstatus_to_exitcode(os.waitpid(os.posix_spawnp("ssh", command, os.environ), 0)[1])
    if code == 255:
        return fail("ERROR: (gcloud.compute.ssh) [/usr/bin/ssh] exited with return code [255].", 255)
    return code


def tunnel(positional: list, flags: dict) -> int:
    import socket
    import threading

    with State() as state:
        port = state["ssh"]["port"]
    with socket.create_connection(("127.0.0.1", port)) as connection:

        def send() -> None:
            while data := os.read(0, 65536):
                connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)

        threading.Thread(target=send, daemon=True).start()
        while data := connection.recv(65536):
            os.write(1, data)
    return 0


COMMANDS = {
    "compute instances describe": describe,
    "compute instances start": change("start", "RUNNING", "lastStartTimestamp"),
    "compute instances stop": change("stop", "TERMINATED", "lastStopTimestamp"),
    "compute instances delete": change("delete", None),
    "compute instances create": create,
    "compute images describe-from-family": image,
    "compute project-info describe": project,
    "compute operations list": operations,
    "compute ssh": ssh,
    "compute start-iap-tunnel": tunnel,
    "storage buckets describe": bucket,
    "storage rsync": rsync,
}

if __name__ == "__main__":
    sys.exit(main())
