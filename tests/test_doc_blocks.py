"""Every block of code of every document is accounted for: a test executes it as it is printed, or BLOCKS says
why none does. Blocks of Python of the guides run here, given the names that the reader would define, with
smaller sizes, CPUs and other folders where the test sets them. Output and trees are compared with the real
ones.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.run
from documents import DOCUMENTS, ROOT, begins, block, blocks, blocks_of, execute
from ranks import on_ranks
from scripts import Script, run_on_ranks, run_under_torchrun
from tools import needs
from torch.nn import functional

import pipecomm_ext
from pipecomm_ext import __main__ as command_line
from pipecomm_ext import schedules

sys.path.insert(0, str(ROOT / "bench"))


class Checked(str):
    """Why a block is not executed, and what is checked instead."""


MIGRATING = "test_migrating.py::"
CLIENTS = "clients/test_{}.py::test_the_code_of_the_page"  # as printed; test_migrating.py runs what is ours
TRANSFORMERS = "test_transformers_integration.py::test_the_code_of_the_guide"
SEVERAL = "test_stages_of_several_ranks_and_a_mesh"
TORCHRUN = "torchrun --standalone --nproc-per-node 2"
FLIGHT = "test_the_commands_for_a_flight_record"
TUTORIAL = "test_the_commands_and_programs_of_the_tutorial"
README = "test_readme.py::test_the_"
QUICKSTART = "test_readme.py::test_the_quickstart_runs_as_printed"
CPP = Checked("parts of files that are not there; test_the_parts_of_the_contribution_guide looks at names")

# The blocks of each document in order: the beginning of a line, and the test. A new or missing block fails
# the test below.
BLOCKS: dict[str, dict[str, str]] = {
    "CONTRIBUTING.md": {
        "make setup": Checked("long; test_the_targets_and_files_of_commands_exist"),
        "cmake -G": Checked("test_cpp.py builds and runs the same tests in another folder"),
        "@generator": "test_the_schedule_of_the_contribution_guide",
        "class LoopbackTransport": CPP,
        "class Loopback(Transport)": "test_the_parts_of_the_contribution_guide",
        "ExchangePlan ring_shift_plan": CPP,
        "m.def(": CPP,
        "def ring_shift": "test_the_parts_of_the_contribution_guide",
    },
    "README.md": {
        'dist.init_process_group("pipecomm")': README + "backend_of_the_readme_is_that_of_its_document",
        "- import": README + "one_line_of_the_readme",
        "PipeCommMismatch": README + "message_of_the_readme_is_real",
        "pip install": Checked("installs and builds; test_info.py runs the doctor"),
        "with Communicator": QUICKSTART,
        "torchrun": QUICKSTART,
        "rank 0: received": QUICKSTART,
    },
    "docs/benchmarks.md": {
        "make bench": "test_the_commands_of_benchmarks",
        "pip install '.[bench]'": "test_the_commands_of_benchmarks",
        "python bench/run.py ulysses": "test_the_commands_of_benchmarks",
        "make gpu-check": Checked("needs a GPU; test_the_stages_of_gpu_check"),
        "cmake -S": Checked("a build; test_the_targets_and_files_of_commands_exist"),
    },
    "docs/backend.md": {"import torch.distributed": "test_backend.py::test_the_block_of_the_document"},
    "examples/README.md": {"torchrun": README + "small_examples_train"},
    "docs/flight_record.md": dict.fromkeys(["PIPECOMM_FLIGHT_DIR", "Communicator"], FLIGHT),
    "docs/install.md": {
        "pip install": Checked("installs and builds; test_info.py runs the doctor"),
        "make demo": Checked("long; test_the_targets_and_files_of_commands_exist"),
    },
    "docs/migrating.md": {
        "import torch.distributed as dist": MIGRATING + "test_torch_distributed",
        "schedule = ": MIGRATING + "test_torch_pipelining",
        "from torch.distributed.pipelining import SplitPoint": MIGRATING + "test_torchs_pipeline",
        "pp_executor = ": MIGRATING + "test_torchtitan",
        "from pipecomm_ext.pipeline_parallel.p2p_communication": CLIENTS.format("megatron"),
        "from megatron.core.pipeline_parallel import": CLIENTS.format("megatron"),
        "losses = forward_backward_func": CLIENTS.format("megatron"),
        "layout = ": MIGRATING + "test_the_layout_of_the_page",
        "from pipecomm_ext.pipeline_parallel.communication_utils": MIGRATING + "test_megatrons_inference",
        "from pipecomm_ext import all_to_all, gather": MIGRATING + "test_mindspeeds_sequence_parallelism",
        "initialize_pipeline(": MIGRATING + "test_mindspeeds_stages",
        "topology = initialize_pipeline(": MIGRATING + "test_mindspeeds_stages",
        "class LlamaStage": MIGRATING + "test_stages_of_a_llama",
        "class SeqAllToAll": "clients/test_yunchang.py::test_ulysses_attention",
    },
    "docs/relay.md": {"relay = ": "test_a_relay_through_three_stages"},
    "docs/schedules.md": {
        "plan = schedules.dualpipe": "test_plans",
        "python -m pipecomm_ext draw": "test_the_commands_of_schedules",
        "mine = ": "test_plans",
        "mine: deadlock": "test_plans",
        "with Executor": "test_a_training_loop",
        "masks = ": "test_keywords_and_what_follows_a_step",
        "num_tokens = ": "test_keywords_and_what_follows_a_step",
        "topology = ": SEVERAL,
        "mesh = ": SEVERAL,
        "executor.sum_shared_gradients": "test_keywords_and_what_follows_a_step",
        "scaler = ": "test_keywords_and_what_follows_a_step",
    },
    "docs/sequence_parallel.md": {
        "qkv = ": "test_ulysses_attention_and_all_to_all",
        "out = pc.attention_with_cp": "test_ring_and_ulysses_groups",
        "y, work = ": "test_a_call_that_does_not_wait",
    },
    "docs/transformers.md": {
        **dict.fromkeys(["pipecomm_transformers.register", "tokens = "], TRANSFORMERS),
        "labels, num_items = ": "test_transformers_models.py::test_labels_of_the_tokens_themselves",
    },
    "docs/tutorial.md": dict.fromkeys(
        ["rank = ", f"{TORCHRUN} plain.py", "from pipecomm_ext import distributed", "name = "]
        + [f"{TORCHRUN} pipeline.py"],
        TUTORIAL,
    ),
}
COMMANDS = [text for document in DOCUMENTS for text in blocks(document, "sh") + blocks(document, "")]


def test_every_block_of_every_document_is_accounted_for() -> None:
    for document in DOCUMENTS:
        found, wanted = blocks_of(document), BLOCKS.get(document, {})
        fits = len(found) == len(wanted) and all(map(begins, (text for _, text in found), wanted))
        assert fits, f"give each block of {document} a test, and a row in BLOCKS"
        for test in wanted.values():
            if not isinstance(test, Checked):
                module, _, name = test.rpartition("::")
                path = Path(__file__).parent / (module or Path(__file__).name)
                assert f"\ndef {name}(" in path.read_text(encoding="utf-8")


# ---- commands ---------------------------------------------------------------------------------------------


def commands(text: str, program: str) -> list[list[str]]:
    """The arguments of each line that starts a program, after its name."""
    lines = [shlex.split(line, comments=True) for line in text.splitlines() if line.startswith(program)]
    return [words[len(program.split()) :] for words in lines]


def test_the_targets_and_files_of_commands_exist() -> None:
    targets = set(
        re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    named = {words[0] for text in COMMANDS for words in commands(text, "make")}
    assert len(named) > 10 and named <= targets
    paths = {
        word for text in COMMANDS for word in re.findall(r"(?<![\w/.])(?:bench|tests|\.ci)/[\w./]+", text)
    }
    assert {".ci/run", "bench/run.py", "tests/cpp"} <= paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert os.access(ROOT / ".ci/run", os.X_OK)
    [target] = re.findall(r"--target (\w+) ", "\n".join(blocks("docs/benchmarks.md", "")))
    assert f"add_executable({target} " in (ROOT / "tests/cpp/CMakeLists.txt").read_text(encoding="utf-8")
    [make] = needs("make")
    result = subprocess.run([make, "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert all(f"make {target} " in result.stdout for target in named - {"help", "gpu-check"})


def test_the_commands_of_benchmarks(ranks, tmp_path, monkeypatch) -> None:
    """Small, with no limit of the link, without MPI, on one node; `make bench` is the same program."""
    text = "\n".join(blocks("docs/benchmarks.md", ""))
    [[arguments]] = commands(text, "make bench")
    lines = [shlex.split(arguments.removeprefix("ARGS=")), *commands(text, "python bench/run.py")]
    assert [line[0] for line in lines] == ["p2p", "batch", "all_to_all", "all_reduce", "ulysses"]
    (tmp_path / "out").mkdir()
    for line in lines:
        size = int(line[line.index("--ranks") + 1])
        line = [str(tmp_path / word) if word.startswith("out/") else word for word in line if word != "--mpi"]
        run_on_ranks(ranks, size, "run", *line, "--sizes", "64K", "--iters", 3, "--warmup", 1)
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"batch.json", "batch.png", "timeline.png"}


def test_the_commands_of_schedules(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    schedules.get_plan("zb_v", P=2, M=4).to_csv("my_plan.csv")
    lines = commands(block("docs/schedules.md", "python -m pipecomm_ext draw"), "python -m pipecomm_ext")
    assert [command_line.main(line) for line in lines] == [0, 0, 0]
    assert (tmp_path / "dualpipe.svg").stat().st_size > 1000


@pytest.mark.slow
def test_the_commands_and_programs_of_the_tutorial(tmp_path) -> None:
    """All train equally: torch's calls, ours instead, and two schedules, which write their pictures."""
    document = "docs/tutorial.md"
    programs = {"plain.py": block(document, "rank = "), "pipeline.py": block(document, "name = ")}
    changed_line = "import torch.distributed as dist\n"
    assert programs["plain.py"].count(changed_line) == 1
    programs["ours.py"] = programs["plain.py"].replace(
        changed_line, block(document, "from pipecomm_ext import distributed")
    )
    for name, text in programs.items():
        assert text.count("ROWS, WIDTH = 8, 64, 512") == 1
        (tmp_path / name).write_text(text.replace("8, 64, 512", "8, 16, 128"))
    lines = [line for text in blocks(document, "sh") for line in text.splitlines()]
    assert [line.split()[4:] for line in lines] == [["plain.py"], ["pipeline.py"], ["pipeline.py", "zb_v"]]
    lines.append(lines[0].replace("plain", "ours"))
    losses = [run_under_torchrun(line, tmp_path) for line in lines]
    assert losses[0].count("loss 0.") == 3 and losses == losses[:1] * 4
    for name in ("1f1b", "zb_v"):
        assert_can_be_read((tmp_path / f"{name}.html").read_text(encoding="utf-8"))


