"""A part of one's own to begin with: a file that works, its test, and its training in five lines."""

import keyword
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from skipless.config.block import BLOCKS
from skipless.config.parts import PARTS, check_name
from skipless.errors import UserError, unknown
from skipless.storage.atomic_files import make_folder, write_bytes


@dataclass(frozen=True)
class Template:
    """What stands in the file of a kind of part."""

    what: str
    imports: str
    settings: str
    body: str
    change: str
    """How a block gets the part."""


TEMPLATES = {
    "norm": Template(
        "A norm: RMSNorm whose weight may start elsewhere than at 1",
        "Field, Settings, block, part, BLOCKS",
        'start: float = Field(1.0, gt=0, description="Where the weights start.")',
        '''
        class {Class}(nn.Module):
            """x / √(mean(x²) + eps) · weight. Change the equation in `forward`."""

            def __init__(self, width: int, settings: {Class}Settings) -> None:
                super().__init__()
                self.start, self.weight = settings.start, nn.Parameter(torch.empty(width))

            def reset_parameters(self) -> None:
                """Sets every parameter that is not in a linear layer: a model may be made without memory at first."""
                nn.init.constant_(self.weight, self.start)

            def forward(self, x: Tensor) -> Tensor:  # (…, width) → (…, width)
                return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-8) * self.weight
        ''',
        'norm="{name}"',
    ),
    "mixing": Template(
        "A mixing matrix: α·I + A, with one trained α for each head",
        "Field, Gain, GainConfig, Mask, MaskLike, ModelConfig, Settings, Softmax, block, gain_shape, part, scaled, "
        "BLOCKS",
        'alpha: Gain = Field(GainConfig(init=0.0, trainable=True), description="α; a bare number fixes it.")',
        '''
        class {Class}(Softmax):
            """α·I + A. The fast form is `combine`, from V and A·V; the explicit form is `matrix`. Keep them equal."""

            def __init__(self, cfg: ModelConfig, settings: {Class}Settings) -> None:
                super().__init__(cfg)
                self.add_gains(cfg.n_layer, gain_shape(cfg), alpha=settings.alpha)

            def combine(self, v: Tensor, attended: Tensor, mask: MaskLike) -> Tensor:  # (B, H, T, D) each
                return attended if self.alpha is None else attended + scaled(self.alpha, v)

            def matrix(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:  # (B, H, T, T)
                attention = super().matrix(q, k, mask)
                eye = mask.identity(q, q.shape[-2], k.shape[-2])
                return attention if self.alpha is None else attention + scaled(self.alpha, eye)
        ''',
        'mixing="{name}"',
    ),
    "map": Template(
        "A value or projection map: two thin matrices in the place of a square one",
        "Field, MapConfig, ModelConfig, Settings, block, part, BLOCKS",
        'rank: int = Field(16, ge=1, description="Width between the two matrices.")',
        '''
        class {Class}(nn.Module):
            """x A B. Linear layers are initialised as all are: Gaussian, std `init_std`."""

            def __init__(self, cfg: ModelConfig, settings: {Class}Settings) -> None:
                super().__init__()
                self.down = nn.Linear(cfg.d_model, settings.rank, bias=False)
                self.up = nn.Linear(settings.rank, cfg.d_model, bias=False)

            def forward(self, x: Tensor) -> Tensor:  # (B, T, d) → (B, T, d)
                return self.up(self.down(x))
        ''',
        'value=MapConfig(kind="{name}")',
    ),
    "mlp": Template(
        "An MLP: of one hidden layer, with a width of its own",
        "Field, ModelConfig, Settings, block, make_activation, part, BLOCKS",
        'expansion: float = Field(4.0, gt=0, description="Hidden width as a multiple of the model\'s.")',
        '''
        class {Class}(nn.Module):
            """φ(x W_up) W_down. Linear layers are initialised as all are: Gaussian, std `init_std`."""

            def __init__(self, cfg: ModelConfig, settings: {Class}Settings) -> None:
                super().__init__()
                hidden = max(1, round(settings.expansion * cfg.d_model))
                self.up = nn.Linear(cfg.d_model, hidden, bias=cfg.block.bias)
                self.down = nn.Linear(hidden, cfg.d_model, bias=cfg.block.bias)
                self.activation = make_activation(cfg.block, hidden)
                self.dropout = nn.Dropout(cfg.dropout)

            def forward(self, x: Tensor) -> Tensor:  # (B, T, d) → (B, T, d)
                return self.dropout(self.down(self.activation(self.up(x))))
        ''',
        'mlp="{name}"',
    ),
    "activation": Template(
        "An activation: a power of the ReLU",
        "Field, Settings, block, part, BLOCKS",
        'power: float = Field(2.0, ge=1, description="Of the ReLU.")',
        '''
        class {Class}(nn.Module):
            """max(x, 0)^p."""

            def __init__(self, width: int, settings: {Class}Settings) -> None:
                super().__init__()
                self.power = settings.power

            def forward(self, x: Tensor) -> Tensor:  # (…, width) → (…, width)
                return torch.relu(x) ** self.power
        ''',
        'activation="{name}"',
    ),
}
"""By the kind of part."""

