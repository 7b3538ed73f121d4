"""The start of a machine that the provider itself would not end: what the user has to agree to first."""

from __future__ import annotations

from dataclasses import replace

from cudadent42.base.errors import UsageError
from cudadent42.remote.core import hosts
from cudadent42.remote.core.consent import Consent
from cudadent42.remote.core.hosts import Remote
from cudadent42.remote.providers.gce.machine import Machine
from cudadent42.remote.providers.gce.reach import ANSWER_S


def agree_to_start(remote: Remote, machine: Machine, consent: Consent) -> None:
    """Agree that ``machine`` of ``remote`` is started without a limit of its own with the provider.

    From the request on until it answers, nothing could end it but this machine. The answer is kept in the remote, so
    that it is asked for once; what is given with ``--yes`` holds for that run alone.

    Raises UsageError where nobody agrees.
    """
    remembered = (
        remote.unguarded_start and remote.address == machine.address
    )  # a name may be another's by now
    if remembered or consent.given:
        return
    what = (
        f"{machine.name} has no limit of its own with the provider: from the request for its start until it answers, "
        f"up to {ANSWER_S / 60:.0f} min, only this machine can end it"
    )
    if consent.asked(
        f"{what}, so it goes on costing money if this one dies then. Start it, now and in future?"
    ):
        if remote.address == machine.address:
            _remember(remote)
        return
    at = machine.address
    raise UsageError(
        f"{what}; nothing was started. Take a specification (remote add --spec), or give it a limit once, while it is "
        f"stopped: gcloud compute instances set-scheduling {at.instance} --zone={at.zone} --project={at.project} "
        "--max-run-duration=8h --instance-termination-action=STOP; or agree with --yes, or for good with "
        "remote add --unguarded-start"
    )


def _remember(remote: Remote) -> None:
    registered = hosts.remotes().get(remote.name)
    if registered is not None and registered.address == remote.address:
        hosts.save(replace(registered, unguarded_start=True))
