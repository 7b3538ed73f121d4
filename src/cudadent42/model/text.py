"""Numbers and names as a reader wants them: three figures, a unit, nothing that a page could misread."""

from __future__ import annotations

import math
import unicodedata

from cudadent42.model.implementations import is_plug_in

NOT_AVAILABLE = "n/a"

_TIME_UNITS = ((1e3, "s"), (1.0, "ms"), (1e-3, "µs"), (1e-6, "ns"))


def clean(text: str) -> str:
    """``text`` on one line without control characters, which neither XML nor a table can hold."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) in ("Cc", "Cs", "Cf", "Zl", "Zp", "Cn") else c
        for c in text
    )


def shorten(text: str, length: int) -> str:
    """At most ``length`` characters, the middle left out: names differ at their ends."""
    if len(text) <= length:
        return text
    tail = (length - 1) // 2
    return f"{text[: length - 1 - tail]}…{text[len(text) - tail :]}"


def implementation(name: str) -> str:
    """An implementation's name; a plug-in's without the folders in front of its file."""
    return clean(name.rpartition("/")[2] if is_plug_in(name) else name)


def figures(value: float, count: int = 3) -> str:
    """``value`` with ``count`` significant figures and no exponent."""
    if not math.isfinite(value):
        return NOT_AVAILABLE
    if value == 0:
        return "0"
    value = float(f"{value:.{count - 1}e}")  # 9.996 has as many decimals as the 10.0 that it is shown as
    decimals = max(0, count - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 12)}f}"


def latency(milliseconds: float) -> str:
    """A time with the unit that suits it: ``8.52 µs``, ``52.5 ms``."""
    if not math.isfinite(milliseconds):
        return NOT_AVAILABLE
    for scale, unit in _TIME_UNITS:
        if milliseconds >= 0.9995 * scale:
            return f"{figures(milliseconds / scale)} {unit}"
    return f"{figures(milliseconds / 1e-6)} ns"


def seconds(value: float) -> str:
    return latency(value * 1e3)


def _ratio_decimals(value: float) -> int:
    if value < 1.1:
        return 3
    return 2 if value < 10 else 1 if value < 100 else 0


def ratio(value: float) -> str:
    """A speed-up: ``4.31×``, ``1.003×``, ``12.4×``."""
    if not math.isfinite(value):
        return NOT_AVAILABLE
    return f"{value:,.{_ratio_decimals(value)}f}×"


def interval(low: float, high: float) -> str:
    """Ends of like size with the same number of decimals: ``4.27 to 4.36``, ``0.061 to 46.1``."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return NOT_AVAILABLE
    decimals = [_ratio_decimals(low), _ratio_decimals(high)]
    if high < 4 * low:
        decimals = [max(decimals)] * 2
    return f"{low:,.{decimals[0]}f} to {high:,.{decimals[1]}f}"


def percent(fraction: float) -> str:
    """``0.0042`` as ``0.42 %``."""
    return NOT_AVAILABLE if not math.isfinite(fraction) else f"{figures(100 * fraction, 2)} %"


def scientific(value: float) -> str:
    """``2.1e-03`` for errors, whose size matters and not their digits."""
    return NOT_AVAILABLE if not math.isfinite(value) else f"{value:.1e}"


def size(count: float) -> str:
    """Bytes with a decimal unit: ``48 kB``."""
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= scale:
            return f"{figures(count / scale)} {unit}"
    return f"{count:.0f} B"


def plural(count: int, singular: str, many: str = "") -> str:
    """``1 case``, ``24 cases``."""
    return f"{count:,} {singular if count == 1 else many or singular + 's'}"
