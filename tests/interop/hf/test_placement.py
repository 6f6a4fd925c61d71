"""Models whose weights are elsewhere: offloaded, sharded over files, quantised. The numbers are the plain ones."""

import subprocess
import sys
import warnings

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model, infer_auto_device_map
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from skipless.interop.hf import SkiplessForCausalLM, SkiplessForMaskedLM, SkiplessForSequenceClassification
from tests.interop.hf.small import V, make

KINDS = [SkiplessForCausalLM, SkiplessForMaskedLM, SkiplessForSequenceClassification]


def outputs(model, ids):
    with torch.no_grad():
        return model(ids).logits


WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
}


def texts(model, ids):
    """What a model that can write goes on with, behind prompts of which one is padded."""
    if not isinstance(model, SkiplessForCausalLM):
        return {}
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    how = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    return {name: model.generate(ids, **how, **way) for name, way in WAYS.items()}


def losses_of(model, ids):
    """The losses in both modes; there is no dropout."""
    labels = ids[:, 0] % 2 if isinstance(model, SkiplessForSequenceClassification) else ids
    with torch.no_grad():
        found = [model.train(mode)(ids, labels=labels).loss for mode in (True, False)]
    return torch.stack(found)


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", ["pre-ln", "sas", "sas-p"])
def test_everything_offloaded(block, kind, tied, tmp_path):
    """Logits, loss, and what is written, by every way to write that keeps a cache."""
    ids = torch.randint(1, V, (2, 9))
    for move in (lambda model: disk_offload(model, tmp_path, execution_device="cpu"), cpu_offload):
        model = make(block, kind, dtype=torch.float32, tie_embeddings=tied)
        expected, written, losses = outputs(model, ids), texts(model, ids), losses_of(model, ids)
        move(model)
        assert all(parameter.is_meta for parameter in model.parameters())
        same(outputs(model, ids), expected)
        same(losses_of(model, ids), losses)
        for name, text in texts(model, ids).items():
            assert torch.equal(text, written[name]), name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("far", ["model.embedding", "lm_head", "model.blocks.0", "model.norm"])
def test_a_part_on_disk(far, tied, tmp_path):
    """By `device_map`, from a checkpoint in several files."""
    model = make("sas-p", dtype=torch.float32, tie_embeddings=tied)
    ids = torch.randint(V, (2, 9))
    expected = outputs(model, ids)
    model.save_pretrained(tmp_path / "saved", max_shard_size="10kB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    same(outputs(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), ids), expected)
    places = {name: "cpu" for name, _ in model.model.named_children() if name != "blocks"}
    device_map = {f"model.{name}": place for name, place in places.items()}
    device_map |= {"model.blocks.0": "cpu", "model.blocks.1": "cpu", "lm_head": "cpu"}
    device_map[far] = "disk"
    if tied and far in ("model.embedding", "lm_head"):  # one matrix is in one place
        device_map["model.embedding"] = device_map["lm_head"] = "disk"
    opened = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", device_map=device_map, offload_folder=tmp_path / "disk"
    )
    same(outputs(opened, ids), expected)
    labels = ids.clone()
    plain = make("sas-p", dtype=torch.float32, tie_embeddings=tied)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        same(opened.train()(ids, labels=labels).loss, plain.train()(ids, labels=labels).loss)


def test_a_map_made_for_little_memory(tmp_path):
    model = make("sas", dtype=torch.float32)
    ids = torch.randint(V, (2, 9))
    expected = outputs(model, ids)
    sizes = infer_auto_device_map(
        model, max_memory={"cpu": 40_000, "disk": 10**9}, no_split_module_classes=list(model._no_split_modules)
    )
    assert {"cpu", "disk"} == set(sizes.values())
    same(outputs(dispatch_model(model, sizes, main_device="cpu", offload_dir=tmp_path), ids), expected)


def test_matrices_of_an_offloaded_model(tmp_path):
    model = make("sas", dtype=torch.float32)
    ids = torch.randint(V, (2, 9))
    with torch.no_grad():
        expected = model(ids, output_attentions=True).attentions
        disk_offload(model, tmp_path, execution_device="cpu")
        for one, other in zip(model(ids, output_attentions=True).attentions, expected, strict=True):
            same(one, other)


