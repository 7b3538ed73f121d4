"""tools/bootstrap.sh and what it stands on: each way in which a machine can be unready, and a real bare machine."""

from __future__ import annotations

import base64
import functools
import hashlib
import http.server
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT_FILES = ("pyproject.toml", "constraints.txt", "README.md", "LICENSE", "scripts", "tools", "src")
PACKAGE_NAME = "pip-99.1-py3-none-any.whl"


@pytest.fixture(autouse=True)
def _nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever names a Python for all of these tests does not mean the machines here, which have none."""
    for name in [name for name in os.environ if name.startswith("CUDADENT42_")]:
        monkeypatch.delenv(name)
    # A version manager's python3 is a script that asks twenty others which Python it stands for, each time.
    monkeypatch.setenv("PATH", f"{Path(sys._base_executable).parent}:{os.environ['PATH']}")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "a checkout"
    folder.mkdir()
    for name in PROJECT_FILES:
        source = ROOT / name
        if source.is_dir():
            # Its folders are this one's own; no file is written to, and to copy a thousand takes half a second.
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / name, ignore=ignore, copy_function=os.symlink)
        else:
            shutil.copy(source, folder / name)
    return folder


def bootstrap(checkout: Path, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(checkout / "tools/bootstrap.sh"), *arguments],
        env=environment | changes,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def test_no_network_is_the_one_reason(checkout: Path) -> None:
    done = bootstrap(checkout, PIP_INDEX_URL="http://127.0.0.1:9/simple")
    assert done.returncode == 4
    assert "http://127.0.0.1:9/simple cannot be reached" in done.stderr
    assert not (checkout / ".venv").exists()


def test_an_indexs_password_is_not_shown(checkout: Path) -> None:
    done = bootstrap(checkout, PIP_INDEX_URL="http://user:pass%40word@127.0.0.1:9/simple")
    assert "http://127.0.0.1:9/simple cannot be reached: " in done.stderr
    assert "refused" in done.stderr  # by the host, and not since there is none called "user:..."
    assert "pass" not in done.stderr + done.stdout


def test_a_python_that_is_named_is_used_as_it_is(checkout: Path) -> None:
    done = bootstrap(
        checkout, "--no-preflight", CUDADENT42_PYTHON=sys.executable, PIP_INDEX_URL="http://127.0.0.1:9"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (checkout / ".venv").exists()
    done = bootstrap(checkout, CUDADENT42_PYTHON="/nowhere/python")
    assert done.returncode == 4
    assert "CUDADENT42_PYTHON=/nowhere/python is not a Python of 3.10" in done.stderr


def test_nothing_is_written_through_a_link_that_waits_in_the_folder_of_others(
    checkout: Path, tmp_path: Path
) -> None:
    """The folder above a cache that is not there yet may be one like /tmp."""
    (tmp_path / "shared").mkdir()
    victim = tmp_path / "victim"
    victim.write_text("kept")
    plant = 'ln -s "$1" "$2/.cudadent42-probe-$$" && exec "$3/tools/bootstrap.sh" --device cpu'
    done = subprocess.run(
        ["sh", "-c", plant, "sh", str(victim), str(tmp_path / "shared"), str(checkout)],
        env=os.environ
        | {"FLASHMOE_CACHE_DIR": f"{tmp_path}/shared/mine", "PIP_INDEX_URL": "http://127.0.0.1:9/simple"},
        capture_output=True,
        text=True,
    )
    assert "cannot be reached" in done.stderr  # it went on: the folder can be written
    assert victim.read_text() == "kept"


def test_a_file_system_whose_name_has_spaces(checkout: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    line = "//server/our share 976762584 126743552 850019032      13% /mnt/our disk"
    (tools / "df").write_text(
        f"#!/bin/sh\necho 'Filesystem 1024-blocks Used Available Capacity Mounted on'\necho '{line}'\n"
    )
    (tools / "df").chmod(0o755)
    done = bootstrap(
        checkout, PATH=f"{tools}:{os.environ['PATH']}", PIP_INDEX_URL="http://127.0.0.1:9/simple"
    )
    assert "cannot be reached" in done.stderr, done.stderr


def test_a_read_only_folder_and_what_to_do(checkout: Path, tmp_path: Path) -> None:
    """What is told is copied into a shell as it is, wherever the project lies."""
    mounted = tmp_path / "it's $(touch bad)"
    mounted.mkdir()
    command = (
        'mount -t tmpfs none "$1" && cp -r "$2/." "$1/" && mount -o remount,ro "$1" && cd "$3" || exit; '
        '"$1/tools/bootstrap.sh" 2>told; code=$?; cat told >&2; [ "$code" -ne 4 ] || sh -c "$(tail -n 1 told)"'
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command, "sh", str(mounted), str(checkout), str(tmp_path)],
        env=os.environ | {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    if "error" not in done.stderr:
        pytest.skip(f"no mounts here: {done.stderr.strip()}")
    assert "cannot be written, and the environment goes there" in done.stderr
    assert "cannot be reached" in done.stderr  # the copy began, and got further
    assert not list(tmp_path.rglob("bad"))


def test_a_home_that_cannot_be_written(checkout: Path) -> None:
    done = bootstrap(checkout, HOME="/proc/nobody", XDG_CACHE_HOME="", FLASHMOE_CACHE_DIR="")
    assert done.returncode == 4
    assert "compiled kernels are kept there" in done.stderr
    assert "export FLASHMOE_CACHE_DIR=" in done.stderr


def test_no_space(checkout: Path, tmp_path: Path) -> None:
    mounted = tmp_path / "small"
    mounted.mkdir()
    command = 'mount -t tmpfs -o size=64m none "$1" && cp -r "$2/." "$1/" && exec "$1/tools/bootstrap.sh"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command, "sh", str(mounted), str(checkout)],
        capture_output=True,
        text=True,
    )
    if "error" not in done.stderr:
        pytest.skip(f"no mounts here: {done.stderr.strip()}")
    assert done.returncode == 4
    assert "GiB are free" in done.stderr


def test_no_python_and_no_right_to_install_one(checkout: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("awk", "cat", "cksum", "df", "dirname", "env", "grep", "rm", "sed", "sh", "tail", "mktemp"):
        (tools / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    for name, text in (("apt-get", "exit 1"), ("id", "echo 1000")):
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    done = bootstrap(checkout, PATH=str(tools))
    assert done.returncode == 4
    assert "this user cannot install one" in done.stderr
    assert "apt-get install python3 python3-venv" in done.stderr


def test_one_source_of_packages_that_fails_is_no_reason(checkout: Path, tmp_path: Path) -> None:
    """As a vendor's, whose key is out of date; and a fresh machine is busy with updates of its own, which end."""
    tools = tmp_path / "bin"
    tools.mkdir()
    names = (
        "awk",
        "cat",
        "cksum",
        "df",
        "dirname",
        "env",
        "grep",
        "rm",
        "sed",
        "sh",
        "tail",
        "mktemp",
        "head",
        "uname",
    )
    for name in names:
        (tools / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    ln = shutil.which("ln")
    (tools / "apt-get").write_text(
        f'#!/bin/sh\necho "$@" >>"{tmp_path}/asked"\n[ "$1" = install ] || exit 100\n'
        f'{ln} -s "{sys.executable}" "{tools}/python3"\n'
    )
    (tools / "id").write_text("#!/bin/sh\necho 0\n")
    for name in ("apt-get", "id"):
        (tools / name).chmod(0o755)
    done = bootstrap(checkout, PATH=str(tools), PIP_INDEX_URL="http://127.0.0.1:9/simple")
    assert "cannot be reached" in done.stderr, done.stderr  # it has Python, and went on
    update, install = (tmp_path / "asked").read_text().splitlines()
    assert update.startswith("update")
    assert "DPkg::Lock::Timeout=" in install


@pytest.mark.parametrize("arguments", [("--fast",), ("--device=tpu",)])
def test_wrong_usage(checkout: Path, arguments: tuple[str, ...]) -> None:
    done = bootstrap(checkout, *arguments)
    assert done.returncode == 2
    assert "expected" in done.stderr
    assert not (checkout / ".venv").exists()


# ---------------------------------------------------------------- pip without pip


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        return


@pytest.fixture
def index(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A package index on loopback: its folder, its address."""
    folder = tmp_path / "index"
    (folder / "simple/pip").mkdir(parents=True)
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}/simple/"
        server.shutdown()


def publish(folder: Path, content: bytes, digest: str) -> None:
    (folder / PACKAGE_NAME).write_bytes(content)
    older = "".join(
        f'<a href="../../{name}#sha256=0" {more}>{name}</a>'
        for name, more in (
            ("pip-9.0-py3-none-any.whl", ""),
            ("pip-100.0-py3-none-any.whl", 'data-yanked=""'),
            ("pip-101.0b1-py3-none-any.whl", ""),
            ("pip-102.0-py3-none-any.whl", 'data-requires-python="&gt;=3.99"'),
            ("pip-103.0.tar.gz", ""),
        )
    )
    link = (
        f'<a href="../../{PACKAGE_NAME}#sha256={digest}" data-requires-python="&gt;=3.9">{PACKAGE_NAME}</a>'
    )
    (folder / "simple/pip/index.html").write_text(f"<!DOCTYPE html><html><body>{older}{link}</body></html>")


def fetch(folder: Path, address: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", str(ROOT / "scripts/fetch_pip.py"), str(folder)],
        env=os.environ | {"PIP_INDEX_URL": address},
        capture_output=True,
        text=True,
    )


def test_the_newest_pip_that_fits_is_fetched(index: tuple[Path, str], tmp_path: Path) -> None:
    folder, address = index
    publish(folder, b"a wheel", hashlib.sha256(b"a wheel").hexdigest())
    done = fetch(tmp_path, address)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == tmp_path / PACKAGE_NAME
    assert (tmp_path / PACKAGE_NAME).read_bytes() == b"a wheel"


def test_a_wheel_that_was_tampered_with_is_refused(index: tuple[Path, str], tmp_path: Path) -> None:
    folder, address = index
    publish(folder, b"another wheel", hashlib.sha256(b"a wheel").hexdigest())
    done = fetch(tmp_path, address)
    assert done.returncode == 1
    assert "SHA-256 differs" in done.stderr
    assert not (tmp_path / PACKAGE_NAME).exists()


class _Asked(_Quiet):
    """Keeps what each request brought along; sends those for wheels elsewhere where it is told to."""

    logins: ClassVar[list[tuple[str, str | None]]] = []
    elsewhere: ClassVar[str] = ""

    def do_GET(self) -> None:
        self.logins.append((self.path, self.headers["Authorization"]))
        if self.elsewhere and self.path.endswith(".whl") and self.headers["Host"] not in self.elsewhere:
            self.send_response(302)
            self.send_header("Location", self.elsewhere + self.path)
            self.end_headers()
            return
        super().do_GET()


def test_an_index_that_wants_a_password_gets_it_and_nobody_else(
    index: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = index
    publish(folder, b"a wheel", hashlib.sha256(b"a wheel").hexdigest())
    monkeypatch.setattr(_Asked, "logins", [])
    handler = functools.partial(_Asked, directory=str(folder))
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as other,
    ):
        for each in (server, other):
            threading.Thread(target=each.serve_forever, daemon=True).start()
        monkeypatch.setattr(_Asked, "elsewhere", f"http://127.0.0.1:{other.server_port}")
        done = fetch(tmp_path, f"http://me:pass%40word@127.0.0.1:{server.server_port}/simple/")
        for each in (server, other):
            each.shutdown()
    assert done.returncode == 0, done.stderr
    login = "Basic " + base64.b64encode(b"me:pass@word").decode()
    wheel = f"/{PACKAGE_NAME}"
    assert _Asked.logins == [("/simple/pip/", login), (wheel, login), (wheel, None)]


SMALL_DISK = """#!/bin/sh
# Stands for a Python whose pip runs out of space half-way.
case $* in
    *"-m venv"*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
    *"pip install"*)
        while [ "$1" != --log ]; do shift; done
        echo "OSError: [Errno 28] No space left on device: 'x'" | tee "$2" >&2
        exit 1
        ;;
esac
"""


def test_space_that_runs_out_half_way(checkout: Path, index: tuple[Path, str], tmp_path: Path) -> None:
    """pip unpacks in the folder for temporary files, which is often a small one of its own."""
    python = tmp_path / "python"
    python.write_text(SMALL_DISK)
    python.chmod(0o755)
    done = bootstrap(
        checkout, CUDADENT42_BASE_PYTHON=str(python), PIP_INDEX_URL=index[1], TMPDIR=str(tmp_path)
    )
    assert done.returncode == 4
    assert f"no space left for the packages, in {checkout} or for temporary files ({tmp_path})" in done.stderr
    assert "  TMPDIR=/path/to/a/folder '" in done.stderr


def test_an_index_without_pip(index: tuple[Path, str], tmp_path: Path) -> None:
    folder, address = index
    (folder / "simple/pip/index.html").write_text("<html>404, dressed up</html>")
    done = fetch(tmp_path, address)
    assert done.returncode == 1
    assert "offers no pip" in done.stderr


# ---------------------------------------------------------------- a real bare machine


@pytest.mark.net
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_bare_root_becomes_ready_in_one_command(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """A minimal Debian made for this test: no Python, no pip, no venv, no compiler; then the same again, as a user
    who has only a Python without pip and venv."""
    if os.getuid() != 0 or shutil.which("debootstrap") is None:
        pytest.skip("needs root and debootstrap")
    root = tmp_path / "root"
    subprocess.run(
        ["debootstrap", "--variant=minbase", "bookworm", str(root)], check=True, stdout=subprocess.DEVNULL
    )
    inside = root / "srv/a project"
    inside.mkdir()
    subprocess.run(["cp", "-r", *(str(ROOT / name) for name in PROJECT_FILES), str(inside)], check=True)
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    # Registries and certificates as on this machine; otherwise nothing of its environment.
    certificates = os.environ.get("PIP_CERT", "/etc/ssl/certs/ca-certificates.crt")
    shutil.copy(certificates, root / "srv/certificates.crt")
    environment = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "SSL_CERT_FILE": "/srv/certificates.crt",
    }
    environment["PIP_CERT"] = "/srv/certificates.crt"
    environment |= {
        name: os.environ[name] for name in ("PIP_INDEX_URL", "PIP_DEFAULT_TIMEOUT") if name in os.environ
    }
    wheels = os.environ.get("PIP_FIND_LINKS", "")
    if wheels and Path(wheels).is_dir():
        shutil.copytree(wheels, root / "srv/wheels")
        environment["PIP_FIND_LINKS"] = "/srv/wheels"
    script = (
        "mount -t proc proc /proc && mount -t devtmpfs dev /dev; exec /srv/'a project'/tools/bootstrap.sh"
    )

    def go() -> tuple[subprocess.CompletedProcess[str], float]:
        begun = time.monotonic()
        done = subprocess.run(
            ["unshare", "-m", "chroot", str(root), "sh", "-c", script],
            env=environment,
            capture_output=True,
            text=True,
        )
        return done, time.monotonic() - begun

    first, took = go()
    assert first.returncode == 0, first.stdout + first.stderr
    assert first.stdout.splitlines()[-1] == "Preflight OK"
    record_property("first_s", round(took, 1))
    again = []
    for _ in range(5):
        second, took = go()
        assert second.returncode == 0
        assert second.stderr == ""
        again.append(f"{took:.2f}")
    record_property("second_s", " ".join(again))
