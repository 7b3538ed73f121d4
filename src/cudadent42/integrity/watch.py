"""The watch over one worker process: begun before it loads anything of a candidate, and asked between blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from cudadent42.integrity import settings
from cudadent42.integrity.account import Account
from cudadent42.integrity.helpers import FIRST_REST_S, REST_S, background_work
from cudadent42.integrity.originals import Originals
from cudadent42.integrity.settings import Settings
from cudadent42.model.integrity import Breach, Finding, Grade

OnFinding = Callable[[Finding], None]

_MOST_NAMES = 4
"""Of replaced functions that are named in one finding."""

OWN_SETTINGS = "set them at import, or put them back before the call returns"
OWN_PROCESS = "do not replace PyTorch's functions: the baseline calls them too"
AT_REST = (
    "let its threads and processes wait, not work or spin, while it is not called (OMP_WAIT_POLICY=passive)"
)


class Watch:
    """What the process was like, and what each implementation has made of its settings.

    ``begin`` is to be called once, when the lab's own settings are made. An implementation that is ``trusted``, one of
    those that come with the lab, is not watched.
    """

    def __init__(self) -> None:
        self.account = Account()
        with self.account.of("functions"):
            self._originals = Originals()
        self._pristine: Settings = settings.read()
        self._own: dict[str, Settings] = {}
        self._looks_always = False
        self.trusted: frozenset[str] = frozenset()
        """Of the stage."""
        self._reported: set[tuple[Breach, str]] = set()
        self._on_finding: OnFinding = _ignored

    def begin(self, trusted: Collection[str], on_finding: OnFinding) -> None:
        """A stage. The lab has made its settings, such as the number of threads."""
        if not self._own:
            self._pristine = settings.read()
        self.trusted = frozenset(trusted)
        self._on_finding = on_finding

    @contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """Inside, the settings are the implementation's own; behind it, those of the process again."""
        if name in self.trusted:
            yield
            return
        own = self._own.get(name, self._pristine)
        if own != self._pristine:
            settings.write(own)
        try:
            yield
        finally:
            self._own[name] = self._restored()

    @contextmanager
    def counted_turn(self, name: str, case: str = "", *, look: bool = True) -> Iterator[None]:
        """A turn whose calls count: the implementation has had its time to set up what it needs.

        Without ``look`` nobody sees whether its settings stay, which takes several times as long as entering and
        leaving. Where a setting turns out to have changed in such a turn, every turn is looked at from then on.
        """
        own = self._own.get(name, self._pristine)
        if name in self.trusted or not (look or self._looks_always or own != self._pristine):
            yield
            return
        with self.account.of("settings"):
            if self._restored() != self._pristine:
                self._looks_always = True
            if own != self._pristine:
                settings.write(own)
        try:
            yield
        finally:
            with self.account.of("settings"):
                after = self._own[name] = self._restored()
            if after != own:
                words = settings.in_words(settings.changes(own, after))
                self.report(
                    Breach.LEFT_SETTINGS,
                    Grade.SUSPECT,
                    name,
                    case,
                    f"a timed call left {words}",
                    OWN_SETTINGS,
                )

    def _restored(self) -> Settings:
        """As they are; behind it, those of the process."""
        now = settings.read()
        if now != self._pristine:
            settings.write(self._pristine)
        return now

    @contextmanager
    def loading(self, name: str) -> Iterator[None]:
        """While its code is imported: what it replaces then is its own doing."""
        with self.turn(name):
            yield
        if name not in self.trusted:
            self.look((name,))

    def look(self, names: Sequence[str], case: str = "") -> None:
        """Between blocks: whether functions are what they were. ``names``: of whom one is to blame."""
        if self._is_alone(names):
            return
        with self.account.of("functions"):
            replaced = self._originals.replaced()
        for of_lab, grade, clears in ((True, Grade.FAILED, ""), (False, Grade.SUSPECT, OWN_PROCESS)):
            replaced_names = [each.name for each in replaced if each.of_lab is of_lab]
            if replaced_names:
                more = (
                    f" and {len(replaced_names) - _MOST_NAMES} more"
                    if len(replaced_names) > _MOST_NAMES
                    else ""
                )
                evidence = f"{', '.join(replaced_names[:_MOST_NAMES])}{more} is no longer what was imported"
                self.report(Breach.REPLACED_FUNCTION, grade, self.blamed(names), case, evidence, clears)

    def rest(self, names: Sequence[str], case: str = "", *, first: bool = False) -> None:
        """Waits until nothing goes on. ``first``: right after preparing, where that may take long."""
        if self._is_alone(names):
            return
        with self.account.of("rest"):
            work = background_work(FIRST_REST_S if first else REST_S)
        if work is not None and not first:
            self.report(
                Breach.BACKGROUND_WORK, Grade.SUSPECT, self.blamed(names), case, work.evidence, AT_REST
            )

    def report(
        self, breach: Breach, grade: Grade, name: str, case: str, evidence: str, clears: str = ""
    ) -> None:
        """Once for each implementation and kind."""
        if (breach, name) not in self._reported:
            self._reported.add((breach, name))
            self._on_finding(Finding(breach, grade, name, case, evidence, clears))

    def notes(self) -> Iterator[str]:
        """What was kept apart."""
        for name, own in self._own.items():
            if changed := settings.changes(self._pristine, own):
                words = settings.in_words(changed)
                yield f"{name} runs with settings of its own, which nobody else's calls see: {words}"

    def _is_alone(self, names: Sequence[str]) -> bool:
        """Whether the lab's own code was all that ever ran here."""
        return not self._own and self.trusted.issuperset(names)

    def blamed(self, names: Sequence[str]) -> str:
        """Those of them that may have done what nobody else does."""
        return ", ".join(name for name in names if name not in self.trusted) or ", ".join(names)


def _ignored(finding: Finding) -> None:
    return
