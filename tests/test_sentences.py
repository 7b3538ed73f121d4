"""Sentences can be read in one breath: none of the documentation or of a message has more than 40 words, none of a help
text 30."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from module_graph import files_of, nodes_of

ROOT = Path(__file__).parents[1]
MOST_WORDS, MOST_OF_HELP = 40, 30
NOTEBOOKS = ROOT / "docs" / "kernels" / "notebooks"
FOLDERS = ("docs", "examples", "skills")
PAGES = sorted({*ROOT.glob("*.md"), *(page for name in FOLDERS for page in (ROOT / name).rglob("*.md"))})
HELP = sorted((Path(__file__).parent / "snapshots" / "help").glob("*.txt"))

CODE = re.compile(r"```.*?```|<!--.*?-->", re.DOTALL)
PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)|\n(?=#)")
SENTENCE = re.compile(r"(?<=[.!?])[\"”)*_]*\s+(?=[A-Z0-9\"“(*_`\[])")


def sentences(page: str) -> list[str]:
    """Sentences of a Markdown page outside of headings, tables and code; what is between backticks is one word."""
    text = CODE.sub("\n\n", page)
    text = "\n".join("" if line.lstrip().startswith("|") else line for line in text.splitlines())
    parts: list[str] = []
    for paragraph in PARAGRAPH.split(text):
        words = " ".join(paragraph.split())
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", words)
        words = re.sub(r"`[^`]*`", "`code`", words)
        if not words.startswith("#"):
            parts += SENTENCE.split(words)
    return parts


def too_long(page: str, most: int = MOST_WORDS) -> list[str]:
    return [
        sentence
        for sentence in sentences(page)
        if sum(bool(re.search(r"\w", word)) for word in sentence.split()) > most
    ]


@pytest.mark.parametrize(
    ("page", "count"),
    [
        ("word " * 40, 0),
        ("word " * 41, 1),
        ("Word " * 30 + "end. " + "Word " * 30, 0),
        ("* " + "word " * 30 + "\n* " + "word " * 30, 0),
        ("`" + "word " * 60 + "`", 0),
        ("```\n" + "word " * 60 + "\n```", 0),
        ("| " + "word " * 60 + " |", 0),
        ("[" + "word " * 41 + "](page.md)", 1),
        ("word " * 30 + "\n" + "word " * 30, 1),
    ],
)
def test_the_words_of_a_sentence_are_counted(page: str, count: int) -> None:
    assert len(too_long(page)) == count


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_of_the_documentation_is_too_long(page: Path) -> None:
    if NOTEBOOKS in page.parents:
        pytest.skip("a notebook of variants is a log")
    long = too_long(page.read_text(encoding="utf-8"))
    assert not long, f"more than {MOST_WORDS} words; make two sentences:\n" + "\n".join(long)


@pytest.mark.parametrize("file", HELP, ids=lambda file: file.stem)
def test_no_sentence_of_a_help_text_is_too_long(file: Path) -> None:
    entries = re.split(r"\n(?=\s*(?:-|[\w-]+\s{2}))|\n\n", file.read_text(encoding="utf-8"))
    long = [sentence for entry in entries for sentence in too_long(entry, MOST_OF_HELP)]
    assert not long, f"more than {MOST_OF_HELP} words; make two sentences:\n" + "\n".join(long)


SAYING = {"fail", "note", "say", "warn", "print", "print_line", "echo", "Finding", "Message"}
"""Functions that show their words to a user, beside the errors."""


def texts_of(node: ast.expr) -> str:
    """The words of a text; a value that is put in is one."""
    if isinstance(node, ast.Constant):
        return str(node.value) if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "value" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return texts_of(node.left) + texts_of(node.right)
    if isinstance(node, ast.IfExp):
        return max(texts_of(node.body), texts_of(node.orelse), key=len)
    return ""


def messages(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Call):
            function = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if function.endswith("Error") or function in SAYING:
                yield from filter(None, map(texts_of, node.args))


def test_the_words_of_a_message_are_counted() -> None:
    long = "word " * 41
    source = (
        f"""raise InputError(f"{long}")\nfail("{long}" + "x")\nsay("{long}" if x else "")\nlen("{long}")"""
    )
    assert sum(len(too_long(message)) for message in messages(ast.walk(ast.parse(source)))) == 3


@pytest.mark.parametrize("package", ["cudadent42", "flashmoe_science"])
def test_no_sentence_of_a_message_is_too_long(package: str) -> None:
    long = [
        f"{path.relative_to(ROOT)}: {sentence}"
        for path in files_of(package).values()
        for message in messages(nodes_of(path))
        for part in re.split(r";\s", message)  # what a message says to do stands behind one
        for sentence in too_long(part)
    ]
    assert not long, f"more than {MOST_WORDS} words; make two sentences:\n" + "\n".join(long)
