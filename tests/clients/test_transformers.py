"""A small Llama of transformers: its sequence is split over ranks, or its layers are pipeline stages."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from pinned import needs
from torch import nn
from torch.nn import functional

needs("transformers")

from page import code_of  # noqa: E402
from side_by_side import assert_same_bits, gradients, ratio_of_times  # noqa: E402
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM  # noqa: E402

from pipecomm_ext.integrations import transformers as pipecomm_transformers  # noqa: E402
from pipecomm_ext.schedules import Executor, Plan, get_plan  # noqa: E402

VOCAB = 96


def llama(num_layers=4, heads=8, kv_heads=2, attention="sdpa") -> LlamaForCausalLM:
    """Every call makes an equal one."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        attn_implementation=attention,
        use_cache=False,
    )
    return LlamaForCausalLM(config).double()


# ---- sequence parallelism --------------------------------------------------------------------------------


def batch_of(seq_len: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seq_len)
    tokens = torch.randint(0, VOCAB, (2, seq_len), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def summed_over_ranks(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    for tensor in tensors:
        dist.all_reduce(tensor)
    return tensors


def split_sequence(world, heads, kv_heads, seq_len, is_masked):
    """Loss and gradients of all ranks together against one process."""
    pipecomm_transformers.register()
    batch = batch_of(seq_len)
    if is_masked:
        batch["attention_mask"] = torch.ones(2, seq_len, dtype=torch.long)
        batch["attention_mask"][1, :3] = 0
    whole = llama(heads=heads, kv_heads=kv_heads)
    expected = whole(**batch).loss
    expected.backward()
    model = llama(heads=heads, kv_heads=kv_heads, attention="pipecomm_ulysses")
    loss = model(**pipecomm_transformers.split_batch(batch)).loss
    loss.backward()
    [loss] = summed_over_ranks([loss.detach()])
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)  # computed in float32
    for mine, truth in zip(summed_over_ranks(gradients([model])), gradients([whole]), strict=True):
        torch.testing.assert_close(mine, truth, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("size", "heads", "kv_heads", "seq_len", "is_masked"),
    [
        (2, 8, 2, 101, False),
        (3, 8, 4, 103, False),
        (4, 8, 2, 64, True),  # fewer key/value heads than ranks
        (4, 2, 1, 35, False),  # fewer heads than ranks
    ],
)
def test_sequence_parallelism(ranks, size, heads, kv_heads, seq_len, is_masked):
    ranks.run(size, split_sequence, heads, kv_heads, seq_len, is_masked)


def equal_all_to_all_attention(module, q, k, v, attention_mask, scaling=None, **_):
    """The usual form, of equal sizes only: one all_to_all_single for each tensor, with copies around it."""

    def exchange(x, scatter_dim, gather_dim):
        return EqualAllToAll.apply(x, scatter_dim, gather_dim)

    q, k, v = (exchange(x, 1, 2) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    return exchange(out, 2, 1).transpose(1, 2), None


class EqualAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scatter_dim, gather_dim):
        ctx.dims = scatter_dim, gather_dim
        pieces = torch.stack(x.chunk(dist.get_world_size(), scatter_dim))
        received = torch.empty_like(pieces)
        dist.all_to_all_single(received, pieces)
        return torch.cat(received.unbind(), gather_dim)

    @staticmethod
    def backward(ctx, grad):
        return EqualAllToAll.apply(grad, *reversed(ctx.dims)), None, None


def time_split_sequence(world):
    seq_len = 128 * world.size
    pipecomm_transformers.register()
    AttentionInterface.register("equal_all_to_all", equal_all_to_all_attention)
    piece = pipecomm_transformers.split_batch(batch_of(seq_len))
    models = [llama(kv_heads=8, attention=name) for name in ("equal_all_to_all", "pipecomm_ulysses")]

    def step(model):
        model.zero_grad()
        model(**piece).loss.backward()

    theirs, ours = (lambda model=model: step(model) for model in models)
    theirs(), ours()
    assert_same_bits(*(gradients([model]) for model in reversed(models)), "gradients")
    return ratio_of_times(theirs, ours)


@pytest.mark.parametrize("size", [2, 4])
def test_time_of_sequence_parallelism(ranks, report, size):
    report(f"split sequence, {size} ranks", ranks.run(size, time_split_sequence)[0])


# ---- pipeline stages -------------------------------------------------------------------------------------


NUM_MICROBATCHES = 8


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def micro_batches() -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[torch.Tensor]]:
    """((token ids, padding mask), labels) of each micro-batch; padded on the left, to different lengths."""
    generator = torch.Generator().manual_seed(2)
    inputs, labels = [], []
    for idx in range(NUM_MICROBATCHES):
        tokens = torch.randint(0, VOCAB, (2, 25 - idx % 3), generator=generator)
        is_token = torch.ones(2, tokens.size(1) - 1, dtype=torch.bool)
        is_token[1, : idx % 4] = False
        inputs.append((tokens[:, :-1], is_token))
        labels.append(tokens[:, 1:])
    return inputs, labels


def stage_of(model: nn.Module, stage: int, plan: Plan) -> nn.Module:
    return code_of("class LlamaStage")["LlamaStage"](model, stage, len(plan.owner))


def my_stages(world, plan: Plan) -> dict[int, nn.Module]:
    return {stage: stage_of(llama(num_layers=8), stage, plan) for stage in plan.stages_of(world.rank)}


def pipeline_of_llama(world, name):
    plan = get_plan(name, P=world.size, M=NUM_MICROBATCHES)
    stages = my_stages(world, plan)
    inputs, labels = micro_batches()
    whole, expected = llama(num_layers=8), []
    for (ids, is_token), target in zip(inputs, labels, strict=True):
        loss = cross_entropy(whole(ids, attention_mask=is_token).logits, target)
        loss.backward()
        expected.append(loss.detach())
    with Executor(plan, stages, loss_fn=cross_entropy) as executor:
        losses = executor.step(inputs, labels).losses
    if losses is not None:
        assert_same_bits(losses, expected, "losses")
    for stage, module in stages.items():
        assert_same_bits(
            gradients([module]), gradients([stage_of(whole, stage, plan)]), f"gradients of stage {stage}"
        )


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["one_f_one_b", "zb_v"])
def test_pipeline_stages(ranks, name, size):
    ranks.run(size, pipeline_of_llama, name)


def time_pipeline_of_llama(world):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    plan = get_plan("one_f_one_b", P=world.size, M=NUM_MICROBATCHES)
    [their_module], [our_module] = (my_stages(world, plan).values() for _ in range(2))
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, VOCAB, (2 * NUM_MICROBATCHES, 65), generator=generator)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    is_first, is_last = world.rank == 0, world.rank == world.size - 1
    stage = PipelineStage(their_module, world.rank, world.size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=cross_entropy, scale_grads=False)

    def theirs():
        their_module.zero_grad()
        schedule.step(*([inputs] if is_first else []), target=labels if is_last else None)

    with Executor(plan, [our_module], loss_fn=cross_entropy) as executor:

        def ours():
            our_module.zero_grad()
            executor.step(inputs, labels)

        theirs(), ours()
        assert_same_bits(gradients([our_module]), gradients([their_module]), "gradients")
        return ratio_of_times(theirs, ours)


@pytest.mark.parametrize("size", [2, 4])
def test_time_of_pipeline_stages(ranks, report, size):
    report(f"1F1B, {size} ranks", ranks.run(size, time_pipeline_of_llama)[0])
