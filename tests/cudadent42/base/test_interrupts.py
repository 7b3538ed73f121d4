from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from cudadent42.base.interrupts import INTERRUPTS, put_off


class TermError(Exception):
    """What a program's own handler raises."""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in INTERRUPTS}

    def raises(number: int, frame: FrameType | None) -> None:
        raise TermError(number)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, raises)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, TermError)]
)
def test_an_interrupt_is_raised_once_the_work_is_done(
    number: signal.Signals, error: type[BaseException]
) -> None:
    done = False
    with pytest.raises(error), put_off():  # noqa: PT012 - that it goes on is the point
        signal.raise_signal(number)
        done = True
    assert done


def test_the_first_of_several_is_raised() -> None:
    with pytest.raises(TermError), put_off():  # noqa: PT012
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)


def test_what_is_ignored_stays_so_and_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in INTERRUPTS]
    with put_off():
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.raise_signal(signal.SIGHUP)
    assert [signal.getsignal(number) for number in INTERRUPTS] == before


def test_an_error_of_the_work_comes_with_the_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, put_off():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        raise ValueError("the work failed")
    assert isinstance(caught.value.__context__, ValueError)


def test_in_another_thread_nothing_is_put_off() -> None:
    """Signals are not handled there."""
    seen: list[object] = []

    def work() -> None:
        with put_off():
            seen.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
