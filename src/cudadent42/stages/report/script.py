"""What a report says of the script that a suite was recorded from: what all of it would gain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from cudadent42.model import text
from cudadent42.model.script import LEAST_PAIRS, Prediction, Replay, Script
from cudadent42.runs.replays import load_replay
from cudadent42.stages.report.view import View

_MOST_ROWS = 20


@dataclass(frozen=True)
class StaysRow:
    """Calls that stay as they are."""

    what: str
    reason: str
    calls: str
    share: str
    """Of the script's time."""


@dataclass(frozen=True)
class ScriptSection:
    title: str
    lines: tuple[str, ...]
    """Sentences, the answer first."""
    stays: tuple[StaysRow, ...]
    notes: tuple[str, ...]


def described(view: View) -> ScriptSection | None:
    """None where the suite was not recorded from a script."""
    script = view.run.plan.script
    if script is None:
        return None
    prediction = view.run.results.prediction if view.run.results else None
    stays = list(_stays(script, prediction))
    more = (
        [f"{len(stays) - _MOST_ROWS} more kinds of calls stay as they are."]
        if len(stays) > _MOST_ROWS
        else []
    )
    return ScriptSection(
        title="The whole script: " + text.clean(" ".join(script.command) or "the recorded block"),
        lines=(*_answer(view, script, prediction), *_replayed(load_replay(view.run.path))),
        stays=tuple(stays[:_MOST_ROWS]),
        notes=tuple(text.clean(note) for note in (*more, *_elsewhere(script), *script.notes)),
    )


def prediction_line(prediction: Prediction) -> str:
    """What the script would gain, in a sentence."""
    return (
        f"The whole script would be {text.ratio(prediction.speedup)} as fast with these kernels "
        f"({text.interval(prediction.ci_low, prediction.ci_high)}): {text.seconds(prediction.seconds)} would become "
        f"{text.seconds(prediction.predicted_seconds)}."
    )


def replay_line(replay: Replay) -> str:
    """What running the script both ways has shown, in two or three sentences."""
    interval = f" ({text.interval(replay.ci_low, replay.ci_high)})" if replay.has_interval else ""
    if not replay.has_interval:
        agreement = f". So few pairs have no interval; from {LEAST_PAIRS} on there is one"
    else:
        agreement = "; the intervals agree" if replay.inside else "; the intervals do not agree"
    return (
        f"Run both ways {text.plural(len(replay.seconds), 'time')}, the script was {text.ratio(replay.speedup)} as "
        f"fast with the kernels{interval}. The prediction of "
        f"{text.ratio(replay.prediction.speedup)} was off by {text.percent(abs(replay.error))} of the script's time"
        f"{agreement}."
    )


def _answer(view: View, script: Script, prediction: Prediction | None) -> Iterator[str]:
    if prediction is None:
        kind = view.run.plan.device.partition(":")[0]
        if kind != script.device:
            yield f"The script ran on {script.device} and these cases on {kind}: nothing is predicted from them."
        else:
            yield "Nothing is predicted: the run has no comparison."
        return
    integrity = view.run.results.integrity if view.run.results else None
    if integrity is not None and not integrity.sound:
        yield "The result that this rests on is not to be trusted: see above."
    yield prediction_line(prediction)
    if prediction.share:
        share = f"{text.percent(prediction.share_low)} to {text.percent(prediction.share_high)}"
        yield (
            f"The calls that change take {text.percent(prediction.share)} of its time ({share}). Weighted by their "
            f"time they are {text.ratio(prediction.calls_speedup)} as fast."
        )
    else:
        yield "No call of it changes."
    rest = max(0.0, 1.0 - prediction.share - prediction.unchanged_share)
    yield (
        f"Recorded calls that stay as they are take {text.percent(prediction.unchanged_share)}, and the rest of the "
        f"script {text.percent(rest)}."
    )


def _stays(script: Script, prediction: Prediction | None) -> Iterator[StaysRow]:
    """Those that take the most time first."""
    total = fmean(script.seconds)
    reasons = prediction.left_out if prediction else {}
    rows = [(fmean(each.seconds), each.what, each.reason, each.calls) for each in script.unchanged]
    rows += [
        (fmean(times.seconds), times.case, reasons[times.case], times.calls)
        for times in script.calls
        if times.case in reasons
    ]
    for seconds, what, reason, calls in sorted(rows, key=lambda row: -row[0]):
        yield StaysRow(text.clean(what), text.clean(reason), f"{calls:,}", text.percent(seconds / total))


def _elsewhere(script: Script) -> Iterator[str]:
    total = fmean(script.seconds)
    for other in script.elsewhere:
        yield (
            f"{other.suite} has {text.plural(other.calls, 'more call')} of this script, "
            f"{text.percent(fmean(other.seconds) / total)} of its time, which count as unchanged here."
        )


def _replayed(replay: Replay | None) -> Iterator[str]:
    if replay is not None:
        yield replay_line(replay)
