"""What an installation takes: the wheel in an empty environment, with the pinned versions; its size, and how it starts.

    python benchmarks/install.py
    python benchmarks/install.py --output benchmarks/results/install.json

Times are those of one core, the best of several. Sizes are what lies on the disk; PyTorch's is that of the build which
pip finds, and one for CUDA is several times as large as one for the CPU.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ROUNDS = 5

STARTS = {
    "import skipless": "import skipless",
    "skipless --help": "import sys; sys.argv = ['skipless', '--help']; from skipless.__main__ import main; main()",
    "skipless.CausalLM": "import skipless; skipless.CausalLM",
    "import torch": "import torch",
}
"""What is timed, as Python."""


def copy_of_the_source(folder: Path) -> Path:
    """What is in the repository, without what lies about in the checkout, so that building leaves nothing in it."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def build(folder: Path) -> tuple[Path, Path]:
    """The wheel and the source distribution, as `python -m build` makes them: the second from the repository, the
    first from the second."""
    source, out = copy_of_the_source(folder / "source"), folder / "dist"
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(out), str(source)], check=True, capture_output=True)
    (wheel,), (archive,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, archive


def install(wheel: Path, folder: Path) -> Path:
    """An environment that has the wheel and what it needs, and nothing else; its Python."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    pinned = ["--constraint", str(ROOT / "constraints.txt")]
    quiet = ["--quiet", "--disable-pip-version-check"]
    subprocess.run([str(python), "-m", "pip", "install", *quiet, *pinned, str(wheel)], check=True, env=clean())
    return python


def clean() -> dict[str, str]:
    """The environment without what leads Python back to the checkout."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def sizes(environment: Path) -> dict[str, int]:
    """Bytes of every package by name, without pip's own and what only it needs."""
    (site,) = environment.glob("lib/python*/site-packages")
    found = {}
    for package in distributions(path=[str(site)]):
        files = [Path(str(package.locate_file(file))) for file in package.files or ()]
        found[package.metadata["Name"]] = sum(file.stat().st_size for file in files if file.is_file())
    return {name: size for name, size in found.items() if name not in ("pip", "setuptools")}


def seconds(python: Path, code: str) -> float:
    """Processor time of a process that runs some code, the least of several."""
    times = []
    for _ in range(ROUNDS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([str(python), "-c", code], check=True, capture_output=True, env=clean(), cwd="/")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def measure(folder: Path) -> dict[str, Any]:
    """Build, install, and measure."""
    wheel, archive = build(folder)
    python = install(wheel, folder / "environment")
    found = sizes(folder / "environment")
    largest = sorted(found, key=lambda name: -found[name])[:6]
    return {
        "python": platform.python_version(),
        "wheel_bytes": wheel.stat().st_size,
        "sdist_bytes": archive.stat().st_size,
        "installed_bytes": sum(found.values()),
        "packages": len(found),
        "largest": {name: found[name] for name in largest},
        "skipless_bytes": found["skipless"],
        "torch": _version(python, "torch"),
        "cpu_seconds": {name: round(seconds(python, code), 2) for name, code in STARTS.items()},
    }


def _version(python: Path, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Measure, show, and keep it where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="Write the figures into this file.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder))
    text = json.dumps(found, indent=1)
    print(text)
    if given.output:
        given.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
