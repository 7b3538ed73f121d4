"""Host keys of machines whose alias, as SkyPilot writes it, switches the check off. With a real sshd."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest
from command_line import cudadent42
from sky_lab import SPEC, Sky, only_start
from sshd import SSHD, Server, await_port

from cudadent42.base.errors import UsageError
from cudadent42.cost import rates
from cudadent42.remote.core import hosts, record
from cudadent42.remote.core import job as jobs
from cudadent42.remote.core.address import SshAddress
from cudadent42.remote.core.job import JobState
from cudadent42.remote.core.run import Returned
from cudadent42.remote.core.ssh import HostKeyError, connect
from cudadent42.remote.flows import pipeline
from cudadent42.remote.flows.stopping import stop_all
from cudadent42.remote.flows.survey import survey
from cudadent42.remote.providers.sky import keys
from cudadent42.remote.providers.sky.reach import workspace_of
from cudadent42.runs import starts
from cudadent42.runs.starts import StartOutcome
from flashmoe_science.jit.requirements import install_command

KEPT = replace(SPEC, keep=True)


@pytest.fixture
def another_answers(server: Server, keys: Path) -> Iterator[Callable[[], None]]:
    """Called, another machine answers at the address: it has another key, and lets the same user in."""
    running: list[subprocess.Popen[bytes]] = []

    def exchange() -> None:
        server.process.terminate()
        server.process.wait()
        server.cut()
        for control in Path(workspace_of(hosts.get("c42-l4")).connection.control).iterdir():
            control.unlink()  # a shared connection is to the machine before
        config = server.folder / "sshd_config"
        config.write_text(config.read_text().replace(f"{keys}/host\n", f"{keys}/stranger\n"))
        running.append(subprocess.Popen([SSHD, "-D", "-e", "-f", str(config)], stderr=subprocess.DEVNULL))
        await_port(server.port, running[-1])

    yield exchange
    for process in running:
        process.terminate()
        process.wait()


def interrupted(*arguments: object) -> Returned:
    raise KeyboardInterrupt


def left_alone(cloud: Sky) -> None:
    """A run that is over on a machine that this one has seen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "bring_back", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cloud.run(KEPT)


def test_a_changed_key_is_refused_in_every_command(
    cloud: Sky, another_answers: Callable[[], None], tmp_path: Path
) -> None:
    left_alone(cloud)
    start = only_start().id
    assert keys.known_hosts().read_text().startswith(f"cudadent42-{start} ")
    assert keys.known_hosts().stat().st_mode & 0o077 == 0
    another_answers()
    in_a_terminal = ["ssh", SPEC.cluster, "true"]
    subprocess.run(
        in_a_terminal, stdin=subprocess.DEVNULL, capture_output=True, check=True
    )  # it does not look
    forget = f"ssh-keygen -f {shlex.quote(str(keys.known_hosts()))} -R cudadent42-{start}"
    job = record.find(None).job
    for words in (
        ("remote", "attach"),
        ("remote", "status", SPEC.cluster),
        ("remote", "stop"),
        ("run", "--on", SPEC.cluster, "--suite=small", "--device=cpu"),
    ):
        done = cudadent42(*words, cwd=Path(__file__).parent)
        assert done.returncode != 0
        assert "its host key is another than before" in done.stderr, (words, done.stderr)
        assert forget in done.stderr
    # What the message says to type lets it in.
    before = keys.known_hosts().read_text()
    subprocess.run(shlex.split(forget), check=True, capture_output=True)
    workspace = workspace_of(hosts.get(SPEC.cluster))
    assert jobs.state(workspace, job).state is JobState.DONE
    workspace.connection.close()
    keys.known_hosts().write_text(before)
    (started,) = survey(rates.load(), datetime.now(timezone.utc)).started
    (stopped,) = stop_all((started,), print)
    assert f"its disk has what {job} measured, which could not be brought back" in stopped.what
    assert not record.find(job).fetched


def test_a_run_is_on_the_machine_of_its_start_whatever_its_remote_is_now(cloud: Sky) -> None:
    left_alone(cloud)
    begun, before = record.find(None), hosts.get(SPEC.cluster)
    assert record.remote_of(begun) == before
    hosts.save(hosts.Remote(SPEC.cluster, SshAddress("another.example.org")))
    assert record.remote_of(begun) == before
    hosts.remove(SPEC.cluster)
    argv = workspace_of(record.remote_of(begun)).connection.argv()
    assert f"HostKeyAlias=cudadent42-{only_start().id}" in argv


