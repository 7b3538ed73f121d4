"""A repository that somebody sent, with settings that have git start programs: no call of the lab starts one.

Each trap is real: git itself, asked for what `Trap.springs` says, starts it.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from cudadent42.base import git, git_programs
from cudadent42.base.errors import LabError
from cudadent42.flows.race.history import Bisection, subject
from cudadent42.remote.core.tree import read_tree
from cudadent42.runs.kernel_sources import _of_files as of_files
from cudadent42.runs.source import revision_of
from cudadent42.session.tree import Tree, create, find
from cudadent42.versions.sources import export

IDENTITY = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "protocol.file.allow=always")
ENTRY = "kernel.py:f"


def told(folder: Path, *words: str, given: str = "", check: bool = True) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *IDENTITY, *words],
        input=given,
        capture_output=True,
        text=True,
        check=check,
        env={name: value for name, value in os.environ.items() if name not in ("GIT_EDITOR", "GIT_ASKPASS")},
    )
    return done.stdout.strip()


@functools.cache
def _made() -> tempfile.TemporaryDirectory[str]:
    kept = tempfile.TemporaryDirectory()
    _make(Path(kept.name) / "made")
    return kept


def repository(folder: Path) -> Path:
    """Three commits of two files."""
    return shutil.copytree(Path(_made().name) / "made", folder)


def _make(folder: Path) -> None:
    folder.mkdir(parents=True)
    told(folder, "init", "-q", "-b", "main")
    for number in range(3):
        (folder / "kernel.py").write_text(f"{number}\n")
        (folder / "other.py").write_text(f"{number}\n")
        told(folder, "add", "-A")
        told(folder, "commit", "-q", "-m", str(number))


@dataclass(frozen=True)
class Checkout:
    """Where a trap is laid."""

    root: Path
    program: str
    """A command that leaves a mark, and hands on what it reads."""
    script: Path
    """A file that does so."""
    mark: Path


Lay = Callable[[Checkout], None]


@dataclass(frozen=True)
class Trap:
    lay: Lay
    springs: tuple[str, ...]
    """Words of git that start the program."""
    given: str = ""


def settings(**values: str) -> Lay:
    """Each ``a__b`` is ``a.b``; ``PROGRAM`` and ``SCRIPT`` in a value are the checkout's."""

    def lay(checkout: Checkout) -> None:
        for key, value in values.items():
            value = value.replace("PROGRAM", checkout.program).replace("SCRIPT", str(checkout.script))
            told(checkout.root, "config", key.replace("__", "."), value)

    return lay


def attributes(line: str, *others: Lay) -> Lay:
    def lay(checkout: Checkout) -> None:
        # Part of the repository's files, as in a clone.
        (checkout.root / ".gitattributes").write_text(line + "\n")
        told(checkout.root, "add", ".gitattributes")
        told(checkout.root, "commit", "-q", "-m", "attributes")
        for other in others:
            other(checkout)
        (checkout.root / "kernel.py").write_text("changed\n")

    return lay


def hooks(checkout: Checkout) -> None:
    folder = checkout.root / ".git" / "theirs"
    folder.mkdir()
    for name in ("reference-transaction", "post-index-change", "post-checkout", "pre-auto-gc"):
        (folder / name).write_text(f"#!/bin/sh\n{checkout.program}\n")
        (folder / name).chmod(0o755)
    told(checkout.root, "config", "core.hooksPath", str(folder))


def included(checkout: Checkout) -> None:
    (checkout.root / "more.config").write_text(f'[filter "trap"]\n\tclean = "{checkout.program}"\n')
    told(checkout.root, "config", "include.path", "../more.config")


def of_the_worktree(checkout: Checkout) -> None:
    told(checkout.root, "config", "extensions.worktreeConfig", "true")
    told(checkout.root, "config", "--worktree", "filter.trap.clean", checkout.program)


def missing_object(checkout: Checkout) -> None:
    """A partial clone that lacks a blob, which git fetches when it is asked for."""
    name = told(checkout.root, "rev-parse", "HEAD:kernel.py")
    (checkout.root / ".git/objects" / name[:2] / name[2:]).unlink()
    settings(
        core__repositoryFormatVersion="1",
        extensions__partialClone="origin",
        remote__origin__promisor="true",
        remote__origin__fetch="+refs/heads/*:refs/remotes/origin/*",
    )(checkout)


