"""A model as an ONNX graph, checked against PyTorch before anybody else sees it."""

import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from skipless.errors import UserError
from skipless.interop.export_folder import ONE_FILE, Model, n_bytes, write_config, write_tokenizer
from skipless.interop.quiet import quiet
from skipless.nn import explicit_form
from skipless.nn.model import CausalLM

ONNX_TOLERANCE = 1e-4
"""Largest difference between ONNX Runtime and PyTorch, in units of the largest logit or of 1."""

ONNX_SHAPES = ((1, 5), (1, 16), (3, 5), (3, 16))
"""Batches and lengths at which an ONNX file is held against PyTorch; a shorter context takes its own length."""


def to_onnx(model: Model, folder: Path) -> None:
    """Write the model as a graph of whole sequences, and hold it against PyTorch in ONNX Runtime.

    A causal model takes `input_ids` alone: padding on the right is seen by nothing before it. The others take an
    `attention_mask` too. ALiBi's running sums are made by doubling, as often as the length asks for, which a graph
    for every length cannot say: there the explicit form is exported.
    """
    write_config(model, folder)
    write_tokenizer(model.tokenizer, folder)
    form = explicit_form(model) if model.config.positions == "alibi" else nullcontext()
    path = folder / "model.onnx"
    example = onnx_inputs(model, 2, min(7, model.config.max_seq_len))
    batch = torch.export.Dim("batch", min=1, max=1 << 16)
    length = torch.export.Dim("length", min=1, max=model.config.max_seq_len)
    with torch.no_grad(), form, quiet("torch.onnx"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            model,
            tuple(example.values()),
            dynamo=True,
            verbose=False,
            input_names=list(example),
            output_names=["logits"],
            dynamic_shapes=tuple({0: batch, 1: length} for _ in example),
        )
        assert program is not None
        program.save(path, external_data=n_bytes(model) > ONE_FILE)
    error = onnx_error(model, path)
    if not error <= ONNX_TOLERANCE:
        raise UserError(f"ONNX Runtime computes other logits than PyTorch, {error:.1g} apart: nothing was exported")


def onnx_inputs(model: Model, batch: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    """Random inputs by name; a mask has padding in all rows but the first."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (batch, length), generator=generator)
    if isinstance(model, CausalLM):
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    mask[1:, length - length // 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def onnx_error(model: Model, path: Path) -> float:
    """The largest difference of an ONNX file from the model, in units of the largest logit or of 1."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    errors = []
    for batch, length in ONNX_SHAPES:
        inputs = onnx_inputs(model, batch, min(length, model.config.max_seq_len), seed=length)
        expected = model(*inputs.values())
        (found,) = session.run(None, {name: value.numpy() for name, value in inputs.items()})
        apart = (torch.from_numpy(found) - expected).abs()
        if "attention_mask" in inputs and expected.ndim == 3:
            apart = apart[inputs["attention_mask"].bool()]  # what comes out at padding means nothing
        errors.append(apart.max() / expected.abs().max().clamp(min=1))
    return torch.stack(errors).max().item()
