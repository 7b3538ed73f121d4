"""The engine for Ray, with its own processes and four GPUs that it only believes in."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cudadent42.base.errors import LabError
from cudadent42.commands.fleet import engines
from cudadent42.fleet.engine import Alive, Claimed, Joined, Left, Message
from cudadent42.fleet.task import Returned, Task, Way
from cudadent42.model.records import Plan
from cudadent42.operations.attention.case import AttentionCase
from flashmoe_science.jit.requirements import install_command

ray = pytest.importorskip("ray", reason=f"Ray is not installed: {install_command('ray')}")

from cudadent42.fleet import ray as fleet_ray  # noqa: E402
from cudadent42.fleet.ray import RayEngine  # noqa: E402

PLAN = Plan(
    "unit", "cpu", (AttentionCase("c", "fp32", 1, 1, 1, 8, 8, 8),), "a", ("a",), repeats=4, warmup=0, seed=1
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    path = str(Path(__file__).parents[3] / "src")
    ray.init(
        num_gpus=4,
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80_000_000,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    yield
    ray.shutdown()


def keeper() -> type:
    """In a function, so that Ray carries it to its processes by value."""

    class Invented:
        def __init__(self, device: str, ignore_preflight: bool) -> None:
            self.gpu = os.environ["CUDA_VISIBLE_DEVICES"]
            self.kept: dict[str, int] = {}

        def keep(self, parcel: str, packed: bytes) -> None:
            from cudadent42.base.parcels import Parcel
            from cudadent42.base.serialise import loads

            name = loads(Parcel, parcel).name
            self.kept[name] = self.kept.get(name, 0) + 1

        def end(self) -> None:
            return

        def who(self) -> str:
            from cudadent42.base.serialise import dumps
            from cudadent42.fleet.task import Worker

            return dumps(Worker(f"gpu{self.gpu}", "here", "cuda:0", "k", self.gpu, "tree"))

        def perform(self, task: str) -> tuple[str, bytes]:
            import io
            import tarfile
            import time

            from cudadent42.base.serialise import dumps, loads
            from cudadent42.fleet.task import Returned, Task

            wanted = loads(Task, task)
            if wanted.name == "deadly":
                os._exit(1)
            if wanted.name == "broken":
                raise ValueError("it broke")
            time.sleep(0.01)
            packed = io.BytesIO()
            with tarfile.open(fileobj=packed, mode="w") as archive:
                missing = [each.name for each in wanted.parcels if self.kept.get(each.name) != 1]
                text = ("missing" if missing else wanted.name).encode()
                member = tarfile.TarInfo("./name.txt")
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text))
            done = Returned(wanted.key, f"gpu{self.gpu}", 0.01, parcels=wanted.parcels)
            return dumps(done), packed.getvalue()

    return Invented


def task(name: str, worker: str = "") -> Task:
    return Task(name, 1, Way.RACE, PLAN, f"races/{name}", worker)


def messages_until(engine: Any, returns: int) -> list[Message]:
    messages: list[Message] = []
    while sum(isinstance(each, Returned | Left) for each in messages) < returns:
        messages += [each for each in engine.wait(5.0) if not isinstance(each, Alive)]
        for each in messages:
            if isinstance(each, Joined):
                engine.admit(each.worker.name)
    return messages


@pytest.mark.usefixtures("cluster")
def test_four_actors_have_a_gpu_each_and_do_every_task_once(tmp_path: Path) -> None:
    engine = RayEngine(tmp_path, keeper=keeper())
    tasks = [task(f"t{number}") for number in range(200)]
    for each in tasks:
        engine.offer(each)
    assert engine.withdraw(tasks.pop().key)
    assert not engine.withdraw("nothing")
    messages = messages_until(engine, len(tasks))
    returned = [each for each in messages if isinstance(each, Returned)]
    assert Counter(each.key for each in returned) == dict.fromkeys((each.key for each in tasks), 1)
    assert Counter(each.key for each in messages if isinstance(each, Claimed)) == Counter(
        each.key for each in returned
    )
    units = [each.worker.unit for each in messages if isinstance(each, Joined)]
    assert len(units) == len(set(units))
    assert set(units) <= {"0", "1", "2", "3"}
    for each in tasks:
        assert (tmp_path / each.run / "name.txt").read_text() == each.name
    engine.close()


@pytest.mark.usefixtures("cluster")
def test_files_of_a_kernel_are_sent_once_to_each_actor(tmp_path: Path) -> None:
    kernel = tmp_path / "mine.py"
    kernel.write_text("def attention(): ...\n")
    engine = RayEngine(tmp_path, keeper=keeper())
    parcels = engine.parcels(replace(PLAN, implementations=("a", f"{kernel}:attention")))
    assert [each.name for each in parcels] == [str(kernel)]
    tasks = [replace(task(f"p{number}"), parcels=parcels) for number in range(20)]
    for each in tasks:
        engine.offer(each)
    returned = [each for each in messages_until(engine, len(tasks)) if isinstance(each, Returned)]
    assert all(each.parcels == parcels for each in returned)
    assert {(tmp_path / each.run / "name.txt").read_text() for each in tasks} == {each.name for each in tasks}
    engine.close()


@pytest.mark.usefixtures("cluster")
def test_actors_that_are_not_taken_on_get_nothing_and_the_end_is_told(tmp_path: Path) -> None:
    engine = RayEngine(tmp_path, keeper=keeper())
    engine.offer(task("t"))
    joined: list[Message] = []
    while len(joined) < 4:
        joined += engine.wait(1.0)
        joined = [each for each in joined if isinstance(each, Joined)]
    for each in joined:
        engine.dismiss(each.worker.name)  # type: ignore[union-attr]
    with pytest.raises(LabError, match="none of Ray's actors"):
        engine.wait(1.0)
    assert engine.withdraw(task("t").key)
    engine.close()


@pytest.mark.usefixtures("cluster")
def test_the_command_line_names_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_ray, "Keeper", keeper())
    engine = engines("ray", "cuda", ignore_preflight=True)(tmp_path)
    try:
        assert isinstance(engine, RayEngine)
    finally:
        engine.close()


@pytest.mark.usefixtures("cluster")
def test_an_actor_that_dies_is_told_of_once_and_its_task_is_not_run_again(tmp_path: Path) -> None:
    engine = RayEngine(tmp_path, keeper=keeper())
    engine.offer(task("deadly"))
    messages = messages_until(engine, 1)
    (left,) = (each for each in messages if isinstance(each, Left))
    (claimed,) = (each for each in messages if isinstance(each, Claimed))
    assert claimed.worker == left.worker
    engine.offer(task("for the dead", worker=left.worker))
    engine.offer(task("broken"))
    (returned,) = (each for each in messages_until(engine, 1) if isinstance(each, Returned))
    assert "it broke" in returned.error
    assert not any(isinstance(each, Claimed | Returned) for each in engine.wait(0.5))
    assert engine.withdraw(task("for the dead").key)
    engine.close()


@pytest.mark.usefixtures("cluster")
def test_a_node_that_is_lost_with_its_result_ends_its_worker_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large result stays on its node until it is asked for."""
    get = ray.get

    def lost(reference: Any) -> Any:
        got = get(reference)
        if isinstance(got, tuple):  # of a task, and not who the actor is
            raise ray.exceptions.ObjectLostError(reference.hex(), None, "")
        return got

    engine = RayEngine(tmp_path, keeper=keeper())
    engine.offer(task("t"))
    with monkeypatch.context() as patch:
        patch.setattr(ray, "get", lost)
        messages = messages_until(engine, 1)
    (claimed,) = (each for each in messages if isinstance(each, Claimed))
    (left,) = (each for each in messages if isinstance(each, Left))
    assert claimed.worker == left.worker
    engine.close()


@pytest.mark.usefixtures("cluster")
def test_a_result_that_cannot_be_kept_ends_no_fleet(tmp_path: Path) -> None:
    engine = RayEngine(tmp_path, keeper=keeper())
    (tmp_path / "races").write_text("in the way")
    engine.offer(task("t"))
    (returned,) = (each for each in messages_until(engine, 1) if isinstance(each, Returned))
    assert "no run folder that can be kept" in returned.error
    engine.close()
