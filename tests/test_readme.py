"""README.md against the code: the quickstart runs as printed; names, variables, messages, paths exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from documents import DOCUMENTS, ROOT, block
from ranks import on_ranks
from scripts import run_under_torchrun

import pipecomm_ext
from pipecomm_ext import PipeCommMismatch, pipeline_parallel, schedules
from pipecomm_ext.core import environment

README = (ROOT / "README.md").read_text(encoding="utf-8")
CODE = {".py", ".cpp", ".h", ".cmake"}
PAGES = [ROOT / document for document in DOCUMENTS if document != "CHANGELOG.md"]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def rows(text: str) -> list[list[str]]:
    """The cells of all table rows; a bar within backticks is not a border."""
    border = re.compile(r"\|(?=(?:[^`]*`[^`]*`)*[^`]*$)")
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in border.split(line)[1:-1]] for line in lines]


def names_table() -> str:
    return page("api/index.md").partition("\n## Names\n")[2]


def code_words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize(
    "page, options",
    [("README.md", ["--short"]), ("docs/benchmarks.md", []), ("docs/benchmarks.md", ["--mpi"])],
)
def test_the_tables_of_results_are_what_the_benchmarks_wrote(page: str, options: list[str]) -> None:
    """`python bench/readme_table.py --write` updates them."""
    command = [sys.executable, str(ROOT / "bench" / "readme_table.py"), *options]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    num_rows = table.count("\n") - 2
    assert num_rows >= 4 and f"\n\n{table}\n<!--" in (ROOT / page).read_text(encoding="utf-8")
    assert page != "README.md" or num_rows <= 6, "the README shows at most 6 rows"


def test_the_readme_is_short_and_shows_code_at_once() -> None:
    lines = README.splitlines()
    assert len(lines) <= 170 and lines.index("```python") < 24


@on_ranks(2)
def test_the_message_of_the_readme_is_real(world) -> None:
    """With the same two calls torch delivers the bytes in the wrong shape."""
    told = block("README.md", "PipeCommMismatch")
    sent, received = torch.randn(4, 32), torch.zeros(32, 4)
    with pytest.raises(PipeCommMismatch) as caught:
        if world.rank == 0:
            pipecomm_ext.distributed.send(sent, 1)
        else:
            pipecomm_ext.distributed.recv(received, 0)
    if world.rank == 0:
        text = re.sub("send #[0-9]+", "send #0", f"PipeCommMismatch: {caught.value}")
        assert text == " ".join(told.split())
        dist.send(sent, 1)
        dist.send(sent.view(32, 4), 1)
    else:
        expected = torch.zeros(32, 4)
        dist.recv(received, 0)
        dist.recv(expected, 0)
        assert torch.equal(received, expected)  # as if the shapes agreed


def test_the_backend_of_the_readme_is_that_of_its_document() -> None:
    """test_backend.py executes it."""
    line = block("README.md", 'dist.init_process_group("pipecomm")')
    assert block("docs/backend.md", "import torch.distributed").endswith(line)


@on_ranks(1)
def test_the_one_line_of_the_readme(world) -> None:
    [removed, added] = [line[2:] for line in block("README.md", "- import").splitlines()]
    names: dict[str, Any] = {}
    exec(removed, names)
    theirs = names["dist"]
    exec(added, names)
    assert names["dist"] is pipecomm_ext.distributed and names["dist"].new_group is theirs.new_group


@pytest.mark.parametrize("name", ["hello_pipeline.py", "torch_pipeline.py", "torch_pipeline.py zb_v"])
def test_the_small_examples_train(name: str) -> None:
    output = run_under_torchrun(f"torchrun --standalone --nproc-per-node 2 examples/{name}", ROOT)
    losses = [float(loss) for loss in re.findall(r"^step \d: loss ([\d.]+)$", output, re.MULTILINE)]
    assert len(losses) == 5 and losses == sorted(losses, reverse=True), output
    assert output.count("from the unsplit model's") == (0 if "hello" in name else 2), output


def test_the_list_of_examples_has_every_program_and_its_folder_nothing_else() -> None:
    folder = ROOT / "examples"
    listed = re.findall(
        r"^\| \[(\w+\.py)\]", (folder / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(listed) == sorted(path.name for path in folder.glob("*.py"))
    for name in listed:
        program = (folder / name).read_text(encoding="utf-8")
        assert '__name__ == "__main__"' in program or "dist.init_process_group" in program


def test_the_hello_pipeline_has_25_lines() -> None:
    assert len((ROOT / "examples" / "hello_pipeline.py").read_text(encoding="utf-8").splitlines()) <= 25


# ---- quickstart -------------------------------------------------------------------------------------------


def test_the_quickstart_runs_as_printed(tmp_path: Path) -> None:
    """Without torchrun itself, which the commands of docs/flight_record.md start in test_doc_blocks.py."""
    program = block("README.md", "with Communicator")
    command, printed = (block("README.md", start) for start in ("torchrun", "rank 0: received"))
    assert len(program.splitlines()) <= 15
    (tmp_path / "quickstart.py").write_text(program)
    output = run_under_torchrun(command, tmp_path)
    assert sorted(output.splitlines()) == sorted(printed.splitlines())


# ---- names ------------------------------------------------------------------------------------------------

MODULES = {
    "distributed": pipecomm_ext.distributed,
    "parallel_state": pipecomm_ext.parallel_state,
    "pipecomm_ext.pipeline_parallel": pipeline_parallel,
    "pipecomm_ext.schedules": schedules,
}


def test_every_name_of_the_api_table_exists() -> None:
    num_checked = 0
    for what, described in rows(names_table())[1:]:
        for name in (word.split("(")[0] for word in code_words(what)):
            owner = pipecomm_ext.Communicator if name.startswith(".") else pipecomm_ext
            for part in name.removeprefix("pipecomm_ext.").removeprefix(".").split("."):
                assert hasattr(owner, part), f"{name} of the API table does not exist"
                owner = getattr(owner, part)
            num_checked += 1
        if (module := MODULES.get(code_words(what)[0])) is not None:
            for name in filter(str.isidentifier, code_words(described)):
                assert hasattr(module, name) or hasattr(dist, name), f"{code_words(what)[0]}.{name}"
                num_checked += 1
    assert num_checked > 60


def test_every_public_name_is_in_the_api_table() -> None:
    words = set(re.findall(r"\w+", " ".join(code_words(names_table()))))
    assert set(pipecomm_ext.__all__) - words == {"__version__"}
    assert set(pipecomm_ext.distributed.__all__) - words == set()


# ---- variables, messages, paths ---------------------------------------------------------------------------


def source_text(*names: str) -> str:
    """The code of files and folders in one string, with literals that are cut over lines put together."""
    files = []
    for name in names:
        path = ROOT / name
        files += [path] if path.is_file() else [file for file in path.rglob("*") if file.suffix in CODE]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(file.read_text(encoding="utf-8") for file in sorted(files)))


def test_the_environment_variables_are_those_that_the_code_reads() -> None:
    def variables(*names: str) -> set[str]:
        return set(re.findall(r'"(PIPECOMM_[A-Z_]+)"', source_text(*names)))

    text = page("environment.md")
    at_run_time = {code_words(row[0])[0] for row in rows(text)[1:]}
    at_build_time = set(re.findall(r"`(PIPECOMM_[A-Z_]+)`", text)) - at_run_time
    assert at_build_time == variables("setup.py")
    assert at_run_time == variables("python", "csrc") - set(environment.BUILD_VARIABLES) - {
        environment.TEST_PREFIX
    }


def test_the_messages_of_the_troubleshooting_table_exist() -> None:
    sources = source_text("python", "csrc", "cmake", "setup.py", "CMakeLists.txt", "Makefile")
    entries = rows(page("troubleshooting.md"))[1:]
    assert len(entries) > 30
    for message, _ in entries:
        for part in filter(None, code_words(message)[0].split("...")):
            assert part.strip() in sources, f"no source says {part.strip()!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_paths_exist(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    paths = [page.parent / link for link in links]
    if page.name == "README.md":
        paths += [ROOT / path for path in re.findall(r"`python ((?:examples|bench)/\S+)", README)]
    missing = [str(path) for path in paths if not path.exists()]
    assert missing == []
