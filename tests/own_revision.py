"""Which revision of this repository runs is asked of git once in a process of tests, and once for all that are forked.

Every run, profile and verdict asks: twelve processes of git, and a look at each file of the working tree. It changes
nothing while tests run. Repositories that tests make are asked as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path


def ask_once(put: Callable[[object, str, object], None] = setattr) -> Callable[[], object]:
    """From here on this process does, and what it forks does once the function that is returned was called."""
    from cudadent42.runs import source

    package = Path(source.__file__).resolve().parent
    ask, revision_of = source.ask, source.revision_of

    @functools.cache
    def told(words: tuple[str, ...], paths: tuple[str, ...] | None) -> str | None:
        return ask(package, *words, paths=paths)

    @functools.cache
    def own() -> source.Revision | None:
        return revision_of(package)

    def ask_here(folder: Path, *words: str, paths: Sequence[str] | None = None) -> str | None:
        if folder != package:
            return ask(folder, *words, paths=paths)
        return told(words, None if paths is None else tuple(paths))

    put(source, "ask", ask_here)
    put(source, "revision_of", lambda folder: own() if folder == package else revision_of(folder))
    return source.revision
