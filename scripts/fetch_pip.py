"""Fetch pip's newest wheel into a folder, with nothing but Python, and print its path: fetch_pip.py FOLDER

For a Python without pip and ensurepip. A wheel of pip can be run as it is: ``python pip-x.whl/pip install ...``.
$PIP_INDEX_URL is honoured. Reference: the simple repository API as HTML, which every index serves (PEP 503).
"""

import base64
import hashlib
import html.parser
import os
import re
import sys
import urllib.parse
import urllib.request

TIMEOUT_S = 30
WHEEL = re.compile(r"pip-(\d+(?:\.\d+)*)-py3-none-any\.whl")  # no pre-releases


class Page(html.parser.HTMLParser):
    """The wheels of one project: (version, address with the digest as its fragment)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[list[int], str]] = []

    def handle_starttag(self, tag: str, attrs: "list[tuple[str, str | None]]") -> None:
        values = dict(attrs)
        address = values.get("href") or ""
        name = WHEEL.fullmatch(urllib.parse.urlsplit(address).path.rpartition("/")[2])
        if (
            tag == "a"
            and name
            and "data-yanked" not in values
            and runs_here(values.get("data-requires-python") or "")
        ):
            self.found.append(([int(part) for part in name[1].split(".")], address))


def runs_here(requires: str) -> bool:
    """pip's own requirements are lower bounds, ``>=3.9``."""
    bound = re.search(r">=\s*(\d+)\.(\d+)", requires)
    return bound is None or sys.version_info >= (int(bound[1]), int(bound[2]))


def newest(address: str) -> "tuple[str, str]":
    """Address and SHA-256 of the newest pip that runs on this Python."""
    page = Page()
    page.feed(read(address).decode())
    if not page.found:
        raise LookupError(f"it offers no pip for Python {sys.version_info[0]}.{sys.version_info[1]}")
    target, fragment = urllib.parse.urldefrag(urllib.parse.urljoin(address, max(page.found)[1]))
    algorithm, _, digest = fragment.partition("=")
    if algorithm != "sha256":
        raise LookupError(f"it gives no SHA-256 for {target}")
    return target, digest


def read(address: str) -> bytes:
    request = urllib.request.Request(address)
    if LOGIN and urllib.parse.urlsplit(address)[:2] == urllib.parse.urlsplit(INDEX)[:2]:
        # Not where it redirects to, nor where its links lead.
        request.add_unredirected_header("Authorization", "Basic " + LOGIN)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        content: bytes = answer.read()
    return content


def split_login(address: str) -> "tuple[str, str]":
    """An index's address without the name and password that it may hold, and those as HTTP's basic login has them."""
    scheme, separator, rest = address.partition("://")
    host, slash, path = rest.partition("/")
    login, _, host = host.rpartition("@")
    name, _, password = login.partition(":")
    words = f"{urllib.parse.unquote(name)}:{urllib.parse.unquote(password)}" if login else ""
    return scheme + separator + host + slash + path, base64.b64encode(words.encode()).decode()


INDEX, LOGIN = split_login(os.environ.get("PIP_INDEX_URL") or "https://pypi.org/simple/")  # pip's own default


def main() -> int:
    page = INDEX.rstrip("/") + "/pip/"
    try:
        address, expected = newest(page)
        content = read(address)
    except (OSError, ValueError, LookupError) as error:
        print(f"error: pip cannot be fetched from {page}: {error}", file=sys.stderr)
        return 1
    if hashlib.sha256(content).hexdigest() != expected:
        print(f"error: {address} is not what {page} says it is (SHA-256 differs)", file=sys.stderr)
        return 1
    path = os.path.join(sys.argv[1], os.path.basename(urllib.parse.urlsplit(address).path))
    with open(path, "wb") as file:
        file.write(content)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
