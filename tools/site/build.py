"""The site, from its pages to a folder that a server can hand out."""

import subprocess
import sys
from pathlib import Path

from tools.site import ROOT
from tools.site.links import broken
from tools.site.staging import stage


def build(project: Path = ROOT) -> Path:
    """Build the site of a project's zensical.toml; a warning, or a link that leads nowhere, ends the process."""
    stage(project / "build" / "docs")
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    # zensical finds the extension for formulas where it is started
    done = subprocess.run([*command, "--config-file", str(project / "zensical.toml")], cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    site = project / "site"
    if found := list(broken(site)):
        sys.exit("\n".join(found))
    return site
