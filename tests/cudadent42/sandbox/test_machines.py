"""Sandboxes as the kernel makes them, on machines of several kinds: what is there holds, what is not there is said."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
import socket
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from cudadent42.model.sandbox import Layer
from cudadent42.sandbox import cgroup, enter, landlock

sys.path.insert(0, str(Path(__file__).parent))

import machines
from machines import LIMITS, MIB, NO_FILTER, NO_LANDLOCK, NO_MOUNT_SETATTR, NO_NAMESPACES, policy, run

PYTHON = sys.executable
ATTEMPTS = machines.ROOT / "tests/adversaries/hostile/attempts.py"
SYSTEM_PYTHON = "/usr/bin/python3"
NOBODY = 65534

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="sandboxes are made of Linux"),
    pytest.mark.usefixtures("fresh_processes"),
]


@pytest.fixture(autouse=True)
def _own_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Path]:
    """A folder with the program of all attempts, and what it attacks."""
    folder = tmp_path / "scene"
    for each in (folder / "program", folder / "home", folder / "run", folder / "cache"):
        each.mkdir(parents=True)
    shutil.copy(ATTEMPTS, folder / "program")
    for name in ("home/key", "home/victim", "run/results.json", "cache/entry"):
        (folder / name).write_text("as it was")
    own = ctypes.create_string_buffer(b"a seed")
    word = uuid.uuid4().hex
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0" + word)
        abstract.listen()
        targets = {
            "home": str(folder / "home"),
            "key": str(folder / "home/key"),
            "run": str(folder / "run"),
            "victim": str(folder / "home/victim"),
            "lab": str(machines.ROOT / "src/cudadent42/__init__.py"),
            "entry": str(folder / "cache/entry"),
            "parent": os.getpid(),
            "address": ctypes.addressof(own),
            "port": tcp.getsockname()[1],
            "socket": str(folder / "nobody listens"),
            "abstract": word,
        }
        (folder / "program/targets.json").write_text(json.dumps(targets))
        yield folder
    kept = [
        (folder / name).read_text() for name in ("home/key", "home/victim", "run/results.json", "cache/entry")
    ]
    assert kept == ["as it was"] * 4


def has_landlock() -> str:
    """Why not, where this machine has none that holds."""
    try:
        version = landlock.abi()
    except OSError as error:
        return f"Landlock: {error.strerror}"
    return "" if version >= landlock.SIGNAL_ABI else f"Landlock has version {version}"


def has_namespaces(scratch: Path) -> str:
    outcome = run(policy(scratch), "/bin/true", accepted=("files", "network", "processes", "limits"))
    wanted = ("USER", "TREE", "NETWORK", "PROCESSES")
    return ", ".join(name for name in wanted if not outcome.layers[name])


def attempts_of(outcome: machines.Outcome) -> dict[str, str]:
    return dict(re.findall(r"attempt (.+?): (.+)", outcome.printed))


@pytest.mark.parametrize(
    ("without", "layers"),
    [
        ({}, {"TREE", "PROCESSES", "NETWORK", "SYSTEM_CALLS"}),
        (NO_LANDLOCK, {"TREE", "PROCESSES", "NETWORK", "SYSTEM_CALLS"}),
        (NO_LANDLOCK | NO_MOUNT_SETATTR, {"TREE", "PROCESSES", "NETWORK", "SYSTEM_CALLS"}),
        (NO_NAMESPACES, {"LANDLOCK_FILES", "LANDLOCK_SIGNALS", "SYSTEM_CALLS"}),
    ],
    ids=["whole", "without Landlock", "without mount_setattr", "container"],
)
def test_every_attempt_is_refused(
    without: dict[int, int], layers: set[str], scratch: Path, scene: Path
) -> None:
    if "TREE" in layers and (lacking := has_namespaces(scratch)):
        pytest.skip(f"this machine lacks {lacking}")
    if without == NO_NAMESPACES and (why_not := has_landlock()):
        pytest.skip(why_not)
    program = scene / "program"
    accepted = ("limits",)  # in a container root's processes may have no bound
    outcome = run(
        policy(scratch, program), PYTHON, str(program / "attempts.py"), without=without, accepted=accepted
    )
    assert outcome.exit_code == 0, outcome.printed
    assert layers <= {name for name, there in outcome.layers.items() if there}
    made = attempts_of(outcome)
    assert len(made) >= 40
    assert {name: result for name, result in made.items() if not result.startswith("refused")} == {}


def test_what_is_taken_from_a_machine_is_reported_as_not_there(scratch: Path) -> None:
    everything = ("files", "network", "processes", "limits")
    taken = NO_NAMESPACES | NO_LANDLOCK | NO_FILTER
    outcome = run(policy(scratch), "/bin/true", without=taken, accepted=everything)
    absent = {name for name, there in outcome.layers.items() if not there}
    assert {"USER", "TREE", "NETWORK", "IPC", "PROCESSES", "LANDLOCK_FILES", "SYSTEM_CALLS"} <= absent
    assert {"files", "network", "processes"} <= set(outcome.missing)
    assert {"ENVIRONMENT", "RLIMITS", "PRIVILEGES"}.isdisjoint(absent)


@pytest.mark.parametrize("accepted", [(), ("network",), ("files", "network", "limits")])
def test_a_machine_with_too_little_is_refused(
    accepted: tuple[str, ...], scratch: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "ran"
    taken = NO_NAMESPACES | NO_LANDLOCK | NO_FILTER
    outcome = run(policy(scratch, tmp_path), "/bin/touch", str(mark), without=taken, accepted=accepted)
    assert outcome.exit_code == 4
    first = next(name for name in ("files", "network", "processes") if name not in accepted)
    assert f"no protection of {first}" in outcome.refused
    assert f"--accept-missing {first}" in outcome.refused
    assert any(os.strerror(code) in outcome.refused for code in (errno.EPERM, errno.ENOSYS))
    assert not mark.exists()


def test_a_user_who_is_not_root_gets_the_same(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("the other tests run as such a user")
    if not os.path.exists(SYSTEM_PYTHON) or not os.access(SYSTEM_PYTHON, os.X_OK):
        pytest.skip(f"no {SYSTEM_PYTHON} for another user")
    # Root's folders for tests are closed to others.
    scratch = Path(f"/tmp/cudadent42-test-{uuid.uuid4().hex}")
    scratch.mkdir()
    try:
        os.chown(scratch, NOBODY, -1)
        confined = policy(scratch)
        count = "import os\nfor n in range(500):\n if os.fork() == 0: import time; time.sleep(600)\n"
        try:
            outcome = run(confined, SYSTEM_PYTHON, "-c", count, python=SYSTEM_PYTHON, user=NOBODY)
        except (PermissionError, AssertionError) as error:
            pytest.skip(f"another user cannot read what is tested: {error}")
        assert outcome.missing == []
        assert outcome.layers["PROCESS_COUNT"]
        assert "BlockingIOError" in outcome.printed
    finally:
        shutil.rmtree(scratch)


FORKS = """
import os, time
for n in range(1, 600):
    try:
        if os.fork() == 0:
            time.sleep(600)
    except OSError as error:
        print("after", n, type(error).__name__, flush=True)
        break
    time.sleep(0.005)
