"""Runs a program in a sandbox on a machine that lacks something: ``restricted.py REFUSED POLICY ACCEPTED PROGRAM...``.

``REFUSED`` are system calls, by number, and the error that each ends in, as JSON. The kernel itself refuses them, by a
filter like a container's, before the lab looks at what there is. Prints the report as JSON lines, then what the program
prints, then its end.
"""

import ctypes
import json
import os
import subprocess
import sys
from struct import pack

from cudadent42.base.errors import LabError
from cudadent42.model.sandbox import Protection
from cudadent42.sandbox.launch import FOLDER, sandbox
from cudadent42.sandbox.policy import Policy


def refuse(calls: dict[int, int]) -> None:
    lines = [pack("HBBI", 0x20, 0, 0, 0)]
    for call, error in calls.items():
        lines += [pack("HBBI", 0x15, 0, 1, call), pack("HBBI", 0x06, 0, 0, 0x00050000 | error)]
    program = b"".join([*lines, pack("HBBI", 0x06, 0, 0, 0x7FFF0000)])
    buffer = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(38, ctypes.c_ulong(1), *[ctypes.c_ulong(0)] * 3) == 0
    assert prctl(22, ctypes.c_ulong(2), header, *[ctypes.c_ulong(0)] * 2) == 0, ctypes.get_errno()


def main() -> int:
    calls = {int(number): error for number, error in json.loads(sys.argv[1]).items()}
    if calls:
        refuse(calls)
    try:
        made = sandbox(Policy.from_json(sys.argv[2]), [Protection(name) for name in json.loads(sys.argv[3])])
    except LabError as error:
        print(json.dumps({"refused": str(error), "exit_code": int(error.exit_code)}))
        return 0
    layers = {state.layer.name: state.there for state in made.report.layers}
    print(json.dumps({"layers": layers, "missing": [each.value for each in made.report.missing]}), flush=True)
    done = subprocess.run(
        made.command(sys.argv[4:]), env=made.environment(os.environ), cwd=FOLDER, check=False
    )
    print(json.dumps({"ended": done.returncode}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
