"""What workers that do not see this machine's disk are sent of it: kernels in files, and versions of a source tree.

Of a kernel's TOML file that is the file, its source, the headers beside it, and what these include in quotes. Of a
Python file it is the file, the modules beside it that it imports, and sources beside it that it names in a text, such
as ``"kernel.cu"``. Nothing else of a folder is sent.
"""

from __future__ import annotations

import ast
import io
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from cudadent42.base import trees
from cudadent42.base.errors import UsageError
from cudadent42.base.parcels import Parcel
from cudadent42.base.paths import is_bytecode, real_path
from cudadent42.base.reading import read_bytes
from cudadent42.base.toml import parse_toml
from cudadent42.model.implementations import is_kernel_file, is_plug_in, path_text_of, plug_in_file
from cudadent42.model.records import Plan
from cudadent42.native import specification
from cudadent42.native.tuned import files_of
from cudadent42.native.writing import kernel_file_text
from cudadent42.versions.sources import checked_folder_of

MOST_BYTES = 64 << 20
"""Of the files of one implementation."""
MOST_FILES = 2000

_SOURCES = frozenset((".cu", ".cuh", ".cpp", ".cc", ".c", ".h", ".hpp", ".toml"))
"""That a Python file may name."""
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


@dataclass(frozen=True)
class _Contents:
    files: Mapping[str, bytes]
    """By path below the parcel's folder."""
    entry: str
    modules: Mapping[str, str] = field(default_factory=dict)
    """Of a Python file: digests of the modules beside it that are imported, by their names."""


class Cargo:
    """Of one command. Each file is read once, so what is edited meanwhile is not raced."""

    def __init__(self) -> None:
        self._parcels: dict[str, Parcel] = {}
        self._packed: dict[str, bytes] = {}
        self._modules: dict[str, Mapping[str, str]] = {}
        """By path."""

    def of(self, plan: Plan) -> tuple[Parcel, ...]:
        """What the plan's implementations need, each once. Raises UsageError for files that cannot be read, or that
        would be raced with each other's modules."""
        paths = [
            path_text_of(name)
            for name in plan.implementations
            if name not in plan.versions and is_plug_in(name)
        ]
        digests = [version.digest for version in plan.versions.values()]
        for path in paths:
            if path not in self._parcels:
                contents = _contents(path)
                digest = trees.digest_of(contents.files)
                self._packed[digest] = _pack(contents.files)
                self._parcels[path] = Parcel(digest, path, contents.entry)
                self._modules[path] = contents.modules
        _check_names({path: self._modules[path] for path in paths})
        for version in plan.versions.values():
            if version.digest not in self._packed:
                self._packed[version.digest] = _pack(_all_of(checked_folder_of(version)))
        sent = [*(self._parcels[path] for path in paths), *map(Parcel, digests)]
        return tuple(dict.fromkeys(sent))

    def packed(self, parcel: Parcel) -> bytes:
        """The files of a parcel of `of`, as an archive."""
        return self._packed[parcel.digest]


def digests_of(parcels: Iterable[Parcel]) -> dict[str, str]:
    """By the path that each was sent for; versions are on record anyway."""
    return {parcel.name: parcel.digest for parcel in parcels if parcel.name}


def _check_names(modules: Mapping[str, Mapping[str, str]]) -> None:
    """UsageError where files, by path, import modules of one name that differ: a worker has one of them for both."""
    first: dict[str, str] = {}
    for path, own in modules.items():
        for name, digest in own.items():
            other = first.setdefault(name, path)
            if modules[other][name] != digest:
                raise UsageError(
                    f"{other} and {path} import different modules named {name!r} from beside them, and a worker of the "
                    "fleet would import one of these for both; rename one"
                )


def _contents(path_text: str) -> _Contents:
    path = plug_in_file(path_text if is_kernel_file(path_text) else f"{path_text}:")
    return _of_kernel_file(real_path(path)) if is_kernel_file(path_text) else _of_python(real_path(path))


def _of_kernel_file(path: Path) -> _Contents:
    kernel = specification.load(path)
    sources = _read(_with_included(files_of(kernel)[1:], kernel.source.parent))
    root = Path(os.path.commonpath([each.parent for each in sources]))
    text = read_bytes(path)
    files = {each.relative_to(root).as_posix(): content for each, content in sources.items()}
    named = parse_toml(text.decode(), str(path))["source"]
    reached = Path(os.path.normpath(path.parent / named))
    if root in path.parents and root in reached.parents and not Path(named).is_absolute():
        entry = path.relative_to(root).as_posix()
        return _Contents({**files, entry: text}, entry)
    # The source lies elsewhere than the file, as a tuning's configurations have it: there, below the file.
    document = parse_toml(text.decode(), str(path))
    document["source"] = kernel.source.relative_to(root).as_posix()
    return _Contents({**files, path.name: kernel_file_text(document).encode()}, path.name)


