"""Where the ledger is: a file of this user by default, or any database that SQLAlchemy has a URL for."""

from __future__ import annotations

import os
import re
from pathlib import Path

from cudadent42.base.folders import state_folder
from cudadent42.base.reading import expanded

VARIABLE = "CUDADENT42_LEDGER"
"""A path or a URL; ``NONE`` keeps no ledger."""

NONE = "none"
FILE = "ledger.sqlite"

_URL = re.compile(
    r".*://|(sqlite|postgres|mysql|mariadb|oracle|mssql|jdbc)[^/]*:|.*password=|[^/]*:[^/]*@", re.IGNORECASE
)
"""What begins like this is no path: a URL, one with a slash missing, or a connection string of another program. As a
path it would be shown, and a folder of that name made, with the password that it may hold."""


def locate(named: str | None = None) -> Path | str | None:
    """The ledger's file or URL: ``named``, else ``$CUDADENT42_LEDGER``, else the user's own file.

    None where the ledger is switched off. SQLite needs a local disk: its shared memory does not work over a network.
    """
    text = named or os.environ.get(VARIABLE, "")
    if text == NONE:
        return None
    if _URL.match(text):
        return text
    return expanded(text).absolute() if text else state_folder() / FILE
