"""A matplotlib figure as SVG that a page can style: roles for colours, text as text, short.

Figures are drawn with placeholder colours, one per ``Role``; here each becomes a class, so that one drawing
serves light and dark pages. A standalone picture carries both palettes with it.
"""

from __future__ import annotations

import functools
import io
import re
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal
from xml.sax.saxutils import escape, quoteattr

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG, RendererSVG
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath


class Role(Enum):
    """What a colour means: (placeholder, light, dark). Hues are Okabe and Ito's, toned for contrast."""

    INK = ("#0a0b01", "#1b1f24", "#e8eaed")
    MUTED = ("#0a0b02", "#5f6873", "#9aa4b0")
    RULE = ("#0a0b03", "#dfe3e8", "#30363e")
    BAND = ("#0a0b04", "#eceff3", "#262b32")
    PAGE = ("#0a0b05", "#ffffff", "#14171b")
    FASTER = ("#0a0b06", "#0067b1", "#56b4f2")
    SLOWER = ("#0a0b07", "#b84800", "#ff8f4a")
    EQUAL = ("#0a0b08", "#5f6873", "#9aa4b0")
    UNDECIDED = ("#0a0b09", "#826600", "#e3c34d")
    CANDIDATE = ("#0a0b0a", "#0067b1", "#56b4f2")
    BASELINE = ("#0a0b0b", "#3c434b", "#c3cad2")
    CONTROL = ("#0a0b0c", "#9aa2ac", "#707a86")
    OTHER_1 = ("#0a0b0d", "#00805c", "#2fc79b")
    OTHER_2 = ("#0a0b0e", "#a8487c", "#e795c1")
    OTHER_3 = ("#0a0b0f", "#a06a00", "#edb04a")

    @property
    def placeholder(self) -> str:
        return self.value[0]

    @property
    def light(self) -> str:
        return self.value[1]

    @property
    def dark(self) -> str:
        return self.value[2]

    @property
    def word(self) -> str:
        """Name of the CSS variable and of the class suffix."""
        return self.name.lower().replace("_", "-")


_BY_PLACEHOLDER = {role.placeholder: role for role in Role}

_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "cudadent42",
    "text.parse_math": False,  # a case may be called "$x"
    "path.simplify": False,
    "font.family": "DejaVu Sans",  # ships with matplotlib; the page's own font replaces it
    "font.size": 11.0,
    "axes.linewidth": 1.0,
}

_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}

_SVG = "{http://www.w3.org/2000/svg}"
_HREF = "{http://www.w3.org/1999/xlink}href"
_DOT = re.compile(r"M([^A-Za-z]+)L\1(?=M|$)")
"""A line of no length, which a round cap shows as a dot."""
_NUMBER = re.compile(r"-?\d+\.\d+")
_DEFAULT_STYLE = {"stroke-linejoin": "miter", "font-weight": "400", "text-anchor": "start"}
_URL = re.compile(r"url\(#([^)]+)\)")
_TIP = "tip:"


def variables(dark: bool) -> str:
    """CSS declarations of every role's variable."""
    return "".join(f"--{role.word}:{role.dark if dark else role.light};" for role in Role)


def classes() -> str:
    """CSS rules ``f-`` and ``s-`` (fill, stroke) for marks that a page draws itself."""
    return "".join(f".f-{r.word}{{fill:var(--{r.word})}}.s-{r.word}{{stroke:var(--{r.word})}}" for r in Role)


class Sheet:
    """The styles of a page's pictures, each once under a short class name: in full they double it."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def name(self, style: Mapping[str, str]) -> str:
        """The class that stands for these declarations."""
        css = ";".join(f"{name}:{value}" for name, value in style.items())
        return self._names.setdefault(css, f"g{len(self._names)}")

    def css(self) -> str:
        """The rules, complete once every picture is drawn."""
        return "".join(f".{name}{{{css}}}" for css, name in self._names.items())


def figure(width: float, height: float) -> Figure:
    """An empty figure of that many CSS pixels."""
    fig = Figure(figsize=(width / 72, height / 72), dpi=72)
    FigureCanvasSVG(fig)
    fig.patch.set_visible(False)
    return fig


def panel(fig: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes at that place, in pixels from the figure's top left, without frame or ticks."""
    full_width, full_height = (72 * inches for inches in fig.get_size_inches())
    box = (
        left / full_width,
        1 - (top + height) / full_height,
        width / full_width,
        height / full_height,
    )
    axes = fig.add_axes(box)
    axes.set_axis_off()  # nothing of it would be seen, and it would be drawn all the same
    return axes


def tip(number: int) -> str:
    """Identity to give an artist so that ``render`` can add the tooltip of that number."""
    return f"{_TIP}{number}"


