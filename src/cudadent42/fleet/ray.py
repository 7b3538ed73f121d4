"""Ray: one actor for each GPU, which is that GPU for as long as it lives.

Nothing is tried again behind the lab's back: a measurement that ran twice would be two.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cudadent42.base import parcels
from cudadent42.base.errors import LabError, UsageError
from cudadent42.base.parcels import Parcel
from cudadent42.base.serialise import dumps, loads
from cudadent42.fleet.cargo import Cargo
from cudadent42.fleet.engine import Alive, Claimed, Joined, Left, Message
from cudadent42.fleet.packing import pack, place
from cudadent42.fleet.task import Returned, Task, Worker
from cudadent42.model.records import Plan
from flashmoe_science.jit.requirements import install_command

_POLL_S = 0.05
_CLOSE_S = 5.0


def imported() -> Any:
    """Raises UsageError where Ray is not installed."""
    try:
        import ray
    except ImportError as error:
        raise UsageError(f"--fleet ray needs Ray: {install_command('ray')}") from error
    return ray


class Keeper:
    """What an actor is: a device and its tasks. Records travel as JSON, run folders and kernels' files as archives."""

    def __init__(self, device: str, ignore_preflight: bool) -> None:
        from cudadent42.base.observer import Quiet
        from cudadent42.fleet.perform import Performer, Racer
        from cudadent42.fleet.worker import identify

        self._folder = Path(tempfile.mkdtemp(prefix="cudadent42-ray-"))
        self._parcels = parcels.make(self._folder / "parcels")
        os.environ[parcels.FOLDER_VARIABLE] = str(
            self._parcels
        )  # of this actor's process, and of what it starts
        identity = identify(device, "", ignore_preflight=ignore_preflight)
        self._worker = identity.worker
        racer = Racer(identity.machine, self._folder / "worker.log", Quiet())
        self._performer = Performer(
            identity.worker.name, identity.worker.device, racer, identity.machine, self._folder, Quiet()
        )

    def who(self) -> str:
        from cudadent42.fleet.worker import process_age_s

        return dumps(replace(self._worker, up_s=process_age_s()), indent=None)

    def keep(self, parcel: str, packed: bytes) -> None:
        """Files that a later task names."""
        parcels.place(loads(Parcel, parcel), packed, self._parcels)

    def end(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def perform(self, task: str) -> tuple[str, bytes]:
        wanted = loads(Task, task)
        returned = self._performer.perform(wanted)
        return dumps(returned, indent=None), pack(self._folder / wanted.run)


class RayEngine:
    """An `Engine`."""

    def __init__(
        self,
        root: Path,
        *,
        address: str = "",
        gpus: bool = True,
        ignore_preflight: bool = False,
        keeper: type = Keeper,
    ) -> None:
        """Joins the cluster at ``address``, or starts one on this machine. Raises UsageError."""
        self._ray = imported()
        self._root = root
        self._offers: deque[Task] = deque()
        self._at: dict[Any, tuple[str, Task]] = {}
        self._idle: list[str] = []
        self._admitted: set[str] = set()
        self._dismissed: set[str] = set()
        self._names: dict[str, Any] = {}
        self._asked: dict[Any, Any] = {}
        self._cargo = Cargo()
        self._sent: dict[str, set[Parcel]] = {}
        """By worker."""
        self._begun = not self._ray.is_initialized()
        if self._begun:
            try:
                self._ray.init(address=address or None, log_to_driver=False, include_dashboard=False)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise UsageError(
                    f"--fleet ray: no cluster at {address or 'this machine'}: {error}"
                ) from error
        resource = "GPU" if gpus else "CPU"
        count = int(self._ray.cluster_resources().get(resource, 0))
        if not count:
            raise UsageError(f"--fleet ray: the cluster has no {resource}")
        share = {"num_gpus": 1, "num_cpus": 0} if gpus else {"num_cpus": 1}
        actor = self._ray.remote(keeper).options(max_restarts=0, max_task_retries=0, **share)
        for _ in range(count):
            handle = actor.remote("cuda:0" if gpus else "cpu", ignore_preflight)
            self._asked[handle.who.remote()] = handle

    def parcels(self, plan: Plan) -> tuple[Parcel, ...]:
        return self._cargo.of(plan)  # a node of the cluster has another disk

    def offer(self, task: Task) -> None:
        self._offers.append(task)

    def withdraw(self, key: str) -> bool:
        kept = deque(task for task in self._offers if task.key != key)
        withdrawn = len(kept) < len(self._offers)
        self._offers = kept
        return withdrawn

    def held(self) -> Mapping[str, str]:
        return {}  # actors end with who began them

    def wait(self, seconds: float) -> Sequence[Message]:
        messages = self._hand_out()
        waiting = [*self._asked, *self._at]
        if not waiting and self._dismissed.issuperset(self._idle):
            raise LabError("none of Ray's actors is left that may work; the same command begins new ones")
        if not waiting:
            time.sleep(min(seconds, _POLL_S))
        ready, _ = self._ray.wait(waiting, num_returns=1, timeout=seconds) if waiting else ([], [])
        for reference in ready:
            messages += self._joined(reference) if reference in self._asked else self._ended(reference)
        # An actor that dies is told of at once, so whoever is not is alive.
        return [*messages, *(Alive(name) for name in self._names)]

    def _hand_out(self) -> list[Message]:
        messages: list[Message] = []
        for name in list(self._idle):
            task = next((task for task in self._offers if task.worker in ("", name)), None)
            if task is None or name not in self._admitted or name in self._dismissed:
                continue
            self._offers.remove(task)
            self._idle.remove(name)
            for parcel in task.parcels:
                if parcel not in self._sent.setdefault(name, set()):
                    self._sent[name].add(parcel)
                    # An actor does one call after the other. What fails here the task says: it is not there.
                    self._names[name].keep.remote(dumps(parcel, indent=None), self._cargo.packed(parcel))
            reference = self._names[name].perform.remote(dumps(task, indent=None))
            self._at[reference] = name, task
            messages.append(Claimed(task.key, name))
        return messages

    def _joined(self, reference: Any) -> list[Message]:
        handle = self._asked.pop(reference)
        try:
            worker = loads(Worker, self._ray.get(reference))
        except self._ray.exceptions.RayError:
            return []  # it never was one
        self._names[worker.name] = handle
        self._idle.append(worker.name)
        return [Joined(worker)]

    def _ended(self, reference: Any) -> list[Message]:
        name, task = self._at.pop(reference)
        try:
            text, packed = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            self._idle.append(name)
            return [Returned(task.key, name, 0.0, error=str(error.cause))]
        except self._ray.exceptions.RayError as error:  # the actor died, or its node with what it had to say
            self._ray.kill(self._names.pop(name), no_restart=True)
            return [Left(name, str(error).split("\n", 1)[0])]
        self._idle.append(name)
        returned = loads(Returned, text)
        try:
            place(packed, self._root / task.run)
        except (LabError, OSError) as error:  # this machine's disk, or one bad actor, which ends no fleet
            return [replace(returned, error=f"{name} sent no run folder that can be kept: {error}")]
        return [returned]

    def admit(self, worker: str) -> None:
        self._admitted.add(worker)

    def dismiss(self, worker: str) -> None:
        self._dismissed.add(worker)

    def close(self) -> None:
        ending = [self._names[name].end.remote() for name in self._idle]
        if ending:
            self._ray.wait(ending, num_returns=len(ending), timeout=_CLOSE_S)
        for handle in (*self._names.values(), *self._asked.values()):
            self._ray.kill(handle, no_restart=True)
        self._names, self._asked, self._at, self._idle = {}, {}, {}, []
        if self._begun and self._ray.is_initialized():
            self._ray.shutdown()
