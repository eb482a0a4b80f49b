#!/usr/bin/env python3
"""Builds the programs of docs/engine-authors.md exactly as they are printed, against an installation, and runs them.

    examples_check.py BUILD_DIR SOURCE_DIR CXX_COMPILER TORCH [CXX_FLAGS]

TORCH is the folder of a torch package; where it is empty the program on libtorch is left out.
"""

import pathlib
import re
import subprocess
import sys
import tempfile

BUILD, SOURCE = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
sys.path.insert(0, str(SOURCE / "tests/integration/cli"))
import checkpoints  # noqa: E402
from service import Service, require_tools  # noqa: E402

PAGE = SOURCE / "docs/engine-authors.md"
# A file's name in backticks, and the next fence of its kind.
FENCE = re.compile(r"^`([\w.]+)`[^\n]*\n```(?:cmake|cpp)\n(.*?)^```$", re.M | re.S)


def run(*command, **options):
    finished = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600, **options)
    assert finished.returncode == 0, f"{command}:\n{finished.stdout}{finished.stderr}"
    return finished.stdout


def main():
    require_tools("cmake", "ninja")
    files = dict(FENCE.findall(PAGE.read_text()))
    assert files.keys() == {"CMakeLists.txt", "library_engine.cc", "bare_engine.cc", "torch_engine.cc"}, f"found {files.keys()}"
    torch = sys.argv[4]
    flags = [f"-DTORCH={torch}"] + [f"-DCMAKE_CXX_FLAGS={flag}" for flag in sys.argv[5:]]
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as models:
        project = pathlib.Path(scratch) / "project"
        project.mkdir()
        for name, text in files.items():
            (project / name).write_text(text)
        run("cmake", "--install", BUILD, "--prefix", f"{scratch}/prefix")
        run("cmake", "-S", project, "-B", project / "build", "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={scratch}/prefix",
            f"-DCMAKE_CXX_COMPILER={sys.argv[3]}", *flags)
        run("cmake", "--build", project / "build", "-j", "2")
        tensors = checkpoints.plain_tensors()
        checkpoints.write_checkpoint(pathlib.Path(models) / "tiny", {"model_type": "llama"}, tensors)
        with Service(BUILD / "bin", {"models": models}) as service:
            # The first has the service load it.
            for program in ("library_engine", "bare_engine") + (("torch_engine",) if torch else ()):
                said = run(project / "build" / program, service.socket, "models:tiny")
                assert re.search(rf"^attached to [0-9a-f]{{64}}: {len(tensors)} tensors", said, re.M), f"{program}: {said}"
                print(f"{program}: {said.strip()}")


if __name__ == "__main__":
    main()
