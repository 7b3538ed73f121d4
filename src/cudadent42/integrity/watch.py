"""The watch over one worker process: begun before it loads anything of a candidate, and asked between blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch

from cudadent42.integrity import settings
from cudadent42.integrity.account import Account
from cudadent42.integrity.helpers import FIRST_REST_S, REST_S, background_work, work_beside
from cudadent42.integrity.originals import Originals
from cudadent42.integrity.pool import Pool
from cudadent42.integrity.settings import Settings
from cudadent42.integrity.underneath import Underneath
from cudadent42.model.implementations import is_ours
from cudadent42.model.integrity import Breach, Finding, Grade
from cudadent42.timing.processor_time import Kin

OnFinding = Callable[[Finding], None]

_MOST_NAMES = 4
"""Of replaced functions that are named in one finding."""

MOST_LOST_S = 0.1
"""That processes may have run between two looks which left the worker's tree and ended: ten of the system's ticks."""

OWN_SETTINGS = "set them at import, or put them back before the call returns"
OWN_THREADS = "leave priority and processors of PyTorch's threads alone: the baseline runs on them"
OWN_CODE = "do not patch machine code of libraries that others call: the baseline does"
OWN_PROCESS = "do not replace PyTorch's functions: the baseline calls them too"
AT_REST = (
    "let its threads and processes wait, not work or spin, while it is not called (OMP_WAIT_POLICY=passive)"
)


class Watch:
    """What the process was like, and what each implementation has made of its settings.

    ``begin`` is to be called once, when the lab's own settings are made. An implementation that is ``trusted``, one of
    those that come with the lab, is not watched. ``kin``: the processes that came of this one.
    ``kernels``: whether one of this project's is raced.
    """

    def __init__(self, kin: Kin | None = None, *, kernels: bool = True) -> None:
        self.kin = kin or Kin()
        self.account = Account()
        with self.account.of("functions"):
            self._originals = Originals(kernels=kernels)
            self._underneath = Underneath()
        self._pristine: Settings = settings.read()
        self._own: dict[str, Settings] = {}
        self._looks_always = False
        self.trusted: frozenset[str] = frozenset()
        """Of the stage."""
        self._reported: set[tuple[Breach, str]] = set()
        self._on_finding: OnFinding = _ignored
        self._pool: Pool | None = None
        self._lost_ns = 0
        """`Kin.lost_ns` at the last look."""

    def begin(self, trusted: Collection[str], on_finding: OnFinding) -> None:
        """A stage. The lab has made its settings, such as the number of threads."""
        if not self._own:
            self._pristine = settings.read()
        self.trusted = frozenset(trusted)
        self._on_finding = on_finding
        if self._pool is None:
            with self.account.of("threads"):
                self._pool = Pool()

    @contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """Inside, the settings are the implementation's own; after it, those of the process again."""
        if name in self.trusted:
            yield
            return
        own = self._own.get(name, self._pristine)
        if own is not self._pristine:
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
        if name in self.trusted or not (look or self._looks_always or own is not self._pristine):
            yield
            return
        with self.account.of("settings"):
            if self._restored() is not self._pristine:
                self._looks_always = True
            if own is not self._pristine:
                settings.write(own)
        try:
            yield
        finally:
            with self.account.of("settings"):
                after = self._own[name] = self._restored()
            if own is not after and not settings.same(own, after):
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
        """As they are, ``_pristine`` itself where nothing differs; after it, those of the process."""
        now = settings.read()
        if settings.same(now, self._pristine):
            return self._pristine
        settings.write(self._pristine)
        return now

    @contextmanager
    def loading(self, name: str) -> Iterator[None]:
        """While its code is imported: what it replaces then is its own doing."""
        with self.turn(name):
            yield
        if name in self.trusted:
            with self.account.of("functions"):
                self._originals.include_new(kernels=is_ours(name))  # what it imported is the lab's own
        else:
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

    def look_underneath(self, names: Sequence[str], case: str = "") -> None:
        """Between blocks: whether PyTorch's threads are run as they were, and the C library and the kernel do nothing
        else than before."""
        if self._is_alone(names) or self._pool is None:
            return
        with self.account.of("threads"):
            of_pool, underneath = self._pool.disturbed(), self._underneath.changed()
        for evidence, clears in ((of_pool, OWN_THREADS), (underneath, OWN_SETTINGS)):
            if evidence:
                self.report(Breach.LEFT_SETTINGS, Grade.SUSPECT, self.blamed(names), case, evidence, clears)

    def look_deep(self, names: Sequence[str], *, with_code: bool) -> None:
        """After all blocks: whether anybody wrote to what functions and constants are made of.

        ``with_code``: to libraries' machine code, too. No GPU's driver has been looked at for what it writes there.
        """
        if self._is_alone(names):
            return
        with self.account.of("functions"):
            rewritten = [each.name for each in self._originals.rewritten()]
            code = self._underneath.code_changed() if with_code else ""
        if rewritten:
            evidence = f"the memory of {', '.join(rewritten[:_MOST_NAMES])} was written to"
            self.report(Breach.REPLACED_FUNCTION, Grade.FAILED, self.blamed(names), "", evidence)
        if code:
            self.report(Breach.REPLACED_FUNCTION, Grade.SUSPECT, self.blamed(names), "", code, OWN_CODE)

    def rest(self, names: Sequence[str], case: str = "", *, first: bool = False) -> None:
        """Waits until nothing goes on. ``first``: right after preparing, where that may take long."""
        if self._is_alone(names):
            return
        with self.account.of("rest"):
            work = background_work(FIRST_REST_S if first else REST_S, self.kin)
        lost_ns = self.kin.lost_ns()
        lost_s, self._lost_ns = (lost_ns - self._lost_ns) / 1e9, lost_ns
        if first:
            return
        if work is not None:
            evidence = work.evidence
        elif lost_s > MOST_LOST_S:
            evidence = (
                f"processes that left the worker's tree ran for {lost_s:.2g} s between blocks and have ended"
            )
        else:
            return
        self.report(Breach.BACKGROUND_WORK, Grade.SUSPECT, self.blamed(names), case, evidence, AT_REST)

    def beside(self, names: Sequence[str], case: str, turn: Callable[[], object]) -> None:
        """Whether others work in the baseline's turn that rest while they are looked at."""
        if self._is_alone(names) or torch.get_num_threads() > 1:
            return
        with self.account.of("rest"):
            work = work_beside(turn, self.kin)
        if work is not None:
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
