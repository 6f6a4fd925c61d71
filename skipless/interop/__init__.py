"""Models for and from others: Hugging Face, ONNX, GPT-2, lm-evaluation-harness, model cards."""