def assert_can_be_read(page: str) -> None:
    """Asserts that both panels are in seconds, and wide enough however slow this machine was."""
    assert "simulated, in seconds" in page and "measured, in seconds" in page
    boxes = re.findall(r'<rect x="([\d.]+)"[^>]* width="([\d.]+)"[^>]* data-m="(\d+)-', page)
    panels = {panel for _, _, panel in boxes}
    assert len(panels) == 2
    for panel in panels:
        ends = [float(x) + float(width) for x, width, of in boxes if of == panel]
        assert max(ends) - min(ends) > 40, f"{max(ends) - min(ends):.0f} of 1200 pixels"


TRAIN = """
import torch
import torch.distributed as dist
from data import next_batch
from pipecomm_ext import Communicator

dist.init_process_group("gloo")
comm = Communicator(device="cpu")
x = torch.zeros(8, 512, dtype=torch.bfloat16)


def forward():
    comm.recv(x, 1)


for _ in range(118):
    comm.send(x, 0) if comm.rank else forward()
next_batch() if comm.rank else forward()
"""
DATA = """
from pathlib import Path
import time


def next_batch():
    Path("hangs").touch()
    time.sleep(1000)
"""


def without_numbers(text: str) -> str:
    text = re.sub(r"Communicator \w+", "Communicator", re.sub(r"(?s)(?<=\s)/.*?/(?=\w+\.py)", "", text))
    return re.sub(r"\d+(\.\d+)?", "0", " ".join(text.split()))


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
def test_the_commands_for_a_flight_record(tmp_path, capsys) -> None:
    """As printed, in another folder; the signal goes to children of this torchrun only."""
    [text] = blocks("docs/flight_record.md", "sh")
    start, signal_it, explain = (shlex.split(line, comments=True) for line in text.splitlines())
    flights = tmp_path / "flights"
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "data.py").write_text(DATA)
    variable, program, *words = start
    assert (variable, program) == ("PIPECOMM_FLIGHT_DIR=/tmp/flights", "torchrun")
    [pkill] = needs(signal_it[0])
    environment = {"PIPECOMM_FLIGHT_DIR": str(flights), "PIPECOMM_TRANSPORT": "shm", "OMP_NUM_THREADS": "1"}
    with Script(torch.distributed.run.__file__, *words, folder=tmp_path, **environment) as script:
        await_that(lambda: (tmp_path / "hangs").exists(), script)
        time.sleep(1.5)  # the doctor ignores shorter waits
        assert signal_it[0] == "pkill"
        torchrun = [sys.executable, "-m", "torch.distributed.run", *words]
        assert not re.search(signal_it[-1], " ".join(torchrun))
        assert explain[:4] == ["python", "-m", "pipecomm_ext", "doctor"]

        def doctor_sees_it() -> bool:  # once the other rank has waited for long enough
            for path in whole_files(flights):
                path.unlink()
            subprocess.run([pkill, signal_it[1], "-P", str(script.process.pid), *signal_it[2:]], check=True)
            await_that(lambda: len(whole_files(flights)) == 2, script)
            capsys.readouterr()
            return command_line.main([*explain[3:-1], str(flights)]) == 1

        await_that(doctor_sees_it, script)
        os.killpg(script.process.pid, signal.SIGTERM)
        script.finish(60)
    [expected] = blocks("docs/flight_record.md", "text")
    assert without_numbers(expected) in without_numbers(capsys.readouterr().out)


