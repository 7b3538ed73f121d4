"""What the tests of the ledger share."""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

from cudadent42.ledger import queries
from cudadent42.ledger.database import connect

SOURCE = os.pathsep.join(sys.path)
MakeRun = Callable[..., Path]


def rows(file: Path) -> dict[str, int]:
    return connect(file).read(queries.contents).rows


def dump(file: Path) -> list[str]:
    with sqlite3.connect(file) as connection:
        return sorted(line for line in connection.iterdump() if line.startswith("INSERT"))