else:
    print("no end", flush=True)
"""


@pytest.mark.parametrize("grouped", [True, False], ids=["control group", "counted"])
def test_processes_are_bounded(grouped: bool, scratch: Path) -> None:
    if lacking := has_namespaces(scratch):
        pytest.skip(f"this machine lacks {lacking}")
    groups = cgroup.make(LIMITS) if grouped else ()
    try:
        if grouped and not groups:
            pytest.skip("no control group may be made here")
        outcome = run(policy(scratch, groups=groups), PYTHON, "-c", FORKS)
        if grouped and not outcome.layers["GROUP_PROCESSES"]:
            pytest.skip("no control group for processes may be made here")
    finally:
        cgroup.remove(groups)
    assert not any(map(os.path.exists, groups))
    assert outcome.layers["PROCESS_COUNT"]
    assert "no end" not in outcome.printed
    killed = outcome.exit_code == -9
    match = re.search(r"after (\d+) BlockingIOError", outcome.printed)
    assert killed or (match is not None and int(match[1]) <= LIMITS.processes), outcome


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("x = bytearray(b'x' * (600 << 20))", "MemoryError"),
        ("import mmap; mmap.mmap(-1, 4 << 30)", "Cannot allocate memory"),
        ("import os; open(os.environ['TMPDIR'] + '/x', 'wb').truncate(1 << 30)", "File too large"),
        ("x = [open('/dev/null') for _ in range(1000)]", "Too many open files"),
    ],
    ids=["memory", "addresses", "a file", "open files"],
)
def test_resources_are_bounded(program: str, says: str, scratch: Path) -> None:
    outcome = run(
        policy(scratch), PYTHON, "-c", program, accepted=("files", "network", "processes", "limits")
    )
    assert outcome.layers["RLIMITS"]
    assert says in outcome.printed
    assert outcome.exit_code == 1


def test_the_scratch_folder_is_bounded_and_leaves_nothing(scratch: Path) -> None:
    if lacking := has_namespaces(scratch):
        pytest.skip(f"this machine lacks {lacking}")
    program = f"""
