from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import repositories as r

from cudadent42.base.errors import UsageError
from cudadent42.versions.sources import (
    WORKING_TREE,
    check_entry,
    check_folder,
    checked_folder_of,
    export,
    folder_of,
)


def tree(path: Path) -> dict[str, str]:
    return {
        file.relative_to(path).as_posix(): file.read_text()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


def test_a_commit_is_exported_without_touching_the_repository(tmp_path: Path) -> None:
    root = r.repository(tmp_path / "repo")
    first = r.git(root, "rev-parse", "HEAD")
    r.write_kernel(root, offset="1.0")
    second = r.commit(root, "Another")
    before = (
        r.git(root, "status", "--porcelain"),
        (root / ".git/index").read_bytes(),
        r.git(root, "for-each-ref"),
    )
    old, new = export("HEAD~1", root, r.ENTRY), export("main", root / "kernels", r.ENTRY)
    after = (
        r.git(root, "status", "--porcelain"),
        (root / ".git/index").read_bytes(),
        r.git(root, "for-each-ref"),
    )
    assert before == after
    assert (old.commit, new.commit) == (first, second)
    assert old.digest != new.digest
    assert "+ 0.0" in tree(folder_of(old))["kernels/mine.py"]
    assert "+ 1.0" in tree(folder_of(new))["kernels/mine.py"]


def test_the_working_tree_has_what_is_not_committed_and_not_what_is_ignored(tmp_path: Path) -> None:
    root = r.repository(tmp_path / "repo")
    (root / ".gitignore").write_text("ignored.py\n")
    (root / "ignored.py").write_text("")
    (root / "new.py").write_text("x = 1\n")
    (root / "kernels/helper.py").unlink()
    files = tree(folder_of(export(WORKING_TREE, root, r.ENTRY)))
    assert set(files) == {".gitignore", "new.py", "kernels/mine.py"}


def test_bytecode_is_no_source(tmp_path: Path) -> None:
    """Not even where git ignores none of it: what Python writes beside its modules would make every version another."""
    root = r.repository(tmp_path / "repo")
    clean = export(WORKING_TREE, root, r.ENTRY)
    (root / "kernels/__pycache__").mkdir()
    (root / "kernels/__pycache__/mine.cpython-311.pyc").write_bytes(b"bytecode")
    assert export(WORKING_TREE, root, r.ENTRY).digest == clean.digest
    r.commit(root, "With bytecode")
    committed = export("HEAD", root, r.ENTRY)
    assert committed.digest == clean.digest
    assert checked_folder_of(committed).is_dir()


def test_equal_sources_have_one_address(tmp_path: Path) -> None:
    root = r.repository(tmp_path / "repo")
    committed, working = export("HEAD", root, r.ENTRY), export(WORKING_TREE, root, r.ENTRY)
    folder = export(str(root), entry=r.ENTRY)
    assert committed.digest == working.digest == folder.digest
    assert (working.commit, folder.revision) == ("", "repo")


@pytest.mark.parametrize("layout", ["src/flashmoe_science", "flashmoe_science"])
def test_the_package_is_found_where_trees_have_it(tmp_path: Path, layout: str) -> None:
    package = tmp_path / "tree" / layout
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (tmp_path / "tree" / "other.py").write_text("")
    assert set(tree(folder_of(export(str(tmp_path / "tree"))))) == {"flashmoe_science/__init__.py"}
    assert export(str(tmp_path / "tree")).digest == export(str(package)).digest


def test_names_that_do_not_exist(tmp_path: Path) -> None:
    root = r.repository(tmp_path / "repo")
    with pytest.raises(UsageError, match="'nothing' is no revision"):
        export("nothing", root, r.ENTRY)
    with pytest.raises(UsageError, match="is no revision"):
        export("--help", root, r.ENTRY)
    with pytest.raises(UsageError, match="not a folder"):
        export("./nothing", root)
    with pytest.raises(UsageError, match="has no file"):
        export("HEAD", root, "kernels/other.py:attention")
    with pytest.raises(UsageError, match="no package flashmoe_science"):
        export("HEAD", root)
    with pytest.raises(UsageError, match=r"expected path/to/file.py:callable"):
        export("HEAD", root, "attention")
    (tmp_path / "plain").mkdir()
    with pytest.raises(UsageError, match="not in a git repository"):
        export("HEAD", tmp_path / "plain")


def test_a_tree_that_points_outside_is_refused(tmp_path: Path) -> None:
    """git refuses such names on checkout, but an object may hold them."""
    root = r.repository(tmp_path / "repo")
    blob = r.git(root, "hash-object", "-w", "kernels/mine.py")
    inner = b"100644 ..\0" + bytes.fromhex(blob)
    made = subprocess.run(
        ["git", "-C", str(root), "hash-object", "-t", "tree", "-w", "--literally", "--stdin"],
        input=inner,
        capture_output=True,
        check=True,
    ).stdout.decode()
    both = f"100644 blob {blob}\tmine.py\n040000 tree {made.strip()}\tx\n"
    whole = subprocess.run(
        ["git", "-C", str(root), "mktree"], input=both.encode(), capture_output=True, check=True
    ).stdout.decode()
    bad = r.git(root, "commit-tree", whole.strip(), "-m", "bad")
    with pytest.raises(UsageError, match="outside"):
        export(bad, root, "mine.py:attention")


def test_links_are_not_followed(tmp_path: Path) -> None:
    root = r.repository(tmp_path / "repo")
    (tmp_path / "secret.py").write_text("secret")
    (root / "link.py").symlink_to(tmp_path / "secret.py")
    r.commit(root, "A link")
    for revision in ("HEAD", WORKING_TREE, str(root)):
        assert "link.py" not in tree(folder_of(export(revision, root, r.ENTRY)))


def edit(folder: Path) -> None:
    (folder / "kernels/mine.py").write_text("edited")


def add(folder: Path) -> None:
    (folder / "numpy.py").write_text("")


def link(folder: Path) -> None:
    (folder / "linked").symlink_to("/etc")


def remove(folder: Path) -> None:
    (folder / "kernels/mine.py").unlink()


@pytest.mark.parametrize("change", [edit, add, link, remove])
def test_a_tree_that_was_changed_in_the_cache_is_refused_and_exported_anew(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    root = r.repository(tmp_path / "repo")
    version = export("HEAD", root, r.ENTRY)
    before = tree(folder_of(version))
    change(folder_of(version))
    check_folder.cache_clear()
    with pytest.raises(UsageError, match=r"not those that were exported.*start the race again"):
        checked_folder_of(version)
    assert export("HEAD", root, r.ENTRY) == version
    assert tree(checked_folder_of(version)) == before
    assert not list(folder_of(version).parent.glob(".new-*"))


def test_bytecode_beside_the_files_is_no_change(tmp_path: Path) -> None:
    version = export("HEAD", r.repository(tmp_path / "repo"), r.ENTRY)
    cached = folder_of(version) / "kernels/__pycache__"
    cached.mkdir()
    (cached / "mine.pyc").write_bytes(b"")
    assert checked_folder_of(version) == folder_of(version)


def test_a_tree_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    rename = Path.rename

    def noted(descriptor: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    def renamed(path: Path, target: Path) -> Path:
        if path.name == "tree":
            assert any(name.endswith("kernels/mine.py") for name in flushed)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", renamed)
    folder = folder_of(export("HEAD", r.repository(tmp_path / "repo"), r.ENTRY))
    assert str(folder.parent) in flushed


def test_a_variant_needs_no_file_in_the_tree(tmp_path: Path) -> None:
    check_entry("cudadent42[portable]", tmp_path)
    with pytest.raises(UsageError, match=r"or a variant such as 'cudadent42\[portable\]'"):
        check_entry("cudadent42", tmp_path)
