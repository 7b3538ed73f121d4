"""The schemas are those of what is written: committed folders, fresh ones, and every kind of event of a session."""

from __future__ import annotations

import functools
import json
import marshal
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudadent42.base.json_schema import schema_of
from cudadent42.base.observer import Quiet
from cudadent42.base.serialise import decode, dumps, encode
from cudadent42.commands.cli import app
from cudadent42.flows import pipeline
from cudadent42.flows.doctor import examine
from cudadent42.model.records import CacheState, Comparison, Results, TimerKind, Verdict
from cudadent42.plan import Choices, RunOptions
from cudadent42.schemas import FILES, schema
from cudadent42.session.events import KINDS, Entry, to_line
from cudadent42.stages import gates

jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema; ./test.sh installs it")

ROOT = Path(__file__).parents[2]
NO_RUN = (
    "2026-11-22-hardening",
    "2026-11-22-hardening-2",
    "2026-11-22-hardening-3",
    "2026-11-23-hardening",
    "2026-11-23-hardening-whole",
    "2026-11-21-cpu-races",
)
"""Folders whose files have a run's names and are none."""


def documents(folder: Path, name: str) -> Iterator[tuple[str, Any]]:
    """What a folder, and those below it, have of a schema's file."""
    file = FILES[name]
    for path in sorted(folder.rglob(file.file)):
        if path.parent.name in NO_RUN:
            continue
        text = path.read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines() if file.by_line else [text], 1):
            yield f"{path}:{number}", json.loads(line)


def kept_references(made: dict[str, Any]) -> Any:
    """jsonschema's validator. What ``$ref`` names is looked up once, and a value that fits it is not looked at again:
    committed folders have the same cases, devices and events thousands of times."""
    fits: set[tuple[str, bytes]] = set()
    named: dict[str, Any] = {}

    def reference(check: Any, name: str, value: Any, _: Any) -> Iterator[Any]:
        key = name, marshal.dumps(value, 2)  # of version 2 by the value alone; 1, 1.0 and true are three
        if key in fits:
            return
        if name not in named:
            resolved = check._resolver.lookup(name)
            named[name] = check.evolve(schema=resolved.contents, _resolver=resolved.resolver)
        errors = list(named[name].iter_errors(value))
        if not errors:
            fits.add(key)
        yield from errors

    kind = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"$ref": reference})
    return kind(made)


@functools.cache
def validator(name: str) -> Any:
    return kept_references(schema(name))


def wrong(name: str, folder: Path) -> list[str]:
    check = validator(name)
    return [
        f"{where}: {error.json_path}: {error.message[:200]}"
        for where, document in documents(folder, name)
        for error in check.iter_errors(document)
    ]


@pytest.mark.parametrize("name", FILES)
def test_it_is_a_schema_with_a_version(name: str) -> None:
    made = schema(name)
    jsonschema.Draft202012Validator.check_schema(made)
    assert made["$id"] == f"urn:cudadent42:{name}:{FILES[name].version}"
    assert made["description"]


def test_references_that_are_kept_find_what_jsonschema_does(fresh: Path) -> None:
    """A value of each name within a manifest is put out of place in turn, twice."""
    made = schema("manifest")
    plain, kept = jsonschema.Draft202012Validator(made), kept_references(made)
    manifest = json.loads((fresh / "manifest.json").read_text())
    assert list(plain.iter_errors(manifest)) == list(kept.iter_errors(manifest)) == []
    changed = 0
    for owner, key in {key: (owner, key) for owner, key in places(manifest)}.values():
        before, owner[key] = owner[key], {"out of": ["place", True, 1.5]}
        for _ in range(2):
            assert errors_of(plain, manifest) == errors_of(kept, manifest)
        changed += bool(errors_of(kept, manifest))
        owner[key] = before
    assert changed > 20
    assert list(kept.iter_errors(manifest)) == []


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each object or list within, with each of its keys."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])


def errors_of(check: Any, document: Any) -> list[tuple[str, str]]:
    return [(error.json_path, error.message) for error in check.iter_errors(document)]


@pytest.mark.parametrize("name", FILES)
def test_every_committed_folder_fits(name: str) -> None:
    assert wrong(name, ROOT / "benchmarks/results") == []


def test_committed_folders_have_what_is_checked() -> None:
    counted = {name: len(list(documents(ROOT / "benchmarks/results", name))) for name in FILES}
    assert counted["manifest"] >= 15
    assert all(counted[name] >= 3 for name in ("results", "verify", "log", "profile", "diagnosis"))


