"""A second user of the machine tries to have their code loaded from the compile cache, a thousand times each way."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from cudadent42.base.compile_cache import clear, empty_cache
from flashmoe_science.errors import BuildError, DeviceError
from flashmoe_science.jit import host
from flashmoe_science.jit.cache import Compilation, CompileCache, recipe_key
from flashmoe_science.jit.private_directory import PrivateDirectory
from flashmoe_science.jit.records import Recipe

ATTACKER = 54321
TRIES = 1000
RECIPES = [Recipe("probe", "host", "x86-64", {"number": n}, "g++", "12", (), {}) for n in range(4)]
OURS, THEIRS = 1, 666
pytestmark = [
    pytest.mark.skipif(os.getuid() != 0, reason="only root can act as a second user"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("libraries")
    made = []
    for answer in (OURS, THEIRS):
        source = folder / f"answer{answer}.cpp"
        source.write_text(
            f'extern "C" __attribute__((visibility("default"))) int answer() {{ return {answer}; }}\n'
        )
        command = [*host.find_compiler().command, "-shared", "-fPIC", str(source)]
        subprocess.run([*command, "-o", str(source.with_suffix(".so"))], check=True)
        made.append(source.with_suffix(".so"))
    return made[0], made[1]


class Attacker:
    """The other user's process, for as long as the block runs."""

    def __init__(self, way: str, ground: Path, library: Path, folder: Path) -> None:
        program = Path(__file__).with_name("cache_attacker.py")
        recipes = folder / "recipes.json"
        recipes.write_text(json.dumps({recipe_key(each): dataclasses.asdict(each) for each in RECIPES}))
        arguments = [way, str(ground), "cache", str(library), str(recipes), str(ATTACKER)]
        self._process = subprocess.Popen(
            [sys.executable, str(program), *arguments], stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def __exit__(self, *error: object) -> None:
        alive = self._process.poll() is None
        self._process.kill()
        self._process.communicate()
        assert alive, "the attacker gave up"


@pytest.fixture
def ground(tmp_path: Path) -> Path:
    """A folder that everybody can reach and write to."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    ground = tmp_path / "ground"
    ground.mkdir()
    ground.chmod(0o777)
    return ground


def loaded_answer(directory: Path, library: Path, turn: int) -> str:
    """What a victim's call gets: the answer of what it loaded, or that it was refused."""

    def compile_to(path: Path) -> Compilation:
        shutil.copy(library, path)
        return Compilation()

    try:
        cache = CompileCache(PrivateDirectory(directory, follow=False))
        if turn % 10 == 0:
            clear(cache)
        build = cache.get_or_build(RECIPES[turn % len(RECIPES)], ".so", compile_to)
        path = cache.path_to_load(build.key)
        if path is None:
            return "refused"
        # In a process of its own the loader would know no name yet; here, the file says whose it is.
        content = Path(path).read_bytes()
        assert host.load(build).answer() == OURS
    except (DeviceError, BuildError):
        return "refused"
    return "ours" if content == library.read_bytes() else "theirs"


@pytest.mark.parametrize("way", ["swap", "link"])
@pytest.mark.parametrize("mode", [0o777, 0o1777], ids=["open", "sticky"])
def test_a_parent_that_others_may_write(
    way: str, mode: int, ground: Path, libraries: tuple[Path, Path], tmp_path: Path
) -> None:
    ground.chmod(mode)
    with Attacker(way, ground, libraries[1], tmp_path):
        answers = Counter(loaded_answer(ground / "cache", libraries[0], turn) for turn in range(TRIES))
    assert answers["theirs"] == 0
    if mode == 0o777:
        assert answers == {"refused": TRIES}


def test_a_cache_that_was_open_for_a_while(
    ground: Path, libraries: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ground.chmod(0o755)
    folder = ground / "cache"
    folder.mkdir()
    monkeypatch.setenv("FLASHMOE_CACHE_DIR", str(folder))
    answers: Counter[str] = Counter()
    planted = 0
    with Attacker("fill", ground, libraries[1], tmp_path):
        for turn in range(TRIES):
            folder.chmod(0o777)
            while not planted and not any(folder.glob("*.json")):
                pass
            planted += len(list(folder.glob("*.json")))
            if turn % 2:
                folder.chmod(0o700)  # what was advised before: without emptying it
            else:
                empty_cache()
            answers[loaded_answer(folder, libraries[0], turn)] += 1
    assert planted > TRIES / 10, "nothing was ever there to load"
    assert answers["theirs"] == 0
    assert answers["ours"] > TRIES / 2


def test_the_same_attacks_succeed_against_a_cache_that_checks_nothing(
    ground: Path, libraries: tuple[Path, Path], tmp_path: Path
) -> None:
    """Else the tests above would prove nothing."""
    folder = ground / "cache"
    folder.mkdir()
    shutil.copy(libraries[0], folder / (recipe_key(RECIPES[0]) + ".so"))
    foreign = libraries[1].read_bytes()
    with Attacker("swap", ground, libraries[1], tmp_path):
        for _ in range(1_000_000):
            try:
                if (folder / (recipe_key(RECIPES[0]) + ".so")).read_bytes() == foreign:
                    return
            except OSError:
                continue
    pytest.fail("the attacker never came between")
