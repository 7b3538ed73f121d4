"""A run on another machine, in order. The one place that knows the order, as ``flows.pipeline`` does for a run here.

check -> resolve the machine -> compile for its GPUs -> agree on the cost -> start it -> send the working tree and start
the run -> follow it, fetch its folder -> keep what was asked for -> end the machine -> gate

All that can be checked without the machine is checked first: one that is paid for is started only after that. What is
lost on the way (a connection, this process, this machine) does not end the run: it is picked up again from its record,
here by itself for a while, later with ``attach``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from cudadent42.base.errors import ExitCode, UsageError
from cudadent42.cost import rates
from cudadent42.cost.rates import Rates
from cudadent42.model.records import Plan
from cudadent42.plan import RunOptions, make_plan
from cudadent42.registry import registry
from cudadent42.remote.core import money, record
from cudadent42.remote.core.arguments import forwarded
from cudadent42.remote.core.checks import check_kernels, check_plan
from cudadent42.remote.core.consent import Consent
from cudadent42.remote.core.money import Estimate, Paid
from cudadent42.remote.core.protection import Limit, Terms
from cudadent42.remote.core.provider import Lease, Offer
from cudadent42.remote.core.record import JobRecord
from cudadent42.remote.core.run import Ended, Returned, RunRequest, bring_back, working_tree
from cudadent42.remote.core.terminal import Say
from cudadent42.remote.core.tree import project_root
from cudadent42.remote.providers import provider_for, provider_of_run
from cudadent42.runs.run_folder import check_output, create_default_folder
from cudadent42.runs.source import revision


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """All that is asked of a run elsewhere."""

    on: str
    """A remote's name, or ``sky://FILE``."""
    run: RunOptions
    """Its output is here, and its gate is judged here."""
    max_cost: float | None = None
    """US dollars; None for no limit."""
    verbose: bool = False
    as_json: bool = False


def run(options: RemoteOptions, consent: Consent, say: Say, on_log: Callable[[bytes], None]) -> Ended:
    """A whole run.

    Raises:
        UsageError: what is asked for cannot be, or its cost is not agreed on; nothing was started.
        RunLostError: the machine was taken away during the run.
        LabError, KeyboardInterrupt: it could not be started, or came to no end; what then runs on has been said.
    """
    provider = provider_for(options.on)
    arguments = arguments_of(options)
    working_tree()  # that it can be sent
    offer = provider.resolve(options.on, options.run.device, say)
    if options.run.device != "cpu":
        check_kernels(options.run.choices, offer.architectures, say)
    terms = terms_of(offer, options, consent, say)
    offer = offer.agree(terms, say)
    output = options.run.output or create_default_folder(options.run.choices.suite, revision())
    request = RunRequest(device=options.run.device, arguments=arguments, output=output)
    return _judged(carry_out(offer, request, terms, say, on_log), options.run, say)


def carry_out(
    offer: Offer, request: RunRequest, terms: Terms, say: Say, on_log: Callable[[bytes], None]
) -> Ended:
    """``run`` from the start of the machine to its end."""
    try:
        lease = offer.start(terms, say)
    except BaseException:
        with suppress(OSError):  # if the caller made it; a folder that holds something stays
            request.output.rmdir()
        raise

    def there() -> Returned:
        begun = lease.begin(request, on_log)
        return bring_back(lease.workspace, begun, say, _unseen if lease.log_is_shown else on_log)

    return _to_its_end(lease, there)


def attach(
    begun: JobRecord, terms: Terms, say: Say, on_log: Callable[[bytes], None], *, start: bool = False
) -> Ended:
    """Bring a run back that was left on its machine. ``start``: start the machine again if it is stopped, on ``terms``.

    Raises like ``run``.
    """
    if start and begun.cloud is None:
        raise UsageError(f"{begun.remote} is no machine that --start could start; leave it out")
    lease = provider_of_run(begun).adopt(begun, terms, say, start=start)
    adopted = record.find(begun.job)  # with the machine as it was started again
    return _to_its_end(lease, lambda: bring_back(lease.workspace, adopted, say, on_log))


def _to_its_end(lease: Lease, there: Callable[[], Returned]) -> Ended:
    """However the run ends, its lease decides what becomes of the machine."""
    try:
        returned = there()
        lease.keep(returned)
    except BaseException as error:
        lease.failed(error)
        raise
    return Ended(returned, lease.end())


def arguments_of(options: RemoteOptions) -> tuple[str, ...]:
    """Check what needs no machine; the arguments of ``cudadent42 run`` there. Raises LabError."""
    check_plan(options.run.choices, options.run.device)
    arguments = forwarded(
        options.run, project_root(), Path.cwd(), verbose=options.verbose, as_json=options.as_json
    )
    if options.run.output is not None:
        check_output(options.run.output)
    return arguments


def terms_of(offer: Offer, options: RemoteOptions, consent: Consent, say: Say) -> Terms:
    """What the run may cost, said and agreed on before anything is started. Raises UsageError where it is not."""
    device = "cuda:0" if offer.has_gpu and options.run.device != "cpu" else "cpu"
    plan = make_plan(options.run.choices, device, registry)
    paid = offer.cost()
    estimate = _estimated(plan, paid, offer.name, rates.load(), options.max_cost, say)
    limit = None
    if estimate is not None:
        say(f"{offer.name}: {estimate.line()}")
        if options.max_cost is not None:
            usd = money.allowed_usd(estimate, options.max_cost, consent)
            limit = Limit(usd, estimate.rate)
    if not paid.rented:
        return Terms(limit, consent=consent)
    from cudadent42.flows.duration import (
        estimate_s,  # PyTorch, for which a run on a machine at hand does not wait
    )

    return Terms(limit, estimate_s(plan), consent, estimate)


def _estimated(
    plan: Plan, paid: Paid, name: str, table: Rates, max_cost: float | None, say: Say
) -> Estimate | None:
    """None where no rate is known, which is no reason not to run, unless there is a limit: then UsageError."""
    rate = money.rate_of(paid.rate, name, table)
    if rate is not None:
        return money.estimate(plan, rate, table, paid)
    wanted = paid.rate or name
    missing = f"no rate {wanted!r} is known, so the cost of {name} cannot be estimated"
    if max_cost is not None:
        raise UsageError(f"--max-cost: {missing}; {money.how_to_add(wanted)}")
    if paid.rented:
        say(f"{missing}; {money.how_to_add(wanted)}")
    return None


def _judged(ended: Ended, run: RunOptions, say: Say) -> Ended:
    """With the exit code of the gates, where a run passed that is held against some."""
    returned = ended.returned
    if run.gate is None or returned.exit_code != ExitCode.PASS:
        return ended
    from cudadent42.stages import gates  # NumPy, for which a run that is not judged does not wait

    judged = gates.judge(run.gate, returned.folder)
    for line in gates.report_lines(judged):
        say(line)
    return replace(ended, returned=replace(returned, exit_code=judged.exit_code))


def _unseen(chunk: bytes) -> None:
    """For a log that was shown already."""
