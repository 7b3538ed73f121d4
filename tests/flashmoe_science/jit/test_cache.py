from __future__ import annotations

import json
import multiprocessing
import os
import resource
import stat
import threading
from pathlib import Path

import pytest
from own_timers import Timers

from cudadent42.base.compile_cache import clear, entries
from flashmoe_science.errors import BuildError, DeviceError
from flashmoe_science.jit.cache import (
    Compilation,
    CompileCache,
    cache_directory,
    default_cache,
    recipe_key,
)
from flashmoe_science.jit.records import Recipe, Resources

RESOURCES = Resources(128, 0, 4, 16, 1024, 65536, 256, 1, 0.5)


def recipe(**changes: object) -> Recipe:
    fields: dict[str, object] = {
        "kernel": "probe",
        "backend": "host",
        "architecture": "x86-64",
        "configuration": {"head_dim": 64},
        "compiler": "/usr/bin/g++",
        "compiler_version": "12.2",
        "flags": ("-O3",),
        "sources": {"probe.cpp": "00"},
    }
    return Recipe(**{**fields, **changes})  # type: ignore[arg-type]


def writer(content: bytes = b"artifact", calls: list[Path] | None = None):
    def compile_to(path: Path) -> Compilation:
        if calls is not None:
            calls.append(path)
        path.write_bytes(content)
        return Compilation(log="said the compiler", resources=RESOURCES)

    return compile_to


@pytest.fixture
def cache(tmp_path: Path) -> CompileCache:
    return CompileCache(tmp_path / "cache")


def test_second_call_finds_what_the_first_compiled(cache: CompileCache) -> None:
    calls: list[Path] = []
    first = cache.get_or_build(recipe(), ".so", writer(calls=calls))
    second = cache.get_or_build(recipe(), ".so", writer(calls=calls))
    assert len(calls) == 1
    assert (first.cached, second.cached) == (False, True)
    assert second.artifact.read_bytes() == b"artifact"
    assert second.resources == RESOURCES
    assert second.log == "said the compiler"
    assert second.recipe == recipe()
    assert second.compile_seconds == first.compile_seconds
    assert first.key == second.key == recipe_key(recipe())


@pytest.mark.parametrize(
    "change",
    [
        {"kernel": "other"},
        {"backend": "nvrtc"},
        {"architecture": "x86-64+avx2"},
        {"configuration": {"head_dim": 128}},
        {"compiler": "/usr/bin/clang++"},
        {"compiler_version": "12.3"},
        {"flags": ("-O2",)},
        {"sources": {"probe.cpp": "01"}},
    ],
)
def test_every_field_of_the_recipe_is_part_of_the_key(change: dict[str, object]) -> None:
    assert recipe_key(recipe(**change)) != recipe_key(recipe())


def test_key_does_not_depend_on_the_order_of_a_dictionary() -> None:
    one = recipe(sources={"a": "1", "b": "2"})
    other = recipe(sources={"b": "2", "a": "1"})
    assert recipe_key(one) == recipe_key(other)


def test_a_failed_compilation_leaves_nothing(cache: CompileCache) -> None:
    def fail(path: Path) -> Compilation:
        path.write_bytes(b"half")
        raise BuildError("no", "log")

    with pytest.raises(BuildError, match="no"):
        cache.get_or_build(recipe(), ".so", fail)
    assert [path.suffix for path in cache.directory.iterdir()] == [".lock"]
    assert cache.get_or_build(recipe(), ".so", writer()).cached is False


def test_a_first_compilation_that_takes_long_is_announced(
    cache: CompileCache, timers: Timers, capfd: pytest.CaptureFixture[str]
) -> None:
    def compile_to(path: Path) -> Compilation:
        timers.pass_s(2.3)
        return writer()(path)

    cache.get_or_build(recipe(), ".so", compile_to)
    assert capfd.readouterr().err == (
        "flashmoe_science: compiling probe[head_dim=64], once; "
        f"the next process finds it in {cache.directory}\n"
    )
    cache.get_or_build(recipe(), ".so", compile_to)
    assert capfd.readouterr().err == ""


def test_a_compiler_that_writes_nothing_is_an_error(cache: CompileCache) -> None:
    with pytest.raises(BuildError, match="wrote no artifact"):
        cache.get_or_build(recipe(), ".so", lambda path: Compilation())


def damage_truncate(artifact: Path, record: Path) -> None:
    artifact.write_bytes(artifact.read_bytes()[:-1])


def damage_flip(artifact: Path, record: Path) -> None:
    artifact.write_bytes(b"artifacT")