import os
written = 0
try:
    for n in range(20):
        with open(os.environ["TMPDIR"] + f"/{{n}}", "wb") as file:
            written += file.write(b"x" * (32 * {MIB}))
            file.flush()
except OSError as error:
    print(error.strerror, written)
"""
    outcome = run(policy(scratch), PYTHON, "-c", program)
    assert "No space left on device" in outcome.printed
    assert list(scratch.iterdir()) == []


def test_each_process_has_a_scratch_of_its_own_in_a_container(scratch: Path) -> None:
    """Where it is the machine's: else one candidate would leave kernels for the next."""
    if why_not := has_landlock():
        pytest.skip(why_not)
    program = """
import os, pathlib
cache = pathlib.Path(os.environ["FLASHMOE_CACHE_DIR"])
print("found", sorted(os.listdir(cache)), [p for p in cache.parent.parent.glob("*/cache/*")])
(cache / "left").touch()
"""
    for _ in range(2):
        outcome = run(policy(scratch), PYTHON, "-c", program, without=NO_NAMESPACES, accepted=("limits",))
        assert "found []" in outcome.printed or "PermissionError" in outcome.printed, outcome.printed
    assert len(list(scratch.glob("*/cache/left"))) == 2


def test_a_file_tree_that_fails_late_leaves_nothing_over_the_scratch_folder(scratch: Path) -> None:
    everything = ("files", "network", "processes", "limits")
    if not run(policy(scratch), "/bin/true", accepted=everything).layers["TREE"]:
        pytest.skip("this machine gives no file tree")
    pivot_root = {41 if machines._ARM else 155: errno.EPERM}
    program = "print(open('/proc/self/mounts').read())"
    outcome = run(policy(scratch), PYTHON, "-c", program, without=pivot_root, accepted=everything)
    assert not outcome.layers["TREE"]
    assert "/proc" in outcome.printed
    assert str(scratch) not in outcome.printed


def test_a_user_namespace_that_would_have_no_user_is_not_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unshared, and then its table of users cannot be written: there is no way back."""
    entered = tmp_path / "entered"

    def own_user() -> None:
        entered.write_text(str(os.getpid()))
        raise PermissionError(errno.EPERM, "Operation not permitted")

    def unshare(flag: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("cudadent42.sandbox.namespaces.own_user", own_user)
    monkeypatch.setattr("cudadent42.sandbox.namespaces.unshare", unshare)
    states = enter._namespaces()
    assert [state.layer for state in states if state.there] == []
    assert int(entered.read_text()) != os.getpid()


def test_the_end_of_the_program_is_handed_on(scratch: Path) -> None:
    everything = ("files", "network", "processes", "limits")
    for program, code in (("exit 7", 7), ("kill -9 $$", -9), ("kill -6 $$", -6)):
        assert run(policy(scratch), "/bin/sh", "-c", program, accepted=everything).exit_code == code


def test_no_privilege_is_left(scratch: Path) -> None:
    program = "print(open('/proc/self/status').read())"
    outcome = run(
        policy(scratch), PYTHON, "-c", program, accepted=("files", "network", "processes", "limits")
    )
    fields = dict(re.findall(r"^(\w+):\s+(\S+)", outcome.printed, re.MULTILINE))
    # Without a user namespace, a user who is not root cannot shrink what a program of root's would get; none runs.
    bounding = ("CapBnd",) if outcome.layers["USER"] or os.geteuid() == 0 else ()
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb", *bounding):
        assert int(fields[name], 16) == 0, name
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"


def test_only_layers_that_exist_have_names() -> None:
    assert len({layer.value for layer in Layer}) == len(Layer)
