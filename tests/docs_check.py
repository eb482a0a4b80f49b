#!/usr/bin/env python3
"""Checks that the documents speak of what is there: links, paths, flags, decisions.

That docs/errors.md and docs/metrics.md have the rows that the code has is checked by unit tests.

    tests/docs_check.py        exits 1 and lists every fault, one a line
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9_-]+)")
OUR_PROGRAM = re.compile(r"\b(weightbrokerd|weightbroker-broker|weightbroker-loader|weightbroker|stub_engine|engine)\s")
TOP_FOLDERS = {"protos", "common", "server", "client", "deploy", "tests", "bench", "docs", "cmake", ".ci"}


def tracked(*patterns):
    output = subprocess.run(["git", "ls-files", "--", *patterns], cwd=ROOT, check=True, capture_output=True, text=True)
    return [ROOT / line for line in output.stdout.splitlines()]


def anchors(path):
    """The anchors of a page's headings, as web front ends make them."""
    found = set()
    for line in without_fences(path.read_text()):
        if line.startswith("#"):
            title = line.lstrip("#").strip().lower()
            found.add(re.sub(r"[^\w\- ]", "", title).replace(" ", "-"))
    return found


def without_fences(text):
    inside = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            inside = not inside
            yield ""
        else:
            yield "" if inside else line


def link_faults(page, number, line):
    for target in LINK.findall(CODE.sub("", line)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists():
            yield number, f"link to {target}: there is no such file"
        elif anchor and path.suffix == ".md" and anchor not in anchors(path):
            yield number, f"link to {target}: {path.name} has no such heading"


def path_faults(number, line):
    for code in CODE.findall(line):
        word = code.split()[0].rstrip("/:,") if code.split() else ""
        if "/" not in word or word.split("/")[0] not in TOP_FOLDERS or re.search(r"[*<>{}$…]", word):
            continue
        if not (ROOT / word).exists():
            yield number, f"`{word}`: there is no such path"


def flag_faults(number, line, sources):
    """Flags on a line that names one of our programs must stand somewhere in the sources."""
    if not OUR_PROGRAM.search(line):
        return
    for flag in FLAG.findall(line):
        if f"--{flag}" not in sources and f'"{flag}"' not in sources:
            yield number, f"--{flag}: no source declares this flag"


def decision_faults():
    pages = sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))
    faults = []
    numbers = [page.name[:4] for page in pages]
    for number, page in zip(numbers, pages):
        if not re.fullmatch(r"\d{4}-[a-z0-9-]+\.md", page.name):
            faults.append(f"docs/decisions/{page.name}: is not named by four digits and words")
        if numbers.count(number) > 1:
            faults.append(f"docs/decisions/{page.name}: another decision has the number {number}")
        if "Status:" not in page.read_text():
            faults.append(f"docs/decisions/{page.name}: has no 'Status:' line")
    return faults


def main():
    sources = "\n".join(path.read_text() for path in tracked("*.cc", "*.h", "*.py", "*.sh"))
    faults = decision_faults()
    pages = tracked("*.md")
    for page in pages:
        text = page.read_text()
        found = []
        for number, line in enumerate(without_fences(text), start=1):
            found += link_faults(page, number, line)
            found += path_faults(number, line)
        for number, line in enumerate(text.splitlines(), start=1):
            found += flag_faults(number, line, sources)
        faults += [f"{page.relative_to(ROOT)}:{number}: {what}" for number, what in found]
    for fault in faults:
        print(fault)
    print(f"docs: {len(pages)} pages, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
