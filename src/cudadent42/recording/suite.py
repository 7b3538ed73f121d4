"""From the recorded runs of a script to suites: one for each operation and baseline that it calls."""

from __future__ import annotations

import json
import math
import secrets
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from cudadent42.base.errors import UsageError
from cudadent42.recording.records import Group, Kind, Recording, Sizes

MOST_CASES = 24
"""Of a suite: each takes seconds to race."""

_REST = "one of many shapes that take little time; --cases takes more of them"
_ANOTHER_DEVICE = "on {}, while most of the script is on {}"
_STEPS = {Kind.ATTENTION: "attention_training_step", Kind.EXPERTS: "moe_training_step"}
_OF_EXPERTS = (Kind.EXPERTS.value, _STEPS[Kind.EXPERTS])


@dataclass(frozen=True)
class Part:
    """Calls that become one case, or stay as they are."""

    operation: str
    baseline: str
    what: str
    device: str
    dtype: str
    sizes: Sizes | None
    reason: str | None
    ours: bool
    calls: int
    seconds: tuple[float, ...]
    """Of each run."""
    spread: float
    """Standard deviation of single calls' times, as a share of their mean."""
    note: str = ""
    """What of the calls the case leaves out."""
    lengths: tuple[int, int] | None = None
    """Of the calls, where the case stands for several lengths: the least and the greatest."""

    @property
    def mean_seconds(self) -> float:
        return fmean(self.seconds)


@dataclass(frozen=True)
class Source:
    """What was recorded."""

    command: tuple[str, ...]
    recording: str
    """Told from others by this."""


@dataclass(frozen=True)
class Written:
    """The suites of one recording."""

    texts: dict[str, str]
    """TOML by the name of its file, the one with the most time first; empty where nothing can be raced."""
    parts: tuple[Part, ...]
    """All recorded calls, those with the most time first."""
    seconds: tuple[float, ...]
    """Of the script, in each run."""
    notes: tuple[str, ...]


def suites(runs: Sequence[Recording], source: Source, name: str, *, most_cases: int = MOST_CASES) -> Written:
    """Suites of at least one recorded run; ``name`` is that of the first one's file, without ``.toml``."""
    seconds = tuple(run.seconds for run in runs)
    device, parts = _on_one_device(_parts(runs))
    by_suite: dict[tuple[str, str], list[Part]] = defaultdict(list)
    unchanged = [part for part in parts if part.reason is not None]
    for part in parts:
        if part.reason is None:
            by_suite[part.operation, part.baseline].append(part)
    chosen: list[tuple[str, list[Part]]] = []
    ordered = sorted(by_suite.items(), key=lambda item: -sum(part.mean_seconds for part in item[1]))
    for number, ((operation, baseline), cases) in enumerate(ordered):
        kept, rest = _fewer(cases, most_cases)
        unchanged += [replace(part, reason=_REST, sizes=None) for part in rest]
        suffix = f"-{operation.replace('_', '-')}"
        twice = sum(other == operation for other, _ in by_suite) > 1
        suffix += f"-{baseline.replace('_', '-')}" if twice else ""
        chosen.append((f"{name}{suffix if number else ''}.toml", kept))
    notes = _notes(runs, parts)
    cold = any(run.cold_weights for run in runs)
    texts = {
        file: _text(
            Path(file).stem,
            cases,
            cold and cases[0].operation in _OF_EXPERTS,
            _script_table(
                source,
                device,
                seconds,
                unchanged,
                {other: others for other, others in chosen if other != file},
                notes,
            ),
        )
        for file, cases in chosen
    }
    return Written(texts, tuple(sorted(parts, key=lambda part: -part.mean_seconds)), seconds, notes)


def recording_id() -> str:
    """By which suites of one recording are told from those of another."""
    return secrets.token_hex(8)


def write(written: Written, folder: Path) -> list[Path]:
    """The files. Raises UsageError where they cannot be written."""
    paths = []
    for name, text in written.texts.items():
        path = folder / name
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"cannot write {path}: {error.strerror or error}; choose another with --output"
            ) from error
        paths.append(path)
    return paths


