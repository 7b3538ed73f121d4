from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashmoe_science import cpu
from flashmoe_science.errors import BuildError, DeviceError
from flashmoe_science.jit import host
from flashmoe_science.jit.cache import CompileCache
from flashmoe_science.jit.host import InstructionSet

SOURCE = (
    '#include "seven.h"\nextern "C" __attribute__((visibility("default"))) int seven() { return SEVEN; }\n'
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source" / "seven.cpp"
    path.parent.mkdir()
    path.write_text(SOURCE)
    path.with_name("seven.h").write_text("#define SEVEN 7\n")
    return path


@pytest.fixture
def cache(tmp_path: Path) -> CompileCache:
    return CompileCache(tmp_path / "cache")


@pytest.fixture
def _compilers_forgotten(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    host.find_compiler.cache_clear()
    yield
    monkeypatch.undo()
    host.find_compiler.cache_clear()


def test_compiles_loads_and_finds_again(source: Path, cache: CompileCache) -> None:
    first = host.build(source, "seven", InstructionSet.PORTABLE, cache)
    assert host.load(first).seven() == 7
    assert first.cached is False
    assert host.build(source, "seven", InstructionSet.PORTABLE, cache).cached is True


def test_a_changed_header_is_another_entry(source: Path, cache: CompileCache) -> None:
    first = host.build(source, "seven", InstructionSet.PORTABLE, cache)
    source.with_name("seven.h").write_text("#define SEVEN 8\n")
    second = host.build(source, "seven", InstructionSet.PORTABLE, cache)
    assert first.key != second.key
    assert host.load(second).seven() == 8


def test_the_recipe_names_the_instruction_set_and_its_features(source: Path, cache: CompileCache) -> None:
    if InstructionSet.AVX2 not in host.available_instruction_sets():
        pytest.skip("this CPU lacks AVX2")
    portable = host.build(source, "seven", InstructionSet.PORTABLE, cache).recipe
    avx2 = host.build(source, "seven", InstructionSet.AVX2, cache).recipe
    assert portable.architecture != avx2.architecture
    assert "avx2+fma+f16c" in avx2.architecture
    assert {"-mavx2", "-mfma", "-mf16c"} <= set(avx2.flags)
    assert not any("native" in flag for flag in (*avx2.flags, *portable.flags))
    assert set(avx2.sources) == {"seven.cpp", "seven.h"}


def test_code_for_a_better_cpu_is_refused(
    source: Path, cache: CompileCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "cpu_features", lambda: frozenset({"sse2", "avx2", "fma", "f16c"}))
    assert host.available_instruction_sets() == (InstructionSet.AVX2, InstructionSet.PORTABLE)
    assert host.choose_instruction_set() is InstructionSet.AVX2
    with pytest.raises(DeviceError, match=r"cannot run avx512 code \(it lacks avx512bw"):
        host.build(source, "seven", InstructionSet.AVX512, cache)


def test_a_cpu_without_known_features_gets_the_portable_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHMOE_CPU_ISA", raising=False)
    monkeypatch.setattr(host, "cpu_features", lambda: frozenset())
    assert host.choose_instruction_set() is InstructionSet.PORTABLE


def test_instruction_set_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMOE_CPU_ISA", "portable")
    assert host.choose_instruction_set() is InstructionSet.PORTABLE
    monkeypatch.setenv("FLASHMOE_CPU_ISA", "mmx")
    expected = "mmx is not an instruction set; set it to one of amx, avx512_bf16, avx512, avx2, portable"
    for command in (host.choose_instruction_set, cpu.build):
        with pytest.raises(DeviceError, match=expected) as raised:
            command()
        assert "\n" not in str(raised.value)


def test_library_that_cannot_be_loaded(source: Path, cache: CompileCache) -> None:
    build = host.build(source, "seven", InstructionSet.PORTABLE, cache)
    build.artifact.write_bytes(b"not a library")
    with pytest.raises(BuildError, match="cannot be loaded"):
        host.load(build)


@pytest.mark.usefixtures("_compilers_forgotten")
def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    if host._find_zig() is not None:
        pytest.skip("the ziglang wheel is installed here")
    with pytest.raises(DeviceError, match="pip install ziglang"):
        host.find_compiler()


@pytest.mark.usefixtures("_compilers_forgotten")
def test_cxx_is_honoured_with_its_arguments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: Path, cache: CompileCache
) -> None:
    compiler = host.find_compiler()
    if len(compiler.command) != 1:
        pytest.skip("needs a compiler that is one program")
    wrapper = tmp_path / "my compiler"
    wrapper.write_text(f'#!/bin/sh\nexec {compiler.command[0]} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{wrapper}' -DWRAPPED")
    host.find_compiler.cache_clear()
    assert host.find_compiler().command == (str(wrapper), "-DWRAPPED")
    source.write_text(SOURCE + "#ifndef WRAPPED\n#error argument lost\n#endif\n")
    build = host.build(source, "seven", InstructionSet.PORTABLE, cache)
    assert host.load(build).seven() == 7
    assert "-DWRAPPED" in build.recipe.compiler


@pytest.mark.usefixtures("_compilers_forgotten")
@pytest.mark.parametrize(
    ("value", "message"),
    [("/no/such/compiler", "not a program"), ("'g++", "not a program"), ("false", "does not run")],
)
def test_cxx_that_does_not_run(monkeypatch: pytest.MonkeyPatch, value: str, message: str) -> None:
    monkeypatch.setenv("CXX", value)
    with pytest.raises(DeviceError, match=message):
        host.find_compiler()


@pytest.mark.usefixtures("_compilers_forgotten")
def test_a_full_disk_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: Path, cache: CompileCache
) -> None:
    compiler = host.find_compiler()
    if len(compiler.command) != 1 or not Path("/dev/full").exists():
        pytest.skip("needs a compiler that is one program, and /dev/full")
    wrapper = tmp_path / "compiler"
    wrapper.write_text(f'#!/bin/sh\nexec {compiler.command[0]} "$@" -o /dev/full\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    host.find_compiler.cache_clear()
    with pytest.raises(
        BuildError, match=r"the disk is full.*No space left on device.*free space in"
    ) as raised:
        host.build(source, "seven", InstructionSet.PORTABLE, cache)
    text = str(raised.value)
    assert str(cache.directory) in text
    assert "another compiler" not in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (
            "/usr/bin/ld: cannot find -lm\ncollect2: error: ld returned 1 exit status\n",
            "/usr/bin/ld: cannot find -lm",
        ),
        ("In file a.cpp:\na.cpp:1:2: error: no\nb.cpp:1:2: error: other\n", "a.cpp:1:2: error: no"),
        ("collect2: error: ld returned 1 exit status\n", "collect2: error: ld returned 1 exit status"),
        ("\n", None),
    ],
)
def test_reason_of_a_failure(output: str, reason: str | None) -> None:
    assert host._reason(output) == reason


