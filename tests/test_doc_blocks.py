"""Every block of Python in the guides runs as it is printed, given the names that it takes from the reader.

README.md's quickstart is run by test_readme.py, docs/transformers.md by test_transformers_integration.py. Of
docs/migrating.md, test_migrating.py parses what it shows of other frameworks and tries its imports; tests of
clients run it with those frameworks.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from ranks import on_ranks
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

import pipecomm_ext
from pipecomm_ext import schedules

DOCS = Path(__file__).resolve().parents[1] / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def block(page: str, start: str) -> str:
    """The block with a line that begins with `start`."""
    [found] = [text for text in blocks(page) if re.search(rf"^{re.escape(start)}", text, re.MULTILINE)]
    return found


# The first words of a line of each block, in order; a block that is new or gone fails the test below.
EXECUTED = {
    "relay.md": ["relay = "],
    "schedules.md": [
        "plan = schedules.dualpipe",
        "mine = ",
        "with Executor",
        "masks = ",
        "topology = ",
        "mesh = ",
        "executor.sum_shared_gradients",
    ],
    "tutorial.md": ["rank = ", "from pipecomm_ext import distributed", "name = "],
    "sequence_parallel.md": ["qkv = ", "out = pc.attention_with_cp", "y, work = "],
}
ELSEWHERE = {
    "migrating.md": "test_migrating.py",
    "transformers.md": "test_transformers_integration.py",
}


def test_every_block_of_the_guides_is_executed():
    for page in sorted(path.name for path in DOCS.glob("*.md")):
        if page in ELSEWHERE:
            assert page in (Path(__file__).parent / ELSEWHERE[page]).read_text()
        else:
            wanted = [block(page, start) for start in EXECUTED.get(page, [])]
            assert wanted == blocks(page), f"give each block of docs/{page} a test here"


def run(page: str, start: str, names: dict, **changes: str) -> dict:
    """Executes a block among `names`, with the keys of `changes` in its text replaced by their values."""
    text = block(page, start)
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    exec(compile(text, f"{page}: {start}", "exec"), names)
    return names


# ---- schedules --------------------------------------------------------------------------------------------


def test_plans(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run("schedules.md", "plan = schedules.dualpipe", {})
    assert (tmp_path / "dualpipe.html").stat().st_size > 1000
    assert "makespan" in capsys.readouterr().out
    run("schedules.md", "mine = ", {"schedules": schedules})
    assert (tmp_path / "mine.svg").stat().st_size > 1000


WIDTH, NUM_CLASSES = 6, 4


class Stage(torch.nn.Module):
    """Takes a mask as the masks of the page go."""

    def __init__(self, stage: int, num_stages: int):
        super().__init__()
        torch.manual_seed(stage)
        self.linear = torch.nn.Linear(WIDTH, NUM_CLASSES if stage == num_stages - 1 else WIDTH)

    def forward(self, tokens, mask=None):
        return self.linear(tokens if mask is None else tokens * mask)


def training_names(num_stages: int, num_rows: int = 32) -> dict:
    torch.manual_seed(7)
    inputs, targets = torch.randn(num_rows, WIDTH), torch.randint(NUM_CLASSES, (num_rows,))
    stages = [Stage(stage, num_stages) for stage in range(num_stages)]
    return {
        "build_stage": lambda stage: stages[stage],
        "all_stages": stages,
        "inputs": inputs,
        "targets": targets,
        "batches": [(inputs, targets)],
        "cross_entropy": functional.cross_entropy,
        "get_plan": schedules.get_plan,
        "Executor": schedules.Executor,
    }


def loss_of_the_whole(names: dict, tokens: torch.Tensor | None = None, masks=(None,)) -> torch.Tensor:
    """The mean loss of the unsplit model."""
    losses = []
    chunks = (names["inputs"] if tokens is None else tokens).chunk(len(masks))
    for chunk, targets, mask in zip(chunks, names["targets"].chunk(len(masks)), masks, strict=True):
        for stage in names["all_stages"]:
            chunk = stage(chunk, mask)
        losses.append(functional.cross_entropy(chunk, targets))
    return torch.stack(losses).mean().detach()


@on_ranks(2)
def test_a_training_loop(world):
    names = training_names(2 * world.size)
    expected = loss_of_the_whole(names)
    parameters = [weight for stage in names["all_stages"] for weight in stage.parameters()]
    names["optimizer"] = torch.optim.SGD(parameters, lr=0.1)
    run("schedules.md", "with Executor", names)
    if names["losses"] is not None:
        torch.testing.assert_close(torch.stack(names["losses"]).mean(), expected)
        assert not torch.allclose(loss_of_the_whole(names), expected)  # a step was taken


@on_ranks(2)
def test_keywords_and_what_follows_a_step(world):
    names = training_names(world.size)
    names["plan"] = plan = schedules.get_plan("1f1b", P=world.size, M=4)
    mine = {stage: names["build_stage"](stage) for stage in plan.stages_of(world.rank)}
    first, last = plan.chains[0][0], plan.chains[0][-1]
    parameters = [weight for stage in mine.values() for weight in stage.parameters()]
    masks = [torch.full((WIDTH,), 0.5 + idx) for idx in range(4)]
    names |= {
        "make_mask": lambda documents: documents,
        "batch_of_documents": masks,
        "tokens": names["inputs"],
        "optimizer": torch.optim.SGD(parameters, lr=0.1),
    }
    with schedules.Executor(plan, mine, loss_fn=functional.cross_entropy) as executor:
        names["executor"] = executor
        run("schedules.md", "masks = ", names)
        if names["losses"] is not None:
            mean = torch.stack(names["losses"]).mean()
            torch.testing.assert_close(mean, loss_of_the_whole(names, masks=masks))
        for stage, name in ((first, "embed"), (last, "head")):
            if stage in mine:  # tied weights, of equal shapes
                mine[stage].register_module(name, torch.nn.Linear(WIDTH, WIDTH, bias=False))
                getattr(mine[stage], name).weight.grad = torch.full((WIDTH, WIDTH), 1.0 + stage)
        names["optimizer"].zero_grad()
        run("schedules.md", "executor.sum_shared_gradients", names)
        assert names["norm"] > 0


@on_ranks(4)
def test_stages_of_several_ranks(world):
    names = training_names(3)
    run("schedules.md", "topology = ", names)
    assert names["topology"].get_vtp_size_list() == [1, 2, 1]
    names["executor"].close()


@on_ranks(4)
def test_a_mesh(world):
    names = training_names(4) | {"num_replicas": 2, "num_stages": 2}
    run("schedules.md", "mesh = ", names, **{'"cuda"': '"cpu"'})
    losses, _ = names["executor"].step(names["inputs"], names["targets"])
    if losses is not None:
        torch.testing.assert_close(torch.stack(losses).mean(), loss_of_the_whole(names))
    names["executor"].close()


# ---- tutorial ----------------------------------------------------------------------------------------------


def printed_by(program: str, *arguments: str) -> str:
    """What a complete program prints on this rank, which has its group already."""
    output = io.StringIO()
    with contextlib.ExitStack() as changed:
        for name in ("init_process_group", "destroy_process_group"):
            changed.enter_context(mock.patch.object(dist, name))
        changed.enter_context(mock.patch.object(sys, "argv", ["program.py", *arguments]))
        changed.enter_context(contextlib.redirect_stdout(output))
        exec(compile(program, "tutorial.md", "exec"), {})
    return output.getvalue()


def run_tutorial(world, folder: str) -> list[str]:
    os.chdir(folder)
    by_torch = block("tutorial.md", "rank = ")
    changed_line = "import torch.distributed as dist\n"
    assert by_torch.count(changed_line) == 1
    by_ours = by_torch.replace(changed_line, block("tutorial.md", "from pipecomm_ext import distributed"))
    by_schedule = block("tutorial.md", "name = ")
    programs = [(by_torch,), (by_ours,), (by_schedule,), (by_schedule, "zb_v")]
    return [printed_by(*program) for program in programs]


def test_the_programs_of_the_tutorial_train_alike(ranks, tmp_path):
    on_rank_0, on_rank_1 = ranks.run(2, run_tutorial, str(tmp_path))
    losses = on_rank_1[0]
    assert losses.count("loss 0.") == 3
    assert on_rank_1 == [losses, losses, losses, ""]
    assert on_rank_0 == ["", "", "", losses]  # ZB-V has the last stage on the first rank
    for name in ("1f1b", "zb_v"):
        assert "measured" in (tmp_path / f"{name}.html").read_text()


# ---- relays, sequence parallelism -------------------------------------------------------------------------


@on_ranks(5)
def test_a_relay_through_three_stages(world):
    sent = torch.arange(24, dtype=torch.bfloat16).reshape(4, 1, 6)
    names = {"stage": lambda x: x + 1, "tokens": sent}
    run("relay.md", "relay = ", names, **{"[1024, 1, 5120]": "[4, 1, 6]"})
    if world.rank > 0:
        stage = names["topology"].get_vtp_my_stage_idx()
        assert torch.equal(names["y"], sent + stage + 1)
    names["relay"].communicator.close()


@on_ranks(2)
def test_ulysses_attention_and_all_to_all(world):
    def attention(q, k, v, is_causal=False):
        mask = causal_lower_right(q.size(1), k.size(1)) if is_causal else None
        heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return functional.scaled_dot_product_attention(*heads_first, attn_mask=mask).transpose(1, 2)

    torch.manual_seed(1)
    seq_len, num_heads = 7, 4
    whole = [torch.randn(2, seq_len, num_heads, 8, dtype=torch.float64) for _ in range(3)]
    mine = [tensor.split(pipecomm_ext.cal_split_sizes(seq_len, 2), 1)[world.rank] for tensor in whole]
    names = dict(zip("qkv", mine, strict=True))
    names |= {"attention": attention, "group": world.comm, "ring_group": world.comm, "seq_len": seq_len}
    names |= {"num_heads": num_heads}
    with_ring, by_hand = block("sequence_parallel.md", "qkv = ").split("\n\n")[1:]
    assert "zigzag" in with_ring
    run("sequence_parallel.md", "qkv = ", names, **{with_ring: with_ring.splitlines()[0]})
    expected = attention(*whole).split(pipecomm_ext.cal_split_sizes(seq_len, 2), 1)[world.rank]
    torch.testing.assert_close(names["out"], expected, rtol=1e-10, atol=1e-10)

    even = [torch.randn(2, 8, num_heads, 8, dtype=torch.float64) for _ in range(3)]  # for the ring
    places = torch.arange(8).chunk(4)
    zigzag = torch.cat([places[world.rank], places[3 - world.rank]])
    names |= dict(zip("qkv", (tensor[:, zigzag] for tensor in even), strict=True)) | {"seq_len": 8}
    run("sequence_parallel.md", "qkv = ", names, **{by_hand: ""})
    expected = attention(*even, is_causal=True)[:, zigzag]
    torch.testing.assert_close(names["out"], expected, rtol=1e-10, atol=1e-10)


@on_ranks(2)
def test_a_call_that_does_not_wait(world):
    x = torch.arange(24.0).reshape(1, 2, 4, 3) + 100 * world.rank
    names = {"pc": pipecomm_ext, "x": x, "group": world.comm, "layer": torch.exp, "other": torch.zeros(2)}
    run("sequence_parallel.md", "y, work = ", names)
    assert torch.equal(names["y"], pipecomm_ext.all_to_all(x, world.comm, 2, 1))
    assert torch.equal(names["z"], torch.ones(2))


@on_ranks(4)
def test_ring_and_ulysses_groups(world):
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    names = {
        "pc": pipecomm_ext,
        "ulysses_group": groups[world.rank // 2],
        "ring_group": groups[2 + world.rank % 2],
    }
    torch.manual_seed(1)
    whole = [torch.randn(2, 16, 4, 8, dtype=torch.float64) for _ in range(3)]
    names |= dict(zip("qkv", whole, strict=True))
    try:
        run("sequence_parallel.md", "out = pc.attention_with_cp", names)
    finally:
        pipecomm_ext.parallel_state.destroy()
    heads_first = (tensor.transpose(1, 2) for tensor in whole)
    expected = functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
    slices = expected.chunk(4, 1)
    ring_rank, ulysses_rank = divmod(world.rank, 2)
    held = torch.cat([slices[ring_rank], slices[3 - ring_rank]], 1)
    torch.testing.assert_close(names["out"], held.chunk(2, 1)[ulysses_rank], rtol=1e-10, atol=1e-10)
