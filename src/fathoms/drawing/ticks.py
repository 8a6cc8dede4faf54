"""Ticks of an axis, linear or logarithmic: round numbers that enclose the values, and their text."""

from __future__ import annotations

import math


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers that enclose low to high, about `count` steps apart.

    >>> ticks(0, 9, 5)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    size = max(abs(low), abs(high))
    # A smaller span is invisible, and below the second limit it underflows.
    if high - low < max(1e-9 * size, 1e-300):
        pad = 0.1 * size if size > 1e-300 else 1.0
        low, high = low - pad, high + pad
    step = nice_step(high - low, count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def nice_step(span: float, count: int) -> float:
    """A round step (1, 2 or 5 times a power of ten) that cuts a span into at most `count` parts."""
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))


def log_ticks(low: float, high: float, count: int) -> list[float]:
    """Powers of ten that enclose low to high, both above zero; over two decades or fewer 1, 2 and 5 times them.

    >>> log_ticks(0.03, 0.17, 5)
    [0.02, 0.05, 0.1, 0.2]
    """
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    if last - first > 2:
        step = max(1, math.ceil((last - first) / count))
        return [10.0**power for power in range(first, last + step, step)]
    fine = [float(f"{factor}e{power}") for power in range(first - 1, last + 1) for factor in (1, 2, 5)]
    fine.append(10.0**last)
    begin = max((value for value in fine if value <= low * (1 + 1e-9)), default=fine[0])
    end = min((value for value in fine if value >= high * (1 - 1e-9) and value > begin), default=fine[-1] * 2)
    return [value for value in fine if begin <= value <= end]


def tick_label(value: float, step: float) -> str:
    """A tick's text on a linear axis, with as many digits as the step needs.

    >>> tick_label(0.5, 0.05)
    '0.50'
    """
    if step < 1e-4 or abs(value) >= 1e6:
        return _short_power(f"{value:.1e}") if value else "0"
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:,.{digits}f}"


def short_number(value: float) -> str:
    """A number in few characters, for an end of a scale or a tick of a logarithmic axis.

    >>> short_number(0.00002)
    '2e-5'
    >>> short_number(0.00016)
    '1.6e-4'
    """
    if value and (abs(value) >= 1e5 or abs(value) < 1e-3):
        return _short_power(f"{value:.1e}".replace(".0e", "e"))
    return f"{value:.4g}"


def _short_power(text: str) -> str:
    return text.replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
