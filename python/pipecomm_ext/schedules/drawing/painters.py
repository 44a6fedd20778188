"""Painters of a `Scene`: SVG text, a self-contained HTML page, and PNG through matplotlib."""

from __future__ import annotations

from html import escape
from itertools import groupby

from .scene import FAINT, FONT_SIZE, IDLE, INK, RULE, Label, Scene

FONT_FAMILY = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
MAX_INTERACTIVE_RECTS = 20_000  # a page with more would be slow
# A dark page has no background of its own, and what is drawn on it is light. Texts on coloured boxes, which
# have an anchor, remain dark.
DARK = (
    "<style>@media (prefers-color-scheme: dark) {"
    f'.paper {{fill: none}} text[fill="{INK}"]:not([text-anchor]) {{fill: #e3e6ec}} '
    f'[fill="{FAINT}"] {{fill: #a0a9b8}} [fill="{IDLE}"] {{fill: #2b303b}} [fill="{RULE}"] {{fill: #4a5160}}'
    "}</style>"
)
POINTS_PER_PIXEL = 0.75
PNG_PIXELS_PER_PIXEL = 1.5


def svg_text(scene: Scene, is_interactive: bool = False) -> str:
    """The scene as SVG. If interactive, rectangles have a tip, and messages are drawn but hidden."""
    is_interactive &= len(scene.rects) <= MAX_INTERACTIVE_RECTS
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {scene.width:g} {scene.height:g}" '
        f'width="{scene.width:g}" height="{scene.height:g}" font-family="{FONT_FAMILY}" '
        f'font-size="{FONT_SIZE}">',
        DARK,
        '<rect class="paper" width="100%" height="100%" fill="#ffffff"/>',
    ]
    parts += _rects_with_tips(scene) if is_interactive else _rects_as_paths(scene)
    parts.append('<g pointer-events="none" dominant-baseline="central">')
    parts += map(_svg_label, scene.labels)
    parts.append("</g>")
    if is_interactive:
        parts.append('<g pointer-events="none" fill="none" stroke="#c2255c" stroke-width="1.4">')
        for curve in scene.curves:
            bend = (curve.x1 + curve.x2) / 2
            parts.append(
                f'<path class="message" data-m="{curve.micro_key}" d="M{curve.x1:.1f} {curve.y1:.1f}'
                f'C{bend:.1f} {curve.y1:.1f} {bend:.1f} {curve.y2:.1f} {curve.x2:.1f} {curve.y2:.1f}"/>'
            )
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"])


def _rects_with_tips(scene: Scene):
    for rect in scene.rects:
        shape = f'<rect x="{rect.x:.1f}" y="{rect.y:.1f}" width="{rect.width:.1f}" height="{rect.height:g}"'
        shape += f' fill="{rect.fill}"'
        if rect.tip:
            yield f'{shape} data-m="{rect.micro_key}"><title>{escape(rect.tip)}</title></rect>'
        else:
            yield f"{shape}/>"


def _rects_as_paths(scene: Scene):
    for fill, rects in groupby(scene.rects, key=lambda rect: rect.fill):
        path = "".join(f"M{r.x:.1f} {r.y:.1f}h{r.width:.1f}v{r.height:g}h-{r.width:.1f}z" for r in rects)
        yield f'<path fill="{fill}" d="{path}"/>'


def _svg_label(label: Label) -> str:
    attributes = f'x="{label.x:.1f}" y="{label.y:.1f}" fill="{label.color}"'
    if label.size != FONT_SIZE:
        attributes += f' font-size="{label.size:g}"'
    if label.anchor != "start":
        attributes += f' text-anchor="{label.anchor}"'
    if label.is_bold:
        attributes += ' font-weight="bold"'
    return f'<text {attributes} xml:space="preserve">{escape(label.text)}</text>'


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>@TITLE@</title>
<style>
:root { color-scheme: light dark; }
body { margin: 0; background: #ffffff; overflow-x: auto; }
@media (prefers-color-scheme: dark) { body { background: #1b1e26; } }
svg { display: block; margin: 0 auto; }
rect[data-m] { cursor: default; }
svg.focus rect[data-m] { opacity: 0.18; }
svg.focus rect.on { opacity: 1; }
.message { visibility: hidden; }
.message.on { visibility: visible; }
#tip {
  position: fixed; display: none; pointer-events: none; white-space: pre; padding: 7px 10px;
  border-radius: 5px; background: #1f2933; color: #ffffff; font: 12px/1.5 @FONT@; box-shadow: 0 2px 8px #0005;
}
</style>
</head>
<body>
@SVG@
<div id="tip"></div>
<script>
const svg = document.querySelector("svg"), tip = document.getElementById("tip"), members = new Map();
for (const shape of svg.querySelectorAll("[data-m]")) {
  const key = shape.dataset.m, title = shape.querySelector("title");
  if (!members.has(key)) members.set(key, []);
  members.get(key).push(shape);
  if (title) { shape.dataset.tip = title.textContent; title.remove(); }
}
let focus = null;
function show(key) {
  if (key === focus) return;
  for (const shape of members.get(focus) || []) shape.classList.remove("on");
  for (const shape of members.get(key) || []) shape.classList.add("on");
  svg.classList.toggle("focus", key !== null);
  focus = key;
}
svg.addEventListener("mousemove", event => {
  const text = event.target.dataset.tip;
  show(text ? event.target.dataset.m : null);
  tip.style.display = text ? "block" : "none";
  if (!text) return;
  tip.textContent = text;
  tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8) + "px";
});
svg.addEventListener("mouseleave", () => { show(null); tip.style.display = "none"; });
</script>
</body>
</html>
"""


def html_text(scene: Scene, title: str) -> str:
    """A page without external parts.

    Hovering over a rectangle shows its action, time and messages, and highlights its micro-batch everywhere.
    """
    page = _PAGE.replace("@TITLE@", escape(title)).replace("@FONT@", FONT_FAMILY)
    return page.replace("@SVG@", svg_text(scene, is_interactive=True))


def save_png(scene: Scene, path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.collections import PatchCollection
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
        from PIL import Image
    except ImportError as error:
        raise ImportError("drawing a .png needs matplotlib; install it, or draw a .svg or .html") from error
    dots_per_inch = 72 / POINTS_PER_PIXEL
    figure = Figure(figsize=(scene.width / dots_per_inch, scene.height / dots_per_inch), facecolor="#ffffff")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, scene.width), ylim=(scene.height, 0))
    axes.axis("off")
    shapes = [Rectangle((rect.x, rect.y), rect.width, rect.height) for rect in scene.rects]
    axes.add_collection(PatchCollection(shapes, facecolor=[rect.fill for rect in scene.rects], linewidth=0))
    alignment = {"start": "left", "middle": "center", "end": "right"}
    for label in scene.labels:
        axes.text(
            label.x, label.y, label.text, fontsize=label.size * POINTS_PER_PIXEL * 0.94, color=label.color,
            ha=alignment[label.anchor], va="center_baseline", fontweight="bold" if label.is_bold else
            "normal", parse_math=False,
        )  # fmt: skip
    figure.set_dpi(dots_per_inch * PNG_PIXELS_PER_PIXEL)
    canvas.draw()
    image = Image.frombuffer("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba()))
    # Flat colours: a palette loses nothing visible and makes the file several times smaller.
    image.convert("RGB").quantize(192, dither=Image.Dither.NONE).save(path, format="png", optimize=True)
