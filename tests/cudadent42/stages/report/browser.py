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
// A copy of a picture with the colours that it has on its page, drawn at its size; how many of its pixels are coloured.
const ink = async (picture, view, without) => {{
  const copy = picture.cloneNode(true), box = picture.getBoundingClientRect();
  const [originals, copies] = [picture, copy].map(each => [...each.querySelectorAll("*")]);
  originals.forEach((each, number) => {{
    const style = view.getComputedStyle(each);
    for (const name of ["stroke", "fill", "stroke-width", "stroke-linecap", "opacity", "display"])
      copies[number].style.setProperty(name, style.getPropertyValue(name));
  }});
  if (without) copy.querySelectorAll(without).forEach(each => each.remove());
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("width", box.width);
  copy.setAttribute("height", box.height);
  const image = new Image();
  image.src = "data:image/svg+xml," + encodeURIComponent(new XMLSerializer().serializeToString(copy));
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = box.width;
  canvas.height = box.height;
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const pixels = context.getImageData(0, 0, canvas.width, canvas.height).data;
  let count = 0;
  for (let at = 3; at < pixels.length; at += 4) count += pixels[at] > 64;
  return count;
}};
const DOTS = "path[d*=h0]";
document.getElementById("page").onload = async event => {{
  const page = event.target.contentDocument, root = page.documentElement;
  const visible = element => {{
    const box = element.getBoundingClientRect();
    return box.width > 0 && box.height > 0;
  }};
  const verdict = page.getElementById("verdict"), box = verdict.getBoundingClientRect();
  const texts = [...page.querySelectorAll("svg[role=img] text")].filter(visible);
  const pictures = [...page.querySelectorAll("svg[role=img]")].filter(visible);
  const figures = [];
  if ({figures}) for (const picture of pictures) {{
    const outline = picture.getBoundingClientRect();
    const marks = [...picture.querySelectorAll("path,rect,circle,line,use,text")].filter(visible);
    const outside = mark => {{
      const box = mark.getBoundingClientRect();
      return box.left < outline.left - 2 || box.right > outline.right + 2 ||
        box.top < outline.top - 2 || box.bottom > outline.bottom + 2;
    }};
    const dots = [...picture.querySelectorAll(DOTS)].map(each => each.getAttribute("d").split("h0").length - 1);
    const all = await ink(picture, page.defaultView, "");
    figures.push({{
      name: picture.getAttribute("aria-labelledby"),
      marks: marks.length,
      stray: marks.filter(outside).map(each => each.outerHTML.slice(0, 200)),
      dots: dots.reduce((one, other) => one + other, 0),
      ink: all,
      ink_of_dots: dots.length ? all - await ink(picture, page.defaultView, DOTS) : 0,
    }});
  }}
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
    figures: figures,
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


def look(
    folder: Path, width: int, profile: Path, *extra: str, page: str = "report.html", figures: bool = False
) -> dict[str, Any]:
    """What the browser makes of a page of the folder in a frame that wide; of each of its figures, where asked for."""
    probe = folder / f"probe-{width}.html"
    probe.write_text(PROBE.format(width=width, page=page, figures=str(figures).lower()), encoding="utf-8")
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