def damage_empty(artifact: Path, record: Path) -> None:
    artifact.write_bytes(b"")


def damage_missing(artifact: Path, record: Path) -> None:
    artifact.unlink()


def damage_record_missing(artifact: Path, record: Path) -> None:
    record.unlink()


def damage_record_cut(artifact: Path, record: Path) -> None:
    record.write_text(record.read_text()[:40])


def damage_record_not_a_record(artifact: Path, record: Path) -> None:
    record.write_text("[1, 2]")


def damage_record_of_another_recipe(artifact: Path, record: Path) -> None:
    data = json.loads(record.read_text())
    data["recipe"]["compiler_version"] = "other"
    record.write_text(json.dumps(data))


def damage_record_nested_deeply(artifact: Path, record: Path) -> None:
    record.write_text("[" * 100_000)


def damage_artifact_is_a_folder(artifact: Path, record: Path) -> None:
    artifact.unlink()
    (artifact / "inner").mkdir(parents=True)


def damage_record_is_a_folder(artifact: Path, record: Path) -> None:
    record.unlink()
    (record / "inner").mkdir(parents=True)


def damage_all_are_folders(artifact: Path, record: Path) -> None:
    damage_artifact_is_a_folder(artifact, record)
    damage_record_is_a_folder(artifact, record)
    damage_artifact_is_a_folder(artifact.with_suffix(".lock"), record)


def damage_record_pointing_elsewhere(artifact: Path, record: Path) -> None:
    data = json.loads(record.read_text())
    data["suffix"] = "/../../elsewhere.so"
    record.write_text(json.dumps(data))


each_damage = pytest.mark.parametrize(
    "damage",
    [
        damage_truncate,
        damage_flip,
        damage_empty,
        damage_missing,
        damage_record_missing,
        damage_record_cut,
        damage_record_not_a_record,
        damage_record_of_another_recipe,
        damage_record_pointing_elsewhere,
        damage_record_nested_deeply,
        damage_artifact_is_a_folder,
        damage_record_is_a_folder,
        damage_all_are_folders,
    ],
)


@each_damage
def test_a_damaged_entry_is_built_again(cache: CompileCache, damage) -> None:
    built = cache.get_or_build(recipe(), ".so", writer())
    damage(built.artifact, built.artifact.with_suffix(".json"))
    assert cache.read(recipe_key(recipe())) is None
    assert entries(cache) == []
    again = cache.get_or_build(recipe(), ".so", writer())
    assert again.cached is False
    assert again.artifact.read_bytes() == b"artifact"
    assert cache.get_or_build(recipe(), ".so", writer()).cached is True


@each_damage
def test_a_damaged_entry_is_cleared(cache: CompileCache, damage) -> None:
    built = cache.get_or_build(recipe(), ".so", writer())
    damage(built.artifact, built.artifact.with_suffix(".json"))
    clear(cache)
    assert list(cache.directory.iterdir()) == []


def test_a_folder_left_in_place_of_the_temporary_file_goes(cache: CompileCache) -> None:
    (cache.directory / f"{recipe_key(recipe())}.{os.getpid()}.new.so" / "inner").mkdir(parents=True)
    assert cache.get_or_build(recipe(), ".so", writer()).artifact.read_bytes() == b"artifact"


@pytest.mark.skipif(os.getuid() == 0, reason="root can write to every directory")
def test_clearing_a_read_only_cache_is_an_error_of_one_line(cache: CompileCache) -> None:
    cache.get_or_build(recipe(), ".so", writer())
    cache.directory.chmod(0o500)
    try:
        with pytest.raises(BuildError, match=r"cannot clear .*Permission denied") as raised:
            clear(cache)
    finally:
        cache.directory.chmod(0o700)
    assert "\n" not in str(raised.value)


def test_a_lock_that_cannot_be_opened_is_an_error_of_one_line(cache: CompileCache) -> None:
    cache.get_or_build(recipe(), ".so", writer())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        with (
            pytest.raises(BuildError, match=r"cannot lock .*Too many open files") as raised,
            cache.locked("ab" * 32),
        ):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "\n" not in str(raised.value)


def test_entries_and_clear(cache: CompileCache) -> None:
    for version in ("1", "2"):
        cache.get_or_build(recipe(compiler_version=version), ".so", writer())
    (cache.tool_directory("zig") / "object").write_bytes(b"x")
    # What a process that was killed in the middle leaves behind.
    (cache.directory / ("ab" * 32 + ".1234.new.so")).write_bytes(b"leftover")
    assert {build.recipe.compiler_version for build in entries(cache)} == {"1", "2"}
    (cache.directory / "notes.txt").write_text("not ours")
    cleared = clear(cache)
    assert cleared.entries == 2
    assert cleared.bytes > 3 * len(b"artifact")
    assert [path.name for path in cache.directory.iterdir()] == ["notes.txt"]
    assert cache.get_or_build(recipe(), ".so", writer()).cached is False