def fetched_by_a_command(checkout: Checkout) -> None:
    missing_object(checkout)
    settings(remote__origin__url="ext::SCRIPT", protocol__ext__allow="always")(checkout)


def fetched_by_a_program_of_the_far_side(checkout: Checkout) -> None:
    missing_object(checkout)
    settings(remote__origin__url=str(checkout.root), remote__origin__uploadpack=f"{checkout.program};false")(
        checkout
    )


def submodule(*more: Lay) -> Lay:
    """A submodule whose own settings have the filter, with a file that may have changed."""

    def lay(checkout: Checkout) -> None:
        origin = repository(checkout.root.parent / "origin")
        told(checkout.root, "submodule", "--quiet", "add", str(origin), "sub")
        told(checkout.root, "commit", "-q", "-m", "submodule")
        inner = checkout.root / "sub"
        told(inner, "config", "filter.trap.clean", checkout.program)
        told(inner, "config", "filter.trap.smudge", checkout.program)
        told(inner, "config", "diff.external", f"{checkout.program};:")
        (checkout.root / ".git/modules/sub/info").mkdir(exist_ok=True)
        (checkout.root / ".git/modules/sub/info/attributes").write_text("* filter=trap\n")
        (inner / "kernel.py").write_text("3\n")
        for other in more:
            other(checkout)
        checkout.mark.unlink(missing_ok=True)

    return lay


def signed(checkout: Checkout) -> None:
    """A commit with a signature, which ``log.showSignature`` has a program look at."""
    commit = told(checkout.root, "cat-file", "commit", "HEAD")
    head, _, message = commit.partition("\n\n")
    signature = "gpgsig -----BEGIN PGP SIGNATURE-----\n \n x\n -----END PGP SIGNATURE-----"
    name = told(
        checkout.root,
        "hash-object",
        "-t",
        "commit",
        "-w",
        "--stdin",
        given=f"{head}\n{signature}\n\n{message}\n",
    )
    told(checkout.root, "update-ref", "HEAD", name)
    settings(gpg__program="SCRIPT", log__showSignature="true")(checkout)


def diverged(checkout: Checkout) -> None:
    attributes("* merge=trap", settings(merge__trap__driver="PROGRAM"))(checkout)
    told(checkout.root, "commit", "-q", "-a", "-m", "here")
    told(checkout.root, "checkout", "-q", "-b", "side", "HEAD~1")
    (checkout.root / "kernel.py").write_text("there\n")
    told(checkout.root, "commit", "-q", "-a", "-m", "there")
    told(checkout.root, "checkout", "-q", "main")


def aliases(checkout: Checkout) -> None:
    """Also of git's own words, which they cannot replace."""
    for word in (
        "trap",
        "add",
        "bisect",
        "config",
        "diff-files",
        "ls-files",
        "restore",
        "rev-parse",
        "update-index",
    ):
        told(checkout.root, "config", f"alias.{word}", f"!{checkout.program}")


