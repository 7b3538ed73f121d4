# Asked only where something has to be fetched, since a run needs no network. tools/bootstrap.sh, whose environment
# begins empty whatever this Python has, says so by CUDADENT42_FETCHES.
v_index=${PIP_INDEX_URL:-https://pypi.org/simple/}
# Without the name and password that it may hold: they are neither shown nor put on a command line.
address=${v_index#*://}
host=${address%%/*}
v_index=${v_index%"$address"}${host##*@}${address#"$host"}
if [ -z "${CUDADENT42_FETCHES:-}" ] && [ "$status_packages" = ok ] && [ "$status_torch" = ok ]; then
    skip 'nothing has to be fetched'
elif [ -n "$python" ]; then
    if v_reason=$("$python" - "$v_index" 2>&1 <<'PYTHON_END'
import http.client
import sys
import urllib.error
import urllib.request

try:
    # Whether it lets anybody in is not asked: a refusal is an answer.
    urllib.request.urlopen(sys.argv[1].rstrip("/") + "/pip/", timeout=10).close()
except urllib.error.HTTPError:
    pass  # it answers
except (OSError, ValueError, http.client.HTTPException) as error:
    print(getattr(error, "reason", error))
    sys.exit(1)
PYTHON_END
    ); then
        detail="$v_index answers"
    else
        detail="$v_index does not answer"
        problem=unreachable
    fi
elif command -v curl >/dev/null 2>&1; then
    if v_reason=$(curl -sS -o /dev/null --max-time 10 "$v_index" 2>&1); then
        detail="$v_index answers"
    else
        detail="$v_index does not answer"
        problem=unreachable
    fi
else
    skip 'neither Python nor curl to ask with'
fi
