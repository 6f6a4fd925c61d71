"""The site and the parts of the README that code writes: `python -m tools.site`."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ARCHIVE = DOCS / "results" / "runs"
STAGED = ROOT / "build" / "docs"
"""The pages that zensical reads: those of docs/ and those that code writes."""
SITE = ROOT / "site"
