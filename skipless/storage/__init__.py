"""Durable storage: files that appear in one piece, locks, manifests, checkpoints, journals."""
