"""Which layers make which protection, and how what is missing is said."""

from __future__ import annotations

from cudadent42.model.sandbox import Layer, LayerState, Protection, SandboxReport


def report(*there: Layer) -> SandboxReport:
    return SandboxReport(
        tuple(
            LayerState(layer, layer in there, "" if layer in there else f"no {layer.name}") for layer in Layer
        )
    )


def test_each_protection_comes_of_one_way_or_another() -> None:
    ways = {
        Protection.FILES: [{Layer.TREE}, {Layer.LANDLOCK_FILES, Layer.SYSTEM_CALLS}],
        Protection.NETWORK: [{Layer.NETWORK, Layer.TREE}, {Layer.SYSTEM_CALLS}],
        Protection.PROCESSES: [{Layer.PROCESSES}, {Layer.LANDLOCK_SIGNALS}],
        Protection.LIMITS: [{Layer.RLIMITS, Layer.PROCESS_COUNT}],
    }
    for protection, rows in ways.items():
        for row in rows:
            assert report(*row).gives(protection)
            for layer in row:
                assert not report(*(row - {layer})).gives(protection)


def test_a_machine_with_everything_lacks_nothing_and_one_with_nothing_all() -> None:
    assert report(*Layer).missing == ()
    assert report().missing == tuple(Protection)


def test_what_is_missing_is_said_with_the_system_s_words() -> None:
    words = report(Layer.SYSTEM_CALLS).why_missing(Protection.FILES)
    assert words == "file tree of its own: no TREE; Landlock: files: no LANDLOCK_FILES"
    assert "not there: " in report().summary
    assert "not there" not in report(*Layer).summary
