from __future__ import annotations

import pytest
from own_timers import Timers

from flashmoe_science.jit.notice import NOTICE_AFTER_S, notice_of_waiting


def test_what_takes_long_says_so_once_on_standard_error(
    timers: Timers, capfd: pytest.CaptureFixture[str]
) -> None:
    with notice_of_waiting("compiling seven"):
        timers.pass_s(NOTICE_AFTER_S)
        timers.pass_s(NOTICE_AFTER_S)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "flashmoe_science: compiling seven\n")


def test_what_is_quick_says_nothing(timers: Timers, capfd: pytest.CaptureFixture[str]) -> None:
    with notice_of_waiting("compiling seven"):
        timers.pass_s(0.9 * NOTICE_AFTER_S)
    timers.pass_s(60)
    assert capfd.readouterr().err == ""
    assert NOTICE_AFTER_S == 2


def test_what_fails_says_nothing_later(timers: Timers, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="no"), notice_of_waiting("compiling seven"):
        raise OSError("no")
    timers.pass_s(60)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("value", "quiet"), [("1", True), ("0", False), ("", False)])
def test_a_variable_keeps_it_away(
    value: str,
    quiet: bool,
    timers: Timers,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLASHMOE_QUIET", value)
    with notice_of_waiting("compiling seven"):
        timers.pass_s(60)
    assert (capfd.readouterr().err == "") is quiet
