"""Megatron's schedules on real ranks against the unsplit model in one process."""

from __future__ import annotations

import contextlib
import itertools
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from pipelines import WIDTH, refused_by_one
from pipelines import MegatronChunk as Chunk
from ranks import on_ranks
from torch import nn

from pipecomm_ext import PipeCommAborted, parallel_state
from pipecomm_ext.pipeline_parallel import (
    P2PCommunicator,
    PipelineConfig,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    get_forward_backward_func,
    get_pp_rank_microbatches,
)
from pipecomm_ext.pipeline_parallel.plan_runner import PlanRunner, StepArguments
from pipecomm_ext.schedules import one_f_one_b

SEQ, BATCH, HIDDEN = 3, 2, WIDTH


def micro_batches(num_microbatches: int, variable: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    lengths = [SEQ + (idx % 3 if variable else 0) for idx in range(num_microbatches)]
    return [
        tuple(torch.randn(length, BATCH, HIDDEN, generator=generator) for _ in range(2)) for length in lengths
    ]


def forward_step_func(data_iterator, model):
    x, target = next(data_iterator)

    def loss_func(output):
        loss = ((output - target) ** 2).mean()
        return loss, {"loss": loss.detach()}

    return model(x), loss_func


def unsplit(num_stages: int, data) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Losses by micro-batch, gradients of the mean loss by stage: plain torch, all stages in one process."""
    whole = nn.Sequential(*(Chunk(stage, None) for stage in range(num_stages)))
    losses = [((whole(x) - target) ** 2).mean() for x, target in data]
    torch.stack(losses).mean().backward()
    return [loss.detach() for loss in losses], [chunk.weight.grad for chunk in whole]


GROUPS = SimpleNamespace(tp=None, cp=None)


def config_of(**settings) -> PipelineConfig:
    return PipelineConfig(**{"pipeline_dtype": torch.float32, "hidden_size": HIDDEN, **settings})


def chunks_of(world, num_chunks: int, config: PipelineConfig) -> list[Chunk]:
    return [Chunk(chunk * world.size + world.rank, config) for chunk in range(num_chunks)]


def check_gradients(world, chunks: list[Chunk], data, scale: float = 1.0) -> None:
    """Compares the gradients of this rank's chunks with the unsplit model."""
    _, expected = unsplit(world.size * len(chunks), data)
    for idx, chunk in enumerate(chunks):
        torch.testing.assert_close(chunk.weight.grad, scale * expected[idx * world.size + world.rank])


def work_of(model, data, func=forward_step_func, **kwargs) -> dict:
    """The arguments of every schedule; `kwargs` replace some."""
    arguments = {
        "forward_step_func": func,
        "data_iterator": [iter(data) for _ in model] if isinstance(model, list) else iter(data),
        "model": model,
        "num_microbatches": len(data),
        "seq_length": SEQ,
        "micro_batch_size": BATCH,
    }
    return {**arguments, **kwargs}


def arguments_of(world, model, data, config, func=forward_step_func, p2p=None, **kwargs) -> dict:
    """The same over the group of this world."""
    groups = {"p2p_communicator": p2p or P2PCommunicator(world.group, config), "pg_collection": GROUPS}
    return work_of(model, data, func, **{**groups, **kwargs})


def step(world, chunk, data, config, *args, **kwargs):
    """1F1B of one chunk."""
    arguments = arguments_of(world, chunk, data, config, *args, **kwargs)
    return forward_backward_pipelining_without_interleaving(**arguments)


def interleaved_step(world, chunks, data, config, **kwargs):
    return forward_backward_pipelining_with_interleaving(
        **arguments_of(world, chunks, data, config, **kwargs)
    )


def run(world, num_chunks: int | None, num_microbatches: int, *, forward_only=False, calls=1, **settings):
    """Runs a schedule on this rank; results of the last call, and chunks."""
    config = config_of(**settings)
    p2p, chunks = P2PCommunicator(world.group, config), chunks_of(world, num_chunks or 1, config)
    data = micro_batches(num_microbatches, config.variable_seq_lengths)
    model = chunks if num_chunks else chunks[0]
    for _ in range(calls):
        arguments = arguments_of(world, model, data, config, p2p=p2p, forward_only=forward_only)
        results = get_forward_backward_func(world.size, num_chunks)(**arguments)
    return results, chunks


def check(world, num_chunks: int | None, num_microbatches: int, **settings) -> None:
    results, chunks = run(world, num_chunks, num_microbatches, **settings)
    data = micro_batches(num_microbatches, settings.get("variable_seq_lengths", False))
    if world.rank == world.size - 1:
        losses, _ = unsplit(world.size * len(chunks), data)
        torch.testing.assert_close([result["loss"] for result in results], losses)
    else:
        assert results == []
    if settings.get("forward_only"):
        assert all(chunk.weight.grad is None for chunk in chunks)
    else:
        check_gradients(world, chunks, data)


MODES = {
    "batched": {},
    "individual": {"batch_p2p_comm": False},
    "overlapped": {"batch_p2p_comm": False, "overlap_p2p_comm": True},
}


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("mode", MODES)
def test_1f1b_equals_the_unsplit_model(world, mode):
    for num_micro, variable, frees in [
        (1, False, False),
        (2, True, False),
        (5, False, True),
        (5, True, True),
    ]:
        settings = {"variable_seq_lengths": variable, "deallocate_pipeline_outputs": frees, **MODES[mode]}
        check(world, None, num_micro, **settings)
    check(world, None, 5, forward_only=True, **MODES[mode])


@on_ranks(2, 3)
@pytest.mark.parametrize("mode", MODES)
def test_interleaving_equals_the_unsplit_model(world, mode):
    P = world.size
    sizes = [(1, P, None), (2, P, None), (2, 2 * P + 1, P + 1), (3, 2 * P, P)]
    for (num_chunks, num_micro, group_size), variable in itertools.product(sizes, (False, True)):
        settings = {
            "microbatch_group_size_per_vp_stage": group_size,
            "variable_seq_lengths": variable,
            "deallocate_pipeline_outputs": num_chunks == 2,
        }
        check(world, num_chunks, num_micro, **settings, **MODES[mode])
    check(world, 2, P, forward_only=True, **MODES[mode])


# ---- what crosses boundaries ------------------------------------------------------------------------------


class Ragged(Chunk):
    """A stage with two outputs that have gradients and one that has none; the last stage has a loss."""

    def set_input_tensor(self, tensors):
        self.inputs = tensors

    def forward(self, x):
        if self.inputs[0] is None:
            hidden, skip, ids = x, x * 2, torch.arange(5)
        else:
            hidden, skip, ids = self.inputs
            assert ids.tolist() == list(range(5)) and not ids.requires_grad
        return torch.tanh(hidden @ self.weight), skip, ids  # an identity and integers among the outputs


@on_ranks(2, 3)
@pytest.mark.parametrize("mode", MODES)
def test_boundaries_of_several_tensors(world, mode):
    """(hidden, skip, ids): all reach the last stage, whose loss uses hidden and skip."""

    def func(iterator, model):
        x, target = next(iterator)
        return model(x), lambda outputs: (((outputs[0] - target + outputs[1]) ** 2).mean(), None)

    data = micro_batches(4)
    chunks = [Ragged(stage, None) for stage in range(world.size)]
    for x, target in data:
        x = x.clone().requires_grad_()
        hidden, skip = x, x * 2
        for chunk in chunks:
            hidden = torch.tanh(hidden @ chunk.weight)
        (((hidden - target + skip) ** 2).mean() / len(data)).backward()

    for variable, frees in itertools.product((False, True), (False, True)):
        config = config_of(
            pipeline_dtype=torch.float32 if variable else [torch.float32, torch.float32, torch.int64],
            variable_seq_lengths=variable,
            deallocate_pipeline_outputs=frees,
            **MODES[mode],
        )
        chunk = Ragged(world.rank, config)
        shape = (SEQ, BATCH, HIDDEN)
        shapes = [()] if variable else [shape, shape, (5,)]
        adjust = lambda recv, send, shapes=shapes: (shapes, shapes)  # noqa: E731
        step(world, [chunk], data, config, func, adjust_tensor_shapes_fn=adjust)
        torch.testing.assert_close(chunk.weight.grad, chunks[world.rank].weight.grad)


class Frozen(Chunk):
    """A stage whose output needs no gradient."""

    def forward(self, x):
        with torch.no_grad():
            return super().forward(x)


@on_ranks(3)
@pytest.mark.parametrize("mode", MODES)
def test_frozen_stages_keep_their_neighbours_going(world, mode):
    """The gradients before a frozen stage are None, or zero; after it they are right."""
    data = micro_batches(4)
    losses, expected = unsplit(3, data)
    for variable, frozen in itertools.product((False, True), (0, 1)):
        config = config_of(variable_seq_lengths=variable, **MODES[mode])
        chunk = (Frozen if world.rank == frozen else Chunk)(world.rank, config)
        results = step(world, chunk, data, config)
        if world.rank > frozen:
            torch.testing.assert_close(chunk.weight.grad, expected[world.rank])
        else:
            assert chunk.weight.grad is None or not chunk.weight.grad.any()
        if world.rank == 2:
            torch.testing.assert_close([result["loss"] for result in results], losses)


@on_ranks(2)
def test_gradients_accumulate_over_steps_and_the_config_is_only_read(world):
    settings = {"microbatch_group_size_per_vp_stage": 2, "no_sync_func": contextlib.nullcontext}
    _, chunks = run(world, 2, 4, calls=3, **settings)
    check_gradients(world, chunks, micro_batches(4), scale=3)
    assert chunks[0].config == config_of(**settings)


@on_ranks(2)
def test_groups_of_the_default_topology(world):
    data = micro_batches(4)
    for num_chunks in (1, 2):
        parallel_state.initialize_pipeline([1, 1], group=world.group, virtual_stages=num_chunks)
        try:
            chunks = chunks_of(world, num_chunks, config_of())
            other_length = {"decoder_seq_length": 7 * SEQ} if num_chunks == 2 else {}  # only 1F1B uses it
            results = default_step(chunks, data, **other_length)
            warmup = get_pp_rank_microbatches(4, num_chunks, None)[2]
        finally:
            parallel_state.destroy()
        check_gradients(world, chunks, data)
        assert len(results) == (4 if world.rank == 1 else 0)
        assert warmup == (1 - world.rank if num_chunks == 1 else 2 * (1 - world.rank) + 2)


class MegatronState(ModuleType):
    """The part of megatron.core.parallel_state that the schedules use, for a pipeline of all ranks."""

    def __init__(self, world, vp_size: int | None, is_initialized: bool = True):
        super().__init__("megatron.core.parallel_state")
        self.model_parallel_is_initialized = lambda: is_initialized
        self.get_pipeline_model_parallel_world_size = lambda: world.size
        self.get_pipeline_model_parallel_rank = lambda: world.rank
        self.get_virtual_pipeline_model_parallel_world_size = lambda: vp_size
        self.get_pipeline_model_parallel_group = lambda: world.group
        self.get_tensor_model_parallel_group = lambda: SimpleNamespace(size=lambda: 1)
        self.get_context_parallel_group = lambda check_initialized=True: SimpleNamespace(size=lambda: 2)


def default_step(chunks, data, **kwargs):
    """Runs a step over the default groups."""
    return get_forward_backward_func()(**work_of(chunks, data, **kwargs))


@on_ranks(2)
def test_sizes_and_groups_of_megatrons_state(world):
    finalized = []
    config = config_of(
        # Megatron's own function uses its own groups for None, and refuses groups without `embd`.
        finalize_model_grads_func=lambda model, num_tokens, pg_collection: finalized.append(pg_collection),
    )
    data = micro_batches(4)
    for vp_size in (None, 1, 2):
        num_chunks = vp_size or 1
        chunks = chunks_of(world, num_chunks, config)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "megatron.core.parallel_state", MegatronState(world, vp_size))
            is_interleaved = get_forward_backward_func() is forward_backward_pipelining_with_interleaving
            assert is_interleaved == (vp_size is not None)
            results = default_step(chunks, data, seq_length=2 * SEQ)  # context parallelism halves it
            warmup = get_pp_rank_microbatches(4, num_chunks, None)[2]
        assert len(results) == (4 if world.rank == 1 else 0)
        assert warmup == (1 - world.rank) * (1 if vp_size is None else 2) + 2 * (num_chunks - 1)
        check_gradients(world, chunks, data, scale=2)
    assert finalized == [None] * 3


