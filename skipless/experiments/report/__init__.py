"""What experiments and runs found, as pages, plots and JSON."""