CLEAN = attributes("* filter=trap", settings(filter__trap__clean="PROGRAM"))
TRAPS = {
    "filter.clean": Trap(CLEAN, ("add", "-A")),
    "filter.clean, required": Trap(
        attributes("* filter=trap", settings(filter__trap__clean="PROGRAM", filter__trap__required="true")),
        ("add", "-A"),
    ),
    "filter.smudge": Trap(
        attributes("* filter=trap", settings(filter__trap__smudge="PROGRAM")), ("checkout", "--", ".")
    ),
    "filter.process": Trap(
        attributes("* filter=trap", settings(filter__trap__process="PROGRAM")), ("add", "-A")
    ),
    "filter in an included file": Trap(attributes("* filter=trap", included), ("add", "-A")),
    "filter of the work tree": Trap(attributes("* filter=trap", of_the_worktree), ("add", "-A")),
    "core.fsmonitor": Trap(settings(core__fsmonitor="PROGRAM"), ("status",)),
    "core.hooksPath": Trap(hooks, ("update-ref", "refs/heads/x", "HEAD")),
    "diff.external": Trap(attributes("", settings(diff__external="PROGRAM")), ("diff",)),
    "diff.textconv": Trap(attributes("* diff=trap", settings(diff__trap__textconv="PROGRAM")), ("diff",)),
    "diff.command": Trap(attributes("* diff=trap", settings(diff__trap__command="PROGRAM")), ("diff",)),
    "credential.helper": Trap(
        settings(credential__helper="!PROGRAM"), ("credential", "fill"), "protocol=https\nhost=localhost\n\n"
    ),
    "core.askPass": Trap(
        settings(core__askPass="SCRIPT"), ("credential", "fill"), "protocol=https\nhost=localhost\n\n"
    ),
    "core.sshCommand": Trap(settings(core__sshCommand="PROGRAM"), ("ls-remote", "ssh://127.0.0.1:1/x")),
    "core.gitProxy": Trap(settings(core__gitProxy="SCRIPT"), ("ls-remote", "git://127.0.0.1:1/x")),
    "core.editor": Trap(settings(core__editor="PROGRAM"), ("commit", "--amend")),
    "merge.driver": Trap(diverged, ("merge", "side")),
    "gpg.program": Trap(signed, ("log", "-1")),
    "alias": Trap(aliases, ("trap",)),
    "remote.url": Trap(fetched_by_a_command, ("cat-file", "-p", "HEAD:kernel.py")),
    "remote.uploadpack": Trap(fetched_by_a_program_of_the_far_side, ("cat-file", "-p", "HEAD:kernel.py")),
    "a submodule's filter": Trap(submodule(), ("status",)),
    "a submodule's diff": Trap(submodule(settings(diff__submodule="diff")), ("diff",)),
    "a submodule's smudge": Trap(
        submodule(settings(submodule__recurse="true")), ("restore", "--worktree", "--source=HEAD", ".")
    ),
    "submodule.update": Trap(
        submodule(settings(submodule__sub__update="!PROGRAM")), ("submodule", "update", "--force")
    ),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "own.config"))
    (tmp_path / "own.config").touch()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    mark, script = tmp_path / "started", tmp_path / "script"
    program = f"touch {mark}; timeout 2 cat"
    script.write_text(f"#!/bin/sh\n{program}\n")
    script.chmod(0o755)
    return Checkout(repository(tmp_path / "theirs"), program, script, mark)


def every_call(root: Path, scratch: Path) -> list[str]:
    """All that the lab does with a repository; why git did not go along with some of it."""
    scratch.mkdir()
    bundle = scratch / "source.bundle"
    tree = Tree(root)
    first = git.text(root, "rev-list", "--max-parents=0", "HEAD").strip()

    def a_session() -> None:
        before = tree.snapshot()
        (root / "kernel.py").write_text("attempt\n")
        (root / "new.py").write_text("attempt\n")
        after = tree.snapshot()
        tree.keep("session/1", after)
        tree.places(before, after)
        assert tree.rebuild(tree.head(), tree.patch(tree.head(), after)) == after
        content = tree.bundle(before)
        assert content is not None
        bundle.write_bytes(content)
        assert sorted(tree.revert(before, after)) == ["kernel.py", "new.py"]

    def unpacked() -> None:
        (scratch / "unpacked").mkdir()
        create(scratch / "unpacked", bundle).show("HEAD")

    refused = []
    for call in (
        lambda: find(root),
        lambda: revision_of(root),
        lambda: read_tree(root),
        lambda: export("HEAD", root, ENTRY),
        lambda: export("WORKTREE", root, ENTRY),
        lambda: of_files([root / "kernel.py"]),
        lambda: subject(root, "HEAD"),
        lambda: Bisection(scratch / "search", root, first, tree.head(), ()).position(),
        a_session,
        unpacked,
    ):
        try:
            call()
        except LabError as error:
            refused.append(str(error))
    return refused


