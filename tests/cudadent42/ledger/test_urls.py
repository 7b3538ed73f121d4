"""URLs of a ledger that lead nowhere: what is wrong is said, and no password that they hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from ledger_files import MakeRun

from cudadent42 import ledger
from cudadent42.base.errors import LabError
from cudadent42.ledger.database import connect

ROOT = Path(__file__).resolve().parents[3]

READABLE = [
    ("oracel://nowhere/x", "no database is called 'oracel'"),
    ("mysql+pymysql://me:secret@nowhere/x?ssl_key_password=secret", "needs the Python package"),
    ("sqlite://", "names no file"),
    ("postgresql://me:secret@127.0.0.1:1/x", "cannot be used"),
    ("postgresql://me:s%65cret%40%2F@127.0.0.1:1/x", "cannot be used"),
    ("postgresql://me:se/cret@127.0.0.1:1/x", "cannot be used"),
    ("postgresql://127.0.0.1:1/x?password=secret", "cannot be used"),
    ("postgresql://127.0.0.1:1/x?user=me&password=secret&sslpassword=secret", "cannot be used"),
    ("postgresql://127.0.0.1:1/x?user=me;password=secret", "cannot be used"),
    ("postgresql://me@127.0.0.1:1?application_name=lab&p%61ssword=secret", "cannot be used"),
    ("postgresql:///x?host=127.0.0.1&port=1&password=secret", "cannot be used"),
    ("postgresql://[::1]:1/x?password=secret", "cannot be used"),
]
"""A URL, and words of its message."""

UNREADABLE = [
    "://",
    "postgresql://me:secret@127.0.0.1:port/x",
    "postgresql://127.0.0.1:1/x#password=secret",
    "postgresql://127.0.0.1:1/x%3Fpassword%3Dsecret",
    "postgresql://127.0.0.1:1/x;password=secret",
    "postgresql://127.0.0.1;password=secret/x",
    "postgresql://me:top@secret@127.0.0.1:1/x",
    "postgresql://me%3Asecret@127.0.0.1:1/x",
    "postgresql://[::1:secret@/x",
    "postgresql:/me:secret@127.0.0.1/x",
    "postgresql:me:secret@127.0.0.1/x",
    "jdbc:postgresql://127.0.0.1/x?password=secret",
    "me:secret@127.0.0.1/x",
    "host=127.0.0.1 password=secret",
]


@pytest.mark.parametrize(("url", "message"), READABLE, ids=range(len(READABLE)))
def test_a_url_that_leads_nowhere_is_told_without_its_password(
    make_run: MakeRun, tmp_path: Path, url: str, message: str
) -> None:
    trouble = str(ledger.record(make_run(tmp_path / "run"), url))
    assert message in trouble
    assert "cret" not in trouble


@pytest.mark.parametrize("url", UNREADABLE, ids=range(len(UNREADABLE)))
def test_a_url_that_cannot_be_read_is_not_repeated(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for trouble in (str(ledger.record(make_run(tmp_path / "run"), url)), _refusal(url)):
        assert "the ledger's URL cannot be read; expected a path or a URL" in trouble
        assert "secret" not in trouble
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_ledger_that_is_not_there_yet_is_named_by_its_file(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.sqlite?password=secret"
    assert _refusal(url).startswith(f"there is no ledger at {tmp_path}/ledger.sqlite yet;")
    assert _refusal(f"sqlite+pysqlcipher://:secret@/{tmp_path}/x").startswith(
        f"there is no ledger at {tmp_path}/x yet;"
    )


def test_a_file_may_have_any_name(make_run: MakeRun, tmp_path: Path) -> None:
    for name in ("a:b", "a#b;c=d", "me@home"):
        assert ledger.record(make_run(tmp_path / "runs" / name), str(tmp_path / name)) is None
        assert connect(tmp_path / name).name == str(tmp_path / name)


def _refusal(url: str) -> str:
    with pytest.raises(LabError) as refused:
        ledger.open_for_reading(url)
    return str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:{0}@127.0.0.1:1/x?sslpassword={0}&application_name=lab",
        "postgresql://127.0.0.1:1/x#password={0}",
    ],
)
def test_a_password_reaches_neither_the_terminal_nor_a_file(tmp_path: Path, url: str) -> None:
    """Of a whole run: what it says, its folder, its logs and what it remembers of this user."""
    secret = uuid.uuid4().hex  # not a word of the sources, whose changes a manifest holds
    suite = tmp_path / "suite.toml"
    suite.write_text(
        'name = "unit"\ndtypes = ["fp32"]\nrepeats = 8\nwarmup = 1\n'
        'case = [{ name = "one", batch = 1, num_heads = 2, seqlen = 32, head_dim = 64 }]\n'
    )
    folders = {f"XDG_{name}_HOME": str(tmp_path / name.lower()) for name in ("CONFIG", "STATE")}
    arguments = ("--suite", suite, "--device", "cpu", "--output-dir", tmp_path / "run", "--debug", "--json")
    done = subprocess.run(
        [sys.executable, "-m", "cudadent42", "run", *arguments],
        cwd=tmp_path,
        env=os.environ | folders | {"CUDADENT42_LEDGER": url.format(secret), "PYTHONPATH": str(ROOT / "src")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    json.loads(done.stdout)
    assert "run is not in the ledger: the ledger" in done.stderr
    assert secret not in done.stdout + done.stderr
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert tmp_path / "run" / "manifest.json" in kept
    assert not [path for path in kept if secret.encode() in path.read_bytes() or secret in path.name]
