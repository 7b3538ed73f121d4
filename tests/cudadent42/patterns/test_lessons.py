from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudadent42.base.errors import NewerVersionError, UsageError
from cudadent42.patterns import PatternEvidence, firings, lessons, match, show
from cudadent42.patterns.evidence import HEAD_LINES, TAIL_LINES, Log, of_file, of_run, of_text
from cudadent42.patterns.lessons import Clause, Lesson, Symptom

LESSON = """
schema_version = 1
id = "of-a-test"
title = "A title"
cause = "A cause"
remedy = "A remedy"
evidence = "Evidence"
cost = "A cost"

[[symptom]]
all = [{ log = "first" }, { metric = "speedup_geomean", below = 0.5 }]
any = [{ fact = "device", equals = "cpu" }, { resource = "spill_store_bytes", above = 0 }]
none = [{ fact = "torch", missing = true }]
"""


@pytest.fixture(autouse=True)
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_all_any_and_none() -> None:
    lesson = lessons.parse(LESSON, "test")
    log, slow, cpu = Log("x", "zero\nthe first line"), {"speedup_geomean": 0.12}, {"device": "cpu"}
    applies = [
        PatternEvidence((log,), slow, (), cpu),
        PatternEvidence((log,), slow, ({"spill_store_bytes": 0.0}, {"spill_store_bytes": 8.0}), {}),
        PatternEvidence((log,), slow, (), {**cpu, "torch": "2.13"}),
    ]
    for evidence in applies:
        assert [each.lesson for each in match(evidence, [lesson])] == [lesson]
    assert match(applies[0], [lesson])[0].because == (
        "x:2: the first line",
        "speedup_geomean = 0.12 (below 0.5)",
        "device = cpu",
    )
    for evidence in (
        PatternEvidence((), slow, (), cpu),
        PatternEvidence((log,), {"speedup_geomean": 0.5}, (), cpu),
        PatternEvidence((log,), {}, (), cpu),
        PatternEvidence((log,), slow, (), {"device": "cuda:0"}),
        PatternEvidence((log,), slow, (), {**cpu, "torch": None}),
    ):
        assert match(evidence, [lesson]) == ()


def test_a_truth_value_is_no_number() -> None:
    lesson = Lesson(1, "x", "", "", "", "", "", (Symptom(all=(Clause(fact="gpu", above=0.5),)),))
    assert match(PatternEvidence(facts={"gpu": True}), [lesson]) == ()
    assert match(PatternEvidence(facts={"gpu": 1}), [lesson])
    lesson = Lesson(1, "x", "", "", "", "", "", (Symptom(all=(Clause(fact="gpu", equals=True),)),))
    assert match(PatternEvidence(facts={"gpu": 1}), [lesson]) == ()


def test_of_a_long_log_both_ends_are_read(tmp_path: Path) -> None:
    lesson = Lesson(1, "x", "", "", "", "", "", (Symptom(all=(Clause(log="needle"),)),))
    for where in (0, HEAD_LINES + TAIL_LINES + 50):
        lines = ["hay"] * (HEAD_LINES + TAIL_LINES + 100)
        lines[where] = "a needle"
        assert match(of_text("\n".join(lines), "log"), [lesson])
    path = tmp_path / "log"
    path.write_bytes(b"needle \xff\n" + b"hay\n" * (2 << 20))
    assert match(of_file(path), [lesson])
    path.write_bytes(b"hay\n" * (2 << 20) + b"needle")
    assert match(of_file(path), [lesson])


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("schema_version = 1", "", "schema_version = 1"),
        ("schema_version = 1", "schema_version = true", "schema_version = 1"),
        ('id = "of-a-test"', 'id = "Of a test"', "lower-case"),
        ('title = "A title"', 'title = " "', "title is empty"),
        ('title = "A title"', "title = 3", "title"),
        ('cost = "A cost"', "", "'cost' is missing"),
        ('cost = "A cost"', 'cots = "A cost"', "unknown field 'cots'"),
        ('{ log = "first" }', '{ log = "first", above = 1 }', "nothing else"),
        ('{ log = "first" }', '{ log = "first", metric = "x" }', "one of log, metric, resource and fact"),
        ('{ log = "first" }', '{ log = "(a+)+b" }', "bound its repeats"),
        ('{ log = "first" }', "{ }", "not none"),
        (", below = 0.5", "", "needs above or below"),
        (", below = 0.5", ", below = nan", "no number"),
        (", below = 0.5", ", above = 2, below = 0.5", "no number"),
        ("missing = true", "missing = true, above = 1", "needs one of"),
        ("[[symptom]]", "[[symptom]]\nall = 3", "valid TOML"),
        ("[[symptom]]", "[[symptoms]]", "unknown field 'symptoms'"),
    ],
)
def test_a_wrong_lesson_is_refused_with_the_reason(old: str, new: str, words: str) -> None:
    with pytest.raises(UsageError, match=f"of-a-test.toml.*{words}"):
        lessons.parse(LESSON.replace(old, new, 1), "of-a-test.toml")