# ---------------------------------------------------------------- from groups to parts


def _parts(runs: Sequence[Recording]) -> list[Part]:
    by_identity: dict[tuple[object, ...], list[tuple[int, Group]]] = defaultdict(list)
    for number, run in enumerate(runs):
        for group in run.groups:
            by_identity[group.identity].append((number, group))
    merged: dict[tuple[object, ...], Part] = {}
    for groups in by_identity.values():
        for part in _of_groups(groups, len(runs)):
            key = (
                *(part.operation, part.baseline, part.device, part.dtype, part.reason, part.ours),
                _canonical(part),
            )
            merged[key] = part if key not in merged else _together(merged[key], part)
    return list(merged.values())


def _canonical(part: Part) -> str:
    return part.what if part.sizes is None else json.dumps(part.sizes, sort_keys=True)


def _of_groups(groups: Sequence[tuple[int, Group]], runs: int) -> list[Part]:
    """The calls of one problem: those with a backward pass are training steps, the others forward passes."""
    first = groups[0][1]
    forward = _over_runs(runs, [(run, group.seconds) for run, group in groups])
    backward = _over_runs(runs, [(run, group.backward_seconds) for run, group in groups])
    calls = round(sum(group.calls for _, group in groups) / len({run for run, _ in groups}))
    steps = round(sum(group.backward_calls for _, group in groups) / len({run for run, _ in groups}))
    steps = min(steps, calls)
    all_groups = [group for _, group in groups]
    of_forward = _variance([(group.calls, group.seconds, group.squares) for group in all_groups])
    of_backward = _variance(
        [(group.backward_calls, group.backward_seconds, group.backward_squares) for group in all_groups]
    )
    mean = sum(group.seconds for group in all_groups) / sum(group.calls for group in all_groups)
    all_steps = sum(group.backward_calls for group in all_groups)
    step = mean + sum(group.backward_seconds for group in all_groups) / max(1, all_steps)

    def part(operation: str, count: int, seconds: tuple[float, ...], spread: float) -> Part:
        return Part(
            operation=operation,
            baseline=first.baseline,
            what=first.what,
            device=first.device,
            dtype=first.dtype,
            sizes=first.sizes,
            reason=first.reason,
            ours=first.ours,
            calls=count,
            seconds=seconds,
            spread=spread,
            note=first.note,
        )

    if first.kind not in _STEPS or first.reason is not None:
        both = tuple(one + other for one, other in zip(forward, backward, strict=True))
        return [part(first.kind.value, calls, both, _share(of_forward, mean))]
    parts = []
    if steps:
        share = steps / calls
        whole = tuple(share * one + other for one, other in zip(forward, backward, strict=True))
        parts.append(part(_STEPS[first.kind], steps, whole, _share(of_forward + of_backward, step)))
    if calls > steps:
        alone = tuple((calls - steps) / calls * one for one in forward)
        parts.append(part(first.kind.value, calls - steps, alone, _share(of_forward, mean)))
    return parts


def _over_runs(runs: int, seconds: Iterable[tuple[int, float]]) -> tuple[float, ...]:
    """Of each run; 0 for one that has no such calls."""
    sums = [0.0] * runs
    for run, each in seconds:
        sums[run] += each
    return tuple(sums)


def _variance(moments: Sequence[tuple[int, float, float]]) -> float:
    """Of single calls' seconds, from their numbers, sums and sums of squares."""
    calls = sum(each[0] for each in moments)
    if calls < 2:
        return 0.0
    mean = sum(each[1] for each in moments) / calls
    return max(0.0, sum(each[2] for each in moments) / calls - mean * mean)


def _share(variance: float, mean: float) -> float:
    return math.sqrt(variance) / mean if mean > 0 else 0.0


def _together(one: Part, other: Part) -> Part:
    """The calls of both, as the first."""
    return replace(
        one,
        calls=one.calls + other.calls,
        seconds=tuple(a + b for a, b in zip(one.seconds, other.seconds, strict=True)),
        spread=max(one.spread, other.spread),
    )


