"""The options that commands share, each defined once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cudadent42.model.records import CacheState, TimerKind

SuiteOption = Annotated[
    str,
    typer.Option(
        "--suite",
        metavar="NAME|FILE",
        help="What to measure: a name that `cudadent42 suites` lists, or the path of a TOML file.",
    ),
]
DTypeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--dtype", metavar="NAME", help="fp16, bf16 or fp32; by commas or repeated. Default: the suite's."
    ),
]
CaseOption = Annotated[
    list[str] | None,
    typer.Option(
        "--case", metavar="NAME", help="Only this case of the suite, or name/dtype; by commas or repeated."
    ),
]
ImplementationsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--implementations",
        metavar="NAMES",
        help="Names, path/to/file.py:callable or path/to/kernel.toml, by commas. The baseline is always measured.",
    ),
]
RepeatsOption = Annotated[
    int | None, typer.Option("--repeats", help="Paired blocks per case. Default: the suite's.")
]
WarmupOption = Annotated[
    int | None,
    typer.Option("--warmup", help="Blocks per case that are thrown away first. Default: the suite's."),
]
SeedOption = Annotated[int, typer.Option("--seed", help="Of the inputs and of the order within blocks.")]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N. auto takes the GPU where there is one."
    ),
]
TimerOption = Annotated[
    TimerKind | None,
    typer.Option(
        "--timer",
        help="call: the whole call. cpu: processor time on one thread. graph: GPU time alone, by a CUDA graph. "
        "queue: GPU time alone, of calls launched ahead.",
    ),
]
CacheStateOption = Annotated[
    CacheState | None, typer.Option("--l2", help="State of the last-level cache before each timed call.")
]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output-dir", help="New folder for the run. Default: runs/<UTC time>-<suite>-<revision>."),
]
SaveOption = Annotated[
    bool, typer.Option("--save-csv/--no-save-csv", help="Keep every sample in samples.csv.")
]
IgnoreOption = Annotated[
    bool, typer.Option("--ignore-preflight", help="Go on where preflight fails; the manifest says so.")
]
LedgerOption = Annotated[
    str | None,
    typer.Option(
        "--ledger",
        metavar="PATH|URL",
        help="The ledger. Default: $CUDADENT42_LEDGER, else a file of this user.",
    ),
]
OnOption = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="NAME|sky://FILE",
        help="Run on this remote machine (see `remote add`), or on a fresh one that SkyPilot finds.",
    ),
]
MaxCostOption = Annotated[
    float | None,
    typer.Option(
        "--max-cost",
        metavar="USD",
        min=0.01,
        help="With --on: what the run may cost. Above, you are asked first; at this, it is ended.",
    ),
]
YesOption = Annotated[
    bool, typer.Option("--yes", help="Agree beforehand to costs that are asked about or refused otherwise.")
]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Say more.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
GateOption = Annotated[
    str | None,
    typer.Option(
        "--gate",
        metavar="NAME|FILE",
        help="Hold the result against gates: default, improvement, profile, or the path of a TOML file.",
    ),
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        "--precision",
        metavar="SHARE",
        help='Measure a case until its interval is ± this, such as "0.5 %"; --repeats is then the most blocks.',
    ),
]
BudgetOption = Annotated[
    float | None,
    typer.Option("--budget", metavar="SECONDS", help="Time for measuring, after which no block begins."),
]