@pytest.mark.parametrize("name", TRAPS)
def test_nothing_of_a_repositorys_settings_is_started(name: str, checkout: Checkout, tmp_path: Path) -> None:
    trap = TRAPS[name]
    trap.lay(checkout)
    checkout.mark.unlink(missing_ok=True)
    refused = every_call(checkout.root, tmp_path / "scratch")
    assert not checkout.mark.exists()
    # What lacks an object cannot be read; all else works, with the files as they lie there.
    if name.startswith("remote."):
        assert any("kernel.py is missing" in reason for reason in refused)
    else:
        assert refused == []


@pytest.mark.parametrize("name", TRAPS)
def test_each_trap_is_one(name: str, checkout: Checkout) -> None:
    """git itself starts the program, so that the test above is about something."""
    trap = TRAPS[name]
    trap.lay(checkout)
    checkout.mark.unlink(missing_ok=True)
    told(checkout.root, *trap.springs, given=trap.given, check=False)
    assert checkout.mark.exists()


def test_the_users_own_filters_hold(checkout: Checkout, tmp_path: Path) -> None:
    """Those of large files, as a rule; a repository cannot put others in their checkout."""
    own = tmp_path / "own"
    told(tmp_path, "config", "--global", "filter.trap.clean", f"touch {own}; tr a-z A-Z")
    CLEAN(checkout)
    snapshot = Tree(checkout.root).snapshot()
    assert git.text(checkout.root, "show", names=(f"{snapshot}:kernel.py",)) == "CHANGED\n"
    assert own.exists()
    assert not checkout.mark.exists()


def test_a_name_that_cannot_be_given_again(checkout: Checkout) -> None:
    attributes("* filter=a=b", settings(**{"filter__a=b__clean": "PROGRAM"}))(checkout)
    checkout.mark.unlink(missing_ok=True)
    with pytest.raises(
        git.GitError, match=r"'filter\.a=b\.clean' names a program and cannot be switched off"
    ):
        git.text(checkout.root, "status")
    with suppress(git.GitError):
        every_call(checkout.root, checkout.root.parent / "scratch")
    assert not checkout.mark.exists()
    told(checkout.root, "add", "-A")
    assert checkout.mark.exists()


def test_a_bare_repository_among_the_files(checkout: Checkout) -> None:
    """git takes a folder that looks like a repository for one, wherever it came from."""
    bare = checkout.root / "data"
    shutil.copytree(checkout.root / ".git", bare)
    told(bare, "config", "core.bare", "false")
    told(bare, "config", "core.worktree", "..")
    told(bare, "config", "core.fsmonitor", checkout.program)
    told(bare, "status")
    assert checkout.mark.exists()
    checkout.mark.unlink()
    find(bare)
    revision_of(bare)
    assert not checkout.mark.exists()


def test_files_elsewhere_are_not_taken_for_the_repositorys(checkout: Checkout, tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private/key").write_text("secret")
    told(checkout.root, "config", "core.worktree", str(tmp_path / "private"))
    with pytest.raises(
        git.GitError, match=r"its settings say that its files are in .*private \(core.worktree\)"
    ):
        git.root(checkout.root)
    assert find(checkout.root) is None


def test_submodules_at_another_commit_are_in_a_snapshot(checkout: Checkout) -> None:
    submodule()(checkout)
    told(checkout.root / "sub", "checkout", "-q", "--force", "HEAD~1")
    tree = Tree(checkout.root)
    changed = tree.patch(tree.head(), tree.snapshot())
    assert b"+Subproject commit" in changed
    revision = revision_of(checkout.root)
    assert revision is not None
    assert "+Subproject commit" in revision.diff


def test_what_a_listing_says() -> None:
    listing = (
        b"global\0filter.x.clean\nmine\0local\0filter.x.clean\ntheirs\0local\0filter.a b.Process\ntheirs\0"
        b"local\0filter.x.required\ntrue\0local\0core.bare\nfalse\0worktree\0diff.external\ntheirs\0local\0novalue\0"
        b"command\0core.sshcommand\nmine\0local\0filter.a b.process\ntheirs\0"
    )
    assert git_programs.switched_off(listing) == (
        ("diff.external", ""),
        ("filter.a b.process", ""),
        ("filter.x.clean", "mine"),
        ("filter.a b.required", "false"),
        ("filter.x.required", "false"),
    )
    assert git_programs.switched_off(b"") == ()