def test_a_build_of_our_kernels_says_nothing() -> None:
    for build in cpu.build():
        assert build.log.splitlines()[1:] == []


def test_sources_with_spaces_and_shell_characters_in_their_path(tmp_path: Path, cache: CompileCache) -> None:
    folder = tmp_path / "a b; $(touch x) 'c'"
    folder.mkdir()
    (folder / "seven.cpp").write_text(SOURCE)
    (folder / "seven.h").write_text("#define SEVEN 7\n")
    build = host.build(folder / "seven.cpp", "seven", InstructionSet.PORTABLE, cache)
    assert host.load(build).seven() == 7
    assert sorted(os.listdir(folder)) == ["seven.cpp", "seven.h"]


def test_processes_that_start_together_share_one_compilation(source: Path, cache: CompileCache) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from flashmoe_science.jit import host\n"
        "from flashmoe_science.jit.cache import CompileCache\n"
        "cache = CompileCache(Path(sys.argv[2]))\n"
        "b = host.build(Path(sys.argv[1]), 'seven', host.InstructionSet.PORTABLE, cache)\n"
        "assert host.load(b).seven() == 7\n"
        "print(b.cached)\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(source), str(cache.directory)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    answers = [process.communicate()[0].strip() for process in processes]
    assert sorted(answers) == ["False", "True", "True"]


def test_loaded_code_outlives_the_entry(source: Path, cache: CompileCache) -> None:
    build = host.build(source, "seven", InstructionSet.PORTABLE, cache)
    library: ctypes.CDLL = host.load(build)
    build.artifact.unlink()
    assert library.seven() == 7


