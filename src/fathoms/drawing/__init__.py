"""Drawings of lines, areas, texts and pixels, written as SVG or PNG: colours, ticks and the shapes themselves."""
