#!/usr/bin/env python3
"""Prints what gpu_attach_bench --json measured as tables, one for each size, and the ratios that count.

    table.py gpu_attach.json
"""

import json
import sys

STEPS = [
    ("attach_to_pointers", "attach: connected channel to every pointer"),
    ("attach_to_tensors", "attach: to every torch::Tensor"),
    ("connect_and_attach", "the part that is ours: connect and attach"),
    ("first_touch", "one read of every 2 MiB"),
    ("since_exec.exec", "since exec: in main"),
    ("since_exec.cu_init", "since exec: CUDA initialized"),
    ("since_exec.context", "since exec: context"),
    ("since_exec.pointers", "since exec: pointers"),
    ("since_exec.touched", "since exec: touched"),
]


def main():
    with open(sys.argv[1]) as file:
        report = json.load(file)
    print(f"{report['gpu']}, driver {report['driver']}, medians in ms")
    for size in report["sizes"]:
        arms = size["seconds"]
        print(f"\n{size['bytes'] / 2**30:.1f} GiB, {size['tensors']} tensors, {size['files']} files, turns {size['turns']}")
        print(f"{'':44}" + "".join(f"{arm:>12}" for arm in arms))
        for step, title in STEPS:
            cells = [arms[arm].get(step, {}).get("median") for arm in arms]
            print(f"{title:44}" + "".join(f"{'' if c is None else format(c * 1e3, '.2f'):>12}" for c in cells))
        ours = arms.get("vmm", {}).get("attach_to_pointers", {}).get("median")
        for arm in arms:
            theirs = arms[arm]["attach_to_pointers"]["median"]
            if ours and arm not in ("vmm", "vmm_torch"):
                print(f"vmm is {theirs / ours:.1f} times as fast as {arm} to every pointer")


if __name__ == "__main__":
    main()
