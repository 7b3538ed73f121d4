"""A page in a real browser, headless: what it measures and what it says."""

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
<iframe id="page" src="{page}" style="width:{width}px;height:900px;border:0"></iframe>
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
    font: page.defaultView.getComputedStyle(verdict).fontFamily,
    pictures: pictures.map(picture => picture.getAttribute("aria-labelledby")),
    cut: [...page.querySelectorAll("h1,h2,p,li,dd")].filter(each => each.scrollWidth > each.clientWidth + 1).length,
    outside: pictures.filter(
      p => !p.closest(".scroll") && p.getBoundingClientRect().right > root.clientWidth + 1).length,
    smallest: Math.min(99, ...texts.map(text => text.getBoundingClientRect().height)),
    requests: page.defaultView.performance.getEntriesByType("resource").map(entry => entry.name),
  }});
}};
</script>
"""


def browser() -> str:
    program = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if program is None:
        pytest.skip(f"no browser found; looked for {', '.join(BROWSERS)}")
    return program


def look(folder: Path, width: int, profile: Path, *extra: str, page: str = "report.html") -> dict[str, Any]:
    """What the browser makes of a page of the folder in a frame that wide."""
    probe = folder / f"probe-{width}.html"
    probe.write_text(PROBE.format(width=width, page=page), encoding="utf-8")
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
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert said == []
    match = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.DOTALL)
    assert match, done.stderr[-2000:]
    measured: dict[str, Any] = json.loads(html.unescape(match.group(1)))
    return measured
