"""What a report says of the script that its suite was recorded from."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_markdown import render, table_rows

from cudadent42.model.script import CallTimes, OtherSuite, Prediction, Replay, Script, Unchanged
from cudadent42.runs.replays import load_replay, write_replay
from cudadent42.runs.run_folder import RunFolder
from cudadent42.stages.report import html
from cudadent42.stages.report.view import View

SCRIPT = Script(
    recording="r",
    command=("train.py", "--steps", "20", "<b>"),
    device="cpu",
    seconds=(10.0, 12.0),
    calls=(CallTimes("tiny/fp16", 400, (3.0, 3.6)), CallTimes("small/fp16", 10, (0.5, 0.6))),
    unchanged=(Unchanged("attention, 8 × 4", "dropout", 1200, (1.0, 1.2)),),
    elsewhere=(OtherSuite("captured-moe.toml", 7, (2.0, 2.4)),),
    notes=("Two places are inside graphs of torch.compile.",),
)
PREDICTION = Prediction(
    11.0, 8.8, 1.25, 1.2, 1.3, 0.3, 0.28, 0.31, 3.0, 0.15, {"small/fp16": "failed verification"}
)


def of(run: RunFolder, prediction: Prediction | None = PREDICTION) -> RunFolder:
    plan = replace(run.plan, script=SCRIPT)
    assert run.results is not None
    return replace(
        run,
        manifest=replace(run.manifest, plan=plan),
        results=replace(run.results, prediction=prediction),
    )


def test_the_answer_comes_first_and_what_stays_is_listed(small: RunFolder) -> None:
    text = render(of(small)).replace("\\", "")
    assert "**The whole script: train.py --steps 20 &lt;b&gt;.**" in text
    assert "would be 1.25× as fast with these kernels (1.20 to 1.30): 11.0 s would become 8.80 s." in text
    assert "The calls that change take 30 % of its time (28 % to 31 %)." in text
    assert "they are 3.00× as fast" in text
    assert "stay as they are take 15 %, and the rest of the script 55 %." in text
    rows = [row for row in table_rows(render(of(small)).replace("\\", "")) if len(row) == 4]
    assert rows[1:3] == [
        ["attention, 8 × 4", "dropout", "1,200", "10 %"],
        ["small/fp16", "failed verification", "10", "5.0 %"],
    ]
    assert "captured-moe.toml has 7 more calls of this script, 20 % of its time" in text
    assert "Two places are inside graphs" in text


def test_the_page_has_it_too_and_escapes_it(small: RunFolder) -> None:
    page = html.render(View(of(small)))
    assert 'id="h-script"' in page
    assert "train.py --steps 20 &lt;b&gt;" in page
    assert "<b>" not in page.partition('id="h-script"')[2].partition("</section>")[0]
    assert 'id="h-script"' not in html.render(View(small))


def test_another_device_and_no_comparison(small: RunFolder) -> None:
    run = of(small, None)
    assert "Nothing is predicted: the run has no comparison" in render(run)
    gpu = replace(run, manifest=replace(run.manifest, plan=replace(run.plan, device="cuda:0")))
    assert "The script ran on cpu and these cases on cuda: nothing is predicted" in render(gpu)


@pytest.mark.parametrize(
    ("low", "high", "speedup", "words"),
    [
        (1.24, 1.30, 1.27, "1.27× as fast with the kernels (1.24 to 1.30)"),
        (1.24, 1.30, 1.27, "was off by 1.3 % of the script's time; the intervals agree"),
        (0.97, 1.03, 1.0, "was off by 20 % of the script's time; the intervals do not agree"),
    ],
)
def test_a_replay_says_how_far_it_was_off(
    small: RunFolder, low: float, high: float, speedup: float, words: str
) -> None:
    replay = Replay((11.0, 11.2, 11.1), (8.7, 8.8, 8.9), speedup, low, high, PREDICTION)
    write_replay(small.path, replay)
    assert load_replay(small.path) == replay
    assert words in render(of(small)).replace("\\", "")


def test_a_replay_of_one_pair_has_no_interval(small: RunFolder) -> None:
    """Which would be a point, and agree with nothing."""
    write_replay(small.path, Replay((11.0,), (8.7,), 1.2644, 1.2644, 1.2644, PREDICTION))
    said = render(of(small)).replace("\\", "")
    assert "1.26× as fast with the kernels. The prediction" in said
    assert "of the script's time. So few pairs have no interval; from 3 on there is one." in said
    assert "intervals" not in said.partition("Run both ways 1 time")[2].partition("from 3 on")[0]
