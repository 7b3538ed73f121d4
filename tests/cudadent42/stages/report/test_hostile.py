"""Every text of every record, hostile: none of a report's formats takes it for markup."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from test_profile_section import profile

from cudadent42.decisions.gates import Decision, Finding, Gate, GateOutcome, GateReport, Relation
from cudadent42.profiles import diagnose
from cudadent42.runs.run_folder import RunFolder
from cudadent42.stages.gates import write_report
from cudadent42.stages.report import html, markdown
from cudadent42.stages.report.figures.speedup import speedup
from cudadent42.stages.report.view import Profiled, View

EVIL = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</code></pre><b onclick=x>",
    "```\n<script>x</script>\n~~~",
    "`` ` <i>",
    "| a | <s>",
    "[a](javascript:x) ![b](http://c)",
    "@everyone",
    "\n\n# heading\n\n<u>",
    "</details><style>*{}</style>",
    "]]>--><svg onload=x>",
)
SPELT = {"dtype", "device", "started", "ended", "unit", "metric"}
"""Fields that the code looks something up by."""


class Tags(HTMLParser):
    """What a browser would make of a text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.words = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.words += data


def poisoned(value: Any, evil: str) -> Any:
    """The record with ``evil`` after every text in it."""
    if isinstance(value, (Enum, Path)):
        return value
    if isinstance(value, str):
        return value + evil if value else value
    if is_dataclass(value) and not isinstance(value, type):
        kept = {f.name: getattr(value, f.name) for f in fields(value) if f.init and f.name not in SPELT}
        return replace(value, **{name: poisoned(each, evil) for name, each in kept.items()})
    if isinstance(value, Mapping):
        return {key: poisoned(each, evil) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(poisoned(each, evil) for each in value)
    return value


def view(run: RunFolder, evil: str) -> View:
    """Of a run with rivals, gates and a profile, all of whose texts are hostile."""
    its_profile = profile("unswizzled")
    told = Profiled(poisoned(its_profile, evil), poisoned(diagnose(its_profile), evil))
    finding = Finding("tiny/fp16", Decision.FAILED, 0.9, 0.8, 1.0, -0.1, "note")
    gate = Gate("held", "speedup", Relation.AT_LEAST, 1.0)
    outcome = GateOutcome(gate, Decision.FAILED, (finding,))
    write_report(run.path, poisoned(GateReport("mine.toml", (outcome,)), evil))
    return View(poisoned(run, evil), told)


@pytest.mark.parametrize("evil", EVIL)
def test_no_text_of_a_record_becomes_markup(make, evil: str) -> None:  # type: ignore[no-untyped-def]
    rivals = ("pytorch", "cudadent42", "flash_attn")
    seen = view(make(implementations=rivals, names=("tiny",), dtypes=("fp16",)), evil)
    page, comment = Tags(), Tags()
    page.feed(html.render(seen))
    written = markdown.render(seen)
    comment.feed(MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(written))
    for tags in (page, comment):
        assert not {"script", "img", "b", "i", "s", "u"} & set(tags.tags) - (
            {"b", "i"} if tags is page else set()
        )
        assert not [name for name, _ in tags.attributes if name.startswith("on")]
        leads = [value for name, value in tags.attributes if name in ("href", "src", "action")]
        assert all(value.startswith(("#", "data:,")) for value in leads)
    assert comment.tags["style"] == comment.tags["svg"] == comment.tags["h1"] == 0
    assert comment.tags["details"] == 6
    assert "<script" not in written
    outside = re.sub(r"<pre>.*?</pre>", "", written, flags=re.DOTALL)
    assert "@everyone" not in outside  # GitHub mentions nobody from inside of code
    drawn = ElementTree.fromstring(speedup(seen, None, wide=True))
    assert not [each.tag for each in drawn.iter() if re.search("script|img|foreignObject", each.tag)]


def test_the_command_is_shown_as_it_was_typed(make) -> None:  # type: ignore[no-untyped-def]
    """Quoted for the shell, and for the page: what a reader copies runs the same."""
    run = make(names=("tiny",))
    name = "a ```<b>&amp; `c` <script>.py:f"
    command = ("cudadent42", "run", "--implementations", name)
    comment = Tags()
    comment.feed(
        MarkdownIt("commonmark", {"html": True})
        .enable("table")
        .render(markdown.render(View(replace(run, manifest=replace(run.manifest, command=command)))))
    )
    assert f"cudadent42 run --implementations '{name}'" in comment.words