@on_ranks(2)
def test_without_any_default(world):
    chunk = Chunk(world.rank, config_of())
    with pytest.MonkeyPatch.context() as patch:
        for is_imported in (False, True):
            if is_imported:
                state = MegatronState(world, None, is_initialized=False)
                patch.setitem(sys.modules, "megatron.core.parallel_state", state)
            for call in (
                get_forward_backward_func,
                lambda: get_pp_rank_microbatches(4, 1, None),
                lambda: step(
                    world, chunk, micro_batches(2), chunk.config, pg_collection=None, p2p_communicator=None
                ),
            ):
                with pytest.raises(ValueError, match="no defaults before .*initialize_pipeline.*Megatron's"):
                    call()


@on_ranks(3)
def test_a_default_topology_of_unequal_stages(world):
    parallel_state.initialize_pipeline([1, 2], group=world.group)
    try:
        chunk = Chunk(0, config_of())
        with pytest.raises(ValueError, match=r"different numbers of ranks, \[1, 2\].*Executor"):
            default_step([chunk], micro_batches(2))
    finally:
        parallel_state.destroy()


# ---- what the steps are told ------------------------------------------------------------------------------


@on_ranks(3)
def test_partial_checkpointing_and_first_microbatches(world):
    flags, firsts = [], []

    class Told(Chunk):
        def set_is_first_microbatch(self):
            firsts.append(len(flags))

    def func(iterator, model, is_checkpointed):
        flags.append(is_checkpointed)
        return forward_step_func(iterator, model)

    config = config_of(
        num_microbatches_with_partial_activation_checkpoints=1,
    )
    chunk, data = Told(world.rank, config), micro_batches(5)
    step(world, chunk, data, config, func)
    in_flight = 3 - world.rank
    assert flags == [idx % in_flight >= 1 for idx in range(5)] and firsts == [0]
    flags.clear()
    step(world, chunk, data, config, func, forward_only=True, first_val_step=False)
    assert firsts == [0]