PART = '''\
"""{what}.

    skipless train --plugin {module}.py --block {block}
    skipless compare pre-ln {block} --plugin {module}.py
"""

import torch
from torch import Tensor, nn

from skipless.parts import {imports}


class {Class}Settings(Settings):
    """What can be set: `--block 'pre-ln:{key}'`."""

    {settings}


@part("{kind}", "{name}", {Class}Settings)
{body}

block("{block}", BLOCKS["pre-ln"].replace({change}))
'''

TEST = '''\
"""What our own parts are held to, for `{name}`."""

from pathlib import Path

import pytest

from skipless.parts import load_plugin
from skipless.testing import PROPERTIES, check

load_plugin(str(Path(__file__).with_name("{module}.py")))


@pytest.mark.parametrize("property", PROPERTIES)
def test_{module}(property):
    check("{block}", property)
'''

TRAIN = '''\
"""Trains a small model with `{name}`."""

import {module}  # noqa: F401
from skipless.recipes import recipe
from skipless.training.train import train

run = train(recipe("smoke", "{block}"), "runs/{block}", resume=True)
print(f"held-out loss: {{list(run.metrics())[-1]['valid_loss']:.3f}}")
'''


def new_part(name: str, kind: str, folder: Path) -> list[Path]:
    """Write the three files, and return their paths. What is there is never written over.

    A file that is already as it would be written is no obstacle: an earlier call may have been killed.
    """
    if kind not in TEMPLATES:
        raise unknown("kind of part to begin with", kind, TEMPLATES)
    check_name(name, "new-part")
    block = f"pre-ln-{name}"
    if name in PARTS[kind] or block in BLOCKS:
        raise UserError(f"there is a {kind} {name!r} already: choose another name")
    module = re.sub(r"\W", "_", name)
    if not (module.isascii() and module.isidentifier() and module[0].isalpha()) or keyword.iskeyword(module):
        raise UserError(
            f"{name!r} cannot be the name of a Python module: begin with a letter from a to z, and take no keyword"
        )
    if module in sys.stdlib_module_names or module in ("skipless", "torch", "numpy", "pytest"):
        raise UserError(f"there is a Python module {module!r} already, which the part's file would hide")
    texts = {folder / file: text.encode() for file, text in _texts(name, kind, block, module).items()}
    for path, text in texts.items():
        if path.is_symlink() or (path.exists() and not (path.is_file() and path.read_bytes() == text)):
            raise UserError(f"{str(path)!r} is there already: choose another name, or another --output")
    make_folder(folder)
    for path, text in texts.items():
        write_bytes(path, text)
    return list(texts)


def _texts(name: str, kind: str, block: str, module: str) -> dict[str, str]:
    template = TEMPLATES[kind]
    words = "".join(word.capitalize() for word in re.split(r"[^0-9A-Za-z]+", name))
    first = template.settings.partition(":")[0]
    key = f"value={{kind: {{name: {name}; {first}: …}}}}" if kind == "map" else f"{kind}={{name: {name}; {first}: …}}"
    given = {"name": name, "kind": kind, "block": block, "module": module, "Class": words, "key": key}
    body = textwrap.dedent(template.body).strip().replace("{Class}", words) + "\n"
    imports = ", ".join(sorted(template.imports.split(", "), key=_as_ruff_sorts))
    line = f"from skipless.parts import {imports}"
    if len(line) > 100:
        imports = "(\n" + "".join(f"    {one},\n" for one in imports.split(", ")) + ")"
    about = {"what": template.what, "imports": imports, "settings": template.settings, "body": body}
    part = PART.format(**given, **about, change=template.change.format(name=name))
    if "nn." not in body:
        part = part.replace("from torch import Tensor, nn\n", "from torch import Tensor\n", 1)
    if "torch." not in body:
        part = part.replace("import torch\n", "", 1)
    return {
        f"{module}.py": part,
        f"test_{module}.py": TEST.format(**given),
        f"train_{module}.py": TRAIN.format(**given),
    }


def _as_ruff_sorts(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)
