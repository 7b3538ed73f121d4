"""What a repository's own settings would have git start: found before each call, and switched off for it.

A repository that came from elsewhere comes with a ``.git/config``, and so do its submodules. Settings of the user, of
the system and of the command are the user's word and hold.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

LISTING = ("config", "--list", "-z", "--show-scope")
"""The words that make git list its settings; none of them starts a program. ``--show-scope``: git 2.26."""

ALWAYS = (
    ("core.fsmonitor", "false"),
    ("core.hooksPath", os.devnull),
    # A child that enters a submodule would follow that one's settings, which nobody has looked at.
    ("submodule.recurse", "false"),
    ("diff.submodule", "short"),
)
"""Settings of every call, whatever the repository's are."""

ENVIRONMENT = {
    # Objects that a partial clone lacks are fetched where they are missed, by a program that its settings name.
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "",
}
"""git before 2.39.4 knows the second only: no protocol is allowed, whatever ``protocol.*`` says."""

_OF_THE_REPOSITORY = frozenset((b"local", b"worktree"))

_PROGRAMS = re.compile(
    r"""
      filter\..*\.(?:clean|smudge|process)
    | diff\.external | diff\..*\.(?:command|textconv)
    | merge\..*\.driver
    | core\.(?:sshcommand|gitproxy|pager|editor|askpass|alternaterefscommand)
    | credential\.(?:.*\.)?helper
    | gpg\.(?:.*\.)?(?:program|defaultkeycommand)
    | remote\..*\.(?:uploadpack|receivepack|vcs)
    | hook\..*\.command
    | sequence\.editor | interactive\.difffilter | uploadpack\.packobjectshook
    """,
    re.VERBOSE | re.DOTALL,
)
_DRIVER = re.compile(r"(filter\..*)\.(?:clean|smudge|process)", re.DOTALL)


class UnusableSettingError(ValueError):
    """A setting that names a program and cannot be switched off."""


@dataclass(frozen=True)
class _Setting:
    scope: bytes
    key: str
    value: str


def switched_off(listing: bytes) -> tuple[tuple[str, str], ...]:
    """The settings that give each program of the repository's its value without the repository: mostly none.

    Args:
        listing: what ``git config --list -z --show-scope`` prints.

    Raises:
        UnusableSettingError: the name of a setting cannot be given to git again.
    """
    settings = _parse(listing)
    theirs = {
        each.key for each in settings if each.scope in _OF_THE_REPOSITORY and _PROGRAMS.fullmatch(each.key)
    }
    # A filter that is required and absent is an error.
    required = {f"{driver[1]}.required" for key in theirs if (driver := _DRIVER.fullmatch(key))}
    own = {each.key: each.value for each in settings if each.scope not in _OF_THE_REPOSITORY}
    for key in theirs:
        if "=" in key or "\n" in key:
            raise UnusableSettingError(
                f"the repository's setting {key!r} names a program and cannot be switched off: remove it from "
                ".git/config"
            )
    return (
        *((key, own.get(key, "")) for key in sorted(theirs)),
        *((key, own.get(key, "false")) for key in sorted(required)),
    )


def _parse(listing: bytes) -> list[_Setting]:
    """Scopes and settings alternate, each with a zero byte behind it; a key and its value have a line between them."""
    fields = listing.split(b"\0")
    settings = []
    for scope, setting in zip(fields[0::2], fields[1::2], strict=False):
        key, _, value = setting.partition(b"\n")
        settings.append(_Setting(scope, os.fsdecode(key), os.fsdecode(value)))
    return settings