@on_ranks(2)
def test_tokens_are_summed_and_handed_on(world):
    finalized = []

    def func(iterator, model):
        x, target = next(iterator)
        return model(x), lambda out: (((out - target) ** 2).sum(), torch.tensor(10, dtype=torch.int), "data")

    for is_per_token in (False, True):
        config = config_of(
            calculate_per_token_loss=is_per_token,
            finalize_model_grads_func=lambda *args, **kwargs: finalized.append((args, kwargs)),
        )
        chunk, data = Chunk(world.rank, config), micro_batches(4)
        assert step(world, chunk, data, config, func) == (["data"] * 4 if world.rank == 1 else [])
        _, expected = unsplit(2, data)
        num_elements = data[0][0].numel()
        scale = num_elements * 4 if is_per_token else num_elements / 10
        torch.testing.assert_close(chunk.weight.grad, expected[world.rank] * scale)
        (models, num_tokens), kwargs = finalized.pop()
        assert models == [chunk] and kwargs == {"pg_collection": GROUPS, "force_all_reduce": False}
        if is_per_token:
            assert int(num_tokens) == (40 if world.rank == 1 else 0)
        else:
            assert num_tokens is None


def test_tokens_are_counted_where_the_messages_are():
    """finalize_model_grads_func broadcasts the count over the pipeline, which may serve CUDA tensors only."""
    config = config_of()
    step_of = StepArguments(
        forward_step_func=forward_step_func,
        data_iterator=[None],
        model=[Chunk(0, config)],
        num_microbatches=2,
        seq_length=SEQ,
        micro_batch_size=BATCH,
        p2p_communicator=SimpleNamespace(communicator=SimpleNamespace(device=torch.device("meta"))),
    )
    runner = PlanRunner(one_f_one_b(2, 2), 0, step_of, None, None)
    assert runner.total_num_tokens.device.type == "meta" and runner.total_num_tokens.dtype == torch.int


