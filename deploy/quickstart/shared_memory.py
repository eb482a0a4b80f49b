#!/usr/bin/env python3
"""Adds up, from /proc/PID/smaps, how much of the weights' memory some processes have mapped.

    shared_memory.py PID...        prints one line of JSON

Rss counts a page in full for each process that maps it, Pss divides it among them: where two engines share every page,
the sum of Rss is twice the sum of Pss.
"""

import json
import re
import sys

MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ (\S+) \S+ \S+ \d+\s*(.*)$")
MEMFD = "/memfd:weightbroker"


def weights_of(pid, sharers):
    totals, counting = {"rss_bytes": 0, "pss_bytes": 0, "writable_mappings": 0}, False
    with open(f"/proc/{pid}/smaps") as file:
        for line in file:
            if mapping := MAPPING.match(line):
                counting = mapping[2].startswith(MEMFD)
                totals["writable_mappings"] += counting and "w" in mapping[1]
            elif counting and line.startswith(("Rss:", "Pss:")):
                totals[line[:3].lower() + "_bytes"] += size_bytes(line)
            elif counting and line.startswith(("Shared_Hugetlb:", "Private_Hugetlb:")):
                # The kernel leaves reserved huge pages out of Rss and Pss.
                totals["rss_bytes"] += size_bytes(line)
                totals["pss_bytes"] += size_bytes(line) // sharers
    return totals


def size_bytes(line):
    return int(line.split()[1]) * 1024


def main():
    engines = [weights_of(int(pid), sharers=len(sys.argv) - 1) for pid in sys.argv[1:]]
    print(json.dumps({key: sum(engine[key] for engine in engines) for key in engines[0]}))


if __name__ == "__main__":
    main()
