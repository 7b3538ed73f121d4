"""How right the results are, of every check."""

from __future__ import annotations

import math
from typing import Any

from cudadent42.model import text
from cudadent42.model.records import VerifiedCase
from cudadent42.stages.report import keys
from cudadent42.stages.report.cases import shares_of_bound
from cudadent42.stages.report.escaping import escape
from cudadent42.stages.report.figures import drawn
from cudadent42.stages.report.figures.errors import errors
from cudadent42.stages.report.section import Section, Text
from cudadent42.stages.report.svg import Sheet
from cudadent42.stages.report.view import View

_HTML = """
<p>{{ view.verification_line }}{% if wide %} Errors are against float64; the bound is set by the error of PyTorch's own result on the same input.{% endif %}</p>
{% if wide %}
<figure>{{ wide }}{{ narrow }}
<figcaption><ul class="key">{% for item in error_key %}<li>{{ item.mark }}{{ item.label }}</li>{% endfor %}</ul></figcaption></figure>
{% endif %}
{% if checks %}
<details{% if view.failures %} open{% endif %}><summary>Every check</summary>
<div class="scroll" tabindex="0" role="region" aria-label="Every check">
<table id="checks">
<thead><tr><th scope="col">Case</th><th scope="col">Input</th><th scope="col">Implementation</th><th scope="col">Result</th><th scope="col" class="n">Worst element</th><th scope="col" class="n">RMS</th><th scope="col" class="n">PyTorch's RMS</th><th scope="col" class="n">Of the bound</th><th scope="col">Detail</th></tr></thead>
<tbody>{% for check in checks %}
<tr><th scope="row">{{ check.case }}</th><td>{{ check.input }}</td><td>{{ check.implementation }}</td><td>{% if check.passed %}<span class="v">passed</span>{% else %}<span class="v v-slower">failed</span>{% endif %}</td><td class="n">{{ check.max }}</td><td class="n">{{ check.rms }}</td><td class="n">{{ check.reference }}</td><td class="n">{{ check.share }}</td><td class="wrap m">{{ check.detail }}</td></tr>
{% endfor %}</tbody></table></div></details>
{% endif %}
"""


def _filled(view: View, sheet: Sheet) -> dict[str, Any]:
    checks = [_check(check) for check in sorted(view.checked, key=lambda check: check.passed)]
    return {**drawn(errors, view, sheet), "error_key": keys.error_key(view), "checks": checks}


def _check(check: VerifiedCase) -> dict[str, Any]:
    shares = [share for share in shares_of_bound(check) if not math.isnan(share)]
    return {
        "case": text.clean(check.case),
        "input": text.clean(check.input),
        "implementation": text.implementation(check.implementation),
        "passed": check.passed,
        "max": text.scientific(check.error.max) if check.error else "",
        "rms": text.scientific(check.error.rms) if check.error else "",
        "reference": text.scientific(check.reference_error.rms) if check.reference_error else "",
        "share": f"{text.figures(100 * max(shares))} %" if shares else "",
        "detail": text.clean(check.detail),
    }


def _closest(view: View) -> list[str]:
    shared = []
    for entry in view.checked:
        shares = [share for share in shares_of_bound(entry) if not math.isnan(share)]
        if shares:
            shared.append((max(shares), entry))
    if not shared:
        return []
    shared.sort(key=lambda pair: -pair[0])
    lines = ["| case | input | implementation | of the bound |", "| --- | --- | --- | ---: |"]
    lines += [
        f"| {escape(e.case)} | {escape(e.input)} | {escape(text.implementation(e.implementation))} "
        f"| {text.figures(100 * share)} % |"
        for share, e in shared[:10]
    ]
    return ["\n".join(lines)]


SECTION = Section(
    "verify",
    "Verification",
    _HTML,
    _filled,
    texts=(
        Text(50, lambda view: [escape(view.verification_line)]),
        Text(140, _closest, fold="Checks closest to their bound"),
    ),
)
