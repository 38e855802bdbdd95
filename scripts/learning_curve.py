"""Draws the learning curve of SmolLM2 from recorded results. With --check, only checks whether it is current."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.generated import write_or_check
from scripts.line_chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Chart, chart

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "smollm2_arithmetic_h200x2.json"
FIGURE = ROOT / "docs" / "figures" / "smollm2_learning_curve.svg"
SERIES = (("mean reward of a training step", "reward"), ("held-out sums solved", "solved"))
COLOURS = ("#2563eb", "#ea580c")
HEADING = 46
"""Height above the chart for the title and the legend [pixels]."""


def svg(figure: Chart) -> str:
    """Return the figure as an SVG document with its own background, so that it is readable in dark mode."""
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {-HEADING} {WIDTH} {HEIGHT + HEADING}"'
        ' font-family="sans-serif" font-size="11" fill="#374151">',
        f"<title>{figure.title}</title>",
        f'<rect y="{-HEADING}" width="{WIDTH}" height="{HEIGHT + HEADING}" rx="6" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="{18 - HEADING}" font-size="13" font-weight="bold">{figure.title}</text>',
    ]
    for number, (line, colour) in enumerate(zip(figure.lines, COLOURS, strict=True)):
        x, y = LEFT + 210 * number, 36 - HEADING
        parts.append(f'<rect x="{x}" y="{y - 6}" width="14" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 20}" y="{y}">{line.label}</text>')
    for tick in figure.y_ticks:
        parts.append(f'<path d="M{LEFT} {tick.at}H{right}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{tick.at + 4}" text-anchor="end">{tick.label}</text>')
    for tick in figure.x_ticks:
        parts.append(f'<text x="{tick.at}" y="{bottom + 16}" text-anchor="middle">{tick.label}</text>')
    parts.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 4}" text-anchor="middle">{figure.unit}</text>')
    for line, colour in zip(figure.lines, COLOURS, strict=True):
        parts += [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>' for path in line.paths]
        if len(line.dots) < 10:
            parts += [f'<circle cx="{dot.x}" cy="{dot.y}" r="4" fill="{colour}"/>' for dot in line.dots]
    parts.append(f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="#9ca3af"/>')
    return "\n".join(parts) + "\n</svg>\n"


def draw() -> str:
    results = json.loads(RESULTS.read_bytes())
    solved = [{"step": row["step"], "solved": row["solved"]} for row in results["held_out"]]
    rows = sorted(results["steps"] + solved, key=lambda row: row["step"])
    title = "SmolLM2-135M-Instruct learns sums: one H200 trains, one serves"
    figure = chart(title, "training step", rows, SERIES)
    assert figure is not None, f"{RESULTS} has no steps"
    return svg(figure)


if __name__ == "__main__":
    write_or_check({FIGURE: draw()})
