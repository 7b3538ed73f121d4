"""Whose host key is believed, on machines of SkyPilot's.

SkyPilot writes an alias for ssh that switches the check off: ``StrictHostKeyChecking no`` and no file of known hosts
(``SSHConfigHelper`` in ``sky/utils/cluster_utils.py`` of 0.14.1). What else the alias says is needed: the address, the
user, the key, a way through a proxy. So it is used, and these options go before it on the command line, where they win.

No provider is asked for the key, so the first that is met is believed, and from then on no other is. It is kept by the
machine's start in the journal: addresses and names come again with another machine behind them.
"""

from __future__ import annotations

import os
from pathlib import Path

from cudadent42.base.errors import UsageError
from cudadent42.base.folders import make_private, state_folder

_FOLDER = "skypilot"
_FILE = "known_hosts"
_ALIAS = "cudadent42-"
"""Before the start's identity."""
_MEANT_BY_SSH = frozenset('"\\%$')
"""Characters of a path that ssh would take for quotes, variables and tokens."""


def known_hosts() -> Path:
    """The keys that were met, in a file of this user's own."""
    return state_folder() / _FOLDER / _FILE


def file() -> Path:
    """`known_hosts`, made if it is missing. Raises UsageError where keys cannot be kept there."""
    path = known_hosts()
    if not str(path).isprintable() or _MEANT_BY_SSH & set(str(path)):
        raise UsageError(
            f"ssh cannot be told to keep host keys in {str(path)!r}; set XDG_STATE_HOME to a folder of a plain name"
        )
    make_private(path.parent)
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise UsageError(f"cannot keep host keys in {path}: {error.strerror}; mend that first") from error
    return path


def options(start: str) -> tuple[str, ...]:
    """Options of ssh for the machine of a start. Raises UsageError where its key could not be kept."""
    return (
        "StrictHostKeyChecking=accept-new",
        f'UserKnownHostsFile="{file()}"',
        "GlobalKnownHostsFile=/dev/null",
        f"HostKeyAlias={_ALIAS}{start}",
        # The alias alone tells: an address is another machine's tomorrow, and that of a tunnel is this one's own.
        "CheckHostIP=no",
        "NoHostAuthenticationForLocalhost=no",
        "VerifyHostKeyDNS=no",
    )
