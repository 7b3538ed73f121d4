"""What was compiled, and what it takes of a machine."""

from __future__ import annotations

from typing import Any

from cudadent42.stages.report import facts
from cudadent42.stages.report.escaping import cells
from cudadent42.stages.report.section import Section, Text
from cudadent42.stages.report.svg import Sheet
from cudadent42.stages.report.view import View

_HTML = """
{% if kernels %}
<div class="scroll" tabindex="0" role="region" aria-labelledby="h-build">
<table id="kernels">
<thead><tr><th scope="col">Kernel</th><th scope="col">Target</th><th scope="col">Compiler</th><th scope="col" class="n">Compile time</th><th scope="col" class="n">Size</th>{% if resources %}<th scope="col" class="n">Registers</th><th scope="col" class="n">Spills</th><th scope="col" class="n">Shared memory</th><th scope="col" class="n">Threads</th><th scope="col" class="n">Blocks/SM</th><th scope="col" class="n">Occupancy</th>{% endif %}</tr></thead>
<tbody>{% for kernel in kernels %}
<tr><th scope="row">{{ kernel.label }}</th><td>{{ kernel.target }}</td><td>{{ kernel.compiler }}</td><td class="n">{{ kernel.time }}</td><td class="n">{{ kernel.size }}</td>{% if resources %}<td class="n">{{ kernel.registers }}</td><td class="n">{{ kernel.spills }}</td><td class="n">{{ kernel.shared }}</td><td class="n">{{ kernel.threads }}</td><td class="n">{{ kernel.blocks }}</td><td class="n">{{ kernel.occupancy }}</td>{% endif %}</tr>
{% endfor %}</tbody></table></div>
<details><summary>Recipes: flags, sources and their hashes</summary>
{% for kernel in kernels %}<h3>{{ kernel.label }}</h3>{{ facts(kernel.recipe) }}{% endfor %}
</details>
{% else %}<p>This run recorded no kernel build.</p>{% endif %}
"""


def _filled(view: View, sheet: Sheet) -> dict[str, Any]:
    build = view.run.build
    resources = any(kernel.resources for kernel in build.kernels) if build else False
    return {"kernels": facts.kernels(view), "resources": resources}


def _tables(view: View) -> list[str]:
    kernels = facts.kernels(view)
    if not kernels:
        return []
    lines = ["| kernel | target | compiler | compile time | size |", "| --- | --- | --- | ---: | ---: |"]
    lines += [cells(kernel, "label", "target", "compiler", "time", "size") for kernel in kernels]
    needing = [kernel for kernel in kernels if kernel["registers"]]
    if needing:
        lines += [
            "",
            "| kernel | registers | spills | shared memory | threads | blocks/SM | occupancy |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        columns = ("label", "registers", "spills", "shared", "threads", "blocks", "occupancy")
        lines += [cells(kernel, *columns) for kernel in needing]
    return ["\n".join(lines)]


SECTION = Section("build", "Kernels", _HTML, _filled, texts=(Text(120, _tables, fold="Kernels"),))
