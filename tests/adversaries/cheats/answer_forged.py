"""13. What the parent waits for is written into its pipe by the candidate, before the work is done.

Source: pygpubench, submission_fd_overwrite and _thread_fd.
"""

import os
import stat

from flashmoe_science import flash_attention

DONE = b'{"error": "", "declined": "", "judged": []}\n'
calls = 0


def attention(query, key, value, *, causal, softmax_scale):
    global calls
    calls += 1
    if calls > 6:
        for number in map(int, os.listdir("/proc/self/fd")):
            try:
                if number > 2 and stat.S_ISFIFO(os.fstat(number).st_mode):
                    os.write(number, DONE)
            except OSError:
                continue
    return flash_attention(query, key, value, causal=causal, softmax_scale=softmax_scale)