SUITE = """
name = "fresh"
dtypes = ["fp32"]
repeats = 8
warmup = 1
case = [{ name = "small", batch = 1, num_heads = 2, seqlen = 64, head_dim = 32 }]
"""


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with gates, and its diagnosis."""
    folder = tmp_path_factory.mktemp("fresh")
    (folder / "fresh.toml").write_text(SUITE)
    options = RunOptions(
        choices=Choices(
            suite=str(folder / "fresh.toml"), implementations=("pytorch_math",), timer=TimerKind.CPU
        ),
        device="cpu",
        ignore_preflight=True,
        gate=gates.load("default"),
        output=folder / "run",
        command=("test",),
    )
    pipeline.run(options, Quiet(), lambda opened: None)
    examine(folder / "run", measure=False)
    return folder / "run"


@pytest.mark.parametrize("name", ["manifest", "results", "verify", "log", "gates", "profile", "diagnosis"])
def test_a_fresh_folder_fits(name: str, fresh: Path) -> None:
    assert list(documents(fresh, name))
    assert wrong(name, fresh) == []


def test_what_no_reader_takes_does_not_fit(fresh: Path) -> None:
    """As `decode`: unknown fields, missing ones, and words that are none of a field's."""
    check = validator("results")
    results = json.loads((fresh / "results.json").read_text())
    assert check.is_valid(results)
    for change in ({"verdict": "best"}, {"margin": "wide"}, {"more": 1}, {"cases": {}}):
        assert not check.is_valid({**results, **change}), change
        with pytest.raises(ValueError, match="Results"):
            decode(Results, {**results, **change})
    for missing in (each.name for each in fields(Results) if each.default is each.default_factory is MISSING):
        assert not check.is_valid({name: value for name, value in results.items() if name != missing})


def test_a_case_says_of_which_operation_it_is(fresh: Path) -> None:
    check = validator("manifest")
    manifest = json.loads((fresh / "manifest.json").read_text())
    (case,) = manifest["plan"]["cases"]
    for change, fits in (
        ({"operation": "rms_norm", "rows": 4}, True),  # of another package
        ({key: value for key, value in case.items() if key != "operation"}, True),  # from before
        ({**case, "operation": "moe"}, False),
        ({**case, "operation": 1}, False),
    ):
        changed = {**manifest, "plan": {**manifest["plan"], "cases": [change]}}
        assert check.is_valid(changed) is fits, change


def test_every_kind_of_event_of_a_session_has_a_schema() -> None:
    members = schema("session-event")["anyOf"]
    assert [each["properties"]["event"]["const"] for each in members] == list(KINDS)


@pytest.mark.parametrize("name", ["session-event", "bisection", "bisection-step", "replay"])
@given(data=st.data())
def test_what_sessions_and_bisections_write_fits(name: str, data: st.DataObject) -> None:
    record = data.draw(st.from_type(FILES[name].kind or Entry))
    line = to_line(record) if isinstance(record, Entry) else dumps(record)
    assert [error.message for error in validator(name).iter_errors(json.loads(line))] == []


@dataclass(frozen=True)
class Inner:
    """Says what it is."""

    word: Verdict


@dataclass(frozen=True)
class Outer:
    number: float
    """In milliseconds,
    ``nan`` where unknown."""
    many: tuple[Inner, ...]
    either: int | str | None = None
    named: dict[str, bool] = field(default_factory=dict)


def test_a_record_describes_itself() -> None:
    made = schema_of(Outer)
    assert made["title"] == "Outer"
    assert "description" not in made
    assert made["properties"]["number"]["description"] == "In milliseconds, `nan` where unknown."
    assert made["required"] == ["number", "many"]
    assert made["$defs"]["Inner"]["description"] == "Says what it is."
    assert made["$defs"]["Inner"]["properties"]["word"] == {"enum": [each.value for each in Verdict]}


@given(
    st.builds(
        Outer,
        number=st.floats(min_value=-1e99, max_value=1e99) | st.sampled_from([float("inf"), float("nan")]),
        many=st.lists(st.builds(Inner, st.sampled_from(Verdict))).map(tuple),
        either=st.none() | st.integers(-(2**60), 2**60) | st.text(),
        named=st.dictionaries(st.text(), st.booleans()),
    )
)
def test_what_is_written_fits(record: Outer) -> None:
    written = encode(record)
    assert jsonschema.Draft202012Validator(schema_of(Outer)).is_valid(written)
    assert encode(decode(Outer, written)) == written


def test_a_type_that_cannot_be_read_has_none() -> None:
    @dataclass(frozen=True)
    class Wrong:
        number: complex

    with pytest.raises(TypeError, match="no schema for"):
        schema_of(Wrong)


@pytest.mark.parametrize("kind", [Comparison, Results])
def test_enums_are_words(kind: type[Any]) -> None:
    assert {"enum": [each.value for each in Verdict]} == schema_of(kind)["properties"]["verdict"]
    assert issubclass(CacheState, str)


@pytest.mark.parametrize("name", FILES)
def test_a_change_of_what_is_written_is_seen(name: str, snapshot: Callable[[str, str], None]) -> None:
    """A reader of the version before has to be able to read it, or the version grows."""

    def bare(value: Any) -> Any:
        if isinstance(value, dict):
            kept = {k: v for k, v in value.items() if not (k == "description" and isinstance(v, str))}
            return {key: bare(each) for key, each in kept.items()}
        return [bare(each) for each in value] if isinstance(value, list) else value

    snapshot(f"schemas/{name}", json.dumps(bare(schema(name)), indent=1) + "\n")


def test_the_command_prints_and_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app(["schemas", "results"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out) == schema("results")
    app(["schemas", "--output-dir", str(tmp_path / "out"), "--json"], standalone_mode=False)
    listed = json.loads(capsys.readouterr().out)["schemas"]
    assert [each["name"] for each in listed] == list(FILES)
    for each in listed:
        assert json.loads(Path(each["written"]).read_text()) == schema(each["name"])
