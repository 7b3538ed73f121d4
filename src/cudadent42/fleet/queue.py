"""Tasks in a shared folder, claimed by atomic rename: nothing listens, and no lock of a network file system is trusted.

    workers/NAME.json        who is there; the file is touched as a sign of life
    offered/NUMBER@KEY@WORKER.json   a task that may be claimed; WORKER is empty where anybody may
    claimed/KEY@NAME.json    the same file, after its rename
    returned/KEY.json        what came of it
    admitted/NAME            may claim
    dismissed/NAME           is to end after its task
    coordinator              is touched while somebody hands out tasks
    closed                   all are to end

Clocks of hosts are never compared. Who waits for a sign of life looks whether the time of a file changes.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from cudadent42.base.errors import UsageError
from cudadent42.base.files import read_record, write_json, write_text
from cudadent42.fleet.task import SCHEMA_VERSION, Returned, Task, Worker

_FOLDERS = ("workers", "offered", "claimed", "returned", "admitted", "dismissed")
_CLOSED = "closed"
_COORDINATOR = "coordinator"


class Queue:
    """One side of the folder; which side, its methods say."""

    def __init__(self, folder: Path) -> None:
        """Raises UsageError where the folder cannot be made."""
        self.folder = folder
        self._offers = 0
        self._token = secrets.token_hex(16)
        self._told: set[Path] = set()
        try:
            for name in _FOLDERS:
                (folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make the fleet's folder {folder}: {error.strerror}") from error

    # ---------------------------------------------------------------- whoever hands out tasks

    def open(self) -> None:
        """Begin to hand out. What was offered before is taken back; what was claimed goes on."""
        (self.folder / _CLOSED).unlink(missing_ok=True)
        for name in ("offered", "admitted", "dismissed"):
            for path in _files(self.folder / name):
                path.unlink(missing_ok=True)
        write_text(self.folder / _COORDINATOR, self._token)

    def touch(self) -> None:
        """A sign of life. Raises UsageError where somebody else hands out the tasks now."""
        if not self._is_ours():
            raise UsageError(f"another process hands out the tasks of {self.folder} now; this one ends")
        os.utime(self.folder / _COORDINATOR)

    def _is_ours(self) -> bool:
        path = self.folder / _COORDINATOR
        return path.is_file() and path.read_text(encoding="utf-8") == self._token

    def offer(self, task: Task) -> None:
        self._offers += 1
        name = f"{self._offers:08}@{task.key}@{task.worker}.json"
        write_json(self.folder / "offered" / name, task)

    def withdraw(self, key: str) -> bool:
        for path in _files(self.folder / "offered"):
            if _parts(path, 3)[1:2] == [key]:
                return _moved(path, self.folder / "dismissed" / path.name)
        return False

    def workers(self) -> dict[str, int]:
        """By name, the time of the last sign of life, which only its host can read."""
        times = {}
        for path in _files(self.folder / "workers"):
            with suppress(FileNotFoundError):
                times[path.stem] = path.stat().st_mtime_ns
        return times

    def worker(self, name: str) -> Worker | None:
        return read_record(Worker, self.folder / "workers" / f"{name}.json", SCHEMA_VERSION)

    def forget(self, name: str) -> None:
        """A worker that is gone."""
        (self.folder / "workers" / f"{name}.json").unlink(missing_ok=True)

    def claims(self) -> dict[str, str]:
        """By key, who has claimed it and not returned."""
        claims = (_parts(path, 2) for path in _files(self.folder / "claimed"))
        return {each[0]: each[1] for each in claims if each}

    def returned(self) -> Iterator[Returned]:
        """Each once by this process. The files stay until `acknowledge`."""
        for path in sorted(_files(self.folder / "returned")):
            if path in self._told:
                continue
            try:
                record = read_record(Returned, path, SCHEMA_VERSION)
            except UsageError as error:
                record = Returned(path.stem, "", 0.0, error=str(error))
            if record is not None:
                self._told.add(path)
                yield record

    def acknowledge(self) -> None:
        """What was told of results is on record: the files may go."""
        for path in self._told:
            path.unlink(missing_ok=True)
        self._told.clear()

    def waiting(self) -> dict[str, str]:
        """By key, whose results nobody has read yet."""
        records = []
        for path in _files(self.folder / "returned"):
            with suppress(UsageError):  # told by `returned`
                records.append(read_record(Returned, path, SCHEMA_VERSION))
        return {record.key: record.worker for record in records if record is not None}

    def admit(self, name: str) -> None:
        (self.folder / "admitted" / name).touch()

    def dismiss(self, name: str) -> None:
        (self.folder / "dismissed" / name).touch()

    def close(self) -> None:
        """All workers are to end, but where somebody else hands out tasks by now: then they are theirs."""
        if self._is_ours():
            (self.folder / _CLOSED).touch()

    # ---------------------------------------------------------------- workers

    def enter(self, worker: Worker) -> None:
        write_json(self.folder / "workers" / f"{worker.name}.json", worker)

    def leave(self, name: str) -> None:
        self.forget(name)

    def show(self, worker: Worker) -> None:
        """A sign of life. One that was taken for gone is there again."""
        try:
            os.utime(self.folder / "workers" / f"{worker.name}.json")
        except FileNotFoundError:
            self.enter(worker)

    def claim(self, name: str) -> Task | None:
        """A task that is now this worker's alone."""
        offered = self.folder / "offered"
        for file in sorted(_names(offered)):
            parts = _parts(Path(file), 3)
            if not parts or parts[2] not in ("", name):
                continue
            key = parts[1]
            mine = self.folder / "claimed" / f"{key}@{name}.json"
            if _moved(offered / file, mine):
                return read_record(Task, mine, SCHEMA_VERSION)
        return None

    def give_back(self, record: Returned) -> None:
        """The result is there before the claim is gone."""
        write_json(self.folder / "returned" / f"{record.key}.json", record)
        (self.folder / "claimed" / f"{record.key}@{record.worker}.json").unlink(missing_ok=True)

    def is_admitted(self, name: str) -> bool:
        """Whether whoever hands out tasks has taken this worker on."""
        return (self.folder / "admitted" / name).exists()

    def is_over(self, name: str) -> bool:
        """Whether this worker is to end."""
        return (self.folder / _CLOSED).exists() or (self.folder / "dismissed" / name).exists()

    def coordinator_seen(self) -> int:
        """The time of the coordinator's last sign of life, which only its host can read."""
        with suppress(FileNotFoundError):
            return (self.folder / _COORDINATOR).stat().st_mtime_ns
        return 0


def _files(folder: Path) -> list[Path]:
    """Without those that are being written."""
    return [folder / name for name in _names(folder)]


def _names(folder: Path) -> list[str]:
    """Of `_files`. There may be thousands, of which a worker takes the first that it gets."""
    with suppress(FileNotFoundError):
        return [name for name in os.listdir(folder) if not name.startswith(".")]
    return []


def _parts(path: Path, count: int) -> list[str]:
    """Of a file's name; none where it is of no file of this protocol, as a file system or a person may leave."""
    parts = path.stem.split("@")
    return parts if path.suffix == ".json" and len(parts) == count else []


def _moved(source: Path, target: Path) -> bool:
    """Whether this process moved it. A network file system may do so and lose the answer: then the target is there."""
    try:
        os.rename(source, target)
    except FileNotFoundError:
        return target.exists()  # a name that only this process moves to
    return True
