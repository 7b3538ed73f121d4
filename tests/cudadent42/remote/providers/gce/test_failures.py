"""What the tool's real messages mean."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standin import MESSAGES, message

from cudadent42.base.errors import ExitCode
from cudadent42.remote.providers.gce.failures import CloudError, Failure, recognise

MEANINGS = {
    "no-capacity-create": Failure.NO_CAPACITY,
    "no-capacity-start": Failure.NO_CAPACITY,
    "no-capacity-old": Failure.NO_CAPACITY,
    "quota-global": Failure.QUOTA_GLOBAL,
    "quota-global-details": Failure.QUOTA_GLOBAL,
    "quota-region": Failure.QUOTA_REGION,
    "quota-family": Failure.QUOTA_REGION,
    "rate-limit": Failure.RATE_LIMIT,
    "no-image": Failure.NO_IMAGE,
    "no-image-create": Failure.NO_IMAGE,
    "not-logged-in": Failure.NOT_LOGGED_IN,
    "login-expired": Failure.NOT_LOGGED_IN,
    "api-disabled": Failure.API_DISABLED,
    "billing-disabled": Failure.BILLING_DISABLED,
    "permission": Failure.PERMISSION,
    "permission-account": Failure.PERMISSION,
    "permission-project": Failure.PERMISSION,
    "permission-storage": Failure.PERMISSION,
    "no-instance": Failure.NO_INSTANCE,
    "no-project": Failure.NO_PROJECT,
    "not-in-zone-type": Failure.NOT_IN_ZONE,
    "not-in-zone-accelerator": Failure.NOT_IN_ZONE,
    "no-network": Failure.NO_NETWORK,
    "external-ip": Failure.POLICY,
    "iap": Failure.NO_TUNNEL,
    "local-ssd": Failure.LOCAL_SSD,
    "unknown": Failure.UNKNOWN,
}


def test_every_recorded_message_has_a_meaning() -> None:
    assert {path.stem for path in MESSAGES.iterdir()} == set(MEANINGS)
    told = set(MEANINGS.values()) | {Failure.NO_TOOL, Failure.TIMED_OUT}  # these two, the tool does not say
    assert told == set(Failure)


@pytest.mark.parametrize("name", MEANINGS)
def test_messages(name: str) -> None:
    assert recognise(message(name)) is MEANINGS[name]


@pytest.mark.parametrize("name", MEANINGS)
def test_what_the_tool_said_is_shown_whole(name: str) -> None:
    error = CloudError(MEANINGS[name], message(name), "starting it")
    assert message(name) in str(error)
    assert str(error).startswith(f"starting it: {MEANINGS[name].value}; ")
    assert error.exit_code is ExitCode.NOT_READY


@pytest.mark.parametrize("failure", Failure, ids=lambda failure: failure.name)
def test_words(failure: Failure, snapshot: Callable[[str, str], None]) -> None:
    """As docs/cloud.md tabulates them."""
    error = CloudError(failure, "<what gcloud says>", "starting gpu-1")
    name = failure.name.lower().replace("_", "-")
    snapshot(f"cloud/{name}", f"{error}\nexit code {error.exit_code.value}\n")


@given(st.text(max_size=200))
def test_nothing_is_guessed(text: str) -> None:
    assert recognise(f"ERROR: {text.lower()}") is Failure.UNKNOWN


def test_publickey_is_not_a_missing_role() -> None:
    """A key that has not arrived yet passes; a missing role does not."""
    assert recognise("me@34.1.2.3: Permission denied (publickey).") is Failure.UNKNOWN
