#!/usr/bin/env python3
"""Prints the quickstart's table from the reports that its steps left.

    table.py FOLDER     with plain.json, register.json, engine.json, stub_engine.json, shared.json, killed.json

Every figure is of this run. Nothing is judged: machines differ.
"""

import json
import pathlib
import sys


def milliseconds(seconds):
    return f"{seconds * 1000:,.1f} ms"


def mebibytes(size):
    return f"{size / 2**20:,.1f} MiB"


def main():
    folder = pathlib.Path(sys.argv[1])
    plain, register, engine, stub, shared, killed = (
        json.loads((folder / f"{name}.json").read_text().splitlines()[0])
        for name in ("plain", "register", "engine", "stub_engine", "shared", "killed"))

    def both(figure):
        return f"{milliseconds(figure(engine))} / {milliseconds(figure(stub))}"

    rows = [
        ("the model", f"{engine['tensors']} tensors, {mebibytes(engine['bytes'])}"),
        ("plain load, Python's safetensors, fresh process", milliseconds(plain["load_seconds"])),
        ("  with the import of the library", milliseconds(plain["import_seconds"] + plain["load_seconds"])),
        ("load by the service, once", milliseconds(register["load_seconds"])),
        ("attach: engine / stub_engine", both(lambda report: report["attach_seconds"])),
        ("attach and touch every page: engine / stub_engine",
         both(lambda report: report["attach_seconds"] + report["first_touch_seconds"])),
        ("mapped by the two engines, counted for each (Rss)", mebibytes(shared["rss_bytes"])),
        ("in memory for both, each page counted once (Pss)", mebibytes(shared["pss_bytes"])),
        ("shared, thus saved", mebibytes(shared["rss_bytes"] - shared["pss_bytes"])),
        ("broker killed (SIGKILL) while both read: alive", f"{killed['engines_alive']} of {killed['engines']} engines"),
        ("  until a new process was answered by the next", milliseconds(killed["serving_seconds"])),
        ("  a third engine's attach", milliseconds(killed["third_attach_seconds"])),
        ("  checkpoint bytes read by the next broker", f"{killed['checkpoint_bytes']}"),
    ]
    width = max(len(name) for name, _ in rows)
    print("-" * (width + 24))
    for name, value in rows:
        print(f"{name:<{width}}  {value:>22}")
    print("-" * (width + 24))


if __name__ == "__main__":
    main()
