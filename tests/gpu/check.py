"""`make gpu-check`: all that needs a GPU, in stages that do not stop each other, the most telling ones first.

    python tests/gpu/check.py --results out/gpu_check [--minutes 30] [--only values,pytest-nccl]
    python tests/gpu/check.py --first    `make gpu-first`: the open questions, in less than ten minutes

Each stage is a process with a limit of time. The folder of results gets STAGE.log, what it printed, and
STAGE.json, how it ended and, where it measures, its figures; at the end it gets summary.json, and a table is
printed. The exit status is that of the worst stage: 0 if all have passed or were skipped for a reason that is
told, 1 if one has failed, 124 if one took too long.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from tools import find_tool, missing  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent.parent
SKIPPED, TIMED_OUT = 77, 124  # exit statuses: of a command that cannot run here, and as timeout(1) has it
PYTHON = sys.executable
FIGURES = "{figures}"  # in a command: the file for its figures, as JSON


@dataclass(frozen=True)
class Stage:
    name: str
    command: Sequence[str]
    limit_s: float
    after: str | None = None  # the stage without which this one makes no sense
    missing: Callable[[], str | None] = lambda: None  # why it cannot run here
    environment: Mapping[str, str] = field(default_factory=dict)  # added to that of this process


@dataclass
class Result:
    name: str
    result: str  # passed, failed, timed out, skipped
    seconds: float = 0.0
    note: str = ""  # the last line of the output, or why the stage was skipped
    status: int | None = None
    command: str = ""
    log: str = ""
    figures: object = None

    @property
    def severity(self) -> int:
        return {"failed": 1, "timed out": TIMED_OUT}.get(self.result, 0)


def run_stages(stages: Sequence[Stage], results: Path, limit_s: float) -> int:
    """Runs all stages in `limit_s` seconds at most; the exit status of the worst."""
    results.mkdir(parents=True, exist_ok=True)
    ends_at = time.monotonic() + limit_s
    done: dict[str, Result] = {}
    interrupted = False
    try:
        for stage in stages:
            reason = reason_to_skip(stage, done, ends_at - time.monotonic())
            print(f"== {stage.name}: {reason or ' '.join(stage.command)}", flush=True)
            if reason:
                done[stage.name] = Result(stage.name, "skipped", note=reason)
            else:
                done[stage.name] = run_stage(stage, results, min(stage.limit_s, ends_at - time.monotonic()))
            write_json(results / f"{stage.name}.json", asdict(done[stage.name]))
    except KeyboardInterrupt:
        interrupted = True
    write_json(results / "summary.json", [asdict(result) for result in done.values()])
    print(table(list(done.values())), flush=True)
    return 130 if interrupted else max((result.severity for result in done.values()), default=0)


def reason_to_skip(stage: Stage, done: dict[str, Result], left_s: float) -> str | None:
    if stage.after in done and done[stage.after].result != "passed":
        return f"{stage.after} has not passed"
    if left_s < 1:
        return "no time is left"
    return stage.missing()


def run_stage(stage: Stage, results: Path, limit_s: float) -> Result:
    log, figures = results / f"{stage.name}.log", results / f"{stage.name}.figures.json"
    figures.unlink(missing_ok=True)
    command = [part.replace(FIGURES, str(figures)) for part in stage.command]
    began = time.monotonic()
    with log.open("wb") as output:
        status = status_of(command, output, limit_s, stage.environment)
    result = {0: "passed", SKIPPED: "skipped", TIMED_OUT: "timed out"}.get(status, "failed")
    note = last_line(log)
    print(f"   {result} after {time.monotonic() - began:.0f} s: {note}", flush=True)
    return Result(
        stage.name,
        result,
        round(time.monotonic() - began, 1),
        note,
        status,
        " ".join(command),
        str(log),
        read_json(figures),
    )


def status_of(command: Sequence[str], output, limit_s: float, added: Mapping[str, str]) -> int:
    """The exit status; TIMED_OUT if the command and what it has started had to be killed."""
    paths = [str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"} | added
    try:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        output.write(f"{error}\n".encode())
        return 127
    try:
        status = process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    finally:
        kill_session(process)
    return status


def kill_session(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def last_line(log: Path) -> str:
    lines = [
        line.strip()
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    return lines[-1].strip("= ")[:100] if lines else ""


def read_json(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        return f"{path.name}: {error}"
    finally:
        path.unlink(missing_ok=True)


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def table(done: list[Result]) -> str:
    rows = [("stage", "result", "seconds", "log or reason")]
    rows += [(r.name, r.result, f"{r.seconds:.0f}", r.log or r.note) for r in done]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d}" for a, b, c, d in rows]
    return "\n".join(["", *lines])


# ---- the stages ------------------------------------------------------------------------------------------


def kernel_stages() -> list[Stage]:
    """The kernels by a program without torch: values, times, and values under a sanitizer."""
    folder = ROOT / "build" / "copy_kernels"
    program = str(folder / "copy_kernels")
    cmake = find_tool("cmake") or "cmake"
    jobs = str(len(os.sched_getaffinity(0)))
    build = f'"{cmake}" -S tests/cpp/kernels -B "{folder}" && "{cmake}" --build "{folder}" --parallel {jobs}'

    def part(name: str, limit_s: float, *arguments: str) -> Stage:
        return Stage(name, [program, name, *arguments], limit_s, after="kernels-build")

    def memcheck(name: str, *arguments: str) -> Stage:
        sanitizer = [find_tool("compute-sanitizer") or "", "--padding", "64", "--error-exitcode", "1"]
        command = [*sanitizer, program, name, *arguments]
        return Stage(
            f"memcheck-{name}",
            command,
            120,
            after="kernels-build",
            missing=lambda: missing("compute-sanitizer"),
        )

    return [
        Stage("kernels-build", ["sh", "-c", build], 300),
        part("values", 90),
        part("many", 60),
        part("mean", 60),
        part("large", 120),
        part("bandwidth", 120, "1024", "--json", FIGURES),
        part("latency", 60, "--json", FIGURES),
        memcheck("values", "40"),
        memcheck("many"),
        memcheck("mean"),
        memcheck("bandwidth", "1"),
    ]


def pytest_stage(name: str, *files: str, limit_s: float, choose: str = "", **environment: str) -> Stage:
    """Tests of this folder, whose ranks have deadlines of their own; what they print is in the log."""
    paths = [f"tests/gpu/test_{file}.py" for file in files]
    chosen = ["-k", choose] if choose else []
    command = [PYTHON, "-m", "pytest", "-q", "-rA", "--tb=short", "--durations=0", *chosen, *paths]
    return Stage(f"pytest-{name}", command, limit_s, after="build", environment=environment)


def bench_stage(op: str, num_gpus: int) -> Stage:
    """Bandwidths mean something with a GPU for each rank; with all ranks on one, only times of the host."""
    extent = ["--quick"] if num_gpus < 2 else []
    ranks = ["--ranks", str(max(num_gpus, 2)), "--device", "cuda", "--transport", "nccl"]
    command = [PYTHON, "bench/run.py", op, *ranks, "--dtype", "bfloat16", "--json", FIGURES, *extent]
    return Stage(f"bench-{op}", command, 120, after="build")


def build_stage() -> Stage:
    build = f'"{PYTHON}" setup.py -q build_ext --inplace && "{PYTHON}" -m pipecomm_ext info'
    return Stage("build", ["sh", "-c", build], 600)


def machine_stage() -> Stage:
    """The GPUs, the room for what NCCL keeps in shared memory, and the limits of a process."""
    smi = find_tool("nvidia-smi") or "nvidia-smi"
    script = f'"{smi}"; df -h /dev/shm; ulimit -n; ulimit -u; "{smi}" -L'
    return Stage("machine", ["sh", "-c", script], 60)


def first_stages() -> list[Stage]:
    """What only a device answers: whether links are made beside its work, and which orders it takes."""
    orders, opposite = "order and cuda", "order and cuda or opposite"
    return [
        machine_stage(),
        build_stage(),
        pytest_stage("first", "nccl", limit_s=60, choose="itself or connect_when or neighbours"),
        pytest_stage("links", "links", limit_s=180),
        pytest_stage("orders", "hazards", limit_s=60, choose=orders),
        pytest_stage(
            "one-queue", "hazards", "links", limit_s=90, choose=opposite, CUDA_DEVICE_MAX_CONNECTIONS="1"
        ),
        pytest_stage("implicit", "hazards", limit_s=60, choose=orders, NCCL_LAUNCH_ORDER_IMPLICIT="1"),
    ]


def all_stages(num_gpus: int) -> list[Stage]:
    host_ops = ["host", "host_prebuilt", "batch", "all_to_all"]
    ops = host_ops if num_gpus < 2 else [*host_ops, "p2p", "pingpong", "broadcast", "gather"]
    train = [PYTHON, "examples/train_text.py", "--ranks", "2", "--steps", "5", "--device", "cuda"]
    return [
        machine_stage(),
        *kernel_stages(),
        build_stage(),
        pytest_stage("kernels", "kernels", limit_s=180),
        pytest_stage("nccl", "nccl", limit_s=240),
        pytest_stage("reductions", "reductions_on_devices", limit_s=180),
        pytest_stage("links", "links", limit_s=180),
        pytest_stage("captures", "captures", limit_s=180),
        pytest_stage("whole-graphs", "whole_graphs", limit_s=180),
        pytest_stage("hazards", "hazards", "allocator", limit_s=240),
        pytest_stage("operations", "all_operations", limit_s=240),
        pytest_stage("staged", "staged", limit_s=120),
        Stage("train", train, 120, after="build"),
        *(bench_stage(op, num_gpus) for op in ops),
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--results", type=Path, default=ROOT / "out" / "gpu_check", help="folder for all that is written"
    )
    parser.add_argument("--first", action="store_true", help="the stages of `make gpu-first`")
    parser.add_argument("--minutes", type=float, help="limit for all together (40; with --first 9.5)")
    parser.add_argument("--only", help="names of stages, or beginnings of names, like values,bench")
    args = parser.parse_args(arguments)
    import torch

    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        print("this machine has no CUDA device", file=sys.stderr)
        return 2
    stages = first_stages() if args.first else all_stages(num_gpus)
    if args.only:
        wanted = tuple(args.only.split(","))
        stages = [stage for stage in stages if stage.name.startswith(wanted)]
    minutes = args.minutes or (9.5 if args.first else 40.0)
    return run_stages(stages, args.results.resolve(), 60 * minutes)


if __name__ == "__main__":
    sys.exit(main())