@on_ranks(2)
def test_collecting_other_data(world):
    config = config_of()

    def func(iterator, model):
        x, _ = next(iterator)
        return model(x), lambda output, non_loss_data: output.sum() if non_loss_data else None

    chunk, data = Chunk(world.rank, config), micro_batches(3)
    collected = step(world, chunk, data, config, func, forward_only=True, collect_non_loss_data=True)
    if world.rank == 1:
        outputs = [Chunk(1, None)(Chunk(0, None)(x)).sum() for x, _ in data]
        torch.testing.assert_close(collected, outputs)


@on_ranks(2)
def test_timers_of_a_schedule(world):
    names = []

    def timers(name, log_level=2):
        def start(**barrier):
            assert (log_level, barrier) == ((1, {"barrier": True}) if name == "forward-backward" else (2, {}))
            names.append(name)

        return SimpleNamespace(start=start, stop=lambda: names.append("stop") if log_level == 1 else None)

    config = config_of(timers=timers, barrier_with_L1_time=True)
    step(world, Chunk(world.rank, config), micro_batches(1), config)
    ends = [["forward-send", "backward-recv"], ["forward-recv", "backward-send"]][world.rank]
    forward, backward = "forward-compute", "backward-compute"
    if world.rank == 0:
        assert names == ["forward-backward", forward, *ends, backward]
    else:
        assert names == ["forward-backward", ends[0], forward, backward, ends[1]]


