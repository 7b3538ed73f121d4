"""The check of a machine's host key, where the user's own configuration of ssh switches it off.

What runs there is this user's code and what comes back is believed, so the key is checked all the same. What else the
configuration says of the machine holds, its files of known hosts too.
"""

from __future__ import annotations

import subprocess

from cudadent42.remote.core.address import SshAddress

_OFF = frozenset(("false", "no", "off"))
_NOWHERE = frozenset(("/dev/null", "none"))
_USUAL_FILE = "~/.ssh/known_hosts"


def options(address: SshAddress) -> tuple[str, ...]:
    """Options of ssh that switch the check on again; none where it is on, as ``ssh -G`` says."""
    port = ["-p", str(address.port)] if address.port else []
    try:
        asked = subprocess.run(
            ["ssh", "-G", *port, "--", address.destination],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except FileNotFoundError:
        return ()  # the connection says so
    means = dict(line.split(" ", 1) for line in asked.stdout.splitlines() if " " in line)
    if means.get("stricthostkeychecking") not in _OFF:
        return ()
    kept = set(means.get("userknownhostsfile", "").split()) - _NOWHERE
    return ("StrictHostKeyChecking=yes", *([] if kept else [f"UserKnownHostsFile={_USUAL_FILE}"]))
