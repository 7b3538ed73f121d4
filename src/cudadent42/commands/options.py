"""The options that commands share, each defined once, and the groups of them that go together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from cudadent42.commands import completion
from cudadent42.commands.help import HOW, KEPT, OUTPUT, WHAT, WHERE
from cudadent42.model.records import CacheState, TimerKind
from cudadent42.model.sandbox import Protection

SuiteOption = Annotated[
    str,
    typer.Option(
        "--suite",
        metavar="NAME|FILE",
        rich_help_panel=WHAT,
        autocompletion=completion.suites,
        help="Take this suite: a name that `cudadent42 suites` lists, or the path of a TOML file.",
    ),
]
DTypeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--dtype",
        metavar="NAME",
        rich_help_panel=WHAT,
        autocompletion=completion.dtypes,
        help="Use fp16, bf16 or fp32. Repeat the option or separate by commas. Default: the suite's.",
    ),
]
CaseOption = Annotated[
    list[str] | None,
    typer.Option(
        "--case",
        metavar="NAME",
        rich_help_panel=WHAT,
        help="Take only this case of the suite, as name or name/dtype. Repeat the option or "
        "separate by commas.",
    ),
]
ImplementationsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--implementation",
        "--implementations",
        metavar="NAME|FILE",
        rich_help_panel=WHAT,
        help="Choose what is raced: a name that `cudadent42 implementations` lists, "
        "path/to/file.py:callable, path/to/kernel.toml or a variant such as "
        "'cudadent42[portable]'. Repeat the option or separate by commas. The baseline is "
        "always measured.",
    ),
]
RepeatsOption = Annotated[
    int | None,
    typer.Option(
        "--repeats",
        metavar="N",
        rich_help_panel=HOW,
        help="Time so many paired blocks per case. Default: the suite's.",
    ),
]
WarmupOption = Annotated[
    int | None,
    typer.Option(
        "--warmup",
        metavar="N",
        rich_help_panel=HOW,
        help="Run so many blocks per case first, which do not count. Default: the suite's.",
    ),
]
SeedOption = Annotated[
    int,
    typer.Option(
        "--seed",
        metavar="N",
        rich_help_panel=HOW,
        help="Draw the inputs and the order within blocks from this seed.",
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="DEVICE",
        rich_help_panel=WHERE,
        autocompletion=completion.devices,
        help="Use auto, cpu, cuda or cuda:N. auto takes the GPU where there is one.",
    ),
]
TimerOption = Annotated[
    TimerKind | None,
    typer.Option(
        "--timer",
        metavar="|".join(TimerKind),
        rich_help_panel=HOW,
        help="call times the whole call, cpu the processor time on one thread, graph the GPU alone by a CUDA "
        "graph, queue the GPU alone over calls launched ahead. Default: the suite's.",
    ),
]
CacheStateOption = Annotated[
    CacheState | None,
    typer.Option(
        "--l2",
        metavar="|".join(CacheState),
        rich_help_panel=HOW,
        help="Set the last-level cache before each timed call: warm, cold by a flush, or rotated. "
        "Rotated calls take turns over up to 48 inputs, together three times its size. "
        "Default: the suite's.",
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output-dir",
        metavar="FOLDER",
        rich_help_panel=KEPT,
        help="Write into this run folder, new or empty. Default: runs/<UTC time>-<suite>-<revision>.",
    ),
]
SaveOption = Annotated[
    bool,
    typer.Option(
        "--save-csv/--no-save-csv",
        rich_help_panel=KEPT,
        help="Keep every sample in samples.csv. This is the default.",
    ),
]
SealedOption = Annotated[
    bool,
    typer.Option(
        "--sealed",
        rich_help_panel=KEPT,
        help="Audit every case and implementation, and further shapes, in separate processes. "
        "The run takes up to a quarter longer.",
    ),
]
UntrustedOption = Annotated[
    bool,
    typer.Option(
        "--untrusted",
        rich_help_panel=WHERE,
        help="Confine candidates to a sandbox: no network, no files but their own, limited memory and processes. "
        "The run is refused where the machine cannot confine them.",
    ),
]
AcceptMissingOption = Annotated[
    list[Protection] | None,
    typer.Option(
        "--accept-missing",
        metavar="|".join(Protection),
        rich_help_panel=WHERE,
        help="With --untrusted: do without this protection where the machine has none. Repeat the option for more.",
    ),
]
IgnoreOption = Annotated[
    bool,
    typer.Option(
        "--ignore-preflight",
        rich_help_panel=WHERE,
        help="Go on where preflight fails. The manifest keeps the failed checks.",
    ),
]
LedgerOption = Annotated[
    str | None,
    typer.Option(
        "--ledger",
        metavar="FILE|URL",
        help="Use this database as the ledger. Default: $CUDADENT42_LEDGER, else a file of this user.",
    ),
]
OnOption = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="NAME|sky://FILE",
        rich_help_panel=WHERE,
        autocompletion=completion.remotes,
        help="Run on this machine, named by `remote add`, or on a fresh one that SkyPilot finds.",
    ),
]
FleetOption = Annotated[
    str | None,
    typer.Option(
        "--fleet",
        metavar="ENGINE",
        rich_help_panel=WHERE,
        help="Spread the work: local[:N] for this machine's devices, slurm:PARTITION[:N], ray[:ADDRESS] or "
        "ssh:NAME[,NAME].",
    ),
]
MaxCostOption = Annotated[
    float | None,
    typer.Option(
        "--max-cost",
        metavar="USD",
        min=0.01,
        rich_help_panel=WHERE,
        help="With --on: let the run cost at most this. You are asked first if the estimate is "
        "higher. A run that reaches the sum is ended.",
    ),
]
YesOption = Annotated[
    bool,
    typer.Option(
        "--yes",
        rich_help_panel=WHERE,
        help="Agree beforehand to what a machine elsewhere costs. Otherwise you are asked, or refused where there is "
        "no terminal.",
    ),
]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", rich_help_panel=OUTPUT, help="Show more detail.")
]
JsonOption = Annotated[
    bool,
    typer.Option("--json", rich_help_panel=OUTPUT, help="Print one JSON document on standard output."),
]
GateOption = Annotated[
    str | None,
    typer.Option(
        "--gate",
        metavar="NAME|FILE",
        rich_help_panel=KEPT,
        autocompletion=completion.gates,
        help="Hold the result against gates: default, improvement, profile, or the path of a TOML file.",
    ),
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        "--precision",
        metavar="SHARE",
        rich_help_panel=HOW,
        help='Measure a case until its interval is ± this, such as "0.5 %". --repeats is then the most blocks.',
    ),
]
BudgetOption = Annotated[
    float | None,
    typer.Option(
        "--budget",
        metavar="SECONDS",
        rich_help_panel=HOW,
        help="Measure for at most this long. No block begins after it.",
    ),
]


@dataclass(frozen=True)
class What:
    """What is measured."""

    suite: SuiteOption = "default"
    dtype: DTypeOption = None
    case: CaseOption = None
    implementations: ImplementationsOption = None


@dataclass(frozen=True)
class How:
    """How it is measured."""

    repeats: RepeatsOption = None
    warmup: WarmupOption = None
    precision: PrecisionOption = None
    budget: BudgetOption = None
    seed: SeedOption = 0
    timer: TimerOption = None
    l2: CacheStateOption = None


@dataclass(frozen=True)
class Where:
    """Where it runs."""

    device: DeviceOption = "auto"
    ignore_preflight: IgnoreOption = False


@dataclass(frozen=True)
class Confined:
    """What candidates are kept from."""

    untrusted: UntrustedOption = False
    accept_missing: AcceptMissingOption = None


@dataclass(frozen=True)
class Elsewhere:
    """On which other machine it runs, and at what cost, or on which machines."""

    on: OnOption = None
    fleet: FleetOption = None
    max_cost: MaxCostOption = None
    yes: YesOption = False


@dataclass(frozen=True)
class Fleet:
    """Over which machines it is spread."""

    fleet: FleetOption = None


@dataclass(frozen=True)
class Kept:
    """What is decided and kept."""

    gate: GateOption = None
    output_dir: OutputOption = None
    save_csv: SaveOption = True
    sealed: SealedOption = False


@dataclass(frozen=True)
class Shown:
    """What is printed, and how."""

    verbose: VerboseOption = False
    as_json: JsonOption = False