def await_that(holds: Callable[[], bool], script: Script) -> None:
    until = time.monotonic() + 250
    while not holds():
        assert script.process.is_alive(), script.finish(10)
        assert time.monotonic() < until
        time.sleep(0.05)


def whole_files(folder: Path) -> list[Path]:
    return [path for path in folder.glob("flight-*") if path.read_text(encoding="utf-8").endswith("\n")]


def test_the_stages_of_gpu_check() -> None:
    text = "\n".join(blocks("docs/benchmarks.md", ""))
    [[], [with_minutes], [with_names]] = commands(text, "make gpu-check")
    assert with_minutes == "ARGS=--minutes 10"
    source = (ROOT / "tests" / "gpu" / "check.py").read_text(encoding="utf-8")
    names = with_names.removeprefix("ARGS=--only ").split(",")
    assert len(names) == 3 and all(f'"{name}' in source for name in names)


# ---- contributions ----------------------------------------------------------------------------------------


def test_the_schedule_of_the_contribution_guide(monkeypatch) -> None:
    from pipecomm_ext.schedules.generators import registry

    monkeypatch.setattr(registry, "GENERATORS", dict(registry.GENERATORS))
    monkeypatch.setattr(registry, "ALIASES", dict(registry.ALIASES))
    names = {"__name__": "pipecomm_ext.schedules.generators.reversed_gpipe"}
    names["__package__"] = "pipecomm_ext.schedules.generators"
    execute("CONTRIBUTING.md", "@generator", names)
    plan = schedules.get_plan("last_in_first_out", 4, 8)
    assert plan.name == "reversed_gpipe"
    schedules.check(plan)


