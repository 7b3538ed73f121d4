"""The entry point: the command line, or preflight alone where this Python lacks its packages."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys

from cudadent42.base.errors import ExitCode


def main() -> int:
    # The lab shows itself what is being compiled, and so do its workers, which inherit this.
    os.environ.setdefault("FLASHMOE_QUIET", "1")
    missing = next((name for name in ("typer", "rich") if importlib.util.find_spec(name) is None), None)
    if missing is None:
        if sys.argv[1:2] == ["mcp"]:
            from cudadent42.commands import alone

            return alone.main()
        from cudadent42.commands import cli

        return cli.main()
    if sys.argv[1:2] == ["preflight"]:
        from cudadent42.preflight import command

        return command.main_on_bare_python(sys.argv[2:])
    print(
        f"error: {sys.executable} lacks {missing}. See all that is missing with\n"
        f"  {shlex.quote(sys.executable)} -m cudadent42 preflight",
        file=sys.stderr,
    )
    return ExitCode.NOT_READY


if __name__ == "__main__":
    sys.exit(main())
