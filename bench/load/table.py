#!/usr/bin/env python3
"""Prints what load_bench --json measured as tables, and the ratios that count.

    table.py load.json
"""

import json
import sys

GB = 1e9
MIB = 2**20
COLUMNS = [
    ("load_seconds", "load s", 1),
    ("exec_seconds", "exec s", 1),
    ("cpu_seconds", "CPU s", 1),
    ("peak_resident_bytes", "resident MiB", MIB),
    ("peak_anonymous_bytes", "own MiB", MIB),
    ("peak_pinned_bytes", "pinned MiB", MIB),
    ("storage_read_bytes", "storage MiB", MIB),
    ("read_call_bytes", "by read() MiB", MIB),
]


def figure(arm, key):
    return arm.get("figures", {}).get(key, {}).get("median")


def rate(measured):
    return measured["bytes_per_second"]["median"]


def is_ours(name):
    return name.startswith("ours")


def print_rivals(rivals):
    if "absent" in rivals:
        print(f"no rivals: {rivals['absent']}")
        return
    print(f"Python {rivals['python']}, torch {rivals['torch']}")
    for name, found in rivals["arms"].items():
        print(f"  {name:26}{found.get('version') or 'absent: ' + found['absent']}")


def print_ceilings(ceilings):
    for name, ceiling in ceilings.items():
        method = ", ".join(f"{key} {value}" for key, value in ceiling["method"].items() if key != "devices")
        print(f"  {name:26}{rate(ceiling) / GB:8.2f} GB/s   {method}")


def print_arms(arms):
    print(f"  {'':26}{'GB/s':>8}{'of lower':>10}" + "".join(f"{title:>15}" for _, title, _ in COLUMNS))
    for name, arm in arms.items():
        if "failed" in arm:
            print(f"  {name:26}failed: {arm['failed'].strip().splitlines()[-1][:150]}")
            continue
        cells = [(figure(arm, key), unit) for key, _, unit in COLUMNS]
        texts = ["" if value is None or value < 0 else format(value / unit, ".2f") for value, unit in cells]
        share = f"{100 * arm['share_of_lower_ceiling']:.1f}%"
        print(f"  {name:26}{rate(arm) / GB:8.2f}{share:>10}" + "".join(f"{text:>15}" for text in texts))


def lower(shares, names):
    """The share of the lowest of those ceilings: the lower it is, the larger the share."""
    return max((shares[name] for name in names if name in shares), default=None)


def print_ratios(state):
    measured = {name: arm for name, arm in state["arms"].items() if "failed" not in arm}
    ours = measured.get("ours")
    if ours is None:
        return
    rivals = {name: rate(arm) for name, arm in measured.items() if not is_ours(name) and name != "safetensors_mapped"}
    if rivals:
        best = max(rivals, key=rivals.get)
        print(f"  ours is {rate(ours) / rivals[best]:.2f} times the fastest other arm that has the bytes, {best}")
    for name, arm in measured.items():
        if not is_ours(name):
            continue
        for others in (("read_direct", "fill"), ("pinned_copy",), ("pinned_copy_all",)):
            share = lower(arm["shares"], others)
            if share is not None and all(other in arm["shares"] for other in others):
                print(f"  {name}: {share:.3f} of {' and '.join(others)}{', the lower' if len(others) > 1 else ''}")
        if name != "ours":
            print(f"  {name}: {figure(arm, 'load_seconds') / figure(ours, 'load_seconds'):.3f} times the time of ours")
        for counted in ("storage_read_bytes", "read_call_bytes"):
            bytes_read = figure(arm, counted) or 0
            if bytes_read > 0:
                print(f"  {name}: {counted} {bytes_read / figure(arm, 'read_bytes'):.3f} of what the plan needs")


def print_scaling(scaling):
    print(f"\nscaling, {scaling['bytes'] / 2**30:.1f} GiB, page cache: {scaling['page_cache']}")
    for table in ("reader_threads", "reads_per_thread", "chunk_bytes", "tensors"):
        print(f"  {table:16}{'GB/s':>8}{'CPU s':>8}{'plan s':>8}{'CPU ns/KiB':>12}")
        for value, row in scaling[table].items():
            per_kib = row["cpu_seconds"] * 1e9 / (row["bytes"] / 1024)
            print(f"  {value:16}{rate(row) / GB:8.2f}{row['cpu_seconds']:8.2f}{row['planned_seconds']:8.3f}{per_kib:12.1f}")


def main():
    with open(sys.argv[1]) as file:
        report = json.load(file)
    for gpu in report.get("gpus", []):
        print(f"{gpu['name']}, driver {report['driver']}")
    if "rivals" in report:
        print_rivals(report["rivals"])
    for size in report.get("sizes", []):
        for state in size["states"]:
            print(
                f"\n{size['bytes'] / 2**30:.2f} GiB, {size['tensors']} tensors, {size['files']} files, "
                f"page cache: {state['page_cache']}; medians of {report['rounds']}"
            )
            print_ceilings(state["ceilings"])
            print_arms(state["arms"])
            print_ratios(state)
    if "scaling" in report:
        print_scaling(report["scaling"])


if __name__ == "__main__":
    main()
