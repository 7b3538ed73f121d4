"""``new``: a starting point for a kernel of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cudadent42.commands.common import print_json
from cudadent42.commands.options import JsonOption
from cudadent42.scaffold import Kind, create


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name the kernel and its folder.")],
    kind: Annotated[
        Kind,
        typer.Option(
            "--kind",
            metavar="|".join(Kind),
            help="python writes a function, cpu a .cpp file, cuda a .cu file.",
        ),
    ] = Kind.PYTHON,
    output_dir: Annotated[
        Path,
        typer.Option(
            "--output-dir", metavar="FOLDER", help="Make it in this folder. Default: the current one."
        ),
    ] = Path(),
    as_json: JsonOption = False,
) -> None:
    """Write a kernel to begin with.

    It verifies and races as it is; its README has the commands.
    """
    paths = create(name, kind, output_dir)
    if as_json:
        print_json({"files": list(paths)})
        return
    for path in paths:
        print(path)