def _process(directory: str, barrier, results) -> None:  # type: ignore[no-untyped-def]
    calls: list[Path] = []
    barrier.wait()
    build = CompileCache(Path(directory)).get_or_build(recipe(), ".so", writer(b"x" * 100_000, calls))
    results.put((len(calls), build.artifact.read_bytes() == b"x" * 100_000))


def test_of_many_processes_one_compiles(cache: CompileCache) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(8), context.Queue()
    processes = [
        context.Process(target=_process, args=(str(cache.directory), barrier, results)) for _ in range(8)
    ]
    for process in processes:
        process.start()
    outcomes = [results.get() for _ in processes]
    for process in processes:
        process.join()
    assert sum(compiled for compiled, _ in outcomes) == 1
    assert all(whole for _, whole in outcomes)


def _build_and_clear(directory: str, seed: int, failures) -> None:  # type: ignore[no-untyped-def]
    cache = CompileCache(Path(directory))
    for step in range(40):
        if (seed + step) % 5 == 0:
            clear(cache)
        else:
            build = cache.get_or_build(recipe(compiler_version=str(step % 3)), ".so", writer())
            if build.artifact_bytes != len(b"artifact"):
                failures.put(seed)


def test_clearing_while_others_build_is_safe(cache: CompileCache) -> None:
    context = multiprocessing.get_context("fork")
    failures = context.Queue()
    processes = [
        context.Process(target=_build_and_clear, args=(str(cache.directory), seed, failures))
        for seed in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert failures.empty()


def _die_while_building(directory: str) -> None:
    def compile_to(path: Path) -> Compilation:
        path.write_bytes(b"half")
        os._exit(9)

    CompileCache(Path(directory)).get_or_build(recipe(), ".so", compile_to)


def test_a_process_that_dies_while_it_builds_blocks_nobody(cache: CompileCache) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=_die_while_building, args=(str(cache.directory),)
    )
    process.start()
    process.join(60)
    assert process.exitcode == 9
    assert cache.get_or_build(recipe(), ".so", writer()).artifact.read_bytes() == b"artifact"


def test_of_many_threads_one_compiles(cache: CompileCache) -> None:
    calls: list[Path] = []
    threads = [
        threading.Thread(target=cache.get_or_build, args=(recipe(), ".so", writer(calls=calls)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_directory_is_made_private_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHMOE_CACHE_DIR", str(tmp_path / "deep" / "cache"))
    before = os.umask(0)
    try:
        directory = cache_directory()
    finally:
        os.umask(before)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_directory_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(DeviceError, match="empty it and close it to them with: cudadent42 cache clear"):
        CompileCache(tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(DeviceError, match="belongs to user 12345"):
        CompileCache(tmp_path)


def test_named_directory_that_cannot_be_made_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHMOE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(DeviceError, match="FLASHMOE_CACHE_DIR"):
        cache_directory()


def test_directories_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("FLASHMOE_CACHE_DIR", raising=False)
    assert cache_directory() == tmp_path / "home/.cache/flashmoe_science"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg/flashmoe_science"
    monkeypatch.setenv("FLASHMOE_CACHE_DIR", str(tmp_path / "named"))
    assert default_cache().directory == tmp_path / "named"


def test_home_that_cannot_be_used_falls_back_to_a_private_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").write_text("not a directory")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("FLASHMOE_CACHE_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    directory = cache_directory()
    assert directory == tmp_path / "tmp" / f"flashmoe_science-{os.getuid()}"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_link_in_place_of_the_temporary_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").write_text("not a directory")
    (tmp_path / "tmp").mkdir()
    (tmp_path / "private").mkdir(mode=0o700)
    (tmp_path / "tmp" / f"flashmoe_science-{os.getuid()}").symlink_to(tmp_path / "private")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("FLASHMOE_CACHE_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    with pytest.raises(DeviceError, match="is a symbolic link"):
        cache_directory()
    # One that the user names is theirs to make.
    monkeypatch.setenv("FLASHMOE_CACHE_DIR", str(tmp_path / "tmp" / f"flashmoe_science-{os.getuid()}"))
    assert cache_directory().samefile(tmp_path / "private")
