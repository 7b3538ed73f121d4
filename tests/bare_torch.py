"""Programs whose interpreter has imported torch and nothing else, or what PyTorch's compiler imports besides.

They are forked from one that has, as to import torch is two to three seconds of a processor for each. Unlike those of
`warm_python` they find neither of this repository's packages imported, and nothing of PyTorch's begun: no thread, no
operator, no library that reads its variables at its first call.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path

from warm_python import FreshPopen

SOURCE = Path(__file__).resolve().parents[1] / "src"
COMPILER = "torch.nn.attention.bias"
"""Which imports ``torch._dynamo`` and sympy."""


def run(
    text: str, environment: Mapping[str, str] | None = None, *, compiler: bool = False
) -> subprocess.CompletedProcess[str]:
    """As ``python -c`` of the text with these variables, by default this process's.

    ``compiler``: that has been imported too.
    """
    connection = _servers()[compiler]
    path = {"PYTHONPATH": str(SOURCE)}
    connection.write(
        json.dumps([text, dict(os.environ | path if environment is None else environment)]) + "\n"
    )
    connection.flush()
    code, output, errors = json.loads(connection.readline())
    return subprocess.CompletedProcess(["python", "-c", text], code, output, errors)


@functools.cache
def _servers() -> list[socket.SocketIO]:
    """Without and with the compiler, one forked from the other; they end with this process."""
    pairs = [socket.socketpair() for _ in range(2)]
    theirs = [their.fileno() for _, their in pairs]
    command = [sys.executable, __file__, *map(str, theirs)]
    FreshPopen(
        command, env=os.environ | {"PYTHONPATH": str(SOURCE)}, stdin=subprocess.DEVNULL, pass_fds=theirs
    )
    for _, their in pairs:
        their.close()
    return [own.makefile("rw") for own, _ in pairs]


def _serve(connection: socket.socket, module: str) -> None:
    requests = connection.makefile("rw")
    for line in requests:
        importlib.import_module(module)
        text, environment = json.loads(line)
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            child = os.fork()
            if child == 0:
                for file, target in ((output, 1), (errors, 2)):
                    os.dup2(file.fileno(), target)
                os.environ.clear()
                os.environ.update(environment)
                os._exit(_code_of(text))
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            said = [(file.seek(0), file.read().decode())[1] for file in (output, errors)]
        requests.write(json.dumps([code, *said]) + "\n")
        requests.flush()


def _code_of(text: str) -> int:
    code = 0
    try:
        exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})
    except BaseException:  # noqa: BLE001 - as an interpreter ends
        traceback.print_exc()
        code = 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
    bare, compiling = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    importlib.import_module("torch")
    if os.fork():
        compiling.close()
        _serve(bare, "torch")
    else:
        bare.close()
        _serve(compiling, COMPILER)
