"""What of a folder and its files is trusted, and that what others put there is not."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cudadent42.base.compile_cache import entries
from flashmoe_science.errors import DeviceError
from flashmoe_science.jit import cache as cache_module
from flashmoe_science.jit import private_directory
from flashmoe_science.jit.cache import (
    Compilation,
    CompileCache,
    cache_directory,
    recipe_key,
)
from flashmoe_science.jit.private_directory import PrivateDirectory, UnsafeParentError
from flashmoe_science.jit.records import Recipe

RECIPE = Recipe("probe", "host", "x86-64", {}, "g++", "12", (), {})
STRANGER = 12345
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as a second user")


def compile_to(path: Path) -> Compilation:
    path.write_bytes(b"artifact")
    return Compilation()


@pytest.fixture
def cache(tmp_path: Path) -> CompileCache:
    made = CompileCache(tmp_path / "cache")
    made.get_or_build(RECIPE, ".so", compile_to)
    return made


def of_another_user(path: Path) -> None:
    os.chown(path, STRANGER, -1)


def writable_by_others(path: Path) -> None:
    path.chmod(0o666)


def writable_by_its_group(path: Path) -> None:
    path.chmod(0o660)


def a_link(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to("elsewhere")


def a_second_name(path: Path) -> None:
    os.link(path, path.parent / "elsewhere")


def a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def a_huge_sparse_file(path: Path) -> None:
    os.truncate(path, 200 << 30)


each_spoiling = pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(of_another_user, marks=as_root),
        writable_by_others,
        writable_by_its_group,
        a_link,
        a_second_name,
        a_fifo,
        a_huge_sparse_file,
    ],
)


@each_spoiling
@pytest.mark.parametrize("suffix", [".so", ".json"])
def test_an_entry_that_somebody_else_may_have_written_is_built_again(
    cache: CompileCache, spoil: Callable[[Path], None], suffix: str
) -> None:
    spoil(cache.directory / (recipe_key(RECIPE) + suffix))
    assert cache.read(recipe_key(RECIPE)) is None
    assert entries(cache) == []
    assert cache.path_to_load(recipe_key(RECIPE)) is None
    assert cache.get_or_build(RECIPE, ".so", compile_to).cached is False
    assert cache.get_or_build(RECIPE, ".so", compile_to).cached is True


@each_spoiling
def test_a_lock_of_somebody_elses_holds_nobody_up(cache: CompileCache, spoil: Callable[[Path], None]) -> None:
    spoil(cache.directory / (recipe_key(RECIPE) + ".lock"))
    (cache.directory / (recipe_key(RECIPE) + ".so")).unlink()
    assert cache.get_or_build(RECIPE, ".so", compile_to).cached is False


@pytest.mark.parametrize("umask", [0, 0o002, 0o077])
def test_entries_are_this_users_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        cache = CompileCache(tmp_path / "deep" / "cache")
        cache.get_or_build(RECIPE, ".so", compile_to)
    finally:
        os.umask(before)
    assert cache.read(recipe_key(RECIPE)) is not None
    for path in (tmp_path / "deep", *(tmp_path / "deep").rglob("*")):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o770])
def test_a_parent_that_others_may_write_is_refused(
    tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_directory, "_is_private_group", lambda group: False)
    parent = tmp_path / "shared"
    parent.mkdir()
    parent.chmod(mode)
    with pytest.raises(
        UnsafeParentError, match=r"lies in .*/shared, which other users can write to"
    ) as raised:
        PrivateDirectory(parent / "between" / "cache")
    assert "FLASHMOE_CACHE_DIR" in str(raised.value)
    parent.chmod(0o1777)  # as /tmp: nobody else can rename what is in it
    PrivateDirectory(parent / "between" / "cache")


@as_root
def test_a_parent_of_somebody_elses_is_refused(tmp_path: Path) -> None:
    parent = tmp_path / "theirs"
    parent.mkdir(mode=0o755)
    os.chown(parent, STRANGER, -1)
    with pytest.raises(UnsafeParentError, match=f"belongs to user {STRANGER}"):
        PrivateDirectory(parent / "cache")


def test_a_parent_that_only_this_users_own_group_may_write_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the umask is 002, every folder of a home is so."""
    import grp
    import pwd

    class Group:
        gr_name, gr_mem = "ada", ["ada"]

    class User:
        pw_name, pw_gid = "ada", os.getegid()

    monkeypatch.setattr(pwd, "getpwuid", lambda user: User)
    monkeypatch.setattr(grp, "getgrgid", lambda group: Group)
    parent = tmp_path / "home"
    parent.mkdir()
    parent.chmod(0o775)
    PrivateDirectory(parent / "cache")
    Group.gr_mem = ["ada", "eve"]
    with pytest.raises(UnsafeParentError):
        PrivateDirectory(parent / "cache")