def test_a_machine_of_another_start_is_another(cloud: Sky, another_answers: Callable[[], None]) -> None:
    """The same name, and the same address: not taken for the one before."""
    assert cloud.run().exit_code == 0
    another_answers()
    first = only_start().id
    cloud.output.rename(cloud.output.parent / "first")
    assert cloud.run().exit_code == 0
    aliases = [line.split()[0] for line in keys.known_hosts().read_text().splitlines()]
    assert aliases == [f"cudadent42-{start.id}" for start in starts.load()]
    assert aliases[0] == f"cudadent42-{first}"


def test_a_kept_machine_is_known_by_its_first_key(cloud: Sky, another_answers: Callable[[], None]) -> None:
    cloud.run(KEPT)
    another_answers()
    cloud.output.rename(cloud.output.parent / "first")
    with pytest.raises(HostKeyError, match="another than before"):
        cloud.run(KEPT)
    # Whoever it is, what it has is not thrown away on its word.
    assert only_start().outcome is StartOutcome.READY
    assert [call[0] for call in cloud.calls()] == ["launch", "launch"]
    assert "is not taken down" in cloud.said[-1]


def test_the_alias_holds_otherwise_and_no_configuration_switches_the_check_off(
    cloud: Sky, tmp_path: Path
) -> None:
    cloud.run(KEPT)
    alias = cloud.folder / "aliases" / SPEC.cluster
    alias.write_text(
        alias.read_text()
        + "  ProxyCommand through %h %p\n  User somebody\n  NoHostAuthenticationForLocalhost yes\n"
        + "  CheckHostIP yes\n  VerifyHostKeyDNS yes\n"
    )
    argv = workspace_of(hosts.get(SPEC.cluster)).connection.argv()
    told = subprocess.run([*argv[:-2], "-G", *argv[-2:]], capture_output=True, text=True, check=True).stdout
    start = only_start().id
    assert {
        "hostname 127.0.0.1",
        f"port {cloud.server.port}",
        "user somebody",
        "proxycommand through %h %p",
        "stricthostkeychecking accept-new",
        f"userknownhostsfile {keys.known_hosts()}",
        "globalknownhostsfile /dev/null",
        f"hostkeyalias cudadent42-{start}",
        "nohostauthenticationforlocalhost no",
        "checkhostip no",
        "verifyhostkeydns false",
    } <= set(told.splitlines())


ALIAS = """
from sky.utils.cluster_utils import SSHConfigHelper
auth = {"ssh_user": "me", "ssh_private_key": "~/.ssh/sky-key", "ssh_proxy_command": "through %h %p"}
SSHConfigHelper.add_cluster("c42-l4", "c42-l4-on-cloud", ["203.0.113.7"], auth, [2222])
"""


@pytest.mark.slow
def test_skypilots_own_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        importlib.metadata.distribution("skypilot")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"SkyPilot is not installed: {install_command('skypilot')}")
    home = tmp_path / "home"
    home.mkdir()
    environment = os.environ | {"HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    subprocess.run([sys.executable, "-c", ALIAS], env=environment, check=True, capture_output=True)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (alias,) = (home / ".sky").rglob("c42-l4")

    def told(options: tuple[str, ...]) -> set[str]:
        argv = connect(SshAddress("c42-l4"), options).argv()
        done = subprocess.run(
            [argv[0], "-F", str(alias), "-G", *argv[1:]], capture_output=True, text=True, check=True
        )
        return set(done.stdout.splitlines())

    ours = {
        "stricthostkeychecking accept-new",
        f"userknownhostsfile {keys.known_hosts()}",
        "hostkeyalias cudadent42-0",
    }
    theirs = {"hostname 203.0.113.7", "user me", "port 2222", "proxycommand through %h %p"}
    assert {"stricthostkeychecking false", "userknownhostsfile /dev/null"} <= told(())
    assert ours | theirs <= told(keys.options("0"))


def test_a_state_folder_of_any_usual_name_and_of_an_impossible_one(
    cloud: Sky, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "a state, $50 'quoted'"))
    with pytest.raises(UsageError, match="set XDG_STATE_HOME"):
        keys.options("0")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "a state, 'quoted' #1"))
    argv = connect(SshAddress("c42-l4"), keys.options("0")).argv()
    told = subprocess.run([*argv[:-2], "-G", *argv[-2:]], capture_output=True, text=True, check=True).stdout
    assert f"userknownhostsfile {keys.known_hosts()}\n" in told
