"""What can be said of a model: costs, device plan, signal, health, held-out loss, samples."""
