"""The drawings of the documentation, as SVG: a round, partial work, SALF's time axis, two levels, the states of a lane.

    python analysis/drawings.py [-o docs/explanation]

Prints one JSON line last: the files. The states of a lane are those of the code.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from html import escape
from math import atan2, cos, pi, sin
from pathlib import Path
from typing import Any

GOOD, LATE = {"fill": "#e6f2ea", "line": "#3a8f5d"}, {"fill": "#fbe9e7", "line": "#c0504d"}
IDLE, PART = {"fill": "#eee", "line": "#8a8a8a"}, {"fill": "#fdf3d8", "line": "#b8860b"}
INK, PALE, BLUE, GREEN, RED, GREY = "#222", "#f4f4f2", "#3b6fb6", "#3a8f5d", "#c0504d", "#8a8a8a"


class Drawing:
    """Shapes on a white ground, in pixels from the upper left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title, self.parts = width, height, title, list[str]()

    def box(self, x: float, y: float, width: float, height: float, text: str = "", **how: Any) -> None:
        fill, line = how.get("fill", PALE), how.get("line", INK)
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" stroke="{line}"'
            f' stroke-width="{how.get("stroke", 1):g}"{how.get("dash", "")}/>'
        )
        if text:
            self.text(x + width / 2, y + height / 2 + 4, text, at="middle", color=how.get("color", INK))

    def text(self, x: float, y: float, text: str, at: str = "start", color: str = INK, size: int = 12) -> None:
        for number, row in enumerate(text.split("\n")):
            self.parts.append(
                f'<text x="{x:g}" y="{y + number * (size + 3):g}" font-size="{size}" fill="{color}"'
                f' text-anchor="{at}">{escape(row)}</text>'
            )

    def line(self, *points: tuple[float, float], color: str = INK, arrow: bool = False, dashed: bool = False) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.4"{dash}/>')
        if arrow:
            (x0, y0), (x, y) = points[-2:]
            turn = atan2(y - y0, x - x0)
            ends = [(x + 9 * cos(turn + each), y + 9 * sin(turn + each)) for each in (pi - 0.4, pi + 0.4)]
            corners = " ".join(f"{a:.1f},{b:.1f}" for a, b in [(x, y), *ends])
            self.parts.append(f'<polygon points="{corners}" fill="{color}"/>')

    def save(self, file: Path) -> Path:
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img"'
        head += f' font-family="Helvetica, Arial, sans-serif"><title>{escape(self.title)}</title>'
        ground = f'<rect width="{self.width}" height="{self.height}" fill="#fff"/>'
        file.write_text("\n".join([head, ground, *self.parts, "</svg>\n"]), encoding="utf-8")
        return file


def a_round() -> Drawing:
    """One round with a deadline: who is invited, what arrives, what counts."""
    drawing = Drawing(760, 330, "A round: the server invites, clients visit, the round closes, the server takes a step")
    begin, close, end = 130, 520, 640
    rows = [("server", 40), ("client 0", 105), ("client 1", 155), ("client 2", 205), ("client 3", 255)]
    for name, y in rows:
        drawing.text(20, y + 14, name)
        drawing.line((110, y + 10), (740, y + 10), color="#ccc")
    ends = {105: 300, 155: 455, 205: 600, 255: None}
    drawing.box(begin - 14, 32, 28, 36, fill=BLUE, line=BLUE)
    drawing.text(begin, 24, "invites", at="middle", color=BLUE)
    for y, until in ends.items():
        if until is None:
            drawing.text(begin + 12, y + 14, "not invited", color=GREY)
            continue
        drawing.line((begin, 68), (begin + 14, y), color=BLUE, arrow=True)
        late = until > close
        drawing.box(
            begin + 16,
            y,
            until - begin - 16,
            22,
            "visit",
            fill="#fbe9e7" if late else "#e6f2ea",
            line=RED if late else GREEN,
        )
        if not late:
            drawing.line((until, y), (until + 14, 70), color=GREEN, arrow=True)
    drawing.line((close, 24), (close, 290), color=RED, dashed=True)
    drawing.text(close, 18, "the round closes", at="middle", color=RED)
    drawing.text(608, 236, "late", color=RED)
    drawing.box(close + 10, 32, end - close - 10, 36, "sums, step", fill=BLUE, line=BLUE, color="#fff")
    drawing.line((end, 50), (end + 60, 50), color=BLUE, arrow=True)
    drawing.text(end + 6, 42, "next round", color=BLUE, size=11)
    drawing.line((110, 300), (740, 300), arrow=True)
    drawing.text(740, 318, "time", at="end")
    drawing.text(begin, 318, "0", at="middle")
    drawing.text(close, 318, "deadline", at="middle")
    return drawing