def render(
    fig: Figure,
    *,
    prefix: str,
    title: str,
    description: str,
    sheet: Sheet | None,
    tips: Mapping[int, str] | None = None,
    css_class: str = "",
) -> str:
    """The figure as one ``<svg>`` element.

    ``prefix`` keeps identities apart where several pictures share a page; ``title`` and ``description`` are
    what a screen reader says; ``tips`` are shown over the artists marked with ``tip``. The styles go to
    ``sheet``; without one the picture carries them, and both palettes, itself.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        # Only metrics come from matplotlib's font; the browser finds glyphs that it lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        width, height = (72 * inches for inches in fig.get_size_inches())
        untyped: Any = _Renderer
        renderer = untyped(width, height, buffer, metadata=_NO_METADATA)
        fig.draw(renderer)
        renderer.finalize()
    root = ElementTree.fromstring(buffer.getvalue())
    writer = _Writer(prefix, sheet, tips or {}, root)
    _, _, across, down = (_round(number, 1) for number in root.get("viewBox", "0 0 0 0").split())
    body = "".join(writer.element(child) for child in root)
    attributes = f'viewBox="0 0 {across} {down}" role="img" aria-labelledby="{prefix}-t {prefix}-d"'
    if css_class:
        attributes += f" class={quoteattr(css_class)}"
    head = f'<title id="{prefix}-t">{escape(title)}</title><desc id="{prefix}-d">{escape(description)}</desc>'
    if sheet is not None:
        return f"<svg {attributes}>{head}{body}</svg>"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {attributes} width="{across}" height="{down}" '
        "font-family=\"system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif\">"
        f"{head}<style>@media (prefers-color-scheme: dark){{{_dark_rules()}}}</style>"
        f'<rect width="100%" height="100%" rx="8" class="f-page" fill="{Role.PAGE.light}"/>{body}</svg>\n'
    )


class _Renderer(RendererSVG):
    """Draws as ``savefig`` has it done. Pages say the same words again and again, so each is measured once."""

    def get_text_width_height_descent(
        self, s: str, prop: FontProperties, ismath: bool | Literal["TeX"]
    ) -> tuple[float, float, float]:
        return _measured(s, prop.copy(), ismath)


@functools.lru_cache(maxsize=4096)
def _measured(words: str, font: FontProperties, math: bool | Literal["TeX"]) -> tuple[float, float, float]:
    """Width, height and depth below the line. ``font`` is the cache's own: its hash changes with what is set."""
    return TextToPath().get_text_width_height_descent(words, font, math)


def _dark_rules() -> str:
    return "".join(f".f-{r.word}{{fill:{r.dark}}}.s-{r.word}{{stroke:{r.dark}}}" for r in Role)


class _Writer:
    """Rewrites matplotlib's elements: shorter, without its identities and colours."""

    def __init__(
        self, prefix: str, sheet: Sheet | None, tips: Mapping[int, str], root: ElementTree.Element
    ) -> None:
        self._sheet = sheet
        self._tips = tips
        used = (name for element in root.iter() for name in _references(element))
        self._names = {name: f"{prefix}-{number}" for number, name in enumerate(dict.fromkeys(used))}

    def element(self, element: ElementTree.Element, decimals: int = 1, tip_text: str = "") -> str:
        tag = element.tag.removeprefix(_SVG)
        if tag in ("metadata", "style") or "}" in tag:
            return ""
        identity = element.get("id", "")
        if identity.startswith(_TIP):
            tip_text = self._tips.get(int(identity.removeprefix(_TIP)), "")
        # Marks are small and drawn often: they deserve the second decimal.
        inner = 2 if tag == "defs" else decimals
        inside = "".join(self.element(child, inner, tip_text) for child in element)
        if tag == "text":
            inside = escape(element.text or "")
        if tag == "use" and tip_text:
            inside = f"<title>{escape(tip_text)}</title>"
        if tag in ("g", "defs") and not inside:
            return ""
        attributes = self._attributes(element, decimals)
        if tag == "g" and not attributes:
            return inside
        return f"<{tag}{attributes}>{inside}</{tag}>" if inside else f"<{tag}{attributes}/>"

    def _attributes(self, element: ElementTree.Element, decimals: int) -> str:
        out: dict[str, str] = {}
        for name, value in element.attrib.items():
            if name == "id":
                if value in self._names:
                    out["id"] = self._names[value]
            elif name == _HREF:
                out["href"] = f"#{self._names[value.lstrip('#')]}"
            elif name == "clip-path":
                out[name] = _URL.sub(lambda match: f"url(#{self._names[match.group(1)]})", value)
            elif name == "style":
                out.update(self._style(value))
            elif name == "d":
                short = re.sub(r"\s*([A-Za-z])\s*", r"\1", _rounded(value, decimals)).strip()
                out[name] = _DOT.sub(r"M\1h0", short)
            elif name == "transform":
                if not value.startswith("rotate(-0 "):
                    out[name] = _rounded(value, decimals)
            else:
                out[name] = _rounded(value, decimals)
        return "".join(f" {name}={quoteattr(value)}" for name, value in out.items())

    def _style(self, text: str) -> dict[str, str]:
        """Attributes that stand for a style: a class of the page's sheet, or the declarations themselves."""
        plain: dict[str, str] = {}
        roles: dict[str, Role] = {}
        for declaration in text.split(";"):
            name, _, value = (part.strip() for part in declaration.partition(":"))
            if name in ("fill", "stroke") and value in _BY_PLACEHOLDER:
                roles[name] = _BY_PLACEHOLDER[value]
            elif name and name != "font-family" and _DEFAULT_STYLE.get(name) != value:
                plain[name] = _rounded(value, 2)
        if not plain and not roles:
            return {}
        if self._sheet is not None:
            colours = {name: f"var(--{role.word})" for name, role in roles.items()}
            return {"class": self._sheet.name({**colours, **plain})}
        plain |= {name: role.light for name, role in roles.items()}
        if roles:
            plain["class"] = " ".join(f"{name[0]}-{role.word}" for name, role in roles.items())
        return plain


def _references(element: ElementTree.Element) -> list[str]:
    href = element.get(_HREF, "").lstrip("#")
    return ([href] if href else []) + _URL.findall(element.get("clip-path", ""))


def _rounded(text: str, decimals: int) -> str:
    return _NUMBER.sub(lambda match: _round(match.group(), decimals), text)


def _round(number: str, decimals: int) -> str:
    short = f"{float(number):.{decimals}f}"
    if "." in short:
        short = short.rstrip("0").rstrip(".")
    return "0" if short in ("-0", "") else short
