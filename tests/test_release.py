"""The parts of a release that are scripts: the tag's check, the changelog's section, the files."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "constraints.txt",
    "run.sh",
    "test.sh",
    "scripts",
    "src",
    "tools",
)
CHANGELOG = """# Changelog

## [Unreleased]

## [1.2.0] - 2026-12-01

### Added

* A thing.

## [1.1.0] - unreleased

* Another.

## [1.0.0] - 2026-01-01
"""


@pytest.fixture(scope="module")
def release() -> ModuleType:
    specification = importlib.util.spec_from_file_location("release", ROOT / "tools/release.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def repository(folder: Path, version: str, own: str = "", cited: str = "") -> Path:
    (folder / "src/cudadent42").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(f'[project]\nversion = "{version}"\n')
    (folder / "src/cudadent42/version.py").write_text(f'__version__ = "{own or version}"\n')
    (folder / "CITATION.cff").write_text(f"title: A lab\nversion: {cited or version}\n")
    (folder / "CHANGELOG.md").write_text(CHANGELOG)
    return folder


def test_the_section_of_the_tag_is_the_page(
    release: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = repository(tmp_path, "1.2.0")
    assert release.main(["check", "v1.2.0"], root) == 0
    assert capsys.readouterr().out == "v1.2.0 is ready\n"
    assert release.main(["notes", "v1.2.0"], root) == 0
    assert capsys.readouterr().out == "### Added\n\n* A thing.\n"


@pytest.mark.parametrize(
    ("version", "own", "tag", "message"),
    [
        ("1.2.0", "", "v1.2.1", "the tag is 'v1.2.1', and the version asks for 'v1.2.0'"),
        ("1.2.0", "", "1.2.0", "asks for 'v1.2.0'"),
        ("1.2.0", "1.1.9", "v1.2.0", "make them agree"),
        ("1.1.0", "", "v1.1.0", r"gives 1\.1\.0 no date; expected '## \[1\.1\.0\] - YYYY-MM-DD'"),
        ("1.0.0", "", "v1.0.0", r"says nothing under 1\.0\.0"),
        ("3.0.0", "", "v3.0.0", r"has no section 3\.0\.0"),
    ],
)
def test_what_does_not_fit_is_said(
    release: ModuleType, tmp_path: Path, version: str, own: str, tag: str, message: str
) -> None:
    with pytest.raises(release.ReleaseError, match=message):
        release.check(repository(tmp_path, version, own), tag)
    assert release.main(["check", tag], tmp_path) == 2


def test_what_is_cited_is_this_version(release: ModuleType, tmp_path: Path) -> None:
    root = repository(tmp_path, "1.2.0", cited="1.1.0")
    with pytest.raises(release.ReleaseError, match=r"1\.2\.0 and CITATION\.cff 1\.1\.0; make them agree"):
        release.check(root, "v1.2.0")
    (root / "CITATION.cff").write_text("title: A lab\n")
    with pytest.raises(release.ReleaseError, match=r"CITATION\.cff nothing; make them agree"):
        release.check(root, "v1.2.0")


def test_this_repository_has_one_version(release: ModuleType) -> None:
    assert release.version(ROOT)


@pytest.mark.slow
def test_two_builds_have_the_same_bytes(tmp_path: Path) -> None:
    """Of copies whose files have other times and permissions."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("building offline needs hatchling; ./test.sh installs it")
    built = []
    for copy, mode in (("one", 0o644), ("other", 0o664)):
        checkout, dist = tmp_path / copy / "checkout", tmp_path / copy / "dist"
        checkout.mkdir(parents=True)
        for name in SHIPPED:
            if (ROOT / name).is_dir():
                without = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / name, checkout / name, copy_function=shutil.copyfile, ignore=without)
            else:
                shutil.copyfile(ROOT / name, checkout / name)
        for path in checkout.rglob("*"):
            if path.is_file():
                path.chmod(mode)
        command = ["sh", str(checkout / "tools/build.sh"), str(dist)]
        done = subprocess.run(
            command, env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}, capture_output=True
        )
        assert done.returncode == 0, done.stderr.decode()
        built.append({path.name: path.read_bytes() for path in dist.iterdir()})
    one, other = built
    assert sorted(one) == sorted(other)
    assert [name.rpartition(".")[2] for name in sorted(one)] == ["whl", "gz"]
    assert one == other
