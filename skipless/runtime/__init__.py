"""Running an export: `decoder.py` by itself needs numpy and ONNX Runtime alone."""
