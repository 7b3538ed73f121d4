"""Calls of the tool that are cut off."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cudadent42.remote.providers.gce import gcloud


class Closing(io.StringIO):
    """A terminal at which a second interrupt comes as the answer to the first is written."""

    def write(self, text: str) -> int:
        raise KeyboardInterrupt


def test_a_second_interrupt_ends_the_call_whenever_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Closing())
    with subprocess.Popen(
        ["sleep", "1000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert not gcloud._is_waited_for(process, "creating bench", timeout_s=1000)
    assert process.returncode != 0


def test_an_interrupt_while_the_tool_starts_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is at work before its number is known here: as it is left, nobody would know what came of it."""
    done = tmp_path / "done"
    tool = tmp_path / "gcloud"
    tool.write_text(f"#!/bin/sh\nsleep 0.2\ntouch {done}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    real = subprocess.Popen

    def interrupted(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        process = real(*arguments, **options)
        signal.raise_signal(signal.SIGINT)
        return process

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored where tests run in the background
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            gcloud.run("creating bench", (), timeout_s=1000)
    finally:
        signal.signal(signal.SIGINT, before)
    assert caught.type is KeyboardInterrupt  # its outcome is known
    assert done.exists()