def _on_one_device(parts: list[Part]) -> tuple[str, list[Part]]:
    """The device on which most of the calls' time passes, and the parts: those elsewhere with that as the reason."""
    by_device: dict[str, float] = defaultdict(float)
    for part in parts:
        by_device[part.device] += part.mean_seconds
    device = max(by_device, key=lambda name: by_device[name], default="cpu")
    return device, [
        part
        if part.device == device or part.reason is not None
        else replace(part, reason=_ANOTHER_DEVICE.format(part.device, device))
        for part in parts
    ]


def _fewer(cases: list[Part], most: int) -> tuple[list[Part], list[Part]]:
    """At most so many cases, and what is left. Neighbouring lengths, such as those of one text that grows token by
    token, become one case first: that in whose middle half of their time is spent."""
    if len(cases) > most:
        by_bin: dict[tuple[object, ...], list[Part]] = defaultdict(list)
        for part in cases:
            by_bin[_bin(part)].append(part)
        cases = [_representative(members) for members in by_bin.values()]
    ordered = sorted(cases, key=lambda part: -part.mean_seconds)
    return ordered[:most], ordered[most:]


_GROWING = ("seqlen", "seqlen_q", "seqlen_k", "tokens")


def _bin(part: Part) -> tuple[object, ...]:
    """Equal for lengths within a factor of about 1.4."""
    sizes = part.sizes or {}
    lengths = tuple(
        (key, key if int(sizes[key]) == 1 else math.floor(2 * math.log2(int(sizes[key]))))  # type: ignore[arg-type]
        for key in _GROWING
        if key in sizes
    )
    rest = tuple(
        (key, str(each))
        for key, each in sorted(sizes.items())
        if key not in _GROWING and not key.endswith("_strides")
    )
    return (part.dtype, part.ours, lengths, rest)


def _representative(members: list[Part]) -> Part:
    def length(part: Part) -> int:
        return max(int((part.sizes or {}).get(key, 0)) for key in _GROWING)  # type: ignore[arg-type]

    ordered = sorted(members, key=length)
    half, so_far = sum(part.mean_seconds for part in ordered) / 2, 0.0
    middle = ordered[-1]
    for part in ordered:
        so_far += part.mean_seconds
        if so_far >= half:
            middle = part
            break
    others = [part for part in ordered if part is not middle]
    whole = middle
    for part in others:
        whole = _together(whole, part)
    return replace(whole, lengths=(length(ordered[0]), length(ordered[-1]))) if others else whole


def _notes(runs: Sequence[Recording], parts: Sequence[Part]) -> tuple[str, ...]:
    notes = []
    traced = max(run.traced for run in runs)
    if traced:
        notes.append(
            f"{traced} calls were traced by torch.compile. What compiled graphs do cannot be seen from outside, so "
            "its time counts as the rest of the script. With TORCHDYNAMO_DISABLE=1 the script runs without graphs."
        )
    graphs = max(run.in_cuda_graphs for run in runs)
    if graphs:
        notes.append(
            f"{graphs} calls went into CUDA graphs. How often these ran cannot be seen, so their time counts as the "
            "rest of the script."
        )
    if any(run.overlapped for run in runs):
        notes.append(
            "Calls of several threads overlapped. Each was given its part of the time they had in common."
        )
    if len(runs) == 1:
        notes.append("The script ran once: how much its time varies from run to run is not in the interval.")
    left_out: dict[str, int] = defaultdict(int)
    for part in parts:
        if part.note and part.reason is None:
            left_out[part.note] += part.calls
    notes += [f"{calls:,} calls had {note}." for note, calls in left_out.items()]
    own = fmean(run.own_seconds for run in runs) / fmean(run.seconds for run in runs)
    notes.append(f"Recording took {100 * own:.2g} % of the script's time on the CPU.")
    return tuple(notes)


# ---------------------------------------------------------------- TOML