def partial_work() -> Drawing:
    """What of a visit counts by partial = discard, layers, steps."""
    drawing = Drawing(760, 280, "What counts of a visit that the closing of its round cuts short")
    close, left = 470, 150
    cases = (
        ("discard", [("step 1", 150, 0), ("step 2", 150, 0), ("step 3", 150, 0)], "nothing"),
        ("steps", [("step 1", 150, 1), ("step 2", 150, 1), ("step 3", 150, 0)], "two of three steps"),
        (
            "layers",
            [("forward", 130, 0), ("layer 3", 80, 1), ("layer 2", 80, 1), ("layer 1", 160, 0)],
            "layers 3 and 2",
        ),
    )
    for number, (name, pieces, counts) in enumerate(cases):
        y, x = 50 + 70 * number, float(left)
        drawing.text(20, y + 20, f'partial = "{name}"')
        for text, width, good in pieces:
            drawing.box(x, y, width, 32, text, **(GOOD if good else IDLE))
            if name == "layers" and good:
                drawing.line((x + width, y + 32), (x + width, y + 52), color=GREEN, arrow=True)
            x += width
        drawing.text(615, y + 20, counts, color=GREEN if "nothing" not in counts else RED)
    drawing.line((close, 24), (close, 250), color=RED, dashed=True)
    drawing.text(close, 18, "the round closes", at="middle", color=RED)
    drawing.text(615, 34, "counts:", color=GREY, size=11)
    drawing.line((left, 262), (740, 262), arrow=True)
    drawing.text(740, 277, "time", at="end")
    return drawing


def time_axis() -> Drawing:
    """Rounds of waiting and of a deadline on one time axis, with the depth that each client comes to (SALF)."""
    import numpy as np

    drawing = Drawing(760, 330, "The same visits with and without a deadline: rounds follow one another faster")
    seconds = np.array([[0.6, 0.9, 2.2], [0.5, 1.4, 0.8], [0.7, 0.8, 1.9]])  # [rounds, clients]
    scale, left = 88.0, 120
    for top, title, deadline in ((30, "the server waits", None), (180, "a deadline of 1 s, layers count", 1.0)):
        drawing.text(20, top, title)
        now = 0.0
        for row in seconds:
            lasts = float(row.max()) if deadline is None else deadline
            for client, took in enumerate(row):
                y, width = top + 12 + 30 * client, min(float(took), lasts) * scale
                x, share = left + now * scale, min(1.0, lasts / took)
                drawing.box(
                    x,
                    y,
                    width,
                    20,
                    fill="#e6f2ea" if share == 1 else "#fdf3d8",
                    line=GREEN if share == 1 else "#b8860b",
                )
                if share < 1:
                    drawing.text(x + width / 2, y + 14, f"{int(4 * share)} of 4 layers", at="middle", size=10)
            now += lasts
            x = left + now * scale
            drawing.line((x, top + 6), (x, top + 104), color=RED, dashed=True)
        for client in range(3):
            drawing.text(60, top + 26 + 30 * client, f"client {client}", size=11)
    drawing.line((left, 312), (740, 312), arrow=True)
    drawing.text(740, 327, "time", at="end")
    return drawing


