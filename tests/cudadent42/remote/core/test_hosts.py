"""The file of remotes: what is named there stays there, whoever else writes at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from cudadent42.base.errors import UsageError
from cudadent42.remote.core import hosts, record
from cudadent42.remote.core.address import parse
from cudadent42.remote.core.hosts import Remote
from cudadent42.remote.core.record import JobRecord

ROOT = Path(__file__).resolve().parents[4]
START = "0123456789abcdef0123456789abcdef"

WRITER = """
import sys
from cudadent42.remote.core.address import parse
from cudadent42.remote.core.hosts import Remote, remove, save
me, count = sys.argv[1], int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for number in range(count):
    save(Remote(f"{me}-{number}", parse("ssh://gpu.example.org")))
    save(Remote(f"{me}-gone", parse("ssh://gpu.example.org")))
    remove(f"{me}-gone")
"""


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def test_of_several_that_write_at_once_none_loses_anything() -> None:
    writers, count = 4, 25
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, f"w{number}", str(count)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(writers)
    ]
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in running:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.communicate()[1] or process.returncode for process in running] == [0] * writers
    assert set(hosts.remotes()) == {f"w{who}-{number}" for who in range(writers) for number in range(count)}


def test_an_error_in_the_middle_leaves_the_file_as_it_was() -> None:
    hosts.save(Remote("one", parse("ssh://one.example.org")))
    before = hosts.config_file().read_bytes()
    with pytest.raises(UsageError, match="no remote 'two'"):
        hosts.remove("two")
    with suppress(KeyboardInterrupt), hosts.changing() as registered:
        registered.clear()
        raise KeyboardInterrupt
    assert hosts.config_file().read_bytes() == before
    hosts.remove("one")  # the lock was let go of
    assert hosts.remotes() == {}


def test_the_start_of_a_machine_is_kept_with_it() -> None:
    mine = Remote("c42", parse("ssh://c42"), start=START)
    hosts.save(mine)
    assert hosts.get("c42") == mine
    # Named again, it is the machine whose key is known; elsewhere it is another.
    hosts.save(Remote("c42", parse("ssh://c42"), folder="elsewhere"))
    assert hosts.get("c42").start == START
    hosts.save(Remote("c42", parse("ssh://another.example.org")))
    assert hosts.get("c42").start == ""


@pytest.mark.parametrize("start", ["", "x", START + "\\n", f"{START} -oProxyCommand=id"])
def test_a_start_that_is_none_is_refused(start: str) -> None:
    hosts.save(Remote("c42", parse("ssh://c42")))
    with hosts.config_file().open("a") as file:
        file.write(f'[bad]\naddress = "ssh://c42"\nstart = "{start}"\n')
    with pytest.raises(UsageError, match="expected the id of a start in the journal"):
        hosts.remotes()


def test_an_address_where_a_name_is_expected_is_not_repeated() -> None:
    with pytest.raises(UsageError, match="expected the name of a remote, not an address") as refused:
        hosts.get("ssh://me:secret@host")
    assert "secret" not in str(refused.value)


def test_runs_that_wait_are_named_where_their_machine_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    first, second = (Remote("gpu", parse(f"ssh://{name}.example.org")) for name in ("old", "new"))
    assert record.moved_from(first) == ()
    hosts.save(first)
    for job, fetched in (("waits", False), ("is-back", True)):
        record.save(JobRecord(job, "gpu", "/nowhere", (), "2026-01-01T00:00:00+00:00", fetched=fetched))
    assert record.moved_from(first) == ()
    (line,) = record.moved_from(second)
    assert line == (
        "waits is not back yet; it was started when gpu was ssh://old.example.org, and is looked for at "
        "ssh://new.example.org now"
    )
    assert record.moved_from(Remote("other", second.address)) == ()
