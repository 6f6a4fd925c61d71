"""Blocks as pictures: well-formed, of what the block has, and within their frame."""

import re
import xml.etree.ElementTree as ET

import pytest

from skipless import BLOCKS
from skipless.analysis.picture import DARK, LIGHT, WIDTH, block_picture
from skipless.recipes.variants import VARIANTS, find_block

SVG = "{http://www.w3.org/2000/svg}"
MORE = [
    "pre-ln:beta_sa=0",
    "sas-p:mlp=glu,activation=gelu,alpha_comb=0.5",
    "sas-p:beta_ff=null",
    "pre-ln:norm=layernorm",
]


def drawn(name, **how):
    return ET.fromstring(block_picture({name: find_block(name)}, **how))


def texts(picture):
    return ["".join(text.itertext()).replace("\u200b", "") for text in picture.iter(f"{SVG}text")]


def count(picture, **attributes):
    return sum(all(one.get(key) == value for key, value in attributes.items()) for one in picture.iter())


@pytest.mark.parametrize("name", [*BLOCKS, *VARIANTS, *MORE])
def test_a_picture_has_what_the_block_has(name):
    block, picture = find_block(name), drawn(name)
    words = texts(picture)
    skips = [gain for gain in (block.alpha_sa, block.alpha_ff, block.alpha_comb) if gain]
    if block.layout == "sequential":  # a skip around a branch that is not there is the line itself
        skips = [
            gain for gain, beta in ((block.alpha_sa, block.beta_sa), (block.alpha_ff, block.beta_ff)) if gain and beta
        ]
    assert count(picture, stroke=LIGHT.skip) == len(skips)
    assert words.count("Attention") == bool(block.beta_sa)
    assert any("WV" in word.replace("WV in layer 1", "") for word in words) == (
        bool(block.beta_sa) and block.value.kind != "identity"
    )
    norms = (
        0 if block.norm == "none" else 1 if block.layout == "parallel" else bool(block.beta_sa) + bool(block.beta_ff)
    )
    assert sum(word in ("RMSNorm", "LayerNorm") for word in words) == norms
    assert ("WV in layer 1 only" in words) == (
        bool(block.beta_sa) and block.first_value is not None and block.value.kind == "identity"
    )


@pytest.mark.parametrize("name", [*BLOCKS, *VARIANTS])
def test_nothing_leaves_the_frame(name):
    picture = drawn(name)
    width, height = (float(picture.get(side)) for side in ("width", "height"))
    for box in picture.iter(f"{SVG}rect"):
        assert float(box.get("x")) >= 0
        assert float(box.get("x")) + float(box.get("width")) <= width
        assert float(box.get("y")) + float(box.get("height")) <= height
    points = [
        tuple(map(float, pair))
        for path in picture.iter(f"{SVG}path")
        for pair in re.findall(r"[ML]([\d.]+) ([\d.]+)", path.get("d"))
    ]
    assert all(0 <= x <= width and 0 <= y <= height for x, y in points)


def test_blocks_stand_side_by_side_on_either_ground():
    both = {name: BLOCKS[name] for name in ("pre-ln", "sas-p")}
    light, dark = (
        ET.fromstring(block_picture(both, dark=dark, captions={"sas-p": "a_b <c>"})) for dark in (False, True)
    )
    assert light.get("width") == str(2 * WIDTH)
    assert {"pre-ln", "sas-p", "a_b <c>"} <= set(texts(light))
    assert texts(light) == texts(dark)
    assert count(light, fill=DARK.text) == count(dark, fill=LIGHT.text) == 0
    assert "no skip" in light.find(f"{SVG}title").text
    paper = drawn("sas", paper=True)
    assert count(paper, fill=LIGHT.paper, rx="8") == 1
