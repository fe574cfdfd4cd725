"""Line plots as SVG text, so that a plot in the docs needs no plotting package."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 78, 150, 46, 56  # room for labels around the plot area
# Okabe and Ito's palette, which stays apart in every form of colour blindness.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKS = ("", "6 4", "2 3", "10 4 2 4")
GREY, LIGHT = "#444444", "#dddddd"
LABEL_HEIGHT = 15


def line_plot(
    path: Path | str,
    title: str,
    x_label: str,
    y_label: str,
    series: Mapping[str, Points],
    log_x: bool = False,
    log_y: bool = False,
) -> None:
    """Write one plot; every series is a line with its name at the right end.

    Args:
        path: the SVG to write; folders are made.
        title: above the plot. x_label, y_label: of the axes, with units.
        series: name -> (x, y) points. On a logarithmic axis they must be positive.
        log_x, log_y: logarithmic axes; a linear one starts at zero unless values are negative.

    Raises:
        ValueError: no points, or one that an axis cannot show.
    """
    points = [point for line in series.values() for point in line]
    if not points:
        raise ValueError(f"{path}: there is nothing to plot; give at least one point")
    x = _Axis([point[0] for point in points], log_x, LEFT, WIDTH - RIGHT)
    y = _Axis([point[1] for point in points], log_y, HEIGHT - BOTTOM, TOP)
    parts = [*_frame(title, x_label, y_label), *_grid(x, y), *_lines(series, x, y)]
    body = "\n".join(f"  {part}" for part in parts)
    text = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="sans-serif" font-size="12">\n{body}\n</svg>\n'
    )
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")


class _Axis:
    """Maps values to pixels; `ticks` are round values over the range shown."""

    def __init__(self, values: Sequence[float], log: bool, start: float, end: float) -> None:
        bad = next((v for v in values if not math.isfinite(v) or (log and v <= 0)), None)
        if bad is not None:
            kind = "a logarithmic" if log else "an"
            raise ValueError(f"{bad} cannot be shown on {kind} axis; leave the point out")
        self._scale: Callable[[float], float] = math.log10 if log else float
        low, high = min(values), max(values)
        self.ticks = _log_ticks(low, high) if log else _linear_ticks(min(low, 0.0), high)
        self._first = self._scale(min(self.ticks[0], low))
        self._last = self._scale(max(self.ticks[-1], high))
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        share = (self._scale(value) - self._first) / (self._last - self._first)
        return round(self._start + share * (self._end - self._start), 1)


def _linear_ticks(low: float, high: float) -> list[float]:
    """Four to ten multiples of 1, 2 or 5 times a power of ten, around [low, high]."""
    span = high - low or abs(high) or 1.0
    unit = 10.0 ** math.floor(math.log10(span / 4))
    step = next(unit * factor for factor in (1, 2, 5, 10) if span / (unit * factor) <= 8)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, with 2 and 5 times them where that leaves few, around [low, high]."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1,) if last - first > 3 else (1, 2, 5)
    every = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    start = max((tick for tick in every if tick <= low), default=every[0])
    end = min((tick for tick in every if tick >= high and tick > start), default=every[-1])
    return [tick for tick in every if start <= tick <= end]


def _frame(title: str, x_label: str, y_label: str) -> Iterator[str]:
    middle_x, middle_y = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    yield _text(LEFT, 26, title, 'font-size="15" font-weight="bold"')
    yield _text(middle_x, HEIGHT - 14, x_label, 'text-anchor="middle"')
    turned = f'text-anchor="middle" transform="rotate(-90 18 {middle_y})"'
    yield _text(18, middle_y, y_label, turned)


def _grid(x: _Axis, y: _Axis) -> Iterator[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for tick in y.ticks:
        yield _line(LEFT, y(tick), right, y(tick), LIGHT)
        yield _text(LEFT - 8, y(tick) + 4, _number(tick), 'text-anchor="end"')
    for tick in x.ticks:
        yield _line(x(tick), bottom, x(tick), bottom + 5, GREY)
        yield _text(x(tick), bottom + 19, _number(tick), 'text-anchor="middle"')
    yield _line(LEFT, bottom, right, bottom, GREY)


def _lines(series: Mapping[str, Points], x: _Axis, y: _Axis) -> Iterator[str]:
    ends = {name: y(line[-1][1]) for name, line in series.items() if line}
    heights = _apart(ends)
    for place, (name, line) in enumerate(series.items()):
        if not line:
            continue
        colour = COLOURS[place % len(COLOURS)]
        dashes = MARKS[place // len(COLOURS) % len(MARKS)]
        path = " ".join(f"{x(left)},{y(right)}" for left, right in line)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashed}/>'
        for left, right in line:
            yield f'<circle cx="{x(left)}" cy="{y(right)}" r="3" fill="{colour}"/>'
        yield _text(x(line[-1][0]) + 8, heights[name] + 4, name, f'fill="{colour}"')


def _apart(ends: Mapping[str, float]) -> dict[str, float]:
    """Heights for the names, near their lines' ends and never one over another."""
    placed: dict[str, float] = {}
    lowest = float(TOP - LABEL_HEIGHT)
    for name, height in sorted(ends.items(), key=lambda item: item[1]):
        lowest = placed[name] = max(height, lowest + LABEL_HEIGHT)
    highest = float(HEIGHT - BOTTOM + LABEL_HEIGHT)
    for name in reversed(placed):
        highest = placed[name] = min(placed[name], highest - LABEL_HEIGHT)
    return placed


def _line(x: float, y: float, to_x: float, to_y: float, colour: str) -> str:
    return f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, attributes: str) -> str:
    return f'<text x="{x}" y="{y}" {attributes}>{escape(text)}</text>'


def _number(value: float) -> str:
    """Thousands and millions by letter, and no more digits than the tick needs."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.6g}{letter}"
    return f"{value:.6g}"
