"""What ``--help`` looks like: options by their purpose, one style of placeholders, as wide as the terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from cudadent42.base.errors import UsageError

WHAT = "What is measured"
HOW = "How it is measured"
WHERE = "Where it runs"
KEPT = "What is decided and kept"
OUTPUT = "Output"
_OTHER = "Options"
_LAST = (KEPT, _OTHER, OUTPUT)
"""Sections at the end of a command's help; the others stand in the order of their options."""

SETTINGS: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 1000,  # of any terminal; click's own limit is 80
}

UNTRUSTED = "--untrusted"
CONFINING = ("run", "bench", "build", "verify", "compare", "bisect")
"""Commands that take it."""

_A_PROFILER = "a profiler attaches to a process, which is what a sandbox refuses"
WHY_NOT = {
    "profile": _A_PROFILER,
    "doctor": _A_PROFILER,
    "tune": "it races what it compiled once, and nothing that was compiled in a sandbox is kept",
    "session": "its checkpoints profile, and work in the project's own folder",
}
"""By command or group, of those that run somebody's code."""

_Callback = TypeVar("_Callback", bound=Callable[..., Any])


def _write_parameters(command: Any, ctx: Any, formatter: Any) -> None:
    sections: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(ctx):
        if getattr(parameter, "hidden", False):
            continue
        if parameter.param_type_name == "argument":
            placeholder = parameter.metavar or parameter.name.upper()
            sections.setdefault("Arguments", []).append((placeholder, _explanation(parameter, ctx)))
        else:
            section = getattr(parameter, "rich_help_panel", None) or _section_of(parameter)
            sections.setdefault(section, []).append((_names(parameter), _explanation(parameter, ctx)))
    for title in sorted(sections, key=lambda title: _LAST.index(title) if title in _LAST else -1):
        with formatter.section(title):
            formatter.write_dl(sections[title])


def _section_of(parameter: Any) -> str:
    return OUTPUT if parameter.name in ("help", "install_completion", "show_completion") else _OTHER


def _names(parameter: Any) -> str:
    """``-v, --verbose``, ``--save-csv / --no-save-csv``, ``--suite NAME|FILE``: of several long names the first."""
    short = [name for name in parameter.opts if not name.startswith("--")]
    long = [name for name in parameter.opts if name.startswith("--")]
    names = ", ".join([*short, *long[:1]])
    if parameter.secondary_opts:
        names += f" / {parameter.secondary_opts[0]}"
    return names if parameter.is_flag else f"{names} {parameter.metavar or parameter.name.upper()}"


def _explanation(parameter: Any, ctx: Any) -> str:
    words = parameter.help or ""
    default = parameter.get_default(ctx, call=False)
    if parameter.required:
        return f"{words}  [required]"
    if parameter.is_eager or default in (None, "", False, (), []) or (default is True):
        return words
    return f"{words}  [default: {getattr(default, 'value', default)}]"


class Command(TyperCommand):
    """A command whose options are grouped by what they are about.

    One that confines nobody does not merely lack the option: whoever asks for a sandbox is told where there is one.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        wanted = UNTRUSTED in args and not ctx.ignore_unknown_options  # else it may be a script's
        if wanted and not any(UNTRUSTED in parameter.opts for parameter in self.get_params(ctx)):
            why = next((WHY_NOT[word] for word in ctx.command_path.split() if word in WHY_NOT), "")
            raise UsageError(
                f"{ctx.command_path} confines nothing to a sandbox, so it takes no {UNTRUSTED} and has run nothing"
                f"{why and ': '}{why}; "
                f"these do: {', '.join(CONFINING)}. Run the rest in a virtual machine of its own"
            )
        rest: list[str] = super().parse_args(ctx, args)
        return rest

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_parameters(self, ctx, formatter)


class Group(TyperGroup):
    """A group of commands, which stand under the headings that ``App.command`` was given."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                title = getattr(command, "rich_help_panel", None)
                heading = title if isinstance(title, str) else "Commands"
                sections.setdefault(heading, []).append((name, command.get_short_help_str(200)))
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)
        _write_parameters(self, ctx, formatter)


class App(typer.Typer):
    """Typer with this help."""

    def __init__(self, *, cls: type[TyperGroup] = Group, **settings: Any) -> None:
        super().__init__(
            cls=cls,
            no_args_is_help=not settings.get("invoke_without_command", False),
            pretty_exceptions_enable=False,
            rich_markup_mode=None,
            context_settings=SETTINGS,
            **settings,
        )

    def command(self, name: str | None = None, **settings: Any) -> Callable[[_Callback], _Callback]:
        """As Typer's; ``rich_help_panel`` is the heading that the command stands under."""
        return super().command(name, cls=Command, **settings)
