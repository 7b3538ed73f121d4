"""From a running instance to an OpenSSH connection.

``gcloud compute ssh`` knows the user's name there (OS Login gives another than here), their key and its way to the
instance. It knows an address or a tunnel through Identity-Aware Proxy, and the host keys that the instance published.
So it is asked once to connect, which puts the keys in place on both sides, and once what it would run, whose options
our own connection then takes over. It is told to check host keys strictly each time: left alone, it accepts the first
it sees.
"""

from __future__ import annotations

import re
import shlex
import time

from cudadent42.remote.core.address import SshAddress
from cudadent42.remote.core.policy import Reach
from cudadent42.remote.core.ssh import Connection, connect
from cudadent42.remote.core.states import MachineState
from cudadent42.remote.core.terminal import Say
from cudadent42.remote.providers.gce import fate, gcloud
from cudadent42.remote.providers.gce.failures import CloudError, Failure
from cudadent42.remote.providers.gce.machine import Machine

ANSWER_S = 420.0
"""How long a machine may take from its start until its sshd answers; large GPU images take three minutes."""
_PAUSE_S = 3.0
_SAY_EVERY_S = 30.0
_LOOK_EVERY = 5
"""Tries, between looks at whether the machine still runs."""
_SETTLE_S = 20.0
"""How long even a refusal is tried again: roles and addresses take a moment to arrive."""
_CONNECT_TIMEOUT_S = 10
_TRY_TIMEOUT_S = 90.0
"""Of one attempt, in which gcloud may wait for a key to arrive."""

# While a machine boots these come and go: no sshd yet, no host keys yet, no key of ours yet, a busy service.
_PASSING = frozenset((Failure.UNKNOWN, Failure.TIMED_OUT, Failure.RATE_LIMIT))

_OPTIONS = frozenset(
    (
        "CheckHostIP",
        "HashKnownHosts",
        "HostKeyAlias",
        "IdentitiesOnly",
        "StrictHostKeyChecking",
        "UserKnownHostsFile",
    )
)
"""What is taken over of the command that gcloud would run."""
_ALIAS = re.compile(r"compute\.[0-9]{1,20}")
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,255}")


def connection(machine: Machine, reach: Reach) -> Connection:
    """How to reach a running machine. Raises CloudError."""
    told = gcloud.run(
        f"reaching {machine.name}", (*_words(machine, reach), "--dry-run"), gcloud.READ_TIMEOUT_S
    )
    return from_command(machine, told)


def from_command(machine: Machine, command: str) -> Connection:
    """The connection that an ssh command of gcloud's means. Raises CloudError where it is not one, or not strict."""
    try:
        options, destination, port = _parsed(shlex.split(command))
    except (ValueError, StopIteration) as error:
        raise CloudError(Failure.UNKNOWN, f"expected an ssh command, found {command!r:.500}") from error
    user, _, host = destination.rpartition("@")
    strict = options.get("StrictHostKeyChecking") == "yes" and _ALIAS.fullmatch(
        options.get("HostKeyAlias", "")
    )
    if not (strict and _WORD.fullmatch(host) and _WORD.fullmatch(user)):
        raise CloudError(
            Failure.UNKNOWN, f"expected an ssh command that checks the host's key, found {command!r:.500}"
        )
    if "ProxyCommand" in options:
        at = machine.address
        # Of names that are checked, so that no shell finds anything in it.
        options["ProxyCommand"] = (
            f"gcloud compute start-iap-tunnel {at.instance} %p --listen-on-stdin --project={at.project} "
            f"--zone={at.zone} --verbosity=warning"
        )
        options["ProxyUseFdpass"] = "no"
    return connect(SshAddress(host, user, port), tuple(f"{name}={value}" for name, value in options.items()))


def wait(machine: Machine, reach: Reach, since: str, say: Say, patience_s: float = ANSWER_S) -> None:
    """Until its sshd answers, with our key in and its key known; lines on the way.

    Raises:
        CloudError: it did not within ``patience_s``, or will not: what was said last.
        MachineLostError: it does not run any more.
    """
    begun = said = time.monotonic()
    say(f"waiting for {machine.name} to answer")
    tries = 0
    while True:
        tries += 1
        try:
            _try(machine, reach)
        except CloudError as error:
            now = time.monotonic()
            if error.failure not in _PASSING and now - begun >= _SETTLE_S:
                raise
            if tries % _LOOK_EVERY == 0:
                raise_if_ended(machine, since)
            if now - begun > patience_s:
                raise CloudError(
                    error.failure, error.said, f"{machine.name} does not answer after {now - begun:.0f} s"
                ) from error
            if now - said >= _SAY_EVERY_S:
                said = now
                say(f"still waiting for {machine.name}, {now - begun:.0f} s so far")
            time.sleep(_PAUSE_S)
        else:
            return


def raise_if_ended(machine: Machine, since: str) -> None:
    """Raises MachineLostError where the machine does not run or is ending; CloudError where that cannot be told."""
    current = machine.state()
    if current in (MachineState.STOPPING, MachineState.STOPPED, MachineState.GONE):
        raise fate.MachineLostError(machine, current, fate.what_happened(machine, since))


def _try(machine: Machine, reach: Reach) -> None:
    words = (*_words(machine, reach), f"--ssh-flag=-oConnectTimeout={_CONNECT_TIMEOUT_S}", "--command=true")
    gcloud.run(f"connecting to {machine.name}", words, _TRY_TIMEOUT_S)


def _words(machine: Machine, reach: Reach) -> tuple[str, ...]:
    at = machine.address
    way = {Reach.AUTO: (), Reach.IAP: ("--tunnel-through-iap",), Reach.INTERNAL: ("--internal-ip",)}[reach]
    return (
        *("compute", "ssh", at.instance, f"--project={at.project}", f"--zone={at.zone}"),
        *("--strict-host-key-checking=yes", "--quiet", *way),
    )


def _parsed(words: list[str]) -> tuple[dict[str, str], str, int | None]:
    """Options, destination and port of an ssh command. Raises ValueError, StopIteration."""
    options: dict[str, str] = {}
    port = None
    rest = iter(words[1:])
    for word in rest:
        if word in ("-t", "-T"):
            continue
        if word == "-i":
            options["IdentityFile"] = _quoted(next(rest))
        elif word == "-p":
            port = int(next(rest))
        elif word.startswith("-o"):
            _take(word[2:].strip() or next(rest), options)
        elif word.startswith("-"):
            raise ValueError(word)
        else:
            return options, word, port
    raise ValueError("no destination")


def _take(option: str, options: dict[str, str]) -> None:
    name, _, value = option.partition("=") if "=" in option.partition(" ")[0] else option.partition(" ")
    if name == "CertificateFile" or name in _OPTIONS:
        options[name] = _quoted(value)
    elif name == "ProxyCommand":
        options[name] = ""
    elif name != "ProxyUseFdpass":
        raise ValueError(name)


def _quoted(value: str) -> str:
    """As ssh reads it in an option: a path with blanks in quotes."""
    if not value or not value.isprintable() or '"' in value:
        raise ValueError(value)
    return f'"{value}"' if " " in value else value