def test_a_lesson_without_symptoms_and_of_a_newer_version() -> None:
    with pytest.raises(UsageError, match="at least one"):
        lessons.parse(LESSON.partition("[[symptom]]")[0], "x")
    with pytest.raises(NewerVersionError, match="upgrade"):
        lessons.parse(LESSON.replace("schema_version = 1", "schema_version = 2"), "x")


@given(st.text(max_size=200))
def test_any_text_is_a_lesson_or_a_clear_error(text: str) -> None:
    for document in (text, LESSON + text, LESSON.replace('"A cause"', text)):
        assert refusal(document).startswith("file")


def refusal(document: str) -> str:
    try:
        lessons.parse(document, "file")
    except UsageError as error:
        return str(error)
    return "file is a lesson"


def test_adding_replacing_and_reading_back(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(LESSON)
    assert (
        lessons.add(file, replace=False) == tmp_path / "config" / "cudadent42" / "patterns" / "of-a-test.toml"
    )
    assert "of-a-test" in {lesson.id for lesson in lessons.library()}
    with pytest.raises(UsageError, match="--replace"):
        lessons.add(file, replace=False)
    file.write_text(LESSON.replace("A title", "Another"))
    lessons.add(file, replace=True)
    assert next(lesson for lesson in lessons.library() if lesson.id == "of-a-test").title == "Another"
    file.write_text(LESSON.replace("of-a-test", "power-limit"))
    lessons.add(file, replace=True)
    ids = [lesson.id for lesson in lessons.library()]
    assert ids.count("power-limit") == 1


def test_a_damaged_lesson_of_the_users_own_does_not_hide_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "config" / "cudadent42" / "patterns"
    folder.mkdir(parents=True)
    (folder / "bad.toml").write_text("schema_version = ")
    with pytest.raises(UsageError, match=r"bad\.toml"):
        lessons.library()
    matches = show.after_failure(of_text("OSError: x.so: undefined symbol: _ZN3c10", "log"))
    assert [item.lesson.id for item in matches] == ["one-translation-unit"]
    said = capsys.readouterr().err
    assert "lesson: Types or symbols" in said
    assert "bad.toml" in said
    assert firings.read().lessons["one-translation-unit"].count == 1


def test_what_is_quoted_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show.after_failure(of_text("undefined symbol: _ZN\x1b]0;title\x07", "log"))
    assert "\x1b" not in capsys.readouterr().err


def _count(times: int) -> None:
    for _ in range(times):
        firings.record(["a", "b"])


def test_several_writers_lose_no_firing() -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_count, args=(25,)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert {name: firing.count for name, firing in firings.read().lessons.items()} == {"a": 100, "b": 100}


def test_damaged_and_newer_counts(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "cudadent42"
    folder.mkdir(parents=True)
    file = folder / "firings.json"
    file.write_text('{"schema_version": 1, "lessons": {"a": 3}}')
    with pytest.raises(UsageError, match="remove it"):
        firings.read()
    firings.record(["a"])
    assert firings.read().lessons["a"].count == 1
    assert "3" in (folder / "firings.damaged.json").read_text()
    newer = json.dumps({"schema_version": 9, "lessons": {}})
    file.write_text(newer)
    with pytest.raises(NewerVersionError):
        firings.record(["a"])
    assert file.read_text() == newer


def test_profile_of_a_run_is_seen(tmp_path: Path) -> None:
    source = Path(__file__).parent / "recorded" / "runs" / "slow"
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert of_run(tmp_path).metrics["profiled"] == 0
    (tmp_path / "profile.json").write_text('{"metrics": {"occupancy": 0.25, "name": "x"}}')
    metrics = of_run(tmp_path).metrics
    assert (metrics["profiled"], metrics["occupancy"]) == (1, 0.25)
    (tmp_path / "profile.json").write_text("{")
    assert of_run(tmp_path).metrics["profiled"] == 0
