"""Draws docs/mechanism.png, the picture of the mechanism in the README: `python docs/mechanism.py`."""

from pathlib import Path

import matplotlib


matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch


INK, PALE = "#22313f", "#eef2f5"
CACHED, TABLE, PLAIN = "#f6c85f", "#9fd3c7", "#ffffff"

# name: (x, y, width, text, colour); x and y are centres
BOXES = {
    "hidden": (1.0, 3.2, 1.5, "hidden state\n$x_t$", PLAIN),
    "id": (1.0, 0.9, 1.5, "token id\n$i_t$", CACHED),
    "query": (3.7, 5.2, 2.2, "queries\n$q^C$ ; RoPE$(q^R)$", PLAIN),
    "rope": (3.7, 3.9, 2.2, "rotary key, shared\nRoPE$(W_{KR}\\,x_t)$", CACHED),
    "latent": (3.7, 2.5, 2.2, "latent $c_t$\nRMSNorm$(W_{DKV}\\,x_t)$", CACHED),
    "table": (3.7, 0.9, 2.2, "gate table, per layer\nEmb$[i_t]$", TABLE),
    "up": (6.4, 2.5, 1.9, "up-projection\n$W_{UKV}\\,c_t$", PLAIN),
    "gate": (6.4, 0.9, 1.9, "gate $g_t$\n$W_{UE}\\,$Emb$[i_t]$", PLAIN),
    "product": (8.6, 2.5, 1.5, "product\n$kv_t \\odot g_t$", PLAIN),
    "norm": (10.6, 2.5, 1.6, "LayerNorm\nover all heads", PLAIN),
    "attention": (12.6, 3.9, 1.6, "attention\n$W_O$", PLAIN),
}
ARROWS = [
    ("hidden", "query"),
    ("hidden", "rope"),
    ("hidden", "latent"),
    ("id", "table"),
    ("latent", "up"),
    ("table", "gate"),
    ("up", "product"),
    ("gate", "product"),
    ("product", "norm"),
]
HEIGHT = 0.86


def side(name: str, right: bool) -> tuple[float, float]:
    x, y, width, *_ = BOXES[name]
    return (x + width / 2 if right else x - width / 2, y)


def arrow(axes, start, end, text: str = "") -> None:
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=INK, lw=1.1, shrinkA=1, shrinkB=1)
    )
    if text:
        axes.text((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.12, text, ha="center", fontsize=9, color=INK)


def main() -> None:
    figure, axes = plt.subplots(figsize=(11.5, 4.6))
    for x, y, width, text, colour in BOXES.values():
        axes.add_patch(
            FancyBboxPatch(
                (x - width / 2, y - HEIGHT / 2),
                width,
                HEIGHT,
                boxstyle="round,pad=0,rounding_size=0.1",
                facecolor=colour,
                edgecolor=INK,
                lw=1.1,
            )
        )
        axes.text(x, y, text, ha="center", va="center", fontsize=9, color=INK, linespacing=1.5)
    for start, end in ARROWS:
        arrow(axes, side(start, True), side(end, False))
    attention_x, attention_y, attention_width, *_ = BOXES["attention"]
    arrow(axes, side("norm", True), (attention_x - 0.2, attention_y - HEIGHT / 2), "K, V   ")
    arrow(axes, side("rope", True), side("attention", False), "one for all heads")
    arrow(axes, side("query", True), (attention_x - 0.2, attention_y + HEIGHT / 2))
    arrow(axes, side("attention", True), (attention_x + attention_width / 2 + 0.7, attention_y))

    for x, colour, text in (
        (0.25, CACHED, "cached: latent and rotary key for each layer group, the id once for all layers"),
        (8.9, TABLE, "static: one row for each id of the vocabulary"),
    ):
        axes.add_patch(FancyBboxPatch((x, -0.32), 0.3, 0.2, boxstyle="round,pad=0", facecolor=colour, edgecolor=INK))
        axes.text(x + 0.45, -0.22, text, va="center", fontsize=9, color=INK)
    axes.set_xlim(0, 14.3)
    axes.set_ylim(-0.6, 5.8)
    axes.axis("off")
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=150, bbox_inches="tight", facecolor="white")


if __name__ == "__main__":
    main()
