"""A ledger that is made anew from run folders, and one whose making is cut short."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ledger_files import SOURCE, MakeRun, dump, rows

from cudadent42 import ledger
from cudadent42.base.errors import UsageError
from cudadent42.ledger import queries, store
from cudadent42.ledger.database import connect
from cudadent42.runs import run_folder


def test_a_rebuild_equals_recording(make_run: MakeRun, tmp_path: Path, file: Path) -> None:
    folders = [make_run(tmp_path / "runs" / name, seed=i) for i, name in enumerate("abc")]
    for folder in folders:
        ledger.record(folder, str(file))
    other = tmp_path / "other.sqlite"
    done = ledger.rebuild(str(other), [tmp_path / "runs"])
    assert (done.runs, done.samples, done.problems, done.forgotten) == (3, 60, (), 0)
    assert dump(file) == dump(other)


def test_a_rebuild_forgets_what_is_gone_and_finds_what_moved(
    make_run: MakeRun, tmp_path: Path, file: Path
) -> None:
    kept, gone, moved = (make_run(tmp_path / "runs" / name, seed=i) for i, name in enumerate("abc"))
    outside = make_run(tmp_path / "elsewhere", seed=9)
    for folder in (kept, gone, moved, outside):
        ledger.record(folder, str(file))
    shutil.rmtree(gone)
    moved.rename(tmp_path / "runs" / "d")
    done = ledger.rebuild(str(file), [tmp_path / "runs"])
    assert (done.runs, done.forgotten) == (3, 1)
    lines = connect(file).read(lambda connection: queries.list_runs(connection, 10))
    assert {Path(line.path).name for line in lines} == {"a", "d", "elsewhere"}


def test_what_cannot_be_read_is_left_out_and_named(make_run: MakeRun, tmp_path: Path, file: Path) -> None:
    root = tmp_path / "runs"
    make_run(root / "good")
    newer, torn, wrong = (
        make_run(root / name, seed=i) for i, name in enumerate(("newer", "torn", "wrong"), 1)
    )
    manifest = json.loads((newer / run_folder.MANIFEST).read_text())
    (newer / run_folder.MANIFEST).write_text(json.dumps(manifest | {"schema_version": 99}))
    (torn / run_folder.MANIFEST).write_text('{"schema_version": 1, ')
    (wrong / run_folder.SAMPLES).write_text("a,b\n1,2\n")
    done = ledger.rebuild(str(file), [root])
    assert done.runs == 1
    assert len(done.problems) == 3
    assert any("newer cudadent42" in problem for problem in done.problems)
    assert any("lacks the column" in problem for problem in done.problems)


def test_a_folder_whose_name_is_no_text_is_left_out_and_named(
    make_run: MakeRun, tmp_path: Path, file: Path
) -> None:
    folder = make_run(tmp_path / "runs" / os.fsdecode(b"caf\xe9"))
    make_run(tmp_path / "runs" / "b", seed=1)
    assert "rename the folder" in str(ledger.record(folder, str(file)))
    done = ledger.rebuild(str(file), [tmp_path / "runs"])
    assert done.runs == 1
    assert "is no UTF-8" in done.problems[0]


def test_without_roots_the_usual_folders_are_read(
    make_run: MakeRun, tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "a")
    make_run(tmp_path / "sessions" / "s" / "runs" / "b", seed=1)
    make_run(tmp_path / "other" / "c", seed=2)
    assert ledger.rebuild(str(file)).runs == 2
    with pytest.raises(UsageError, match="is not a folder"):
        ledger.rebuild(str(file), [tmp_path / "nowhere"])


# ---------------------------------------------------------------- killed, and a full disk

REBUILD = """
import sys
from pathlib import Path
from cudadent42 import ledger
ledger.rebuild(sys.argv[1], [Path(sys.argv[2])])
"""


@pytest.mark.parametrize("kills", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_kill_at_any_moment_of_a_rebuild(make_run: MakeRun, tmp_path: Path, file: Path, kills: int) -> None:
    """After each kill the ledger is whole, holds only whole runs, and is completed by the next rebuild."""
    count = 60
    for i in range(count):
        make_run(tmp_path / "runs" / str(i), seed=i, latencies=(1.0, 2.0))
    environment = os.environ | {"PYTHONPATH": SOURCE}
    command = [sys.executable, "-c", REBUILD, str(file), str(tmp_path / "runs")]
    begun = time.monotonic()
    subprocess.run(command, env=environment, check=True)
    whole = time.monotonic() - begun
    expected = dump(file)
    for number in range(kills):
        if number % 2:
            for side in ("", "-wal", "-shm"):
                file.with_name(file.name + side).unlink(missing_ok=True)
        process = subprocess.Popen(command, env=environment)
        time.sleep(whole * (0.3 + 0.72 * number / kills))
        process.send_signal(signal.SIGKILL)
        process.wait()
        if file.exists() and not connect(file).is_empty():
            opened = connect(file)
            opened.check()
            contents = opened.read(queries.contents)
            assert contents.rows["timings"] == 4 * contents.rows["runs"]
            assert contents.rows["comparisons"] == 3 * contents.rows["runs"]
    done = ledger.rebuild(str(file), [tmp_path / "runs"])
    assert done.moved_aside is None
    assert connect(file).read(queries.contents).unfinished_rebuild is None
    assert [line for line in dump(file) if "rebuilding" not in line] == expected


def test_an_unfinished_rebuild_is_known(
    make_run: MakeRun, tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "runs" / "a")

    def die(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.rebuild(file, [tmp_path / "runs"], die)
    assert connect(file).read(queries.contents).unfinished_rebuild is not None


def test_a_full_disk_is_told_and_harms_nothing(make_run: MakeRun, tmp_path: Path, file: Path) -> None:
    """A file-size limit stands for the full disk."""
    first, second = (make_run(tmp_path / name, seed=i) for i, name in enumerate("ab"))
    ledger.record(first, str(file))
    script = f"""
import resource, signal
from pathlib import Path
from cudadent42 import ledger
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))
print(ledger.record(Path({str(second)!r}), {str(file)!r}))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "is not in the ledger" in done.stdout
    connect(file).check()
    assert rows(file)["runs"] == 1
    assert ledger.record(second, str(file)) is None
    assert rows(file)["runs"] == 2
