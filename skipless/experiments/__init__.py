"""Experiments: runs, claims, verdicts and reports. The library never imports them."""