@pytest.mark.parametrize(
    ("instruction_set", "expected"),
    [
        (InstructionSet.AVX512_BF16, ("avx512_vnni",)),
        (InstructionSet.AVX512, ("avx512_vnni",)),
        (InstructionSet.AVX2, ()),
        (InstructionSet.PORTABLE, ()),
    ],
)
def test_integer_dot_products_are_asked_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch, instruction_set: InstructionSet, expected: tuple[str, ...]
) -> None:
    features = frozenset(InstructionSet.AVX512_BF16.features)
    monkeypatch.setattr(host, "cpu_features", lambda: features)
    assert host.integer_dot_products(instruction_set) == ()
    monkeypatch.setattr(host, "cpu_features", lambda: features | {"avx512_vnni"})
    assert host.integer_dot_products(instruction_set) == expected
    assert host.feature_flags(expected) == tuple(f"-m{name.replace('_', '')}" for name in expected)


_AMX_CPU = frozenset({*InstructionSet.AVX512_BF16.features, "amx_tile", "amx_bf16"})


@pytest.mark.parametrize("granted", [True, False])
def test_the_matrix_unit_is_taken_where_the_system_grants_it(
    monkeypatch: pytest.MonkeyPatch, granted: bool
) -> None:
    monkeypatch.delenv("FLASHMOE_CPU_ISA", raising=False)
    monkeypatch.setattr(host, "cpu_features", lambda: _AMX_CPU)
    monkeypatch.setattr(host, "amx_is_granted", lambda: granted)
    monkeypatch.setattr(host, "_compiler_takes", lambda flags: True)
    # Its vectors multiply bf16 more slowly than what they widen.
    assert host.choose_instruction_set() is (InstructionSet.AMX if granted else InstructionSet.AVX512)
    assert set(host.available_instruction_sets()) == set(InstructionSet) - (
        set() if granted else {InstructionSet.AMX}
    )
    if not granted:
        with pytest.raises(DeviceError, match=r"cannot run amx code \(it lacks the operating system's leave"):
            host.require_instruction_set(InstructionSet.AMX)


class _System:
    """A C library whose system call gives one answer."""

    def __init__(self, answer: int | Exception) -> None:
        self.answer, self.asked = answer, list[tuple[int, ...]]()

    def syscall(self, *arguments: int) -> int:
        self.asked.append(arguments)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "granted"),
    [(0, True), (-1, False), (OSError("seccomp"), False), (AttributeError("no syscall"), False)],
    ids=str,
)
def test_what_the_system_answers_decides(
    monkeypatch: pytest.MonkeyPatch, answer: int | Exception, granted: bool
) -> None:
    """A sandbox may show a CPU's features and refuse the call; then AVX-512 is taken."""
    system = _System(answer)
    monkeypatch.setattr(host, "cpu_features", lambda: _AMX_CPU)
    monkeypatch.setattr(host.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(host.ctypes, "CDLL", lambda name: system)
    assert host.amx_is_granted.__wrapped__() is granted
    assert system.asked == [(158, 0x1023, 18)]  # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)


@pytest.mark.parametrize(("missing", "machine"), [({"amx_bf16"}, "x86_64"), (set(), "aarch64")])
def test_nothing_is_asked_where_there_is_no_matrix_unit(
    monkeypatch: pytest.MonkeyPatch, missing: set[str], machine: str
) -> None:
    """That number is another call on another architecture."""
    system = _System(0)
    monkeypatch.setattr(host, "cpu_features", lambda: _AMX_CPU - missing)
    monkeypatch.setattr(host.platform, "machine", lambda: machine)
    monkeypatch.setattr(host.ctypes, "CDLL", lambda name: system)
    assert host.amx_is_granted.__wrapped__() is False
    assert system.asked == []


def test_an_old_compiler_builds_for_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHMOE_CPU_ISA", raising=False)
    monkeypatch.setattr(host, "cpu_features", lambda: _AMX_CPU)
    monkeypatch.setattr(host, "amx_is_granted", lambda: True)
    monkeypatch.setattr(host, "_compiler_takes", lambda flags: "-mamx-tile" not in flags)
    assert host.choose_instruction_set() is InstructionSet.AVX512
    with pytest.raises(DeviceError, match=r"it lacks a compiler that knows amx_tile"):
        host.require_instruction_set(InstructionSet.AMX)


@pytest.mark.parametrize(("flag", "takes"), [("-DANY=1", True), ("-mno-such-unit", False)])
def test_a_compiler_is_asked_for_its_flags(flag: str, takes: bool) -> None:
    assert host._compiler_takes((flag,)) is (takes or bool(host.find_compiler().environment))


def test_flags_of_the_matrix_unit() -> None:
    assert {"-mamx-tile", "-mamx-bf16", "-mavx512bf16"} <= set(InstructionSet.AMX.flags)
