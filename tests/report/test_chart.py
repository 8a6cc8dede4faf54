"""Geometry of the line charts: scale and gaps."""

from __future__ import annotations

from fathoms.report.run import chart


def test_geometry_is_to_scale_and_gaps_stay_gaps():
    points = [(1.0, 0.0), (2.0, 10.0), (3.0, None), (4.0, 5.0), (5.0, 5.0)]
    made = chart.draw("k", "t", {"a": ("train", points)})
    assert made is not None
    across, up = chart.WIDTH - chart.RIGHT, chart.HEIGHT - chart.BOTTOM
    assert made.lines[0].path.startswith(f"M{chart.LEFT}.0 {up}.0 L")
    assert f"{chart.TOP}.0 M" in made.lines[0].path, "the line goes to the top, then breaks"
    assert made.lines[0].path.endswith(f"L{across}.0 {(chart.TOP + up) / 2}")
    assert [text for _, text in made.y_ticks] == ["0", "2", "4", "6", "8", "10"]
    assert chart.draw("k", "t", {"a": ("train", [(1.0, None)])}) is None
    single = chart.draw("k", "t", {"a": ("train", [(1.0, 3.0)])})
    assert single is not None
    assert len(single.lines[0].dots) == 1