def test_the_parts_of_the_contribution_guide() -> None:
    """The C++ of a transport and of a collective, and the Python of both with a stand-in for the C++."""
    names = {"math": math, "Any": Any, "Sequence": Sequence, "Mapping": Mapping, "functools": functools}
    names |= {"torch": torch, "_C": mock.Mock(), "TensorSpec": None}
    for module, wanted in {
        "transports": ["Costs", "Transport"],
        "communicator.registry": ["communicator_of"],
        "core.checked": ["whole_number"],
        "core.tensor_specs": ["spec_of"],
        "sequence_parallel.differentiable": ["ExchangeStep", "Step", "apply"],
    }.items():
        found = importlib.import_module(f"pipecomm_ext.{module}")
        names |= {name: getattr(found, name) for name in wanted}
    execute("CONTRIBUTING.md", "class Loopback(Transport)", names)
    transport = names["Loopback"]()
    assert transport.status() == (True, "a group of one rank")
    execute("CONTRIBUTING.md", "def ring_shift", names)
    comm = mock.MagicMock(spec=pipecomm_ext.Communicator, rank=0, size=2)
    comm.empty.side_effect = lambda shape, dtype: torch.zeros(shape, dtype=dtype)
    names["communicator_of"] = lambda group, tensor: comm
    names["ring_shift"](torch.ones(2, 3, requires_grad=True)).sum().backward()
    assert [call.args[:2] + call.args[3:] for call in names["_C"].plan_ring_shift.call_args_list] == [
        (0, 2, 1),
        (0, 2, -1),
    ]
    assert comm.exchange.call_count == 2
    transport, builder, binding = blocks("CONTRIBUTING.md", "cpp")
    sources = {name: (ROOT / "csrc" / name).read_text(encoding="utf-8") for name in PLACES}
    whole_transport = f'#include "transport/transport.h"\nnamespace pipecomm {{\n{transport}}}\n'
    whole_transport += "void make() { pipecomm::LoopbackTransport transport; }\n"
    end = "}  // namespace pipecomm\n"
    with_builder = sources["plan/builders.cpp"].removesuffix(end) + builder + end
    for text in (whole_transport, with_builder):
        assert_compiles(text)
    known = sources["bindings/plan.cpp"]
    assert all(word in known for word in re.findall(r"PySpec|prepare\(|spec_of\(|py::arg", binding))