def _text(name: str, cases: Sequence[Part], cold: bool, script: str) -> str:
    first = cases[0]
    dtypes = list(dict.fromkeys(part.dtype for part in cases))
    head = [
        "# Written by `cudadent42 capture`: what a script asks for. `cudadent42 run --suite` with this file says what",
        "# the script would gain.",
        _line("name", name),
        _line("description", f"{len(cases)} {'shape' if len(cases) == 1 else 'shapes'} of a recorded script"),
        _line("operation", first.operation),
        _line("dtypes", dtypes),
        _line("baseline", first.baseline),
        _line("implementations", [first.baseline, "cudadent42"]),
    ]
    if cold:
        head += ["# The script's experts have more weights than the cache holds.", _line("l2", "cold")]
    return "\n".join([*head, "", script, *_cases(cases)]) + "\n"


def _cases(cases: Sequence[Part]) -> Iterable[str]:
    taken: set[str] = set()
    for part in cases:
        assert part.sizes is not None
        lines = ["[[case]]"]
        if part.lengths:
            lines.append(f"# stands for calls of {part.lengths[0]} to {part.lengths[1]}")
        if part.note:
            lines.append(f"# the calls had {part.note}")
        lines += [_line("name", _name(part, taken)), _line("dtype", part.dtype)]
        lines += [_line(key, value) for key, value in part.sizes.items()]
        lines += [_line("calls", part.calls), _line("seconds", _rounded(part.seconds))]
        lines.append(_line("spread", float(f"{part.spread:.3g}")))
        if part.ours:
            lines.append(_line("ours", True))
        yield "\n".join([*lines, ""])


def _name(part: Part, taken: set[str]) -> str:
    """Of the sizes, and a number where strides or other things alone differ."""
    sizes = part.sizes or {}
    if "tokens" in sizes:
        words = [
            f"t{sizes['tokens']}",
            f"h{sizes['hidden']}",
            f"i{sizes['intermediate']}",
            f"{sizes['top_k']}of{sizes['experts']}",
        ]
    else:
        kv_heads = f"-{sizes['num_kv_heads']}" if "num_kv_heads" in sizes else ""
        lengths = sizes["seqlen"] if "seqlen" in sizes else f"{sizes['seqlen_q']}x{sizes['seqlen_k']}"
        words = [
            f"b{sizes['batch']}",
            f"h{sizes['num_heads']}{kv_heads}",
            f"s{lengths}",
            f"d{sizes['head_dim']}",
        ]
        words += ["causal"] if sizes.get("causal") else []
    name = plain = "-".join(words)
    number = 1
    while name in taken:
        number += 1
        name = f"{plain}-{number}"
    taken.add(name)
    return name


def _script_table(
    source: Source,
    device: str,
    seconds: tuple[float, ...],
    unchanged: Sequence[Part],
    elsewhere: Mapping[str, Sequence[Part]],
    notes: Sequence[str],
) -> str:
    lines = [
        "[script]",
        _line("recording", source.recording),
        _line("command", list(source.command)),
        _line("device", device),
        _line("seconds", _rounded(seconds)),
        _line("notes", list(notes)),
        "",
    ]
    for part in sorted(unchanged, key=lambda part: -part.mean_seconds):
        lines += [
            "[[script.unchanged]]",
            _line("what", part.what),
            _line("reason", part.reason or ""),
            _line("calls", part.calls),
            _line("seconds", _rounded(part.seconds)),
            "",
        ]
    for file, parts in elsewhere.items():
        lines += [
            "[[script.elsewhere]]",
            _line("suite", file),
            _line("calls", sum(part.calls for part in parts)),
            _line("seconds", _rounded([sum(each) for each in zip(*(p.seconds for p in parts), strict=True)])),
            "",
        ]
    return "\n".join(lines)


def _rounded(seconds: Iterable[float]) -> list[float]:
    return [float(f"{each:.6g}") for each in seconds]


def _line(key: str, value: object) -> str:
    return f"{key} = {_value(value)}"


def _value(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    return repr(value)


def _quoted(text: str) -> str:
    """A basic string of TOML. Of what UTF-8 cannot hold, only a mark stays."""
    whole = text.encode("utf-8", errors="replace").decode("utf-8")
    return json.dumps(whole, ensure_ascii=False).replace("\x7f", "\\u007f")
