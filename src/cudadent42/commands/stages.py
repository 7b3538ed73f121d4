"""One stage at a time: ``preflight``, ``build``, ``verify`` and ``report``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cudadent42.base.errors import ExitCode
from cudadent42.commands import trace
from cudadent42.commands.common import (
    checked,
    choices_of,
    console_for,
    encoded,
    print_json,
    print_line,
    run_options,
    split,
    watching,
)
from cudadent42.commands.grouped import grouped
from cudadent42.commands.options import (
    AcceptMissingOption,
    Confined,
    DeviceOption,
    How,
    JsonOption,
    Kept,
    SeedOption,
    Shown,
    UntrustedOption,
    VerboseOption,
    What,
    Where,
)

if TYPE_CHECKING:
    from cudadent42.model.records import MachineReport
    from cudadent42.sandbox.launch import Sandbox


def preflight(
    device: DeviceOption = "auto",
    fix: Annotated[
        bool,
        typer.Option(
            "--fix", help="Mend what can be mended safely: the cache, and packages in the project's .venv."
        ),
    ] = False,
    emit_shell: Annotated[
        bool,
        typer.Option("--emit-shell", help="Print the checks as a POSIX shell script (tools/preflight.sh)."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check that this machine is ready.

    Each failure comes with its cause and the command that mends it.
    """
    if emit_shell:
        from cudadent42.preflight.shell_form import emit

        print(emit(), end="")
        return
    from cudadent42.preflight import command

    code = command.main(device, fix, as_json, _remember)
    raise typer.Exit(code)


def _remember(machine: MachineReport) -> None:
    trace.current().machine = machine


def build(
    device: DeviceOption = "auto",
    arch: Annotated[
        list[str] | None,
        typer.Option(
            "--arch",
            metavar="NAME",
            help="Compile for a CUDA architecture such as sm_90a, which need not be present. Repeat "
            "the option or separate by commas.",
        ),
    ] = None,
    implementations: Annotated[
        list[str] | None,
        typer.Option(
            "--implementation",
            "--implementations",
            metavar="NAME|FILE",
            help="Choose whose kernels are compiled: cudadent42, or path/to/kernel.toml. Repeat the "
            "option or separate by commas. Default: cudadent42.",
        ),
    ] = None,
    untrusted: UntrustedOption = False,
    accept_missing: AcceptMissingOption = None,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compile the kernels and show what they need.

    It compiles for this machine, or with --arch for CUDA architectures that are not present.
    """
    from cudadent42.commands import tables
    from cudadent42.stages.build import build as build_kernels
    from cudadent42.stages.build import buildable, check_architectures, choose_device

    target = choose_device(device, offline=bool(arch))
    kernel_names, architectures = buildable(split(implementations)), split(arch)
    check_architectures(architectures, kernel_names)
    confined = checked(Confined(untrusted, accept_missing))
    with watching(verbose) as watcher, _sandbox(target, kernel_names, confined) as sandbox:
        watcher.stage("build")
        report = build_kernels(
            target,
            architectures,
            lambda done, total, what: watcher.advance(done / total, what),
            implementations=kernel_names,
            sandbox=sandbox,
        )
    if as_json:
        print_json({"passed": report.passed, **encoded(report)})
    else:
        console = console_for()
        for title, table in tables.build_tables(report):
            print_line(console, title)
            console.print(table)
        for line in tables.recipe_lines(report) if verbose else ():
            print_line(console, line)
        for failure in report.failures:
            print_line(console, f"{failure.kernel} for {failure.architecture} failed: {failure.message}")
            print_line(console, failure.log)
        print_line(console, tables.build_line(report))
    trace.current().build = report
    if not report.passed:
        raise typer.Exit(ExitCode.BUILD_FAILED)


def _sandbox(device: str, names: Sequence[str], confined: Confined) -> AbstractContextManager[Sandbox | None]:
    """Of the compilers of kernel files."""
    from cudadent42.flows import sandboxing
    from cudadent42.model.implementations import is_kernel_file, plug_in_file

    if not confined.untrusted:
        return nullcontext()
    files = [plug_in_file(name) for name in names if is_kernel_file(name)]
    return sandboxing.untrusted(device, files, confined.accept_missing or ())


@grouped
def verify(*, what: What, seed: SeedOption = 0, where: Where, confined: Confined, shown: Shown) -> None:
    """Check results against float64.

    It checks every case of the suite, and adversarial inputs.
    """
    from cudadent42.commands import tables
    from cudadent42.flows import pipeline

    options = run_options(choices_of(what, How(seed=seed)), where, Kept(), confined)
    with watching(shown.verbose) as watcher:
        report = pipeline.verify_only(options, watcher)
    if shown.as_json:
        print_json({"passed": report.passed, **encoded(report)})
    else:
        console = console_for()
        if shown.verbose or not report.passed:
            console.print(tables.verify_table(report, everything=shown.verbose))
        print_line(console, tables.verify_line(report))
    if not report.passed:
        raise typer.Exit(ExitCode.VERIFICATION_FAILED)


def report(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Name a run folder.")],
    as_json: JsonOption = False,
) -> None:
    """Write the report of a run folder again."""
    from cudadent42.stages import report as reports

    paths = reports.write(folder)
    if as_json:
        print_json(encoded(paths))
    else:
        print(paths.html)
