#!/usr/bin/env python3
"""Writes the unit files as an installation does, and has systemd-analyze judge them.

    units_check.py BIN_DIR SOURCE_DIR

`verify` must find nothing; `security`'s score is printed, and must not exceed what is given here.
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(sys.argv[2]) / "tests/integration/cli"))
from service import SKIP  # noqa: E402

# 0 is best, 10 worst. What is left is told in hardening.conf.
WORST_SCORE = 4.0


def write_units(bin_dir, source, folder):
    """With the same substitutions as install_units.cmake."""
    values = {"BIN_DIR": bin_dir, "DOC_DIR": source / "docs", "CONFIG_DIR": "/etc",
              "HARDENING": (source / "deploy/systemd/hardening.conf").read_text()}
    for template in sorted((source / "deploy/systemd").glob("*.service.in")):
        text = re.sub(r"@(\w+)@", lambda match: str(values[match[1]]), template.read_text())
        unit = folder / template.name.removesuffix(".in")
        unit.write_text(text)
        yield unit


def analyze(*arguments):
    return subprocess.run(["systemd-analyze", *map(str, arguments)], capture_output=True, text=True, timeout=60)


def check(unit):
    verified = analyze("verify", "--man=no", unit)
    said = [line for line in (verified.stdout + verified.stderr).splitlines() if unit.name.split("@")[0] in line]
    assert verified.returncode == 0 and not said, f"{unit.name}: {said or verified.stderr}"
    judged = analyze("security", "--offline=yes", f"--threshold={int(WORST_SCORE * 10)}", unit)
    score = re.search(r"Overall exposure level for \S+: ([\d.]+) (\w+)", judged.stdout)
    assert score, f"{unit.name}: {judged.stdout}{judged.stderr}"
    print(f"{unit.name}: verified, exposure {score[1]} ({score[2]})")
    assert judged.returncode == 0 and float(score[1]) <= WORST_SCORE, f"{unit.name}: exposure {score[1]} > {WORST_SCORE}"


def main():
    if shutil.which("systemd-analyze") is None:
        print("skipped: systemd is not installed here")
        sys.exit(SKIP)
    with tempfile.TemporaryDirectory() as folder:
        units = list(write_units(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), pathlib.Path(folder)))
        assert len(units) == 4, f"expected four unit files: {units}"
        for unit in units:
            check(unit)


if __name__ == "__main__":
    main()
