"""Training: optimisers, schedule, the update, the loop, what stops it."""
