"""Draws the pictures of architecture.md into docs/img, or into the folder of its argument, without torch.

architecture_layers.svg      the order of the layers, as tests/layers.py has it
architecture_messages.svg    one message over each transport
architecture_connection.svg  the states of a TCP connection

The script fails if a layer has no text here, or if a state or a record of the pictures is not in csrc/.
"""

from __future__ import annotations

import re
import runpy
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "img"
INK, GREY, LINE = "#1f2430", "#5a6270", "#7a8392"
PYTHON, CPP, END, INNER = "#dbe9f8", "#dff0d8", "#f3dede", "#ffffff"
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {height}" width="900" height="{height}" \
font-family="Helvetica, Arial, 'DejaVu Sans', sans-serif" font-size="12">
<title>{title}</title>
<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" orient="auto">\
<path d="M0 1L9 5L0 9z" fill="{line}"/></marker></defs>
<style>@media (prefers-color-scheme: dark) {{{dark}}}</style>
<rect class="paper" width="100%" height="100%" fill="#ffffff"/>"""
DARK = {INK: "#e3e6ec", GREY: "#a5adba", LINE: "#8c95a4"}
DARK |= {PYTHON: "#24405e", CPP: "#2b4a2a", END: "#5b2f2f", INNER: "#1b2230"}


class Drawing:
    def __init__(self, height: int, title: str) -> None:
        rules = [
            f'[{kind}="{old}"] {{{kind}: {new}}}' for old, new in DARK.items() for kind in ("fill", "stroke")
        ]
        dark = " ".join([*rules, ".paper {fill: none}"])
        self.parts = [HEAD.format(height=height, title=escape(title), line=LINE, dark=dark)]

    def box(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        size = f'x="{x}" y="{y}" width="{width}" height="{height}"'
        self.parts.append(f'<rect {size} rx="5" fill="{fill}" stroke="{LINE}"/>')

    def text(
        self, x: float, y: float, text: str, at: str = "middle", color: str = INK, weight="normal"
    ) -> None:
        style = f'text-anchor="{at}" fill="{color}" font-weight="{weight}"'
        for idx, line in enumerate(text.split("\n")):
            self.parts.append(f'<text x="{x}" y="{y + 15 * idx}" {style}>{escape(line)}</text>')

    def line(self, *points: tuple[float, float], tip: str = ' marker-end="url(#tip)"') -> None:
        path = "L".join(f"{x} {y}" for x, y in points)
        self.parts.append(f'<path d="M{path}" fill="none" stroke="{LINE}"{tip}/>')

    def save(self, name: str) -> None:
        path = FOLDER / f"architecture_{name}.svg"
        path.write_text("\n".join([*self.parts, "</svg>", ""]), encoding="utf-8")


ABOUT = {
    "plan": "boxes and plans, and their lowering to copies; no torch, no I/O",
    "copy": "packs, unpacks, scales and averages on CPU and CUDA",
    "message": "descriptors, matching, operations, failures, the flight record",
    "transport": "moves bytes between ranks: shm, tcp, nccl",
    "routes": "shared memory or TCP for each pair of ranks",
    "engine": "order, deadlines, one failure; host and device execution",
    "bindings": "pybind11: arguments in, exceptions out",
    "errors": "the exceptions of communication",
    "schedules": "pipeline schedules as data; imports nothing of the package",
    "core": "loads the extension; environment variables, rendezvous of ranks",
    "transports": "one row for each transport; records and routes of ranks",
    "communicator": "Communicator, its construction and its registry",
    "distributed": "the calls of torch.distributed",
    "backend": "its backend",
    "parallel_state": "groups, stages",
    "sequence_parallel": "all-to-all, split, gather, attention, with autograd",
    "relay": "boundary tensors between stages of different sizes",
    "runtime": "runs schedules: plan loop, stage boundaries, backward, gradients",
    "dualpipe": "the interface of DualPipe",
    "mindspeed": "that of MindSpeed-MM",
    "pipeline_parallel": "Megatron's pipeline layer",
    "diagnostics": "info, doctor, flight reports",
    "integrations": "transformers",
    "__main__": "the command line",
    "__init__": "the public names",
}


def draw_layers() -> None:
    order = runpy.run_path(str(ROOT / "tests" / "layers.py"))
    stacks = {"Python": (order["PYTHON"], PYTHON), "C++": (order["CSRC"], CPP)}
    drawing = Drawing(50 + 30 * sum(len(rows) for rows, _ in stacks.values()), "The layers, users at the top")
    drawing.text(
        110, 24, "A layer uses only the layers below it. Layers of one row do not use each other.", "start"
    )
    y = 40
    for language, (rows, fill) in stacks.items():
        drawing.text(20, y + 15 * len(rows), language, "start", weight="bold")
        for row in reversed(rows):
            width = (300 - 6 * (len(row) - 1)) / len(row)
            for idx, name in enumerate(row):
                x = 110 + idx * (width + 6)
                drawing.box(x, y, width, 25, fill)
                drawing.text(x + width / 2, y + 17, name, weight="bold")
            drawing.text(425, y + 17, "; ".join(ABOUT[name] for name in row), "start", GREY)
            y += 30
    drawing.save("layers")


# ">", "<", "=": to the receiver, back, both ways; "s", "r", "b": what the sender, the receiver or both do.
MESSAGES = {
    "shm, more than 32 KiB": [
        (">", "rendezvous: the descriptor, in the ring"),
        ("r", "compares it with the posted receive"),
        ("<", "grant: stream or direct"),
        (">", "packed in chunks of 128 KiB into the ring,\nor in pieces of 512 KiB into the window"),
        (">", "direct: landed"),
        ("r", "unpacks (stream), completes"),
        ("<", "num_answered, doorbell"),
        ("s", "completes"),
    ],
    "tcp, more than 32 KiB": [
        ("s", "packs into staging memory, if needed"),
        (">", "announce: the descriptor, in a packet"),
        ("r", "compares it with the posted receive"),
        ("<", "ready: the descriptor of the receive"),
        ("s", "compares it with the send"),
        (">", "body in pieces of 1 MiB,\nmemory to socket to memory"),
        ("b", "complete after the last byte"),
        ("r", "unpacks from staging memory, if needed"),
    ],
    "nccl, message between two ranks": [
        ("=", "claims about a new message, over TCP"),
        ("s", "packs tensors with gaps, one launch"),
        (">", "ncclSend and ncclRecv on the lane,\nat most 64 in a round"),
        ("r", "unpacks tensors with gaps, one launch"),
        ("b", "record an event; the call returns"),
        ("b", "wait(): the current stream waits for it"),
        ("b", "a host thread finds it done: completes"),
    ],
}


def draw_messages() -> None:
    bottom = 66 + 42 * max(map(len, MESSAGES.values()))
    drawing = Drawing(bottom + 10, "One message over shared memory, TCP and NCCL")
    for lane, (title, steps) in enumerate(MESSAGES.items()):
        left, right = 15 + lane * 300, 285 + lane * 300
        middle = (left + right) / 2
        drawing.text(middle, 22, title, weight="bold")
        for x, at, end in ((left, "start", "sender"), (right, "end", "receiver")):
            drawing.text(x, 42, end, at, GREY)
            drawing.line((x, 50), (x, bottom), tip="")
        for idx, (kind, text) in enumerate(steps):
            y = 76 + 42 * idx
            place = {"s": (left + 8, y, text, "start"), "r": (right - 8, y, text, "end")}
            drawing.text(*place.get(kind, (middle, y, text)))
            y += 6 + 15 * text.count("\n")
            if kind in ">=":
                drawing.line((left, y), (right, y))
            if kind in "<=":
                drawing.line((right, y), (left, y))
    drawing.save("messages")


STATES = [  # name, meaning, x, y, width, height, color
    ("idle", "no attempt", 20, 75, 120, 50, PYTHON),
    ("trying", "", 235, 40, 395, 115, PYTHON),
    ("connecting", "TCP", 247, 80, 95, 50, INNER),
    ("greeting", "hello sent", 385, 80, 95, 50, INNER),
    ("ready", "ready sent", 523, 80, 95, 50, INNER),
    ("resting", "100 ms", 235, 345, 120, 50, PYTHON),
    ("attached", "own attempt, may send", 720, 75, 160, 50, PYTHON),
    ("attached", "the peer has sent a packet", 700, 210, 180, 50, PYTHON),
    ("attached", "peer's attempt, must wait", 700, 345, 180, 50, PYTHON),
    ("over", "no new connection", 440, 210, 130, 50, END),
]
CHANGES = [  # points of an arrow, its text, where that begins
    (((140, 90), (235, 90)), "needed", 188, 82),
    (((235, 112), (140, 112)), "missed", 188, 128),
    (((342, 105), (385, 105)), "", 0, 0),
    (((480, 105), (523, 105)), "welcome", 502, 72),
    (((618, 100), (720, 100)), "taken", 675, 92),
    (((265, 155), (265, 345)), "all addresses tried,\nnot all refused", 200, 240),
    (((305, 345), (305, 155)), "time is up", 342, 250),
    (((405, 155), (405, 360), (700, 360)), "ready received, taken sent", 555, 353),
    (((700, 382), (355, 382)), "connection ended", 525, 399),
    (((800, 125), (800, 210)), "packet", 829, 170),
    (((790, 345), (790, 260)), "packet", 819, 305),
    (((740, 125), (740, 180), (505, 180), (505, 210)), "connection ended: missed", 625, 173),
    (((700, 235), (570, 235)), "connection ended", 636, 228),
]


def draw_connection() -> None:
    drawing = Drawing(415, "The states of a TCP connection")
    for name, meaning, x, y, width, height, color in STATES:
        drawing.box(x, y, width, height, color)
        drawing.text(x + width / 2, y + 21, name, weight="bold")
        drawing.text(x + width / 2, y + 38, meaning, color=GREY)
    for points, text, x, y in CHANGES:
        drawing.line(*points)
        drawing.text(x, y, text)
    drawing.save("connection")


def names_in(path: str, enum: str) -> set[str]:
    text = re.sub(r"//[^\n]*", "", (ROOT / "csrc" / "transport" / path).read_text(encoding="utf-8"))
    return set(
        re.findall(r"[a-z]\w*", re.search(rf"enum class {enum} : \w+ \{{(.*?)\}}", text, re.DOTALL)[1])
    )


def check_names() -> None:
    states = names_in("tcp/handshake.h", "State") | names_in("tcp/handshake.h", "Stage")
    assert states == {state[0] for state in STATES}, states
    assert names_in("tcp/wire.h", "Kind") >= {"announce", "ready"}
    assert names_in("tcp/greeting.h", "Word") >= {"hello", "welcome", "ready", "taken"}
    assert names_in("shm/layout.h", "RecordKind") >= {"rendezvous", "landed"}
    assert names_in("shm/layout.h", "GrantKind") == {"stream", "direct"}


if __name__ == "__main__":
    check_names()
    draw_layers()
    draw_messages()
    draw_connection()
