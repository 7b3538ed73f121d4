"""From an instance to a connection: whose keys are checked, and what is taken over of gcloud's own command."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standin import BENCH, Cloud, message

from cudadent42.remote.core.address import SshAddress
from cudadent42.remote.core.policy import Reach
from cudadent42.remote.core.ssh import call
from cudadent42.remote.providers.gce import reach
from cudadent42.remote.providers.gce.failures import CloudError, Failure
from cudadent42.remote.providers.gce.fate import Fate, MachineLostError
from cudadent42.remote.providers.gce.machine import Machine

MACHINE = Machine(BENCH, "gcp-l4")
SINCE = "2026-01-01T00:00:00+00:00"
STRICT = (
    "/usr/bin/ssh -t -i /home/me/.ssh/google_compute_engine -o CheckHostIP=no -o HashKnownHosts=no "
    "-o HostKeyAlias=compute.12345 -o IdentitiesOnly=yes -o StrictHostKeyChecking=yes "
    "-o UserKnownHostsFile=/home/me/.ssh/google_compute_known_hosts "
)


def test_what_gcloud_would_run_is_taken_over() -> None:
    connection = reach.from_command(MACHINE, STRICT + "sa_1234@34.1.2.3\n")
    assert connection.address == SshAddress("34.1.2.3", "sa_1234")
    assert connection.options == (
        "IdentityFile=/home/me/.ssh/google_compute_engine",
        "CheckHostIP=no",
        "HashKnownHosts=no",
        "HostKeyAlias=compute.12345",
        "IdentitiesOnly=yes",
        "StrictHostKeyChecking=yes",
        "UserKnownHostsFile=/home/me/.ssh/google_compute_known_hosts",
    )
    assert "StrictHostKeyChecking=yes" in connection.argv()


def test_a_certificate_a_port_and_blanks_in_paths() -> None:
    command = STRICT.replace("/home/me/.ssh/google_compute_engine", '"/home/m e/key"')
    command = command.replace("-t ", '-t -p 2222 "-o CertificateFile=/home/m e/cert" ')
    connection = reach.from_command(MACHINE, command + "me@34.1.2.3")
    assert connection.address.port == 2222
    assert connection.options[:2] == ('CertificateFile="/home/m e/cert"', 'IdentityFile="/home/m e/key"')


def test_a_tunnel_is_made_of_checked_names_only() -> None:
    tunnel = (
        "-o \"ProxyCommand /usr/bin/python3 -S gcloud.py compute start-iap-tunnel 'bench' '%p' --listen-on-stdin "
        '--project=my-project --zone=us-central1-a; touch bad" -o ProxyUseFdpass=no '
    )
    connection = reach.from_command(MACHINE, STRICT + tunnel + "me@compute.12345")
    assert connection.address == SshAddress("compute.12345", "me")
    assert (
        "ProxyCommand=gcloud compute start-iap-tunnel bench %p --listen-on-stdin --project=my-project "
        "--zone=us-central1-a --verbosity=warning"
    ) in connection.options
    assert "ProxyUseFdpass=no" in connection.options


@pytest.mark.parametrize(
    "command",
    [
        "",
        "'",
        STRICT,
        STRICT.replace("=yes -o User", "=no -o User") + "me@34.1.2.3",
        STRICT.replace("-o StrictHostKeyChecking=yes ", "") + "me@34.1.2.3",
        STRICT.replace("-o HostKeyAlias=compute.12345 ", "") + "me@34.1.2.3",
        STRICT.replace("compute.12345", "*") + "me@34.1.2.3",
        STRICT + "-oProxyCommand=x",
        STRICT + "me@-oProxyCommand=x",
        STRICT + "-l@34.1.2.3",
        STRICT + "34.1.2.3",
        STRICT + "-o LocalCommand=x me@34.1.2.3",
        STRICT + "-o ProxyCommand",
        STRICT + "-F /tmp/other me@34.1.2.3",
        STRICT + "'$(touch bad)@34.1.2.3'",
        "/usr/bin/ssh -i '' me@34.1.2.3",
    ],
)
def test_any_other_command_is_refused(command: str) -> None:
    with pytest.raises(CloudError) as caught:
        reach.from_command(MACHINE, command)
    assert caught.value.failure is Failure.UNKNOWN


@given(st.text(max_size=80))
def test_no_destination_is_an_option(text: str) -> None:
    try:
        connection = reach.from_command(MACHINE, STRICT + text)
    except CloudError:
        return
    assert not connection.address.destination.startswith("-")
    assert "StrictHostKeyChecking=yes" in connection.options


@pytest.mark.parametrize("way", [Reach.AUTO, Reach.IAP])
def test_a_command_runs_there(cloud: Cloud, way: Reach) -> None:
    cloud.add(status="RUNNING")
    cloud.refuses(2)
    said: list[str] = []
    reach.wait(MACHINE, way, SINCE, said.append)
    done = call(reach.connection(MACHINE, way), 'printf "%s" "$1"', "$(touch bad)")
    assert done.output == b"$(touch bad)"
    assert said == [f"waiting for {BENCH} to answer"]
    for words in cloud.calls("compute", "ssh"):
        assert "--strict-host-key-checking=yes" in words
        assert ("--tunnel-through-iap" in words) is (way is Reach.IAP)


def test_another_key_than_the_published_one_is_refused(cloud: Cloud) -> None:
    cloud.add(status="RUNNING")
    cloud.change(ssh={**cloud.state["ssh"], "host_key": "stranger"})
    with pytest.raises(CloudError, match="HOST IDENTIFICATION HAS CHANGED") as caught:
        reach.wait(MACHINE, Reach.AUTO, SINCE, lambda text: None, patience_s=0)
    assert "does not answer after" in str(caught.value)


def test_an_unknown_key_is_refused(cloud: Cloud) -> None:
    cloud.add(status="RUNNING", metadata={})
    with pytest.raises(CloudError, match="Host key verification failed"):
        reach.wait(MACHINE, Reach.AUTO, SINCE, lambda text: None, patience_s=0)


def test_what_will_not_pass_is_not_waited_for(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "_SETTLE_S", 0.0)
    cloud.add(status="RUNNING")
    cloud.fails("compute ssh", "iap", times=99)
    with pytest.raises(CloudError) as caught:
        reach.wait(MACHINE, Reach.AUTO, SINCE, lambda text: None)
    assert caught.value.failure is Failure.NO_TUNNEL
    assert len(cloud.calls("compute", "ssh")) == 1


def test_a_machine_that_is_taken_away_is_not_waited_for(cloud: Cloud) -> None:
    cloud.add(status="RUNNING")
    cloud.takes_away()
    with pytest.raises(MachineLostError) as caught:
        reach.wait(MACHINE, Reach.AUTO, SINCE, lambda text: None)
    assert caught.value.ending.fate is Fate.PREEMPTED


def test_a_refusal_to_log_in_is_shown(cloud: Cloud) -> None:
    cloud.fails("compute ssh", "not-logged-in")
    with pytest.raises(CloudError) as caught:
        reach.connection(MACHINE, Reach.AUTO)
    assert message("not-logged-in") in str(caught.value)