# ---- errors -----------------------------------------------------------------------------------------------


@on_ranks(3)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("failing_rank", [0, 2])
def test_an_exception_in_one_stage_reaches_all(world, failing_rank, overlap):
    config = config_of(batch_p2p_comm=not overlap, overlap_p2p_comm=overlap)
    num_calls = itertools.count()

    def func(iterator, model):
        if world.rank == failing_rank and next(num_calls) == 2:
            raise KeyError("no such token")
        return forward_step_func(iterator, model)

    expected, text = PipeCommAborted, f"one_f_one_b, rank {failing_rank}, F{failing_rank}.2: KeyError"
    if world.rank == failing_rank:
        expected, text = KeyError, "no such token"
    chunk, data = Chunk(world.rank, config), micro_batches(6)
    with world.broken_comm(channels=4) as comm, pytest.raises(expected, match=text) as caught:
        step(world, chunk, data, config, func, p2p=P2PCommunicator(comm, config))
    assert "no such token" in str(caught.value)
    # A new one of the same group works.
    again = P2PCommunicator(world.fresh_comm(channels=4), config)
    step(world, chunk, data, config, p2p=again)


@on_ranks(2)
@pytest.mark.parametrize("what", ["model", "overlap", "interleaved"])
def test_wrong_arguments_of_one_rank_reach_all_over_the_default_pipeline(world, what):
    parallel_state.initialize_pipeline([1, 1], group=torch.distributed.new_group(), virtual_stages=1)
    config, data = config_of(), micro_batches(4)
    chunk, wrong = Chunk(world.rank, config), Chunk(world.rank, config_of(overlap_p2p_comm=True))
    schedule = get_forward_backward_func(2, 2 if what == "interleaved" else None)
    try:
        default_step([chunk], data)
        model = {"model": [chunk, chunk], "overlap": [wrong], "interleaved": [chunk]}[what]
        arguments = work_of(model if world.rank == 1 else [chunk], data)
        if what == "interleaved":
            arguments["data_iterator"] = [iter(data)] * (2 if world.rank == 1 else 1)
        text = "model must be one|overlap_p2p_comm needs|1 model chunks and 2 data iterators"
        expected = ValueError if world.rank == 1 else PipeCommAborted
        with world.breaking(), refused_by_one(), pytest.raises(expected, match=text):
            schedule(**arguments)
    finally:
        parallel_state.destroy()


