"""The page in a real browser: does it fit, does it show, does it stay silent."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cudadent42.runs.run_folder import RunFolder
from cudadent42.stages import report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--hide-scrollbars",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    # The probe reads the page in its frame; to the browser every file is an origin of its own.
    "--allow-file-access-from-files",
    "--virtual-time-budget=5000",
    "--dump-dom",
)

PROBE = """<!doctype html><title>probe</title><body style="margin:0">
<iframe id="page" src="report.html" style="width:{width}px;height:900px;border:0"></iframe>
<pre id="found"></pre>
<script>
document.getElementById("page").onload = event => {{
  const page = event.target.contentDocument, root = page.documentElement;
  const visible = element => {{
    const box = element.getBoundingClientRect();
    return box.width > 0 && box.height > 0;
  }};
  const verdict = page.getElementById("verdict"), box = verdict.getBoundingClientRect();
  const texts = [...page.querySelectorAll("svg[role=img] text")].filter(visible);
  const pictures = [...page.querySelectorAll("svg[role=img]")].filter(visible);
  document.getElementById("found").textContent = JSON.stringify({{
    width: root.clientWidth,
    content: root.scrollWidth,
    verdict: verdict.innerText,
    inside: box.left >= 0 && box.right <= root.clientWidth && box.top < 400,
    background: page.defaultView.getComputedStyle(page.body).backgroundColor,
    ink: page.defaultView.getComputedStyle(verdict).color,
    pictures: pictures.map(picture => picture.getAttribute("aria-labelledby")),
    outside: pictures.filter(p => p.getBoundingClientRect().right > root.clientWidth + 1).length,
    smallest: Math.min(...texts.map(text => text.getBoundingClientRect().height)),
    requests: page.defaultView.performance.getEntriesByType("resource").map(entry => entry.name),
  }});
}};
</script>
"""


def browser() -> str:
    found = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if found is None:
        pytest.skip(f"no browser found; looked for {', '.join(BROWSERS)}")
    return found


def look(folder: Path, width: int, profile: Path, *extra: str) -> dict[str, Any]:
    """What the browser makes of ``report.html`` in a frame that wide."""
    probe = folder / f"probe-{width}.html"
    probe.write_text(PROBE.format(width=width), encoding="utf-8")
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [
            browser(),
            *FLAGS,
            *sandbox,
            *extra,
            f"--user-data-dir={profile}",
            "--window-size=1600,1000",
            probe.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert said == []
    match = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.DOTALL)
    assert match, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(html.unescape(match.group(1)))
    return found


@pytest.mark.parametrize(("width", "shown", "hidden"), [(1280, "wide", "narrow"), (390, "narrow", "wide")])
def test_page_fits_and_shows_the_verdict(
    run: RunFolder, tmp_path_factory: pytest.TempPathFactory, width: int, shown: str, hidden: str
) -> None:
    report.write_run(run)
    found = look(run.path, width, tmp_path_factory.mktemp("profile"))
    assert found["width"] == width
    assert found["content"] <= width, "the page scrolls sideways"
    assert found["verdict"].startswith("cudadent42 is faster than pytorch: ")
    assert found["inside"]
    assert found["outside"] == 0
    assert found["smallest"] >= 9, "text in a picture is too small to read"
    assert any(f"speedup-{shown}" in name for name in found["pictures"])
    assert not any(f"-{hidden}-" in name for name in found["pictures"])
    assert found["requests"] == []


def test_long_names_do_not_widen_a_phone(make, tmp_path_factory: pytest.TempPathFactory) -> None:  # type: ignore[no-untyped-def]
    run = make(names=("x" * 200, "<b>bold</b>"), implementations=("pytorch", "y" * 120 + ".py:attention"))
    report.write_run(run)
    found = look(run.path, 360, tmp_path_factory.mktemp("profile"))
    assert found["content"] <= 360


def test_dark_and_light_differ(small: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> None:
    report.write_run(small)
    light = look(
        small.path, 800, tmp_path_factory.mktemp("profile"), "--blink-settings=preferredColorScheme=1"
    )
    dark = look(
        small.path, 800, tmp_path_factory.mktemp("profile"), "--blink-settings=preferredColorScheme=0"
    )
    assert light["background"] == "rgb(255, 255, 255)"
    assert dark["background"] == "rgb(20, 23, 27)"
    assert light["ink"] != dark["ink"]
