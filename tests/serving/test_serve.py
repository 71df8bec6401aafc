"""`lorajax serve` as a process: both front ends, a drain that lets requests end, and its mistakes."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading

import httpx
import pytest
from golden_files import TINY_LLAMA, adapters_of

from serving.cli import main
from serving.rpc import lorajax_pb2 as pb
from serving.rpc.client import RpcClient
from serving.sampling_params import SamplingParams

ADAPTER = adapters_of(TINY_LLAMA)["attn_r8"]
FLAGS = (
    "--no-warmup --num-pages 160 --max-num-seqs 8 --max-num-batched-tokens 64 --compilation-cache-dir none"
)
LONG = SamplingParams(temperature=0, max_tokens=480, ignore_eos=True)


@contextlib.contextmanager
def serve(*flags, environment=None):
    """The process, and its ports by name."""
    command = [sys.executable, "-m", "serving.cli", "serve", str(TINY_LLAMA), *FLAGS.split(), *flags]
    process = subprocess.Popen(
        [*command, "--lora-modules", f"attn_r8={ADAPTER}"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=TINY_LLAMA.parents[3],
        env={**os.environ, **(environment or {})},
    )
    watchdog = threading.Timer(120, process.kill)
    watchdog.start()
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("lorajax: serving"):
                break
        ports = dict(re.findall(r"(gRPC|HTTP) on 127.0.0.1:(\d+)", lines[-1] if lines else ""))
        assert ports, lines
        yield process, ports
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        process.stderr.close()


def test_both_front_ends_and_a_drain():
    with serve("--grpc-port", "0", "--http-port", "0", environment={"LORAJAX_API_KEY": "k"}) as (
        process,
        ports,
    ):
        url = f"http://127.0.0.1:{ports['HTTP']}"
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/v1/models").status_code == 401
        models = httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer k"}).json()["data"]
        assert [model["id"] for model in models] == [TINY_LLAMA.name, "attn_r8"]
        with RpcClient(f"127.0.0.1:{ports['gRPC']}", token="k", timeout=60) as client:
            stream = client.stream([5, 6], LONG, adapter="attn_r8")
            next(stream)
            process.send_signal(signal.SIGTERM)
            *_, last = stream
            assert last.completions[0].finish_reason == pb.FINISH_REASON_LENGTH
        assert process.wait(timeout=20) == 0
        assert "draining" in process.stderr.read()


def test_a_second_signal_cuts_http_answers_off():
    with serve("--http-port", "0", "--drain-seconds", "100") as (process, ports):
        url = f"http://127.0.0.1:{ports['HTTP']}/v1/completions"
        body = {"model": TINY_LLAMA.name, "prompt": "a", "max_tokens": 500, "n": 64, "ignore_eos": True}
        with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert "draining" in process.stderr.readline()
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 0


def test_a_second_signal_ends_the_wait():
    with (
        serve("--grpc-port", "0", "--drain-seconds", "100") as (process, ports),
        RpcClient(f"127.0.0.1:{ports['gRPC']}", timeout=60) as client,
    ):
        events = client.stream([5, 6], SamplingParams(max_tokens=None, n=64, ignore_eos=True))
        next(events)
        process.send_signal(signal.SIGINT)
        assert "draining" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lora-modules", "nonsense"], "--lora-modules is 'nonsense'"),
        (["--adapter-root", "/no/such/folder"], "not a folder"),
        (["--certificate", "x.pem", "--grpc-port", "0", *FLAGS.split()], "certificate and key"),
        (
            ["--certificate", "x.pem", "--key", "y.pem", "--grpc-port", "0", *FLAGS.split()],
            "readable PEM files",
        ),
        (["--http-port", "70000", *FLAGS.split()], "0 to 65535"),
    ],
)
def test_mistakes_are_one_line(flags, words, capsys):
    assert main(["serve", str(TINY_LLAMA), *flags]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lorajax:")]
    assert words in line
