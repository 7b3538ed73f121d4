"""The choices that a remote keeps for a cloud machine: its end after a run, how it is reached, where results go."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from cudadent42.base.errors import UsageError

MOST_MINUTES = 7 * 24 * 60
_BUCKET = re.compile(r"gs://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9](?:/[A-Za-z0-9][A-Za-z0-9._=-]{0,200}){0,20}")
_EXPECTED = "expected stop, keep or keep:MINUTES"


class Ending(str, Enum):
    STOP = "stop"
    """A fresh instance is deleted, any other stopped."""
    KEEP = "keep"
    KEEP_FOR = "keep-for"
    """Kept, and told to shut itself down after some minutes."""


@dataclass(frozen=True)
class After:
    """The policy of a machine that was started for a run."""

    ending: Ending
    minutes: int | None = None
    """Of KEEP_FOR."""

    def __str__(self) -> str:
        return f"keep:{self.minutes}" if self.ending is Ending.KEEP_FOR else self.ending.value


STOP = After(Ending.STOP)


def parse_after(text: str) -> After:
    """The policy that ``text`` names. Raises UsageError."""
    if text in (Ending.STOP.value, Ending.KEEP.value):
        return After(Ending(text))
    word, colon, minutes = text.partition(":")
    # The length first: a number of any size is read otherwise.
    if word == "keep" and colon and minutes.isascii() and minutes.isdigit() and len(minutes) < 6:
        number = int(minutes)
        if 1 <= number <= MOST_MINUTES:
            return After(Ending.KEEP_FOR, number)
    raise UsageError(f"--after {text!r}: {_EXPECTED}, with 1 to {MOST_MINUTES} minutes")


class Reach(str, Enum):
    """How ``gcloud compute ssh`` gets to an instance."""

    AUTO = "auto"
    """Its external address; through Identity-Aware Proxy where it has none."""
    IAP = "iap"
    INTERNAL = "internal"
    """Its internal address, from within the network."""


def parse_reach(text: str) -> Reach:
    """Raises UsageError."""
    try:
        return Reach(text)
    except ValueError as error:
        raise UsageError(f"reach {text!r}: expected {', '.join(member.value for member in Reach)}") from error


def check_bucket(text: str) -> str:
    """``text`` if it is empty or a place in a bucket; no wildcard passes. Raises UsageError."""
    if text and not _BUCKET.fullmatch(text):
        raise UsageError(f"bucket {text!r}: expected gs://BUCKET or gs://BUCKET/FOLDER")
    return text
