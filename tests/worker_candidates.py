"""Plug-ins of which most do something wrong to the worker that calls them."""

CANDIDATES = """
import ctypes, json, os, time
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

def says_that_it_hangs():
    with open(__file__ + ".hang", "w") as file:
        file.write(str(os.getpid()))

def right(q, k, v, *, causal, softmax_scale):
    if q.shape[1] != k.shape[1] or q.shape[2] != k.shape[2]:
        raise NotImplementedError("equal shapes only")
    print("a candidate may print", flush=True)
    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale)

def segfault(q, k, v, *, causal, softmax_scale):
    if q.shape[2] == 64:
        ctypes.string_at(0)
    return right(q, k, v, causal=causal, softmax_scale=softmax_scale)

def always_aborts(q, k, v, *, causal, softmax_scale):
    os.write(2, b"double free or corruption\\n")
    os.abort()

def hangs_always(q, k, v, *, causal, softmax_scale):
    says_that_it_hangs()
    time.sleep(600)

def prints(q, k, v, *, causal, softmax_scale):
    for _ in range(16):
        os.write(1, b"x" * 999_999 + b"\\n")
    if q.shape[2] == 64:
        os._exit(9)
    return right(q, k, v, causal=causal, softmax_scale=softmax_scale)

def leaves_a_daemon(q, k, v, *, causal, softmax_scale):
    pids = __file__ + ".daemon"
    if not os.path.exists(pids):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                with open(pids + ".new", "w") as file:
                    file.write(f"{os.getpid()}\\n")
                os.rename(pids + ".new", pids)
                if os.path.exists(__file__ + ".anonymous"):
                    os.execve("/bin/sleep", ["sleep", "600"], {})
                time.sleep(600)
            os._exit(0)
        while not os.path.exists(pids):
            time.sleep(0.01)
    if q.shape[2] == 80 and os.path.exists(__file__ + ".die"):
        os._exit(9)
    return right(q, k, v, causal=causal, softmax_scale=softmax_scale)

def says_that_it_is_there():
    open(__file__ + ".there", "w").close()

def sleeps(q, k, v, *, causal, softmax_scale):
    says_that_it_is_there()
    time.sleep(600)

def holds_the_lock(q, k, v, *, causal, softmax_scale):
    says_that_it_is_there()
    ctypes.PyDLL(None).sleep(600)

def stops_itself(q, k, v, *, causal, softmax_scale):
    says_that_it_is_there()
    os.kill(os.getpid(), 19)

def forges(code):
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if number > 2 and "pipe" in os.readlink(f"/proc/self/fd/{number}"):
                message = "all is \\x1b[2Jwell " * 100
                event = {"event": "StageFailed", "data": {"message": message, "exit_code": code}}
                os.write(number, json.dumps(event).encode() + b"\\n")
        except OSError:
            pass
    time.sleep(600)

def says_that_it_passed(q, k, v, *, causal, softmax_scale):
    forges(0)

def says_that_it_was_interrupted(q, k, v, *, causal, softmax_scale):
    forges(130)

def says_999(q, k, v, *, causal, softmax_scale):
    forges(999)

def says_that_it_was_used_wrongly(q, k, v, *, causal, softmax_scale):
    forges(2)

def hangs(q, k, v, *, causal, softmax_scale):
    if q.shape[2] == 64:
        says_that_it_hangs()
        time.sleep(600)
    return right(q, k, v, causal=causal, softmax_scale=softmax_scale)

def dies_on_a_sign(q, k, v, *, causal, softmax_scale):
    if q.shape[2] == 64 and os.path.exists(__file__ + ".sign"):
        os._exit(9)
    return right(q, k, v, causal=causal, softmax_scale=softmax_scale)

calls = 0

def dies_later(q, k, v, *, causal, softmax_scale):
    global calls
    calls += q.shape[2] == 64
    if calls > 40:
        os._exit(9)
    return right(q, k, v, causal=causal, softmax_scale=softmax_scale)

def turns_wrong(q, k, v, *, causal, softmax_scale):
    global calls
    calls += q.shape[2] == 64
    result = right(q, k, v, causal=causal, softmax_scale=softmax_scale)
    return result * (1.5 if calls > 40 else 1.0)
"""

GPU_CANDIDATES = (
    CANDIDATES
    + """
def faults(q, k, v, *, causal, softmax_scale):
    if q.shape[2] == 64:
        return q.view(-1)[torch.tensor([1 << 40], device=q.device)].expand_as(q)
    return right(q, k, v, causal=causal, softmax_scale=softmax_scale)

def spins(q, k, v, *, causal, softmax_scale):
    if q.shape[2] == 64:
        for _ in range(1000):
            torch.cuda._sleep(1 << 31)
    return right(q, k, v, causal=causal, softmax_scale=softmax_scale)

for each in list(globals().values()):
    if callable(each) and getattr(each, "__module__", "") == __name__:
        each.peer_of = "PyTorch"
"""
)
