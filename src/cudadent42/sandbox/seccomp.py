"""A filter of system calls: seccomp(2), a program for the kernel's packet filter that is assembled here.

It refuses what no candidate needs and what has been a way out of a sandbox: sockets, debugging other processes,
mounting, namespaces, keys, io_uring (whose requests pass by every filter). Everything else is allowed: a GPU's driver
and PyTorch use hundreds of calls, and which ones differs between versions.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Iterable, Sequence

from cudadent42.sandbox.syscalls import number, prctl, system_call

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
"""Of ``struct seccomp_data``; the low half of an argument, on processors with the low byte first."""
_SET_MODE_FILTER = 1
_SPECULATION_ALLOWED = 4
"""Before Linux 5.16 a filter without this flag switches a processor's speculation down, and all would time slower."""
_PR_SET_SECCOMP = 22
_X32_BIT = 0x40000000
_AF_UNIX = 1
_NEW_NAMESPACES = 0x7E020080
"""CLONE_NEWNS, NEWTIME, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

REFUSED = {
    # debugging and looking into other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "perf_event_open": (298, 241),
    # ways around the other layers
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "userfaultfd": (323, 282),
    "bpf": (321, 280),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    # keys, quotas, the kernel's log
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "acct": (163, 89),
    "lookup_dcookie": (212, 18),
    # the machine
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
}
"""By name, the numbers on x86-64 and on 64-bit ARM."""

MODES_AND_OWNERS = {
    "chmod": (90, None),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fchmod": (91, 52),
    "fchown": (93, 55),
    "fsetxattr": (190, 7),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
}
"""Refused too where the file tree is the machine's own: Landlock does not hold them."""

OTHER_PROCESSES = {
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
}
"""Refused too where processes or IPC objects are the machine's: other processes of this user could be disturbed, and
processes apart could talk to each other."""

ITSELF_ALONE = {
    "prlimit64": (302, 261),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
}
"""Allowed there for the caller, whose number is 0. Not ``sched_setaffinity``: the C library calls it with the numbers
of a process's own threads, and GNU OpenMP ends the process where that is refused."""

SOCKET, CLONE, CLONE3 = (41, 198), (56, 220), (435, 435)


def install(*, own_tree: bool, own_processes: bool) -> None:
    """Filters this process and all that it starts. Raises OSError.

    ``own_tree``: the files that it sees are only those it was given, so sockets that are files are harmless, and so
    are modes of files. ``own_processes``: it can name no processes and IPC objects but its own. `privileges.renounce`
    comes before it.
    """
    program = assemble(platform.machine(), own_tree=own_tree, own_processes=own_processes)
    instructions = ctypes.create_string_buffer(program, len(program))
    address = ctypes.addressof(instructions)
    header = struct.pack("HxxxxxxQ", len(program) // 8, address)
    try:
        system_call("seccomp", number("seccomp"), _SET_MODE_FILTER, _SPECULATION_ALLOWED, header)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS):
            raise
        pointer = ctypes.create_string_buffer(header, len(header))
        prctl("prctl(PR_SET_SECCOMP)", _PR_SET_SECCOMP, 2, ctypes.addressof(pointer))


def assemble(machine: str, *, own_tree: bool, own_processes: bool) -> bytes:
    """The program for a processor. Raises OSError for one whose numbers are not listed."""
    if machine not in ARCHITECTURES:
        raise OSError(0, f"the system calls of {machine} are not listed")
    index = 0 if machine == "x86_64" else 1
    refused = [numbers[index] for numbers in REFUSED.values()]
    if not own_tree:
        refused += [numbers[index] for numbers in MODES_AND_OWNERS.values()]
    if not own_processes:
        refused += [numbers[index] for numbers in OTHER_PROCESSES.values()]
    lines = [(_LOAD, 0, 0, _ARCHITECTURE_AT), (_EQUAL, 1, 0, ARCHITECTURES[machine])]
    lines += [(_RETURN, 0, 0, _KILL_PROCESS), (_LOAD, 0, 0, _NUMBER_AT)]
    if machine == "x86_64":
        lines += [(_AT_LEAST, 0, 1, _X32_BIT), _error(errno.ENOSYS)]
    for each in refused:
        if each is not None:
            lines += [(_EQUAL, 0, 1, each), _error(errno.EPERM)]
    if not own_processes:
        for numbers in ITSELF_ALONE.values():
            lines += _if_call(numbers[index], [*_unless_equal((0,)), _error(errno.EPERM)])
    # Without clone3 the C library falls back on clone, whose flags can be looked at.
    lines += [(_EQUAL, 0, 1, CLONE3[index]), _error(errno.ENOSYS)]
    lines += _if_call(CLONE[index], [(_ANY_BIT, 0, 1, _NEW_NAMESPACES), _error(errno.EPERM)])
    allowed_families = (_AF_UNIX,) if own_tree else ()
    lines += _if_call(SOCKET[index], [*_unless_equal(allowed_families), _error(errno.EACCES)])
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *line) for line in lines)


_Line = tuple[int, int, int, int]


def _error(code: int) -> _Line:
    return (_RETURN, 0, 0, _ERRNO | code)


def _unless_equal(values: Iterable[int]) -> list[_Line]:
    return [line for value in values for line in ((_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW))]


def _if_call(call: int, lines: Sequence[_Line]) -> list[_Line]:
    """Lines about a call's first argument, for that call alone; it is allowed where they do not return."""
    block = [(_LOAD, 0, 0, _FIRST_ARGUMENT_AT), *lines, (_RETURN, 0, 0, _ALLOW)]
    return [(_EQUAL, 0, len(block), call), *block]
