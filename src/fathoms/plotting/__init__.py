"""Figures by matplotlib: their style and their SVG, panels of lines, maps of numbers."""
