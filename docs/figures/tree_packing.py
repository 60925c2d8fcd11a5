"""Draw the figure of tree_packing.md: four rollouts, their trie, and which node sees which.

    python docs/figures/tree_packing.py            # writes tree_packing_light.svg and tree_packing_dark.svg

Everything drawn is read off the batch that ``TreePacker`` makes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Polygon, Rectangle

from torchrl_asyncgrpo import TreeBatch, TreePacker, make_rollout, packing_ratio

PROMPT = ["2", "+", "3", "="]
ANSWERS = {"A": ["It", "is", "5", "eos"], "B": ["It", "is", "6", "eos"], "C": ["5", "eos"], "D": ["5", "eos"]}
TOKENS = {token: i for i, token in enumerate(["eos", "2", "3", "+", "=", "It", "is", "5", "6"])}


@dataclass(frozen=True)
class Theme:
    """Colors of text, of lines that only guide the eye and of segments, and how densely segments are filled."""

    name: str
    text: str
    muted: str
    line: str
    segments: tuple[str, ...]
    fill: float


THEMES = [
    Theme("light", "#1f2328", "#656d76", "#c4cad1", ("#2a6fe8", "#c2690f", "#16835a", "#8046e6", "#cc2f68"), 0.17),
    Theme("dark", "#e6edf3", "#9aa4ae", "#4a525b", ("#5c98ff", "#f2a35e", "#3cc490", "#b385ff", "#f4719b"), 0.32),
]


def pack() -> TreeBatch:
    """The micro-batch of the four rollouts."""
    rollouts = []
    for i, answer in enumerate(ANSWERS.values()):
        mask = [False] * len(PROMPT) + [True] * len(answer)
        ids = [TOKENS[token] for token in PROMPT + answer]
        rollouts.append(make_rollout(ids, mask, [-1.0] * len(ids), group_id=0, rollout_id=i))
    (batch,) = TreePacker()(rollouts)
    return batch.validate()


class Drawing:
    """One figure in one theme."""

    def __init__(self, batch: TreeBatch, theme: Theme) -> None:
        self.theme = theme
        self.depth = batch["node", "position_ids"].tolist()
        self.parent = batch["node", "parent"].tolist()
        self.end = batch["node", "subtree_end"].tolist()
        names = list(TOKENS)
        self.token = [names[i] for i in batch["node", "input_ids"].tolist()]
        self.entries = [batch["entry", "node"].tolist().count(node) for node in range(len(self.token))]
        self.leaf = dict(zip(ANSWERS, batch["rollout", "leaf"].tolist(), strict=True))
        self.ratio = packing_ratio([batch])
        self.segment = self._segments()

    def _segments(self) -> list[int]:
        """Segment of each node: a chain without a branch."""
        children = [self.parent.count(node) for node in range(len(self.parent))]
        segment: list[int] = []
        for parent in self.parent:
            goes_on = parent >= 0 and children[parent] == 1
            segment.append(segment[parent] if goes_on else max(segment, default=-1) + 1)
        return segment

    def color(self, node: int) -> str:
        """Color of the segment of a node."""
        return self.theme.segments[self.segment[node]]

    def draw(self, path: Path) -> None:
        """Write the figure."""
        figure = plt.figure(figsize=(11.6, 6.2))
        left, width = 0.012, 0.52
        self.rollouts(figure.add_axes((left, 0.56, width, 0.395)))
        self.trie(figure.add_axes((left, 0.0, width, 0.525)))
        self.visibility(figure.add_axes((0.545, 0.0, 0.445, 0.955)))
        figure.savefig(path, transparent=True, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)
        plt.close(figure)

    def frame(self, axes: Axes, title: str, width: float, height: float) -> None:
        """An empty canvas with a title, one unit of x as long as one of y, y downwards from the title."""
        axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal", anchor="NW")
        axes.axis("off")
        axes.set_title(title, loc="left", color=self.theme.text, fontsize=11.5, fontweight="bold", pad=5)

    def text(self, axes: Axes, x: float, y: float, text: str, *, size: float = 9.5, muted: bool = False, **kw) -> None:
        """Text centered at a point."""
        color = self.theme.muted if muted else self.theme.text
        axes.text(x, y, text, **{"ha": "center", "va": "center", "color": color, "fontsize": size, **kw})

    def box(self, axes: Axes, x: float, y: float, node: int, *, size: tuple[float, float], bold: bool = False) -> None:
        """A token in the color of its segment."""
        w, h = size
        shape = FancyBboxPatch((x - w / 2, y - h / 2), w, h, boxstyle="round,pad=0,rounding_size=0.12", zorder=2)
        shape.set(facecolor=self.color(node), edgecolor="none", alpha=self.theme.fill)
        edge = FancyBboxPatch((x - w / 2, y - h / 2), w, h, boxstyle="round,pad=0,rounding_size=0.12", zorder=3)
        edge.set(facecolor="none", edgecolor=self.color(node), linewidth=1.3)
        axes.add_patch(shape)
        axes.add_patch(edge)
        self.text(axes, x, y, self.token[node], fontweight="bold" if bold else "normal", zorder=4)

    def path(self, leaf: int) -> list[int]:
        """Nodes from the root to a leaf."""
        path = [leaf]
        while self.parent[path[0]] >= 0:
            path.insert(0, self.parent[path[0]])
        return path

    def rollouts(self, axes: Axes) -> None:
        """The rows that were sampled."""
        total = sum(len(PROMPT) + len(answer) for answer in ANSWERS.values())
        self.frame(axes, f"Four rollouts of one group: {total} tokens", 11.1, 4.3)
        for row, (name, leaf) in enumerate(self.leaf.items()):
            y = 0.5 + row * 0.95
            self.text(axes, 0.35, y, name, fontweight="bold")
            for i, node in enumerate(self.path(leaf)):
                trained = i >= len(PROMPT)
                self.box(axes, 1.4 + 1.16 * i, y, node, size=(1.0, 0.62), bold=trained)
        self.text(axes, 0.9, 4.1, "bold: sampled by the policy, trained", muted=True, ha="left", size=9)

    def trie(self, axes: Axes) -> None:
        """The trie, each node with its index in pre-order, its interval and its entries."""
        T = len(self.token)
        self.frame(axes, f"Their trie: {T} nodes, ρ = {self.ratio:.2f}", 11.1, 6.1)
        leaves = sorted(set(self.leaf.values()))
        height = {leaf: 0.9 + 1.85 * i for i, leaf in enumerate(leaves)}
        for node in reversed(range(T)):
            below = [height[child] for child in range(T) if self.parent[child] == node]
            height.setdefault(node, sum(below) / max(len(below), 1))
        for node in range(T):
            x, y = 1.4 + 1.16 * self.depth[node], height[node]
            if self.parent[node] >= 0:
                px, py = x - 1.16, height[self.parent[node]]
                axes.plot([px + 0.5, x - 0.5], [py, y], color=self.theme.muted, linewidth=1.1, zorder=1)
            self.box(axes, x, y, node, size=(1.0, 0.66), bold=self.entries[node] > 0)
            self.text(axes, x, y - 0.55, f"{node}", size=9, color=self.color(node), fontweight="bold")
            self.text(axes, x, y + 0.56, f"[{node}, {self.end[node]})", size=7.6, muted=True)
            for i in range(self.entries[node]):
                dot = x + 0.36 - 0.16 * i
                axes.plot(dot, y - 0.2, marker="o", markersize=3.2, color=self.color(node), zorder=5)
        for leaf in leaves:
            names = ", ".join(name for name, at in self.leaf.items() if at == leaf)
            self.text(axes, 1.4 + 1.16 * self.depth[leaf] + 0.75, height[leaf], names, ha="left", fontweight="bold")
        legend = "above: index in pre-order · below: [index, subtree_end) · dot: one loss entry"
        self.text(axes, 0.9, 5.72, legend, muted=True, ha="left", size=9)

    def visibility(self, axes: Axes) -> None:
        """Query by key: squares where a segment sees itself, rectangles where its descendants see it."""
        T = len(self.token)
        pairs = sum(end - node for node, end in enumerate(self.end))
        self.frame(axes, f"Who sees whom: {pairs} of {T * T} pairs", T + 1.85, T + 3.3)
        x0, y0 = 1.75, 1.3
        for node in range(T):
            self.text(axes, x0 + node + 0.5, y0 - 0.32, self.token[node], size=8.5, color=self.color(node))
            self.text(axes, x0 + node + 0.5, y0 - 0.85, f"{node}", size=8.5, muted=True)
            self.text(axes, x0 - 0.18, y0 + node + 0.5, self.token[node], size=8.5, ha="right", color=self.color(node))
            self.text(axes, x0 - 1.12, y0 + node + 0.5, f"{node}", size=8.5, ha="right", muted=True)
        self.text(axes, x0 - 0.18, y0 - 0.85, "key", size=8.5, ha="right", muted=True)
        self.text(axes, x0 - 1.12, y0 - 0.32, "query", size=8.5, ha="right", muted=True)
        axes.add_patch(Rectangle((x0, y0), T, T, facecolor="none", edgecolor=self.theme.line, linewidth=0.8))
        for i in range(1, T):
            axes.plot([x0, x0 + T], [y0 + i, y0 + i], color=self.theme.line, linewidth=0.35, zorder=0)
            axes.plot([x0 + i, x0 + i], [y0, y0 + T], color=self.theme.line, linewidth=0.35, zorder=0)
        for segment in range(max(self.segment) + 1):
            self._segment(axes, [node for node in range(T) if self.segment[node] == segment], x0, y0)
        y = y0 + T + 0.62
        items = [(0.5, "a segment sees itself, causally"), (1.0, "its descendants see all of it")]
        for x, (strength, label) in zip((x0, x0 + 6.6), items, strict=True):
            patch = Rectangle((x, y - 0.25), 0.5, 0.5, facecolor=self.theme.muted, alpha=self.theme.fill * strength * 2)
            axes.add_patch(patch)
            self.text(axes, x + 0.7, y, label, size=9, ha="left", muted=True)
        note = "each column is one interval of queries: [k, subtree_end[k])"
        self.text(axes, x0, y + 0.85, note, size=9, ha="left", muted=True)

    def _segment(self, axes: Axes, nodes: list[int], x0: float, y0: float) -> None:
        first, last, end = nodes[0], nodes[-1] + 1, self.end[nodes[-1]]
        color, fill, size = self.color(first), self.theme.fill, len(nodes)
        stairs = [(first, first)]
        for i in range(size):
            stairs += [(first + i + 1, first + i), (first + i + 1, first + i + 1)]
        stairs = [(x0 + x, y0 + y) for x, y in [*stairs, (first, last)]]
        axes.add_patch(Polygon(stairs, facecolor=color, alpha=fill, edgecolor="none"))
        axes.add_patch(Polygon(stairs, facecolor="none", edgecolor=color, linewidth=1.2))
        if end > last:
            corner, shape = (x0 + first, y0 + last), (size, end - last)
            axes.add_patch(Rectangle(corner, *shape, facecolor=color, alpha=2 * fill, edgecolor="none"))
            axes.add_patch(Rectangle(corner, *shape, facecolor="none", edgecolor=color, linewidth=1.6))


def main(directory: Path, suffix: str = ".svg") -> None:
    """Write the figure in both themes."""
    plt.rcParams.update({"svg.hashsalt": "tree_packing", "font.family": "DejaVu Sans"})
    batch = pack()
    for theme in THEMES:
        Drawing(batch, theme).draw(directory / f"tree_packing_{theme.name}{suffix}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent, *sys.argv[2:])