@on_ranks(2)
@pytest.mark.parametrize("what", ["finalize", "shapes", "model"])
def test_what_fails_before_and_after_the_schedule_reaches_all(world, what):
    def fail(*_, **__):
        if world.rank == 1:
            raise KeyError("no such weight")
        return [], []

    config = config_of(finalize_model_grads_func=fail if what == "finalize" else None)
    chunk, data = Chunk(world.rank, config), micro_batches(3)
    wrong: dict = {"adjust_tensor_shapes_fn": fail} if what == "shapes" else {}
    model = [chunk] * 2 if what == "model" and world.rank == 1 else chunk
    expected = (KeyError if what != "model" else ValueError) if world.rank == 1 else PipeCommAborted
    with world.broken_comm(channels=4) as comm, refused_by_one():
        p2p = P2PCommunicator(comm, config)
        with pytest.raises(expected, match="no such weight|model must be one, or a list of one"):
            step(world, model, data, config, p2p=p2p, **(wrong if world.rank == 1 else {}))
            step(world, chunk, data, config, p2p=p2p)  # a rank that was done gets the error here


@on_ranks(1)
def test_a_pipeline_of_one_rank(world):
    """1F1B of one rank equals no pipelining; there is nothing to interleave."""
    check(world, None, 3)
    config = config_of()
    p2p, data, losses = P2PCommunicator(world.group, config), micro_batches(3), unsplit(1, micro_batches(3))
    chunk = Chunk(0, config)
    results = step(world, chunk, data, config, p2p=p2p)
    torch.testing.assert_close(([result["loss"] for result in results], [chunk.weight.grad]), losses)
    with pytest.raises(ValueError, match="at least two pipeline ranks"):
        interleaved_step(world, [chunk] * 2, data, config)


@on_ranks(2)
def test_wrong_arguments_of_schedules(world):
    config = config_of()
    chunk = Chunk(world.rank, config)

    def with_config(**settings):
        return Chunk(world.rank, config_of(**settings))

    def plain(**kwargs):
        step(world, kwargs.pop("model", chunk), micro_batches(2), config, **kwargs)

    def interleaved(num_micro=4, model=None, **kwargs):
        kwargs = {"data_iterator": [iter(())] * 2, **kwargs}
        interleaved_step(world, model or [chunk] * 2, micro_batches(num_micro), config, **kwargs)

    overlap = {"overlap_p2p_comm": True}
    for error, message, call in [
        (ValueError, "both p2p_communicator and pg_collection", lambda: plain(pg_collection=None)),
        (TypeError, "be a pipecomm_ext.pipeline_parallel.P2PCommunicator, not megatron.core.p2p.P2PCommunic",
         lambda: plain(p2p_communicator=type("P2PCommunicator", (), {"__module__": "megatron.core.p2p"})())),
        (ValueError, "model must be one, or a list of one", lambda: plain(model=[chunk, chunk])),
        (ValueError, "needs config.batch_p2p_comm=False", lambda: plain(model=with_config(**overlap))),
        (ValueError, "warmup_flush needs config.overlap_p2p_comm",
         lambda: plain(model=with_config(overlap_p2p_comm_warmup_flush=True))),
        (ValueError, "hidden_size must be set", lambda: plain(model=with_config(hidden_size=None))),
        (ValueError, "M must be at least 1", lambda: plain(num_microbatches=0)),
        (TypeError, r"^forward_backward_pipelining_with_interleaving\(\) got an unexpected .* 'models'",
         lambda: interleaved(models=[chunk])),
        (TypeError, "model must be a list", lambda: interleaved(model=chunk)),
        (TypeError, "data_iterator must be a list", lambda: interleaved(data_iterator=iter(()))),
        (ValueError, "2 model chunks and 1 data iterators", lambda: interleaved(data_iterator=[None])),
        (ValueError, "not supported with interleaving", lambda: interleaved(adjust_tensor_shapes_fn=print)),
        (ValueError, "needs config.batch_p2p_comm=False",
         lambda: interleaved(model=[with_config(**overlap)] * 2)),
        (ValueError, "at least the number of pipeline ranks, 2, and at most that of micro-batches, 1",
         lambda: interleaved(1)),
        (ValueError, "microbatch_group_size_per_vp_stage is 5",
         lambda: interleaved(model=[with_config(microbatch_group_size_per_vp_stage=5)] * 2)),
        (RuntimeError, "of 5 micro-batches in groups of 4 the last group has 1; it must have at least 2",
         lambda: interleaved(5, model=[with_config(microbatch_group_size_per_vp_stage=4)] * 2)),
    ]:  # fmt: skip
        with pytest.raises(error, match=message):
            call()
    check(world, None, 2)
