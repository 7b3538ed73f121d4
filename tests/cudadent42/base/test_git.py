"""git looks at the folder that is named: in another repository's hook, by any configuration, whatever the name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cudadent42.base import git
from cudadent42.base.errors import LabError, UsageError
from cudadent42.flows.race.history import Bisection
from cudadent42.remote.core.tree import read_tree
from cudadent42.runs.source import revision_of
from cudadent42.session.tree import Tree, find
from cudadent42.versions.sources import export, repository_root, resolve

ROOT = Path(__file__).resolve().parents[3]
IDENTITY = ("-c", "user.name=t", "-c", "user.email=t@t")

IN_A_HOOK = """#!/bin/sh
# What git exports to this hook is on record, so that the test knows that there is something to drop.
env | grep ^GIT_ >"$RECORD"
exec "$PYTHON" -c '
import sys
from pathlib import Path
from cudadent42.flows.race.history import Bisection
from cudadent42.versions.sources import export
from cudadent42.remote.core.tree import read_tree
from cudadent42.session.tree import find
from cudadent42.runs.source import revision_of
meant = Path(sys.argv[1])
tree = find(meant)
snapshot = tree.snapshot()
revision = revision_of(meant)
first, last = sys.argv[3:]
print(tree.root, revision.commit, revision.diff.count("of this one"), snapshot, read_tree(meant).files[0].decode())
print(export("HEAD", meant, "kernel.py:f").commit, Bisection(Path(sys.argv[2]), meant, first, last, ()).position().next)
' "$MEANT" "$SCRATCH" "$FIRST" "$LAST"
"""


def told(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *IDENTITY, *words], check=True, capture_output=True)
    return done.stdout.decode().strip()


def repository(folder: Path, *contents: str) -> Path:
    """A commit for each content of its one file."""
    folder.mkdir()
    told(folder, "init", "-q", "-b", "main")
    for content in contents:
        (folder / "kernel.py").write_text(content)
        told(folder, "add", "-A")
        told(folder, "commit", "-q", "-m", content)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def meant(tmp_path: Path) -> Path:
    root = repository(tmp_path / "meant", "1\n", "2\n", "3\n")
    (root / "kernel.py").write_text("of this one\n")
    return root


@pytest.fixture
def other(tmp_path: Path) -> Path:
    root = repository(tmp_path / "other", "x\n")
    (root / "another.py").write_text("")
    return root


def test_inside_the_hook_of_another_repository(meant: Path, other: Path, tmp_path: Path) -> None:
    """`git commit` exports GIT_DIR, GIT_INDEX_FILE and more to its hooks."""
    hook = other / ".git/hooks/pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(IN_A_HOOK)
    hook.chmod(0o755)
    first, middle, last = told(meant, "rev-list", "--reverse", "HEAD").split()
    before = told(other, "status", "--porcelain"), told(other, "for-each-ref")
    environment = {
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT / "src"),
        "MEANT": str(meant),
        "SCRATCH": str(tmp_path / "bisection"),
        "RECORD": str(tmp_path / "exported"),
        "FIRST": first,
        "LAST": last,
    }
    # From the work tree of a linked repository GIT_DIR is exported as well.
    linked = tmp_path / "linked"
    told(other, "worktree", "add", "-q", str(linked))
    (linked / "kernel.py").write_text("y\n")
    done = subprocess.run(
        ["git", *IDENTITY, "commit", "-q", "-a", "-m", "y"],
        cwd=linked,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    exported = {line.partition("=")[0] for line in (tmp_path / "exported").read_text().splitlines()}
    assert {"GIT_DIR", "GIT_INDEX_FILE"} <= exported
    # A hook's standard output goes where git's messages go.
    root, commit, changed, snapshot, file, exported_commit, between = (done.stdout + done.stderr).split()
    assert (root, commit, changed, file) == (str(meant), last, "1", "kernel.py")
    assert (exported_commit, between) == (last, middle)
    assert told(meant, "show", f"{snapshot}:kernel.py") == "of this one"
    assert told(meant, "status", "--porcelain").split() == ["M", "kernel.py"]
    assert (told(other, "status", "--porcelain"), told(other, "for-each-ref", "refs/heads/main")) == (
        before[0],
        before[1],
    )


@pytest.mark.parametrize("name", ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY"])
def test_each_exported_variable_alone(
    name: str, meant: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = told(meant, "rev-parse", "HEAD")
    file_of = {"GIT_WORK_TREE": "", "GIT_INDEX_FILE": ".git/index", "GIT_OBJECT_DIRECTORY": ".git/objects"}
    monkeypatch.setenv(name, str(other / file_of.get(name, ".git")))
    revision = revision_of(meant)
    assert revision is not None
    assert (revision.commit, revision.untracked) == (last, ())
    assert read_tree(meant).files == (b"kernel.py",)
    assert repository_root(meant) == meant
    assert export("WORKTREE", meant, "kernel.py:f") == export("WORKTREE", meant, "kernel.py:f")
    tree = find(meant)
    assert tree is not None
    assert tree.patch(last, tree.snapshot()).count(b"of this one") == 1


def test_every_variable_of_this_git_is_known() -> None:
    """All but the two that carry configuration, which git hands on as well where it enters another repository."""
    listed = {*told(Path(), "rev-parse", "--local-env-vars").split()}
    assert listed - {"GIT_CONFIG_PARAMETERS", "GIT_CONFIG_COUNT"} <= {*git.REPOSITORY_VARIABLES}


def test_configuration_from_the_environment_still_holds(meant: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers that work in a folder of another user's say `safe.directory` there."""
    for name, value in {"COUNT": "1", "KEY_0": "safe.directory", "VALUE_0": "/a folder"}.items():
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    assert git.text(meant, "config", "safe.directory") == "/a folder\n"


