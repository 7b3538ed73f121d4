"""What each check says of what can be wrong, and how it is mended; ``./test.sh --update-snapshots`` writes it again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cudadent42.preflight.definitions import THIS_PYTHON, Definition
from cudadent42.preflight.table import DEFINITIONS


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda each: each.name)
def test_words_of_a_check(definition: Definition, snapshot: Callable[[str, str], None]) -> None:
    """A name in braces stands for what the check saw."""
    lines = [f"{definition.name}: {definition.purpose}"]
    for problem in definition.problems:
        lines += [f"{problem.status.value}  {problem.key}", f"    {problem.cause}", f"    fix: {problem.fix}"]
    snapshot(f"preflight/{definition.name}", "\n".join(lines).replace(THIS_PYTHON, "<python>") + "\n")