@as_root
def test_a_home_that_others_can_change_is_as_good_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose HOME is the host's folder."""
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, STRANGER, -1)
    (tmp_path / "tmp").mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("FLASHMOE_CACHE_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    assert cache_directory().parent == tmp_path / "tmp"


def test_what_was_swapped_after_opening_is_not_looked_at(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path / "cache")
    cache.get_or_build(RECIPE, ".so", compile_to)
    (tmp_path / "cache").rename(tmp_path / "moved")
    (tmp_path / "cache").mkdir(mode=0o700)
    path = cache.path_to_load(recipe_key(RECIPE))
    assert path is not None
    assert Path(path).read_bytes() == b"artifact"
    assert Path(path).resolve().parent == tmp_path / "moved"


@as_root
def test_a_tools_folder_that_somebody_else_made_is_refused(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path / "cache")
    tools = cache.directory / "flashmoe_science-tools"
    tools.mkdir()
    of_another_user(tools)
    with pytest.raises(DeviceError, match="was made by another user"):
        cache.tool_directory("zig")


def test_without_a_home_the_cache_is_not_made_below_the_working_directory(tmp_path: Path) -> None:
    """No HOME, and a user whom the table of users lacks."""
    program = (
        "import pwd, sys\n"
        "def nobody(user): raise KeyError(user)\n"
        "pwd.getpwuid = nobody\n"
        "from flashmoe_science.jit.cache import cache_directory\n"
        "print(cache_directory())\n"
    )
    working, temporary = tmp_path / "working", tmp_path / "tmp"
    working.mkdir()
    temporary.mkdir()
    temporary.chmod(0o1777)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=working,
        env={
            "TMPDIR": str(temporary),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(Path(cache_module.__file__).parents[2]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{temporary}/flashmoe_science-{os.getuid()}"
    assert list(working.iterdir()) == []


def test_a_home_that_is_named_after_nobody_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMOE_CACHE_DIR", "~nobody-of-that-name/cache")
    with pytest.raises(DeviceError, match="has no home directory; give a full path"):
        cache_directory()


@pytest.mark.parametrize(
    "change",
    [
        {"compile_seconds": 10**400},
        {"compile_seconds": float("nan")},
        {"compile_seconds": -1},
        {"suffix": "/../x.so"},
        {"suffix": 5},
        {"artifact_bytes": "8"},
        {"resources": {"registers_per_thread": 1}},
        {"resources": [1]},
        {"recipe": {"flags": 3}},
    ],
)
def test_a_record_of_nonsense_counts_as_absent(cache: CompileCache, change: dict[str, object]) -> None:
    path = cache.directory / (recipe_key(RECIPE) + ".json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert cache.read(recipe_key(RECIPE)) is None
    assert entries(cache) == []


def test_a_resource_that_is_no_number_counts_as_absent(tmp_path: Path) -> None:
    from flashmoe_science.jit.records import Resources

    resources = Resources(128, 0, 4, 16, 1024, 65536, 256, 1, 0.5)

    def compiled(path: Path) -> Compilation:
        path.write_bytes(b"artifact")
        return Compilation(resources=resources)

    cache = CompileCache(tmp_path / "cache")
    build = cache.get_or_build(RECIPE, ".cubin", compiled)
    record = build.artifact.with_suffix(".json")
    for field in dataclasses.fields(Resources):
        content = json.loads(record.read_text())
        content["resources"][field.name] = "\x1b[2J"
        record.write_text(json.dumps(content))
        assert cache.read(recipe_key(RECIPE)) is None
        content["resources"] = dataclasses.asdict(resources)
        record.write_text(json.dumps(content))
        assert cache.read(recipe_key(RECIPE)) is not None


@pytest.fixture
def _one_user_namespace() -> None:
    done = subprocess.run(["unshare", "-U", "true"], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("no user namespaces here")


@pytest.mark.usefixtures("_one_user_namespace")
def test_in_a_namespace_without_root_whoever_is_not_known_counts_as_root() -> None:
    """Apptainer and the like: / belongs to nobody there, and is nobody's to write to."""
    program = "from flashmoe_science.jit import private_directory as p; print(p._root_users())"
    done = subprocess.run(
        ["unshare", "-U", sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(Path(cache_module.__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "(0, 65534)"
