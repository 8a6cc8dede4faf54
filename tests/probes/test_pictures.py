"""Figures show the numbers that they were given, as files and inside a page."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from importlib.resources import files

import numpy as np
import pytest
import torch
from PIL import Image

from fathoms import FathomsError, ViT, ViTConfig
from fathoms.plotting.panels import Line, Panel, line_panels
from fathoms.plotting.style import PALETTE, VARIABLES, save_figure, to_svg
from fathoms.probes.attention_maps import attention_by_head
from fathoms.probes.blocks import centre_and_corners, patch_filters, residual_scales
from fathoms.probes.probe_figures import profile_data, profile_figure, scale_figure
from fathoms.probes.signal import probe

CONFIG = ViTConfig(image_size=8, patch_size=2, in_channels=1, dim=12, heads=3, depth=3, num_classes=4)


def model(**options):
    torch.manual_seed(0)
    return ViT(CONFIG.replace(**options)).eval()


def test_a_value_of_zero_on_a_logarithmic_axis_breaks_the_line():
    broken = Panel("t", "x", [Line("", [(0, 1.0), (1, 2.0), (2, 0.0), (3, 3.0), (4, None)])], log_y=True)
    heights = line_panels([broken], "w", 1).axes[0].lines[0].get_ydata()
    np.testing.assert_equal(heights, [1.0, 2.0, np.nan, 3.0, np.nan])
    empty = Panel("t", "x", [Line("", [(0, 0.0)])], log_y=True)
    assert "nothing to show" in to_svg(line_panels([empty], "w", 1))


def test_a_notebook_shows_a_figure_without_pyplot():
    figure = line_panels([Panel("t", "x", [Line("", [(0, 1.0), (1, 2.0)])])], "w", 1)
    assert figure._repr_svg_().startswith("<svg")


def test_what_hardly_changes_looks_as_if_it_did_not():
    flat = Panel("t", "x", [Line("", [(0, 0.970), (1, 0.972)])], log_y=True)
    low, high = line_panels([flat], "w", 1).axes[0].get_ylim()
    assert high / low == pytest.approx(2.0)


def test_the_figure_of_a_probe_shows_its_numbers_and_is_saved_by_ending(tmp_path):
    signal = probe(model(), torch.randn(2, 1, 8, 8))
    figure = signal.plot()
    attn, mlp = figure.axes[1].lines[:2]
    assert attn.get_ydata().tolist() == signal.column("ratio", "attn")
    assert mlp.get_ydata().tolist() == signal.column("ratio", "mlp")
    stored = profile_data(signal.to_json()["sites"])[""]
    assert [site["ratio"] for site in stored] == [site.ratio for site in signal]
    with Image.open(save_figure(figure, tmp_path / "a.png")) as image:
        assert image.size == tuple((figure.get_size_inches() * 144).round())
    with pytest.raises(FathomsError, match=r"pictures are written as \.svg or \.png"):
        save_figure(figure, tmp_path / "a.pdf")


def test_names_are_text_in_a_picture_and_a_page_styles_it_by_its_own_colours():
    hostile = '<script>"$x&\x00\x1b\u202e漢'
    panel = Panel(hostile, "x", [Line(hostile, [(0, 1.0), (1, 2.0)]), Line("b", [(0, 1.0), (1, 3.0)], 1)])
    figure = line_panels([panel], hostile, 1)
    root = ET.fromstring(to_svg(figure))
    shown = [text.strip() for text in root.itertext() if "script" in text]
    assert shown == ['<script>"$x&   漢'] * 4, "suptitle, its title element, panel and legend"
    inside = to_svg(figure, page="key-")
    assert 'style="' not in inside
    assert f"var(--c1, {PALETTE[1]})" in inside
    assert set(re.findall(r"url\(#(.{4})", inside)) == {"key-"}


def test_the_pages_have_the_colours_of_the_figures():
    style = (files("fathoms.report") / "templates" / "page.css").read_text()
    light = dict(re.findall(r"(--[a-z]+\d?): light-dark\((#\w+),", style))
    assert {colour: light[name] for colour, name in VARIABLES.items()} == {name: name for name in VARIABLES}


def test_drawing_leaves_the_callers_settings_alone():
    import matplotlib

    before = dict(matplotlib.rcParams)
    to_svg(profile_figure({"": probe(model(), torch.randn(2, 1, 8, 8)).to_json()["sites"]}))
    assert dict(matplotlib.rcParams) == before


def test_a_profile_of_several_models_has_a_line_for_each():
    sites = probe(model(), torch.randn(2, 1, 8, 8)).to_json()["sites"]
    svg = to_svg(profile_figure({"one": sites, "two": sites}))
    assert svg.count(">one<") == svg.count(">two<") == 1


def test_centre_and_corners_of_a_patch():
    values = np.zeros((8, 8))
    values[2:6, 2:6] = 3.0
    values[:2, :2] = values[-2:, -2:] = -1.0
    assert centre_and_corners(values) == (3.0, 0.5)


def test_every_gamma_is_read_and_models_without_one_have_none():
    found = residual_scales(model(residual="layerscale", residual_init=0.5))
    assert found["mlp"]["blocks.2"] == [0.5] * 12
    assert scale_figure(found).axes[1].images[0].get_array().tolist() == [[0.5] * 12] * 3
    assert residual_scales(model()) == {}


def test_filters_are_laid_out_as_the_patch_is():
    vit = model()
    with torch.no_grad():
        vit.stem.proj.weight.zero_()
        vit.stem.proj.weight[3] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    found = patch_filters(vit)
    assert found["order"][0] == 3
    assert found["filters"][0] == [[[1.0, 2.0], [3.0, 4.0]]]


def test_attention_by_head_is_that_of_the_class_token():
    vit = model(attention="softmax")
    image = torch.randn(1, 8, 8)
    found = attention_by_head(vit, image)
    assert list(found) == ["blocks.0", "blocks.1", "blocks.2"]
    with torch.no_grad():
        tokens = vit.embed(image[None])
        q, k, _ = vit.blocks[0].attn.project(vit.blocks[0].attn_join.enter(tokens), None)
        probs = (q @ k.mT / 2.0).softmax(-1)[0, :, 0, 1:]
    expected = (probs / probs.sum(-1, keepdim=True)).unflatten(-1, (4, 4))
    torch.testing.assert_close(found["blocks.0"], expected)


def test_class_attention_is_drawn_by_head_too():
    found = attention_by_head(model(readout="class_attention"), torch.randn(1, 8, 8))
    assert found["readout.blocks.1"].shape == (3, 4, 4)
    assert found["readout.blocks.1"].sum((1, 2)).tolist() == pytest.approx([1.0] * 3)


def test_few_blocks_have_whole_numbers_on_their_axis():
    line = Line("", [(0, 0.5), (1, 0.6), (2, 0.7)])
    axes = line_panels([Panel("", "block", [line])], "", 1).axes[0]
    axes.figure.draw_without_rendering()
    assert [text.get_text() for text in axes.get_xticklabels()][1:-1] == ["0", "1", "2"]
