"""Figures of attention for serving, read from files of races."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from cudadent42.base.errors import UsageError

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import figure_serving

    return figure_serving


def race(
    part: str, name: str, gigabytes: float, us: dict[str, float], *pairs: tuple[str, str]
) -> dict[str, object]:
    stated = [{"time_of": one, "over": other, "ratio": us[one] / us[other]} for one, other in pairs]
    return {
        "part": part,
        "race": name,
        "bytes_of_keys_and_values": gigabytes * 1e9,
        "us": us,
        "ratios": stated,
    }


def folder(path: Path, *races: dict[str, object]) -> Path:
    for name in ("decode", "window", "prefill", "queries"):
        (path / f"{name}.json").write_text(json.dumps({"races": list(races) if name == "decode" else []}))
    return path


def test_rates_are_those_of_large_batches_alone(figures: ModuleType, tmp_path: Path) -> None:
    pair = ("pages of 64", "dense")
    there = folder(
        tmp_path,
        race("decode", "1x1k", 0.004, {"pages of 64": 10.0, "dense": 5.0}, pair),
        race("decode", "8x32k", 1.0, {"pages of 64": 250.0, "dense": 240.0}, pair),
        race("decode", "64x32k", 8.0, {"pages of 64": 1900.0, "dense": 1890.0}, pair),
    )
    assert figures.least_rate(64)(there) == pytest.approx(4.0)
    assert figures.most_over_dense(64)(there) == pytest.approx(250 / 240)
    assert figures.least_of("decode", "dense", "pages of 64")(there) == pytest.approx(0.5)


def test_sequences_alone_options_and_batches(figures: ModuleType, tmp_path: Path) -> None:
    sizes = [(f"split_keys={size}", "free") for size in (256, 512)]
    there = folder(
        tmp_path,
        race("split", "1x8k", 1.0, {"free": 10.0, "split_keys=256": 12.0, "split_keys=512": 11.0}, *sizes),
        race("split", "8x8k", 1.0, {"free": 10.0, "split_keys=256": 10.5, "split_keys=512": 13.0}, *sizes),
        race("window", "1x8k", 1.0, {"fa3": 9.0, "ours": 6.0}, ("fa3", "ours")),
        race("window", "64x8k", 1.0, {"fa3": 9.0, "ours": 8.0}, ("fa3", "ours")),
    )
    assert figures.most_at_best("split", "free")(there) == pytest.approx(1.1)
    assert figures.most_at_one("split", "free")(there) == pytest.approx(1.2)
    assert figures.most_us_alone("window", "ours")(there) == 6.0
    assert figures.least_alone("window", "fa3", "ours")(there) == pytest.approx(1.5)
    assert figures.from_batch("window", 8, "fa3", "ours")(there) == pytest.approx(1.125)


def test_what_lies_between_two_points_of_a_launch(figures: ModuleType, tmp_path: Path) -> None:
    cases = [{"us": {"nothing": 0.8, "share": 2.3}}, {"us": {"nothing": 1.2, "share": 3.0}}]
    (tmp_path / "parts-warm.json").write_text(json.dumps(cases))
    assert figures.most_between("share", "nothing")(tmp_path) == pytest.approx(1.8)


def test_a_ratio_that_no_race_states_is_no_figure(figures: ModuleType, tmp_path: Path) -> None:
    there = folder(tmp_path, race("decode", "1x8k", 1.0, {"pages of 64": 10.0}))
    with pytest.raises(UsageError, match="does not state flashinfer over pages of 64"):
        figures.least_of("decode", "flashinfer", "pages of 64")(there)
    with pytest.raises(UsageError, match="no races of window"):
        figures.least_of("window", "fa3", "pages of 64")(there)


def test_a_folder_of_one_part(figures: ModuleType, tmp_path: Path) -> None:
    there = race("prefill", "8x2k", 1.0, {"dense": 98.0, "packed": 100.0}, ("dense", "packed"))
    (tmp_path / "prefill.json").write_text(json.dumps({"races": [there]}))
    assert figures.least_of("prefill", "dense", "packed")(tmp_path) == pytest.approx(0.98)
    with pytest.raises(UsageError, match="no races of decode"):
        figures.least_of("decode", "dense", "packed")(tmp_path)
