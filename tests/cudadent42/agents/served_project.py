"""The files of the project that the tests of the server work in."""

SUITE = """
name = "agents"
dtypes = ["fp32"]
repeats = 8
warmup = 1
timer = "cpu"
case = [{ name = "small", batch = 1, num_heads = 2, seqlen = 64, head_dim = 32 }]
"""
MINE = """
from flashmoe_science import flash_attention


def attention(query, key, value, *, causal, softmax_scale):
    return flash_attention(query, key, value, causal=causal, softmax_scale=softmax_scale)
"""
WITHOUT_END = """
import os, pathlib, subprocess, sys, time

other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
written = pathlib.Path(__file__).with_name("processes.tmp")
written.write_text(f"{os.getpid()} {other.pid}")
written.rename(written.with_name("processes"))
while True:
    time.sleep(1)
"""
"""It never comes to an end, and starts a process in a session of its own."""