@pytest.mark.parametrize("name", ["--help", "-x", "--output=bad", "--upload-pack=touch bad", "HEAD\0"])
def test_no_name_is_an_option(name: str, meant: Path, tmp_path: Path) -> None:
    with pytest.raises(git.GitError, match="is no revision"):
        git.run(meant, "log", names=(name,))
    with pytest.raises(UsageError, match="is no revision of meant"):
        resolve(name, meant)
    with pytest.raises(LabError):
        Bisection(tmp_path / "search", meant, name, "HEAD", ())
    with pytest.raises(UsageError):
        Tree(meant).patch(name, "HEAD")
    assert not [*tmp_path.rglob("bad")]


def test_no_path_is_an_option(meant: Path) -> None:
    (meant / "--cached").write_text("")
    told(meant, "add", "--", "--cached")
    assert git.run(meant, "ls-files", paths=("--cached",)) == b"--cached\n"


def test_the_users_configuration_does_not_change_a_patch(
    meant: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session's patch is applied again, and the diff of a manifest may be."""
    for key, value in {
        "diff.noprefix": "true",
        "color.diff": "always",
        "diff.context": "0",
        "diff.mnemonicPrefix": "true",
    }.items():
        told(meant, "config", key, value)
    tree = Tree(meant)
    head, snapshot = tree.head(), tree.snapshot()
    assert tree.rebuild(head, tree.patch(head, snapshot)) == snapshot
    revision = revision_of(meant)
    assert revision is not None
    assert "\x1b" not in revision.diff
    assert "--- a/kernel.py\n+++ b/kernel.py" in revision.diff


def test_looking_does_not_write_the_index(meant: Path) -> None:
    """`git status` would note there what it found, under a lock that whoever is at work waits for or fails at."""
    index = meant / ".git/index"
    told(meant, "checkout", "-q", "--", ".")
    os.utime(meant / "kernel.py", (0, 0))  # the same content: an index that is written to would know that now
    before = index.read_bytes()
    git.run(meant, "status", "--porcelain")
    assert index.read_bytes() == before


def test_the_top_of_a_repository_with_a_commit(tmp_path: Path) -> None:
    folder = tmp_path / "a name\nof two lines"
    folder.mkdir()
    told(folder, "init", "-q")
    assert git.root(folder) == folder
    assert find(folder) is None
    with pytest.raises(git.GitError):
        git.root(folder, with_commit=True)
    told(folder, "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-q", "--allow-empty", "-m", "first")
    (folder / "below").mkdir()
    assert find(folder / "below") == Tree(folder)


def test_why_git_failed(tmp_path: Path, meant: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(git.GitError, match=r"^fatal: .*not a git repository"):
        git.run(tmp_path, "status")
    with pytest.raises(UsageError, match=r"not in a git repository that can be read \(fatal: .*give --repo"):
        repository_root(tmp_path)
    with pytest.raises(git.GitError, match="longer than"):
        git.run(meant, "-c", "alias.wait=!sleep 60", "wait", timeout_s=0.2)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(git.GitMissingError):
        git.run(meant, "status")


@pytest.mark.parametrize("setting", ["core.fsmonitor", "core.hooksPath", "hook"])
def test_programs_of_a_repository_are_not_started(tmp_path: Path, setting: str) -> None:
    """The repository came with its settings, as in an archive from somebody."""
    folder = repository(tmp_path / "theirs", "one")
    started = tmp_path / "started"
    hooks = tmp_path / "hooks" if setting == "core.hooksPath" else folder / ".git/hooks"
    program = (tmp_path / "program") if setting == "core.fsmonitor" else hooks / "reference-transaction"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\ntouch {started}\nexit 0\n")
    program.chmod(0o755)
    if setting != "hook":
        told(folder, "config", setting, str(program if setting == "core.fsmonitor" else hooks))
    (folder / "kernel.py").write_text("changed")
    tree = find(folder)
    assert tree is not None
    started.unlink(missing_ok=True)
    tree.keep("session/1", tree.snapshot())
    revision_of(folder)
    assert not started.exists()
