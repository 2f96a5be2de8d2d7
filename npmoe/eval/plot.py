"""Loss against bytes per token as an SVG, written by hand: axes, ticks, labelled points."""

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 90, 110, 50, 60
LABEL_WIDTH, LABEL_HEIGHT = 90, 16

Point = tuple[str, float, float]
"""Label, x, y."""


def ticks(low: float, high: float) -> list[float]:
    """Round numbers, three to ten of them in most cases, between low and high; low < high."""
    magnitude = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = magnitude * max((f for f in (2, 5) if f * magnitude <= (high - low) / 4), default=1)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [step * i for i in range(first, last + 1)]


class Axis:
    """Values from `low` to `high`, with a margin, onto pixels from `start` to `stop`."""

    def __init__(self, values: Sequence[float], start: float, stop: float) -> None:
        low, high = min(values), max(values)
        margin = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
        self.low, self.high, self.start, self.stop = low - margin, high + margin, start, stop

    def at(self, value: float) -> float:
        """The pixel of a value."""
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.stop - self.start), 1)

    def ticks(self) -> list[tuple[float, str]]:
        """Pixel and text of each tick."""
        values = ticks(self.low, self.high)
        return [(self.at(value), f"{value:.6g}") for value in values]


def scatter_svg(points: Sequence[Point], title: str, x_label: str, y_label: str) -> str:
    """The picture, as text."""
    x = Axis([p[1] for p in points], LEFT, WIDTH - RIGHT)
    y = Axis([p[2] for p in points], HEIGHT - BOTTOM, TOP)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    middle = (TOP + bottom) / 2
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 28, title, "start", ' font-size="15"'),
        f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="black"/>',
        _text((LEFT + right) / 2, HEIGHT - 16, x_label, "middle"),
        _text(20, middle, y_label, "middle", f' transform="rotate(-90 20 {middle})"'),
    ]
    for at, text in x.ticks():
        lines.append(_line(at, bottom, at, bottom + 5) + _text(at, bottom + 20, text, "middle"))
    for at, text in y.ticks():
        lines.append(_line(LEFT - 5, at, LEFT, at) + _text(LEFT - 9, at + 4, text, "end"))
    spots = [(label, x.at(px), y.at(py)) for label, px, py in points]
    for (label, px, py), label_y in zip(spots, label_heights(spots), strict=True):
        lines.append(_line(px, py, px + 12, label_y, "#999"))
        lines.append(f'<circle cx="{px}" cy="{py}" r="4" fill="#1f77b4"/>')
        lines.append(_text(px + 15, label_y + 4, label, "start"))
    return "\n".join([*lines, "</svg>", ""])


def label_heights(spots: Sequence[Point]) -> list[float]:
    """A y for each label, right of its spot, so that labels near each other do not overlap."""
    placed: dict[int, float] = {}
    for i in sorted(range(len(spots)), key=lambda i: spots[i][2]):
        _, x, y = spots[i]
        near = sorted(at for j, at in placed.items() if abs(spots[j][1] - x) < LABEL_WIDTH)
        for at in near:
            if abs(at - y) < LABEL_HEIGHT:
                y = at + LABEL_HEIGHT
        placed[i] = y
    return [placed[i] for i in range(len(spots))]


def _line(x1: float, y1: float, x2: float, y2: float, color: str = "black") -> str:
    return f'<path d="M{x1} {y1}L{x2} {y2}" stroke="{color}"/>'


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{more}>{escape(text)}</text>'
