"""The command line: its commands, and where each stands in its help."""

from __future__ import annotations

from cudadent42.commands import (
    capture,
    cost,
    fleet,
    gate,
    history,
    inventory,
    ledger,
    mcp,
    new,
    patterns,
    profile,
    race,
    remote,
    run,
    session,
    stages,
    tune,
)
from cudadent42.commands.program import make_app, run_program

app = make_app()
MEASURE, DECIDE, LOOK, KEEP = "Measure", "Decide", "Look up", "Sessions, machines and records"
for heading, commands in {
    MEASURE: (run.run, run.bench, stages.preflight, stages.build, stages.verify, stages.report),
    DECIDE: (gate.gate, race.compare, race.bisect, profile.profile, profile.doctor),
    LOOK: (inventory.suites, inventory.implementations, inventory.schemas, history.history, new.new, mcp.mcp),
}.items():
    for command in commands:
        app.command(rich_help_panel=heading)(command)
# What stands behind a script is the script's, and -m MODULE is a script too.
OF_A_SCRIPT = {"allow_interspersed_args": False, "ignore_unknown_options": True}
app.command(rich_help_panel=MEASURE, context_settings=OF_A_SCRIPT)(capture.capture)
app.add_typer(tune.tune_app, name="tune", rich_help_panel=DECIDE)
app.add_typer(fleet.fleet_app, name="fleet", rich_help_panel=KEEP)
for name, group in {
    "session": session.session_app,
    "remote": remote.remote_app,
    "cost": cost.cost_app,
    "ledger": ledger.ledger_app,
    "patterns": patterns.patterns_app,
    "cache": inventory.cache_app,
}.items():
    app.add_typer(group, name=name, rich_help_panel=KEEP)


def main() -> int:
    """Run the command line; the exit code."""
    return run_program(app)
