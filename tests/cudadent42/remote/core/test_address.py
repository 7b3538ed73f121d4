"""Addresses: what is one, and that nothing else passes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudadent42.base.errors import UsageError
from cudadent42.remote.core.address import GceAddress, SshAddress, check_name, gce_address, parse

HOSTILE = (
    "ssh://-oProxyCommand=touch bad",
    "ssh://host;touch bad",
    "ssh://$(touch bad)",
    "ssh://`touch bad`",
    "ssh://user@-oProxyCommand=x",
    "ssh://-l@host",
    "ssh://user name@host",
    "ssh://host:22;id",
    "ssh://host:-1",
    "ssh://host:99999",
    "ssh://host:٢٢",
    "ssh://host\ntouch bad",
    "ssh://",
    "ssh:///etc/passwd",
    "ssh://host/path",
    "gce://project/zone",
    "gce://my-project/us-central1-a/x/y",
    "gce://my-project/us-central1-a/-x",
    "gce://my-project/--flag/x",
    "gce://-p/us-central1-a/x",
    "gce://my-project/us-central1-a/x\n",
    "gce://my-project/us-central1-a/$(id)",
    "gce://project/zone/--flag",
    "gce://Project/zone/instance",
    "gce://p/z/i;id",
    "http://host",
    "host",
    "",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected ssh://"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("ssh://host", SshAddress("host")),
        ("ssh://me@gpu-1.example.org:2222", SshAddress("gpu-1.example.org", "me", 2222)),
        ("ssh://my_alias", SshAddress("my_alias")),
        ("ssh://root@[::1]:22", SshAddress("[::1]", "root", 22)),
        ("ssh://10.0.0.1", SshAddress("10.0.0.1")),
        ("gce://my-project/us-central1-a/bench-1", GceAddress("my-project", "us-central1-a", "bench-1")),
        ("gce://example.org:lab/europe-west4-b/l4", GceAddress("example.org:lab", "europe-west4-b", "l4")),
    ],
)
def test_addresses(text: str, address: object) -> None:
    assert parse(text) == address
    assert str(address) == text


@given(st.text(max_size=60))
def test_what_passes_is_neither_an_option_nor_shell_text(text: str) -> None:
    try:
        address = parse("ssh://" + text)
    except UsageError:
        return
    assert isinstance(address, SshAddress)
    assert not address.destination.startswith("-")
    assert not set(address.destination) & set(" \t\r\n'\"`$;&|<>(){}*?!\\~#")


@settings(max_examples=200)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(["my-project", "us-central1-a", "-x", "$(id)", "a b"]), st.text(max_size=30)
        )
    )
)
def test_no_part_of_an_instance_is_an_option_or_shell_text(parts: list[str]) -> None:
    try:
        address = parse("gce://" + "/".join(parts))
    except UsageError:
        return
    assert isinstance(address, GceAddress)
    assert [address.project, address.zone, address.instance] == parts
    for part in parts:
        assert part.isascii()
        assert not part.startswith("-")
        assert not set(part) - set("abcdefghijklmnopqrstuvwxyz0123456789.:-")


@pytest.mark.parametrize(
    "bad", [("P", "us-central1-a", "x"), ("my-project", "us", "x"), ("my-project", "us-central1-a", "-x")]
)
def test_parts_are_checked_wherever_they_come_from(bad: tuple[str, str, str]) -> None:
    with pytest.raises(UsageError, match="expected ssh://"):
        gce_address(*bad)


@pytest.mark.parametrize("name", ["-x", "a b", "", "a/b", "a\n", "$(x)"])
def test_names_of_remotes(name: str) -> None:
    with pytest.raises(UsageError, match="remote name"):
        check_name(name)


@pytest.mark.parametrize(
    "text", ["ssh://me:secret@host", "ssh://me:secret@host:22/x", "ssh://me:@secret@host"]
)
def test_a_password_in_an_address_is_not_repeated(text: str) -> None:
    with pytest.raises(UsageError, match=r"an address holds no password \(ssh://me:\*\*\*@host") as refused:
        parse(text)
    assert "secret" not in str(refused.value)