PLACES = ("plan/builders.cpp", "bindings/plan.cpp")  # of the functions of a collective


def assert_compiles(text: str) -> None:
    [compiler] = needs(os.environ.get("CXX", "c++"))
    command = [compiler, "-std=c++20", "-fsyntax-only", f"-I{ROOT / 'csrc'}", "-xc++", "-"]
    done = subprocess.run(command, input=text, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


# ---- schedules --------------------------------------------------------------------------------------------


def test_plans(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    execute("docs/schedules.md", "plan = schedules.dualpipe", {})
    assert (tmp_path / "dualpipe.html").stat().st_size > 1000
    assert "makespan" in capsys.readouterr().out
    execute("docs/schedules.md", "mine = ", {"schedules": schedules})
    assert (tmp_path / "mine.svg").stat().st_size > 1000
    rows = ["F0.0 B0.0 F0.1 B0.1", "F1.1 B1.1 F1.0 B1.0"]
    with pytest.raises(schedules.PlanError) as caught:
        schedules.check(schedules.Plan("mine", P=2, M=2, owner=[0, 1], compute=rows))
    assert str(caught.value).startswith(block("docs/schedules.md", "mine: deadlock").rstrip())


WIDTH, NUM_CLASSES = 6, 4


class Stage(torch.nn.Module):
    """Takes a mask in the way of the page's masks."""

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
    execute("docs/schedules.md", "with Executor", names)
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
        "torch": torch,
        "make_mask": lambda documents: documents,
        "batch_of_documents": masks,
        "tokens": names["inputs"],
        "optimizer": torch.optim.SGD(parameters, lr=0.1),
    }
    with schedules.Executor(plan, mine, loss_fn=functional.cross_entropy) as executor:
        names["executor"] = executor
        execute("docs/schedules.md", "masks = ", names)
        if names["losses"] is not None:
            mean = torch.stack(names["losses"]).mean()
            torch.testing.assert_close(mean, loss_of_the_whole(names, masks=masks))
        execute("docs/schedules.md", "num_tokens = ", names)
        if names["losses"] is not None:
            torch.testing.assert_close(torch.stack(names["losses"]).sum(), loss_of_the_whole(names))
        for stage, name in ((first, "embed"), (last, "head")):
            if stage in mine:  # tied weights, of equal shapes
                mine[stage].register_module(name, torch.nn.Linear(WIDTH, WIDTH, bias=False))
                getattr(mine[stage], name).weight.grad = torch.full((WIDTH, WIDTH), 1.0 + stage)
        names["optimizer"].zero_grad()
        execute("docs/schedules.md", "executor.sum_shared_gradients", names)
        assert names["norm"] > 0
        execute("docs/schedules.md", "scaler = ", names, **{'"cuda"': '"cpu"'})
        assert names["scaler"].get_scale() > 1


@on_ranks(4)
def test_stages_of_several_ranks_and_a_mesh(world):
    names = training_names(3)
    execute("docs/schedules.md", "topology = ", names)
    assert names["topology"].get_vtp_size_list() == [1, 2, 1]
    names["executor"].close()
    names = training_names(4) | {"num_replicas": 2, "num_stages": 2}
    execute("docs/schedules.md", "mesh = ", names, **{'"cuda"': '"cpu"'})
    losses, _ = names["executor"].step(names["inputs"], names["targets"])
    if losses is not None:
        torch.testing.assert_close(torch.stack(losses).mean(), loss_of_the_whole(names))
    names["executor"].close()


# ---- relays, sequence parallelism -------------------------------------------------------------------------


@on_ranks(5)
def test_a_relay_through_three_stages(world):
    sent = torch.arange(24, dtype=torch.bfloat16).reshape(4, 1, 6)
    names = {"stage": lambda x: x + 1, "tokens": sent}
    execute("docs/relay.md", "relay = ", names, **{"[1024, 1, 5120]": "[4, 1, 6]"})
    if world.rank > 0:
        stage = names["topology"].get_vtp_my_stage_idx()
        assert torch.equal(names["y"], sent + stage + 1)
    names["relay"].communicator.close()


@on_ranks(2)
def test_ulysses_attention_and_all_to_all(world):
    from torch.nn.attention.bias import causal_lower_right  # imports torch._dynamo, as ranks have done

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
    with_ring, by_hand = block("docs/sequence_parallel.md", "qkv = ").split("\n\n")[1:]
    assert "zigzag" in with_ring
    execute("docs/sequence_parallel.md", "qkv = ", names, **{with_ring: with_ring.splitlines()[0]})
    expected = attention(*whole).split(pipecomm_ext.cal_split_sizes(seq_len, 2), 1)[world.rank]
    torch.testing.assert_close(names["out"], expected, rtol=1e-10, atol=1e-10)

    even = [torch.randn(2, 8, num_heads, 8, dtype=torch.float64) for _ in range(3)]  # for the ring
    places = torch.arange(8).chunk(4)
    zigzag = torch.cat([places[world.rank], places[3 - world.rank]])
    names |= dict(zip("qkv", (tensor[:, zigzag] for tensor in even), strict=True)) | {"seq_len": 8}
    execute("docs/sequence_parallel.md", "qkv = ", names, **{by_hand: ""})
    expected = attention(*even, is_causal=True)[:, zigzag]
    torch.testing.assert_close(names["out"], expected, rtol=1e-10, atol=1e-10)


@on_ranks(2)
def test_a_call_that_does_not_wait(world):
    x = torch.arange(24.0).reshape(1, 2, 4, 3) + 100 * world.rank
    names = {"pc": pipecomm_ext, "x": x, "group": world.comm, "layer": torch.exp, "other": torch.zeros(2)}
    execute("docs/sequence_parallel.md", "y, work = ", names)
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
        execute("docs/sequence_parallel.md", "out = pc.attention_with_cp", names)
    finally:
        pipecomm_ext.parallel_state.destroy()
    heads_first = (tensor.transpose(1, 2) for tensor in whole)
    expected = functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
    slices = expected.chunk(4, 1)
    ring_rank, ulysses_rank = divmod(world.rank, 2)
    held = torch.cat([slices[ring_rank], slices[3 - ring_rank]], 1)
    torch.testing.assert_close(names["out"], held.chunk(2, 1)[ulysses_rank], rtol=1e-10, atol=1e-10)
