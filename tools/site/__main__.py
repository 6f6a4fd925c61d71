"""Write what code writes: the site, or the figures and tables of the README."""

import argparse
import subprocess
import sys

from tools.site import ROOT, SITE, readme
from tools.site.links import broken
from tools.site.staging import stage


def build() -> None:
    """The site, into site/; a warning or a link that leads nowhere is an error."""
    stage()
    done = subprocess.run([sys.executable, "-m", "zensical", "build", "--clean", "--strict"], cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    if found := list(broken(SITE)):
        sys.exit("\n".join(found))
    print(f"site: {SITE / 'index.html'}")


def main() -> None:
    """`python -m tools.site [build|readme]`."""
    parser = argparse.ArgumentParser(prog="python -m tools.site", description=__doc__)
    parser.add_argument("what", choices=["build", "readme"], nargs="?", default="build")
    build() if parser.parse_args().what == "build" else readme.write()


if __name__ == "__main__":
    main()
