from __future__ import annotations

import re
import shlex
import sys
from importlib import metadata
from pathlib import Path

import pytest

from flashmoe_science.jit.requirements import install_command

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[3]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
SOURCES = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]


def test_a_checkout_is_installed_again_with_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "a b"
    checkout.mkdir()
    (checkout / "pyproject.toml").touch()
    command = shlex.split(install_command("cu13", checkout))
    assert command == [sys.executable, "-m", "pip", "install", "-e", f"{checkout}[cu13]"]
    monkeypatch.chdir(checkout)
    assert install_command("cu13", checkout).endswith(" -e '.[cu13]'")


def test_beside_a_wheel_the_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = [f"{package}; extra == '{extra}'" for extra in EXTRAS for package in EXTRAS[extra]]
    monkeypatch.setattr(metadata, "requires", lambda name: ["torch>=2.10", *declared])
    for extra, packages in EXTRAS.items():
        # A requirement's own condition has been judged where it was installed.
        named = [package.partition(";")[0].strip() for package in packages]
        assert shlex.split(install_command(extra, tmp_path))[4:] == named


def test_beside_nothing_no_package_is_named_that_no_index_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the sources, as on a PYTHONPATH."""

    def not_installed(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", not_installed)
    command = install_command("cu13", tmp_path)
    assert shlex.split(command, comments=True)[1:] == ["-m", "pip", "install", "-e", ".[cu13]"]
    assert command.endswith("# in a checkout of cudadent42")


def test_every_extra_that_a_message_names_exists() -> None:
    named = {extra for text in SOURCES for extra in re.findall(r"""install_command\(["'](\w+)["']\)""", text)}
    assert named
    assert named <= set(EXTRAS)


def test_no_message_no_page_and_no_test_installs_what_is_not_published() -> None:
    pages = [
        path.read_text(encoding="utf-8") for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
    ]
    tests = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    for text in (*SOURCES, *pages, *tests):
        assert not re.search(r"pip install [^\n]*['\" ](cudadent42|flashmoe[-_]science)\b", text)
