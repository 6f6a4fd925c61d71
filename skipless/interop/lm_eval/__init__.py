"""Evaluation by lm-evaluation-harness, and a task of our own."""
