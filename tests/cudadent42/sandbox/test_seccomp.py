"""The filter of system calls, by a machine for its programs: what the kernel would answer to each call."""

from __future__ import annotations

import errno
import struct

import pytest

from cudadent42.sandbox.seccomp import (
    ARCHITECTURES,
    CLONE,
    CLONE3,
    ITSELF_ALONE,
    MODES_AND_OWNERS,
    OTHER_PROCESSES,
    REFUSED,
    SOCKET,
    assemble,
)

ALLOWED = 0
KILLED = -1
AF_UNIX, AF_INET = 1, 2
READ = {"x86_64": 0, "aarch64": 63}
FORK, CLONE_NEWUSER = 0x11, 0x10000000


def answer(program: bytes, architecture: int, call: int, argument: int = 0) -> int:
    """What the program returns: 0 for allowed, an error's number, or `KILLED`."""
    data = struct.pack("<IIQQQQQQQ", call, architecture, 0, argument, 0, 0, 0, 0, 0)
    lines = [struct.unpack("HBBI", program[at : at + 8]) for at in range(0, len(program), 8)]
    assert len(lines) <= 4096
    accumulator = at = 0
    while True:
        code, when_true, when_false, value = lines[at]
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x06:
            action = value & 0xFFFF0000
            return ALLOWED if action == 0x7FFF0000 else value & 0xFFFF if action == 0x00050000 else KILLED
        else:
            holds = {
                0x15: accumulator == value,
                0x35: accumulator >= value,
                0x45: accumulator & value != 0,
            }[code]
            at += when_true if holds else when_false


@pytest.fixture(params=sorted(ARCHITECTURES))
def machine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("own_tree", [True, False])
def test_each_listed_call_is_refused_and_others_are_not(machine: str, own_tree: bool) -> None:
    program, architecture = assemble(machine, own_tree=own_tree, own_processes=True), ARCHITECTURES[machine]
    index = 0 if machine == "x86_64" else 1
    for name, numbers in REFUSED.items():
        if (number := numbers[index]) is not None:
            assert answer(program, architecture, number) == errno.EPERM, name
    for name, numbers in MODES_AND_OWNERS.items():
        if (number := numbers[index]) is not None:
            assert answer(program, architecture, number) == (ALLOWED if own_tree else errno.EPERM), name
    assert answer(program, architecture, READ[machine]) == ALLOWED


def test_newer_calls_that_set_modes_are_listed(machine: str) -> None:
    program, architecture = assemble(machine, own_tree=False, own_processes=True), ARCHITECTURES[machine]
    for setxattrat_removexattrat_file_setattr in (463, 466, 469):
        assert answer(program, architecture, setxattrat_removexattrat_file_setattr) == errno.EPERM


@pytest.mark.parametrize("own_processes", [True, False])
def test_other_processes_are_left_alone_where_they_can_be_named(machine: str, own_processes: bool) -> None:
    program = assemble(machine, own_tree=True, own_processes=own_processes)
    architecture, index = ARCHITECTURES[machine], 0 if machine == "x86_64" else 1
    refused = ALLOWED if own_processes else errno.EPERM
    for name, numbers in OTHER_PROCESSES.items():
        assert answer(program, architecture, numbers[index]) == refused, name
    for name, numbers in ITSELF_ALONE.items():
        assert answer(program, architecture, numbers[index], 0) == ALLOWED, name
        assert answer(program, architecture, numbers[index], 4242) == refused, name


def test_sockets_are_files_or_nothing(machine: str) -> None:
    architecture, call = ARCHITECTURES[machine], SOCKET[0 if machine == "x86_64" else 1]
    with_tree, without = (
        assemble(machine, own_tree=True, own_processes=True),
        assemble(machine, own_tree=False, own_processes=True),
    )
    assert answer(with_tree, architecture, call, AF_UNIX) == ALLOWED
    assert answer(without, architecture, call, AF_UNIX) == errno.EACCES
    for family in (AF_INET, 10, 16, 17, 40):
        assert answer(with_tree, architecture, call, family) == errno.EACCES
        assert answer(without, architecture, call, family) == errno.EACCES


def test_processes_may_be_started_and_namespaces_not(machine: str) -> None:
    architecture, index = ARCHITECTURES[machine], 0 if machine == "x86_64" else 1
    program = assemble(machine, own_tree=True, own_processes=True)
    assert answer(program, architecture, CLONE[index], FORK) == ALLOWED
    assert answer(program, architecture, CLONE[index], FORK | CLONE_NEWUSER) == errno.EPERM
    assert answer(program, architecture, CLONE3[index]) == errno.ENOSYS


def test_calls_of_another_architecture_end_the_process(machine: str) -> None:
    program = assemble(machine, own_tree=True, own_processes=True)
    i386 = 0x40000003
    assert answer(program, i386, READ[machine]) == KILLED
    if machine == "x86_64":
        assert answer(program, ARCHITECTURES[machine], 0x40000000 | 101) == errno.ENOSYS


def test_no_number_is_listed_twice(machine: str) -> None:
    index = 0 if machine == "x86_64" else 1
    listed = [
        numbers[index]
        for numbers in (
            *REFUSED.values(),
            *MODES_AND_OWNERS.values(),
            *OTHER_PROCESSES.values(),
            *ITSELF_ALONE.values(),
        )
    ]
    numbers = [number for number in listed if number is not None]
    assert len(numbers) == len(set(numbers))


def test_a_processor_without_a_list_is_not_pretended() -> None:
    with pytest.raises(OSError, match="riscv64 are not listed"):
        assemble("riscv64", own_tree=True, own_processes=True)
