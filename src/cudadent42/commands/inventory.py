"""What there is: ``suites``, ``implementations``, ``schemas``, and the kept kernels (``cache``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cudadent42.commands.common import console_for, encoded, print_json, print_line
from cudadent42.commands.help import App
from cudadent42.commands.options import DeviceOption, JsonOption

if TYPE_CHECKING:
    from cudadent42.schemas import File

cache_app = App(help="Show or remove the compiled kernels.")


def suites(as_json: JsonOption = False) -> None:
    """List the built-in suites."""
    from cudadent42.suites.loader import builtin_suites, load_suite

    loaded = [load_suite(name) for name in builtin_suites()]
    if as_json:
        print_json({"suites": loaded})
        return
    width = max(len(suite.name) for suite in loaded) + 2
    for suite in loaded:
        print(f"{suite.name:{width}}{suite.description}; {suite.repeats} repeats")
        print(f"{'':{width}}cases: {', '.join(shape.name for shape in suite.shapes)}")


def implementations(
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """List what can be raced here."""
    from cudadent42.model.implementations import why_not
    from cudadent42.operations import names
    from cudadent42.registry import registry
    from cudadent42.stages.build import choose_device

    device = choose_device(device, offline=False)
    rows = [
        (item.name, item.description, why_not(item, device), operation)
        for operation in names()
        for item in registry(operation).values()
    ]
    if as_json:
        keys = ("name", "description", "unavailable", "operation")
        print_json({"implementations": [dict(zip(keys, row, strict=True)) for row in rows]})
        return
    shown = ""
    for name, description, reason, operation in rows:
        if operation != shown:
            print(f"{operation}:")
            shown = operation
        print(f"  {name:21}{description}" + (f" (not here: {reason})" if reason else ""))


def schemas(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Print this schema. Without it, the schemas are listed."),
    ] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", metavar="FOLDER", help="Write all schemas into this folder."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the JSON Schemas of the files that runs and sessions leave."""
    from cudadent42.base.files import disk_errors, write_text
    from cudadent42.schemas import FILES, schema

    if name is not None:
        print(json.dumps(schema(name), indent=2))
        return
    written = {}
    if output_dir is not None:
        with disk_errors(output_dir):
            output_dir.mkdir(parents=True, exist_ok=True)
        for each in FILES:
            written[each] = output_dir / f"{each}.schema.json"
            write_text(written[each], json.dumps(schema(each), indent=2) + "\n")
    if as_json:
        print_json(
            {"schemas": [{**_listed(file), "written": written.get(file.name)} for file in FILES.values()]}
        )
        return
    for file in FILES.values():
        what = f"each line of {file.file}" if file.by_line else file.file
        print(f"{file.name:16}version {file.version}  {written.get(file.name, what)}")


def _listed(file: File) -> dict[str, object]:
    return {
        "name": file.name,
        "file": file.file,
        "version": file.version,
        "id": file.id,
        "by_line": file.by_line,
    }


@cache_app.command("list")
def cache_list(as_json: JsonOption = False) -> None:
    """Show the compiled kernels."""
    from cudadent42.base.compile_cache import entries
    from cudadent42.commands import tables
    from cudadent42.stages.build import open_cache

    cache = open_cache()
    kernels = entries(cache)
    if as_json:
        print_json({"directory": cache.directory, "entries": kernels})
        return
    console = console_for()
    if kernels:
        console.print(tables.cache_table(kernels))
    size = sum(kernel.artifact_bytes for kernel in kernels)
    print_line(console, f"{len(kernels)} kernels, {size / 1e6:.1f} MB in {cache.directory}")


@cache_app.command("clear")
def cache_clear(as_json: JsonOption = False) -> None:
    """Remove the compiled kernels.

    A cache that others can write to is closed to them first.
    """
    from cudadent42.stages.build import emptied_cache

    directory, cleared = emptied_cache()
    if as_json:
        print_json({"directory": directory, **encoded(cleared)})
    else:
        print(f"removed {cleared.entries} kernels, {cleared.bytes / 1e6:.1f} MB, from {directory}")
