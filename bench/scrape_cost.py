#!/usr/bin/env python3
"""What a scrape of the metrics costs, and what it does to calls, with many weight sets and leases.

    bench/scrape_cost.py BIN_DIR [--sets 100] [--leases 64] [--scrapes 500] [--blocks 20] [--json FILE]

Needs a Python that has grpcio. Scrapes are timed one after the other. Then unary calls are made in blocks of two seconds,
alternately with nobody scraping and with a scrape each second, which is fifteen times as often as usual: what counts is
the ratio of the two blocks' medians, in pairs.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

import grpc

SOURCE = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(SOURCE / "tests/integration/cli"))
import checkpoints  # noqa: E402
from service import Service  # noqa: E402

METHODS = {"Check": "/grpc.health.v1.Health/Check", "Health": "/weightbroker.v1.WeightBrokerService/Health"}
BLOCK_SECONDS = 2


def percentile(values, part):
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


def scrape(port):
    started = time.perf_counter()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        text = response.read()
    return time.perf_counter() - started, len(text), text.count(b"\n") - text.count(b"\n#") - 1


class Scraper:
    """Scrapes each second, in a process of its own so that it takes no time of the caller's interpreter."""

    CODE = ("import sys, time, urllib.request\n"
            "while True:\n"
            "    urllib.request.urlopen(sys.argv[1]).read()\n"
            "    time.sleep(1)\n")

    def __init__(self, port):
        self._process = subprocess.Popen([sys.executable, "-c", self.CODE, f"http://127.0.0.1:{port}/metrics"])

    def __enter__(self):
        time.sleep(0.3)
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()


def time_calls(call, seconds):
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        call(b"")
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def measure_effect(call, port, blocks):
    """Medians of pairs of blocks: without and with scrapes. Which of a pair comes first alternates."""
    pairs = []
    for block in range(blocks):
        medians = {}
        for scraped in ((False, True) if block % 2 == 0 else (True, False)):
            if scraped:
                with Scraper(port):
                    medians[scraped] = time_calls(call, BLOCK_SECONDS)
            else:
                medians[scraped] = time_calls(call, BLOCK_SECONDS)
        pairs.append((medians[False], medians[True]))
    return pairs


def start_engines(service, count):
    engines = [subprocess.Popen([service.bin_dir / "engine", "--socket", service.socket, "--model", "models:m0", "--torch_version",
                                 "any", "--fallback", "fail", "--hold_seconds", "3600"], stdout=subprocess.DEVNULL)
               for _ in range(count)]
    while json.loads(service.run("weightbroker", "health", "--json").stdout)["lease_count"] < count:
        time.sleep(0.2)
    return engines


def measure(service, arguments):
    for index in range(arguments.sets):
        run = service.run("weightbroker", "register", f"models:m{index}", "--torch_version", "any")
        assert run.returncode == 0, run.stderr
    engines = start_engines(service, arguments.leases)
    try:
        scrapes = [scrape(service.metrics_port) for _ in range(arguments.scrapes)]
        result = {
            "machine": {"cores": os.cpu_count(), "kernel": os.uname().release}, "sets": arguments.sets, "leases": arguments.leases,
            "scrape": {"bytes": scrapes[-1][1], "samples": scrapes[-1][2],
                       "p50_ms": percentile([each[0] for each in scrapes], 0.5) * 1e3,
                       "p99_ms": percentile([each[0] for each in scrapes], 0.99) * 1e3,
                       "seconds": [each[0] for each in scrapes]},
            "calls": {}}
        with grpc.insecure_channel(f"unix:{service.socket}", options=[("grpc.max_receive_message_length", 64 << 20)]) as channel:
            for name, method in METHODS.items():
                pairs = measure_effect(channel.unary_unary(method), service.metrics_port, arguments.blocks)
                result["calls"][name] = {
                    "p50_us": statistics.median(pair[0] for pair in pairs) * 1e6,
                    "p50_us_scraped": statistics.median(pair[1] for pair in pairs) * 1e6,
                    "ratio": statistics.median(pair[1] / pair[0] for pair in pairs), "pairs_seconds": pairs}
        return result
    finally:
        for engine in engines:
            engine.kill()
        for engine in engines:
            engine.wait()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin_dir")
    parser.add_argument("--sets", type=int, default=100)
    parser.add_argument("--leases", type=int, default=64)
    parser.add_argument("--scrapes", type=int, default=500)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as models:
        for index in range(arguments.sets):
            checkpoints.write_checkpoint(pathlib.Path(models) / f"m{index}", {"model_type": "llama"}, checkpoints.plain_tensors())
        with Service(arguments.bin_dir, {"models": models}) as service:
            result = measure(service, arguments)
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")
    taken = result["scrape"]
    print(f"{arguments.sets} sets, {arguments.leases} leases: a scrape has {taken['samples']} samples, {taken['bytes']} bytes; "
          f"p50 {taken['p50_ms']:.2f} ms, p99 {taken['p99_ms']:.2f} ms")
    for name, call in result["calls"].items():
        print(f"{name}: p50 {call['p50_us']:.0f} us, with a scrape each second {call['p50_us_scraped']:.0f} us, "
              f"ratio of pairs {call['ratio']:.3f}")


if __name__ == "__main__":
    main()
