from __future__ import annotations

import ast

import pytest

from cudadent42.versions.rename import Names, defined_namespaces, rename

NAMES = Names("_private", frozenset(("mine", "helper")), frozenset(("ours",)))


def renamed(source: str) -> str:
    return ast.unparse(rename(source.encode(), "file.py", NAMES))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch, os.path", "import torch\nimport os.path"),
        ("import mine as m", "import _private.mine as m"),
        ("import mine.a.b as m", "import _private.mine.a.b as m"),
        ("import mine.a", "import _private.mine.a\nfrom _private import mine"),
        ("from mine.a import b as c", "from _private.mine.a import b as c"),
        ("from . import a", "from . import a"),
        ("from .mine import a", "from .mine import a"),
        ("from mineral import a", "from mineral import a"),
        (
            "def f():\n    from helper import g\n    return g",
            "def f():\n    from _private.helper import g\n    return g",
        ),
        ("importlib.import_module('mine.x')", "importlib.import_module('_private.mine.x')"),
        ("import_module('torch')", "import_module('torch')"),
        ("resources.files('mine.kernels')", "resources.files('_private.mine.kernels')"),
        ("print('mine.x')", "print('mine.x')"),
        ("Library('ours', 'DEF')", "Library('ours__private', 'DEF')"),
        ("Library('aten', 'IMPL')", "Library('aten', 'IMPL')"),
        ("torch.ops.ours.f(x)", "torch.ops.ours__private.f(x)"),
        ("torch.ops.aten.mm(x)", "torch.ops.aten.mm(x)"),
        ("@custom_op('ours::f')\ndef f():\n    pass", "@custom_op('ours__private::f')\ndef f():\n    pass"),
        ("x = 'aten::mm'", "x = 'aten::mm'"),
    ],
)
def test_only_the_tree_s_own_names_change(source: str, expected: str) -> None:
    assert renamed(source) == expected


def test_line_numbers_stay() -> None:
    tree = rename(b"import mine.a\n\n\nx = 1\n", "f", NAMES)
    assert [node.lineno for node in tree.body] == [1, 1, 4]


def test_future_imports_stay_first() -> None:
    source = '"""Words."""\nfrom __future__ import annotations\nimport mine.a\n'
    compile(rename(source.encode(), "f", NAMES), "f", "exec")


def test_namespaces_that_a_tree_defines() -> None:
    sources = [
        "lib = torch.library.Library('a', 'DEF')",
        "@torch.library.custom_op('b::f', mutates_args=())\ndef f(): ...",
        "torch.library.define('c::g', '() -> ()')",
        "torch.library.Library('aten', 'IMPL')",
        "Library(name, 'DEF')",
        "custom_op('no namespace')",
        "def broken(:  # Library",
    ]
    assert defined_namespaces(sources) == {"a", "b", "c"}
