"""Write what code writes: the site, or the figures and tables of the README."""

import argparse

from tools.site import readme
from tools.site.build import build


def main() -> None:
    """`python -m tools.site [build|readme]`."""
    parser = argparse.ArgumentParser(prog="python -m tools.site", description=__doc__)
    parser.add_argument("what", choices=["build", "readme"], nargs="?", default="build")
    if parser.parse_args().what == "readme":
        readme.write()
    else:
        print(f"site: {build() / 'index.html'}")


if __name__ == "__main__":
    main()