@pytest.mark.parametrize("tied", [True, False])
def test_quantised(tied):
    """PyTorch's dynamic quantisation replaces linear layers, the head among them."""
    model = make("sas-p", dtype=torch.float32, tie_embeddings=tied)
    ids = torch.randint(V, (2, 9))
    expected = outputs(model, ids)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    found = outputs(small, ids)
    assert type(small.lm_head) is not nn.Linear
    assert 0 < (found - expected).abs().max() < 0.2 * expected.abs().max()


def test_half_precision_from_a_file(tmp_path):
    model = make("sas", SkiplessForMaskedLM, dtype=torch.float32)
    ids = torch.randint(V, (2, 9))
    expected = outputs(model, ids)
    model.save_pretrained(tmp_path)
    half = AutoModelForMaskedLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert (outputs(half, ids) - expected).abs().max() < 0.1 * expected.abs().max()
    loss = half.train()(ids, labels=ids).loss
    assert loss.dtype == torch.float32
    loss.backward()


PARALLEL = """
import sys
import torch
from skipless.interop.hf import SkiplessForCausalLM

folder = sys.argv[1]
plain = SkiplessForCausalLM.from_pretrained(folder)
model = SkiplessForCausalLM.from_pretrained(folder, tp_plan="auto")
assert len(model.model.blocks[0].mlp.up.weight.to_local()) == 48
ids = torch.arange(18).view(2, 9)
with torch.no_grad():
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=0, atol=1e-5)
how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
assert torch.equal(model.generate(ids, **how), plain.generate(ids, **how))
for one in (model, plain):
    one.train()(ids, labels=ids).loss.backward()
found = model.model.embedding.weight.grad.full_tensor()
torch.testing.assert_close(found, plain.model.embedding.weight.grad, rtol=0, atol=1e-5)
"""


def run_in_two(folder, script):
    """A script in two processes, about the model in the folder."""
    (folder / "run.py").write_text(script)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([*launch, folder / "run.py", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("block", ["sas-p", "sas", "pre-ln:bias=true"])
def test_two_processes_with_half_of_the_matrices_each(block, tmp_path):
    make(block, dtype=torch.float32).save_pretrained(tmp_path)
    run_in_two(tmp_path, PARALLEL)


SHARDED = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from skipless.interop.hf import SkiplessForCausalLM

dist.init_process_group("gloo")
plain, copied, *others = [SkiplessForCausalLM.from_pretrained(sys.argv[1]).train() for _ in range(4)]
mesh = init_device_mesh("cpu", (2,))
for model in others:
    for block in model.model.blocks:
        fully_shard(block, mesh=mesh)
if not plain.config.tie_embeddings:
    fully_shard(others[1].lm_head, mesh=mesh)
for model in others:
    fully_shard(model, mesh=mesh)
others.append(DistributedDataParallel(copied))
ids = torch.arange(18).view(2, 9)
mask = torch.ones_like(ids)
mask[0, :3] = 0
labels = ids.masked_fill(mask == 0, -100)
whole = lambda tensor: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, *others)]
for step in range(3):
    found = []
    for model, optimizer in zip((plain, *others), optimizers):
        output = model(ids, mask, labels=labels)
        logits = whole(output.logits)[mask.bool()]
        output.loss.backward()
        found.append([output.loss, logits, *(whole(p.grad) for p in model.parameters())])
        optimizer.step()
        optimizer.zero_grad()
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-5)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("block", ["sas-p", "pre-ln"])
def test_two_processes_with_half_of_every_matrix_each(block, tied, tmp_path):
    """By FSDP2, or by DDP with all of it: losses, logits, gradients and updates are the plain ones."""
    make(block, dtype=torch.float32, tie_embeddings=tied).save_pretrained(tmp_path)
    run_in_two(tmp_path, SHARDED)


def test_a_glu_is_not_sharded():
    """Its first matrix holds two, of which a shard would take the wrong columns."""
    assert make("pre-ln:mlp=glu").config.base_model_tp_plan is None
