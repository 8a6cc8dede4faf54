"""A picture shows the same shapes as SVG and as PNG, and nothing that it is given becomes markup."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from importlib.resources import files

import numpy as np
from PIL import Image

from fathoms.drawing.colours import PALETTE, RAMP, channels, ramp_colour, ramp_pixels
from fathoms.drawing.picture import Picture


def pixels_of(picture):
    return np.asarray(Image.open(io.BytesIO(picture.png())).convert("RGB"), int)


def test_every_shape_is_drawn_in_both_formats():
    picture = Picture(120, 40, "all shapes")
    picture.line([(4, 4), (36, 4)], "#ff0000", 3)
    picture.area([(44, 4), (76, 4), (76, 36), (44, 36)], "#0000ff", 0.5)
    picture.dot((100, 10), "#00ff00", 5)
    picture.box((84, 20), (12, 12), "#ff00ff")
    picture.text((4, 34), "words", size=20)
    picture.pixels((104, 24), (12, 12), np.full((2, 2, 3), 128))
    tags = [element.tag.rpartition("}")[2] for element in ET.fromstring(picture.svg())]
    assert tags == ["title", "rect", "polyline", "polygon", "circle", "rect", "text", "image"]
    image = pixels_of(picture)
    assert image.shape == (80, 240, 3)
    seen = [image[2 * y, 2 * x].tolist() for x, y in ((20, 4), (60, 20), (100, 10), (90, 26), (110, 30))]
    assert seen == [[255, 0, 0], [127, 127, 255], [0, 255, 0], [255, 0, 255], [128] * 3]
    assert image[40:72, 8:80].min() < 60, "the words are dark"


def test_a_dash_leaves_gaps():
    whole, dashed = Picture(100, 10), Picture(100, 10)
    whole.line([(0, 5), (100, 5)], "#000000", 2)
    dashed.line([(0, 5), (100, 5)], "#000000", 2, (5, 5))
    dark = [(pixels_of(picture)[10, :, 0] < 128).mean() for picture in (whole, dashed)]
    assert dark[0] == 1.0
    assert abs(dark[1] - 0.5) < 0.05
    assert 'stroke-dasharray="5 5"' in dashed.svg()


def test_texts_titles_and_tips_are_text_without_control_characters():
    hostile = '<script>"&\x00\x1b\ud800'
    picture = Picture(10, 10, hostile)
    picture.text((0, 0), hostile)
    picture.dot((5, 5), tip=hostile)
    root = ET.fromstring(picture.svg().encode())
    assert {text for text in root.itertext() if text.strip()} == {'<script>"&   '}
    assert picture.png()


def test_colours_run_from_the_first_to_the_last_and_gaps_are_grey():
    pixels = ramp_pixels(np.array([[0.0, 1.0, np.nan]]), 0.0, 1.0)
    assert [tuple(pixel) for pixel in pixels[0]] == [channels(RAMP[0]), channels(RAMP[-1]), (190, 190, 190)]
    assert [ramp_colour(share) for share in (-1.0, 0.0, 1.0, 2.0)] == [RAMP[0], RAMP[0], RAMP[-1], RAMP[-1]]


def test_the_pages_have_the_colours_of_the_drawings():
    style = (files("fathoms.report") / "templates" / "comparison.css").read_text()
    light = re.findall(r"--c\d: light-dark\((#\w+),", style)
    assert tuple(light) == PALETTE
