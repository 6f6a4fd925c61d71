"""Weights away from their initial values, where some of them are zero and hide what is computed."""

import torch


def disturbed(model, size=0.3):
    """Move every weight, so that no gain, no ΔW and no query hides behind its initial value."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * size)
    return model
