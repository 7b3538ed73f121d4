"""What a search proposes to race next, by Optuna: a function of a tuning's state.

Optuna's tree-structured Parzen estimator (Bergstra et al., 2011; several parameters at once: Falkner et al., 2018) is
told what every configuration came to, is asked for a round of others, and is forgotten: so a tuning that was killed
goes on from its journal, and the same journal with the same seed gives the same proposals, by one version of Optuna.

Each case is asked in turn, by what was measured on it alone, and what it proposes is raced on every case.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cudadent42.base.errors import UsageError
from cudadent42.base.seeds import derived_seed
from cudadent42.decisions.racing import middle
from cudadent42.tune.arms import implementations
from cudadent42.tune.grammar import Kind, Value, kind_of
from cudadent42.tune.journal import Proposed, Searched
from cudadent42.tune.space import DEFAULT, Arm, Space
from cudadent42.tune.state import CaseState, State
from flashmoe_science.jit.requirements import install_command

Settings = Mapping[str, Value]

_SEEDS = 2**32

_TRIES = 8
"""Of Optuna, for one configuration that is new and meets the conditions; then chance proposes it."""

_DRAWS = 1000
"""Of chance; then the first in the file's order that is left."""


def imported() -> Any:
    """Raises UsageError where Optuna is not installed."""
    try:
        import optuna
    except ImportError as error:
        raise UsageError(
            f"a search needs Optuna: {install_command('search')}; --search exhaustive races every configuration"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def propose(space: Space, state: State, folder: Path) -> Proposed | Searched:
    """The next round of a tuning in ``folder``, or why there is none. Raises UsageError without Optuna."""
    search = state.setup.search
    assert search is not None
    if state.rounds >= search.rounds:
        return Searched(f"{state.rounds} rounds were raced")
    open_cases = [case for case in state.cases.values() if case.settled is None]
    since = min((_stale(state, case) for case in open_cases), default=0)
    if since >= search.stale:
        return Searched(f"{since} rounds, one after the other, brought nothing better")
    arms = _round(space, state, open_cases, search.round)
    if not arms:
        return Searched("every configuration was raced")
    return Proposed(
        round=state.rounds + 1,
        by=f"optuna {imported().__version__}",
        arms=implementations(space, arms, folder),
        settings={arm.name: dict(arm.settings) for arm in arms},
    )


def _round(space: Space, state: State, cases: Sequence[CaseState], size: int) -> list[Arm]:
    studies = [_Study(space, state, case) for case in cases]
    chance = random.Random(derived_seed(state.setup.plan.seed, "search", state.rounds))
    told = set(state.setup.arms)
    arms: list[Arm] = []
    for study in itertools.islice(itertools.cycle(studies), size):
        arm = next((arm for arm in _candidates(space, study, chance) if arm.name not in told), None)
        if arm is None:
            break
        told.add(arm.name)
        arms.append(arm)
    return arms


def _candidates(space: Space, study: _Study, chance: random.Random) -> Iterator[Arm]:
    """That meet the conditions; in the end all of them."""
    asked = (study.ask() for _ in range(_TRIES))
    drawn = (
        {name: chance.choice(values) for name, values in space.parameters.items()} for _ in range(_DRAWS)
    )
    for settings in itertools.chain(asked, drawn):
        if space.admits(settings):
            yield space.arm(settings)
    yield from space.configurations()


def _stale(state: State, case: CaseState) -> int:
    """Rounds since a case's best rose by half the margin: less is what chance brings."""
    best, since = 0.0, 0
    at = 1
    for count in case.added:
        centres = [
            centre for arm in case.raced[at : at + count] if (centre := _centre(case, arm)) is not None
        ]
        at += count
        top = max(centres, default=best)
        if top > best + state.setup.rules.margin / 2:
            best, since = top, 0
        else:
            since += 1
    # A round of which nothing could be raced brought nothing either.
    return since + state.rounds - len(case.added)


def _centre(case: CaseState, arm: str) -> float | None:
    """Logarithm of the ratio; None where nothing is measured."""
    row = case.rows.get(arm)
    return middle(row) if row else None


class _Study:
    """What Optuna is told of a case, and asked."""

    def __init__(self, space: Space, state: State, case: CaseState) -> None:
        optuna = imported()
        self._space = space
        seed = derived_seed(state.setup.plan.seed, "search", case.case, state.rounds) % _SEEDS
        sampler = optuna.samplers.TPESampler(multivariate=True, constant_liar=True, seed=seed)
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._kinds = {
            name: optuna.distributions.IntDistribution(0, len(values) - 1)
            if kind_of(values[0]) is Kind.NUMBER
            else optuna.distributions.CategoricalDistribution(list(range(len(values))))
            for name, values in _ordered(space).items()
        }
        create = optuna.trial.create_trial
        for arm, centre in _told(state, case):
            params = {
                name: _ordered(space)[name].index(value) for name, value in state.setup.settings[arm].items()
            }
            refused = 1.0 if centre is None else 0.0
            self._study.add_trial(
                create(
                    value=centre or 0.0,
                    params=params,
                    distributions=self._kinds,
                    constraints={"can be raced": refused},
                )
            )

    def ask(self) -> dict[str, Value]:
        """A configuration, which need not be new or meet the conditions."""
        trial = self._study.ask(self._kinds)
        values = _ordered(self._space)
        settings = {name: values[name][index] for name, index in trial.params.items()}
        if not self._space.admits(settings):
            trial.set_constraint("can be raced", 1.0)
            self._study.tell(trial, 0.0)
        return settings


def _ordered(space: Space) -> dict[str, tuple[Value, ...]]:
    """Numbers by size: neighbours are alike."""
    return {
        name: tuple(sorted(values)) if kind_of(values[0]) is Kind.NUMBER else values
        for name, values in space.parameters.items()
    }


def _told(state: State, case: CaseState) -> Iterator[tuple[str, float | None]]:
    """What each configuration came to on a case, in the order of their proposals; None where it cannot be raced. What
    is not measured yet is not told."""
    racing = set(case.raced)
    of_code = {state.compiled[arm].code.get(case.case): arm for arm in case.raced}
    for arm in state.setup.arms:
        if arm == DEFAULT or arm not in state.compiled:
            continue
        stands_for = arm if arm in racing else of_code.get(state.compiled[arm].code.get(case.case))
        if stands_for == DEFAULT:
            yield arm, 0.0
        elif stands_for is None or stands_for in case.out:
            yield arm, None
        elif (centre := _centre(case, stands_for)) is not None:
            yield arm, centre