def _of_python(path: Path) -> _Contents:
    root = path.parent
    modules = _read(_with_imported(path))
    named = [each for module in modules for each in _named_in(modules[module], root)]
    files = {**modules, **_read(_with_included(named, root))}
    inside = {
        each.relative_to(root).as_posix(): content for each, content in files.items() if root in each.parents
    }
    return _Contents(inside, path.name, _digests_of_imported(modules.values(), inside))


def _digests_of_imported(modules: Iterable[bytes], files: Mapping[str, bytes]) -> dict[str, str]:
    names = {name for content in modules for name in _imported(content)}
    own = {
        name: {
            path: content
            for path, content in files.items()
            if path == f"{name}.py" or path.startswith(f"{name}/")
        }
        for name in sorted(names)
    }
    return {name: trees.digest_of(contents) for name, contents in own.items() if contents}


def _with_included(sources: Iterable[Path], folder: Path) -> list[Path]:
    """Sources, and the files that they include in quotes, however far."""
    reached: dict[Path, None] = {}
    waiting = list(sources)
    while waiting:
        path = waiting.pop()
        if path in reached:
            continue
        reached[path] = None
        _check_count(reached)
        for name in _INCLUDE.findall(_content(path)):
            included = [each / os.fsdecode(name) for each in (path.parent, folder)]
            waiting += [Path(os.path.normpath(each)) for each in included if each.is_file()][:1]
    return list(reached)


def _with_imported(path: Path) -> list[Path]:
    """A Python file, and the modules beside it that it imports, however far."""
    reached: dict[Path, None] = {}
    waiting = [path]
    while waiting:
        module = waiting.pop()
        if module in reached:
            continue
        reached[module] = None
        _check_count(reached)
        for name in _imported(_content(module)):
            package = path.parent / name
            if (package / "__init__.py").is_file():
                waiting += [each for each in sorted(package.rglob("*.py")) if not is_bytecode(each)]
            elif (path.parent / f"{name}.py").is_file():
                waiting.append(path.parent / f"{name}.py")
    return list(reached)


def _imported(content: bytes) -> Iterator[str]:
    """Top-level names that a module imports; none of one that is not Python: loading it says so."""
    for node in _nodes(content):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (
                [node.module.partition(".")[0]] if node.module else (alias.name for alias in node.names)
            )


def _named_in(content: bytes, folder: Path) -> Iterator[Path]:
    """Sources below the folder that a module names in a text."""
    for node in _nodes(content):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and 0 < len(node.value) < 256:
            path = PurePosixPath(node.value)
            if path.suffix in _SOURCES and not path.is_absolute() and ".." not in path.parts:
                file = folder / path
                if "\0" not in node.value and file.is_file():
                    yield file


def _nodes(content: bytes) -> Iterator[ast.AST]:
    try:
        return ast.walk(ast.parse(content))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return iter(())


def _all_of(folder: Path) -> dict[str, bytes]:
    paths = sorted(path for path in folder.rglob("*") if trees.is_file(path))
    names = {path.relative_to(folder): path for path in paths}
    return {
        name.as_posix(): read_bytes(path, trees.MOST_BYTES)
        for name, path in names.items()
        if not is_bytecode(name)
    }


def _read(paths: Iterable[Path]) -> dict[Path, bytes]:
    contents = {path: _content(path) for path in paths}
    if sum(map(len, contents.values())) > MOST_BYTES:
        raise UsageError(
            f"the files of a kernel, {next(iter(contents))} among them, have more than {MOST_BYTES >> 20} MiB; "
            "a kernel's sources are expected"
        )
    return contents


def _check_count(paths: Mapping[Path, None]) -> None:
    if len(paths) > MOST_FILES:
        raise UsageError(
            f"{next(iter(paths))} leads to more than {MOST_FILES:,} files; a kernel's sources are expected"
        )


def _content(path: Path) -> bytes:
    try:
        return read_bytes(path, MOST_BYTES)
    except OSError as error:
        raise UsageError(f"{path} cannot be read, and a fleet would be sent it: {error.strerror}") from error


def _pack(files: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(files):
            member = tarfile.TarInfo(name)
            member.size = len(files[name])
            archive.addfile(member, io.BytesIO(files[name]))
    return packed.getvalue()
