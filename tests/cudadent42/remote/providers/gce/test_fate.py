"""What became of an instance, from the provider's operations."""

from __future__ import annotations

import pytest

from cudadent42.remote.providers.gce.fate import End, Fate, last_end

SINCE = "2026-11-01T12:00:00+00:00"


def operation(kind: str, time: str, name: str = "bench", user: str = "system") -> dict[str, str]:
    return {
        "operationType": kind,
        "insertTime": time,
        "targetLink": f"https://www.googleapis.com/compute/v1/projects/p/zones/z/instances/{name}",
        "user": user,
    }


PREEMPTED = operation("compute.instances.preempted", "2026-11-01T05:30:00.123-07:00")


@pytest.mark.parametrize(
    ("operations", "fate"),
    [
        ([PREEMPTED], Fate.PREEMPTED),
        ([operation("setMetadata", "2026-11-01T05:31:00-07:00"), PREEMPTED], Fate.PREEMPTED),
        ([operation("compute.instances.hostError", "2026-11-01T13:00:00+00:00"), PREEMPTED], Fate.HOST_ERROR),
        ([operation("compute.instances.guestTerminate", "2026-11-01T12:10:00+00:00")], Fate.SHUT_DOWN),
        (
            [operation("compute.instances.preempted", "2026-11-01T11:00:00+00:00")],
            Fate.UNKNOWN,
        ),  # of a start before
        ([operation("compute.instances.preempted", "2026-11-01T12:30:00+00:00", "bench-2")], Fate.UNKNOWN),
        ([operation("compute.instances.somethingNew", "2026-11-01T12:30:00+00:00")], Fate.UNKNOWN),
        ([operation("compute.instances.preempted", "yesterday"), 7, {}], Fate.UNKNOWN),
        ([], Fate.UNKNOWN),
        ({"not": "a list"}, Fate.UNKNOWN),
    ],
)
def test_the_last_end_counts(operations: object, fate: Fate) -> None:
    assert last_end(operations, "bench", SINCE).fate is fate


def test_words() -> None:
    assert str(End(Fate.UNKNOWN)) == "the provider does not say why"
    end = last_end([operation("stop", "2026-11-01T12:30:00+00:00", user="me@example.org")], "bench", SINCE)
    assert str(end) == "it was stopped by me@example.org, 2026-11-01T12:30:00+00:00"