def two_levels() -> Drawing:
    """The server leads leaders, one on each node, and these the ranks of their node."""
    drawing = Drawing(760, 300, "Two levels: one copy of the state to each node, one of the sums from it")
    drawing.box(320, 20, 120, 36, "server, rank 0", fill=BLUE, line=BLUE, color="#fff")
    for node, x in enumerate((40, 280, 520)):
        drawing.box(x, 110, 200, 170, fill="#fafafa", line=GREY)
        drawing.text(x + 10, 272, f"node {node}", color=GREY, size=11)
        drawing.box(x + 40, 125, 120, 34, f"leader, rank {1 + 4 * node}", fill="#e3ecf7", line=BLUE)
        drawing.line((380, 56), (x + 100, 124), color=BLUE, arrow=True)
        drawing.line((x + 116, 124), (396, 58), color=GREEN, arrow=True)
        for place in range(3):
            left = x + 12 + 60 * place
            drawing.box(left, 215, 56, 34, f"rank {2 + 4 * node + place}")
            drawing.line((x + 100, 160), (left + 22, 214), color=BLUE, arrow=True)
            drawing.line((left + 34, 214), (x + 108, 161), color=GREEN, arrow=True)
    drawing.text(60, 44, "the state, once per node", color=BLUE)
    drawing.text(560, 44, "sums of its visits", color=GREEN)
    return drawing


def lane_states() -> Drawing:
    """The states of a lane and what leads from one to another, as the code has them."""
    from hpcfl.realtime.lane import TRANSITIONS

    drawing = Drawing(760, 320, "The states of a lane")
    left = {"idle": 60, "visiting": 320, "asked": 320, "late": 320, "dead": 620}
    top = {"idle": 130, "visiting": 40, "asked": 130, "late": 220, "dead": 130}
    out, back = {"visiting": -8, "asked": -4, "late": 12}, {"visiting": 16, "asked": 10, "late": -16}
    for name, x in left.items():
        color = RED if name == "dead" else BLUE
        drawing.box(x, top[name], 110, 40, name, fill="#fbe9e7" if name == "dead" else "#e3ecf7", line=color)
    for state, following in TRANSITIONS.items():
        x, y = left[state], top[state] + 20
        for word, after in following.items():
            tilt = (y - 150) / 8
            if word == "failed":
                if state not in ("dead", "idle"):
                    drawing.line((x + 110, y), (620, 150 + tilt), color=RED, arrow=True)
            elif word == "complete":
                drawing.line((x, y + back[state]), (170, 150 + back[state] / 2 + tilt), color=GREEN, arrow=True)
            elif state == "idle":
                height = top[after] + 20
                drawing.line((170, y + out[after]), (320, height + out[after] / 2), color=BLUE, arrow=True)
                lift = 22 if after == "late" else -12
                drawing.text(215, (y + height) / 2 + out[after] + lift, word, color=BLUE, size=11)
            elif state == "asked":
                drawing.line((350, 170), (350, 220), arrow=True)
                drawing.text(356, 212, word, size=11)
            else:
                drawing.line((430, y + 12), (450, y + 12), (450, 232), (430, 232), arrow=True)
                drawing.text(456, 205, word, size=11)
    drawing.text(20, 290, "Green: complete. Red: failed, from any state.", size=11, color=GREY)
    drawing.text(20, 306, "Who is late keeps its requests and buffers until it has caught up.", size=11, color=GREY)
    return drawing


DRAWINGS = {
    "round": a_round,
    "partial-work": partial_work,
    "time-axis": time_axis,
    "two-levels": two_levels,
    "lane-states": lane_states,
}


def main(words: Sequence[str] | None = None) -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-o", "--out", type=Path, default=Path(__file__).resolve().parents[1] / "docs" / "explanation")
    asked = parser.parse_args(words)
    files = [draw().save(asked.out / f"{name}.svg") for name, draw in DRAWINGS.items()]
    print(json.dumps({"files": [file.name for file in files]}))


if __name__ == "__main__":
    main()
