"""Processes that train one model: devices, messages, DDP, FSDP2."""
