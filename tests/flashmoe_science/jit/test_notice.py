from __future__ import annotations

import time

import pytest

from flashmoe_science.jit.notice import NOTICE_AFTER_S, notice_of_waiting


def test_what_takes_long_says_so_once_on_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    with notice_of_waiting("compiling seven", after_s=0.01):
        time.sleep(0.3)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "flashmoe_science: compiling seven\n")


def test_what_is_quick_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with notice_of_waiting("compiling seven", after_s=60):
        pass
    assert capfd.readouterr().err == ""
    assert NOTICE_AFTER_S == 2


def test_what_fails_says_nothing_later(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="no"), notice_of_waiting("compiling seven", after_s=0.05):
        raise OSError("no")
    time.sleep(0.2)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("value", "quiet"), [("1", True), ("0", False), ("", False)])
def test_a_variable_keeps_it_away(
    value: str, quiet: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHMOE_QUIET", value)
    with notice_of_waiting("compiling seven", after_s=0.01):
        time.sleep(0.3)
    assert (capfd.readouterr().err == "") is quiet
