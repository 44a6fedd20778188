"""Models of Hugging Face transformers over split sequences, against the same model in one process.

Ranks import transformers once, in the server that they are forked from; this process does not.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import types
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from documents import ROOT, blocks
from ranks import on_ranks
from sequence_cases import cut, remainder_first
from test_attention_with_cp import my_piece, state_of
from torch.nn import functional

from pipecomm_ext import PipeCommMismatch
from pipecomm_ext.parallel_state import ParallelState

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are made from configs
ranks.PRELOADED.append("transformers.models.llama.modeling_llama")

VOCAB, WINDOW = 61, 3

LAYERS = {
    "vocab_size": VOCAB,
    "hidden_size": 40,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "head_dim": 8,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW}
WINDOWS |= {"layer_types": ["sliding_attention", "full_attention"]}
GPT = {"vocab_size": VOCAB, "n_embd": 40, "n_layer": 2, "n_head": 4, "n_positions": 64}
GPT |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def with_heads(heads: int, kv_heads: int) -> dict:
    return LAYERS | {"num_attention_heads": heads, "num_key_value_heads": kv_heads}


CONFIGS = {
    "llama": ("LlamaConfig", with_heads(4, 4)),
    "llama 8/2": ("LlamaConfig", with_heads(8, 2)),
    "llama 5/5": ("LlamaConfig", with_heads(5, 5)),
    "qwen3": ("Qwen3Config", with_heads(6, 3)),
    "qwen2 with windows": ("Qwen2Config", with_heads(4, 2) | WINDOWS),
    "gpt2": ("GPT2Config", GPT),
    "gemma2": ("Gemma2Config", with_heads(4, 2)),
}


def config_of(name, **changed):
    import transformers

    kind, options = CONFIGS[name]
    return getattr(transformers, kind)(**{**options, "pad_token_id": 0, **changed})


def exact_loss(logits, labels, vocab_size, num_items_in_batch=None, shift_labels=None, **_):
    """The loss of transformers, without its conversion to float32."""
    if shift_labels is None:
        shift_labels = functional.pad(labels, (0, 1), value=-100)[:, 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def make_model(name, attention="pipecomm_ulysses", **changed):
    """Makes a model; all calls make equal ones."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name, **changed), attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():  # so large that attention is far from uniform
            parameter.normal_(std=0.2)
    model.loss_function = exact_loss
    return model.double()


def registered(comm, chunks="auto"):
    from pipecomm_ext.integrations import transformers as integration

    integration.register(comm, chunks=chunks)
    return integration


def tokens(length, seed=0):
    return torch.randint(1, VOCAB, (2, length), generator=torch.Generator().manual_seed(seed))


def padding(length, side, count):
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, slice(None, count) if side == "left" else slice(length - count, None)] = 0
    return mask


def make_batch(length, **parts):
    return {"input_ids": tokens(length), "labels": tokens(length), **parts}


def ignoring(batch):
    """Makes some labels not count, more on one rank than on another."""
    batch["labels"] = batch["labels"].clone()
    batch["labels"][0, :5] = -100
    return batch


def gradients(model):
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def check_equal(world, integration, comm, batch, whole, model, only_tokens=False):
    """Compares logits of each piece (without padding if `only_tokens`), loss and gradients of all ranks."""
    whole.zero_grad(), model.zero_grad()
    expected = whole(**batch)
    expected.loss.backward()
    result = model(**integration.split_batch(batch, comm))
    result.loss.backward()
    state = comm if isinstance(comm, ParallelState) else ParallelState(comm)
    logits, their_logits = result.logits, my_piece(expected.logits, state)
    if only_tokens and (mask := batch.get("attention_mask")) is not None:
        is_token = my_piece(mask[..., None], state)[..., 0].bool()
        logits, their_logits = logits[is_token], their_logits[is_token]
    assert_close(logits, their_logits)
    loss = result.loss.detach().clone()
    dist.all_reduce(loss)
    assert_close(loss, expected.loss.detach())
    integration.sum_gradients(model, comm)
    mine, theirs = gradients(model), gradients(whole)
    assert len(mine) == len(theirs) > 10
    for grad, truth in zip(mine, theirs, strict=True):
        assert_close(grad, truth)


def check_works(world, integration, comm):
    check_equal(world, integration, comm, make_batch(9), make_model("llama", "sdpa"), make_model("llama"))


# ---- training ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size"),
    [("llama", 2), ("llama 8/2", 4), ("llama 5/5", 2), ("llama 5/5", 4), ("qwen3", 4), ("gpt2", 2)]
    + [("qwen2 with windows", size) for size in (2, 4)],
)
def test_equal_to_the_unsplit_model(ranks, name, size):
    ranks.run(size, check_batches, name)


def check_batches(world, name):
    comm = world.comm
    integration = registered(comm)
    whole, model = make_model(name, "sdpa"), make_model(name)
    batches = [
        make_batch(8),
        make_batch(11),
        ignoring(make_batch(10, attention_mask=padding(10, "right", 6))),
        make_batch(9, attention_mask=padding(9, "left", 4)),
        make_batch(7, position_ids=torch.arange(3, 10).expand(2, 7)),
    ]
    for batch in batches:
        check_equal(world, integration, comm, batch, whole, model)


@on_ranks(3)
def test_transports_and_chunks(world):
    batch = ignoring(make_batch(11, attention_mask=padding(11, "left", 5)))
    for transport in ("tcp", "shm"):
        comm = world.shared_comm(transport=transport)
        integration = registered(comm, chunks=2)
        whole, model = make_model("llama 8/2", "sdpa"), make_model("llama 8/2")
        check_equal(world, integration, comm, batch, whole, model)
        assert comm.transport == transport


@pytest.mark.parametrize("num_ulysses", [1, 2])
@on_ranks(4)
def test_over_a_ring_in_zigzag_order(world, num_ulysses):
    state = state_of(num_ulysses)
    integration = registered(state)
    for name in ("llama 8/2", "gpt2"):
        whole, model = make_model(name, "sdpa"), make_model(name)
        for batch in (make_batch(16), ignoring(make_batch(13))):
            check_equal(world, integration, state, batch, whole, model)
    prompt = {"input_ids": tokens(11), "attention_mask": torch.ones(2, 11, dtype=torch.long)}
    options = {"max_new_tokens": 3, "do_sample": False}
    expected = whole.generate(**prompt, **options)
    assert torch.equal(integration.generate(model, **prompt, process_group=state, **options), expected)
    piece = integration.split_batch({"input_ids": tokens(9), "attention_mask": padding(9, "left", 2)}, state)
    with pytest.raises(ValueError, match="over a ring group pipecomm_ulysses takes causal or bidirectional"):
        model(**piece)
    piece = integration.split_batch({"input_ids": tokens(9)}, state)
    error = ValueError if world.rank == 1 else PipeCommMismatch
    with pytest.raises(error, match="needs the attention_mask"):
        model(**(piece | {"attention_mask": None} if world.rank == 1 else piece))
    check_equal(world, integration, state, make_batch(9), whole, model)


@on_ranks(2)
def test_one_graph_of_torch_compile(world):
    integration, comm = registered(world.comm), world.comm
    whole, model = make_model("llama 8/2", "sdpa"), make_model("llama 8/2")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    batch = make_batch(9, attention_mask=padding(9, "left", 4), use_cache=False)
    check_equal(world, integration, comm, batch, whole, compiled)
    torch._dynamo.reset()


@on_ranks(2)
def test_the_loss_of_transformers_and_the_default_group(world):
    """As in normal use: its own loss, in float32, and no communicator."""
    integration = registered(None)
    whole, model = make_model("llama", "sdpa"), make_model("llama")
    del whole._loss_function, model._loss_function
    batch = ignoring(make_batch(9))
    loss = model(**integration.split_batch(batch)).loss.detach()
    dist.all_reduce(loss)
    torch.testing.assert_close(loss, whole(**batch).loss.detach(), rtol=1e-6, atol=0)


@on_ranks(3)
def test_packed_sequences_and_masks_of_four_dims(world):
    integration, comm = registered(world.comm), world.comm
    whole, model = make_model("llama", "sdpa"), make_model("llama")
    packed = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]])
    # Without a cache, as transformers sees packed sequences only then.
    check_equal(world, integration, comm, make_batch(10, position_ids=packed, use_cache=False), whole, model)
    mask = torch.rand(2, 1, 10, 10, generator=torch.Generator().manual_seed(1)) < 0.5
    mask = (mask | torch.eye(10, dtype=torch.bool)).tril()
    check_equal(world, integration, comm, make_batch(10, attention_mask=mask), whole, model)
    added = torch.zeros(1, 1, 10, 10, dtype=torch.float64).masked_fill(~mask[:1], -1e9)
    check_equal(world, integration, comm, make_batch(10, attention_mask=added), whole, model)


@on_ranks(2)
def test_accumulation_embeddings_and_checkpointing(world):
    """One step of two batches; inputs_embeds, whose gradient is summed like the others; recomputation."""
    integration, comm = registered(world.comm), world.comm
    whole, model = make_model("llama 8/2", "sdpa"), make_model("llama 8/2")
    model.gradient_checkpointing_enable()
    model.train()
    for batch in (make_batch(7, num_items_in_batch=25), ignoring(make_batch(9, num_items_in_batch=25))):
        check_equal(world, integration, comm, batch, whole, model)
    embeds = torch.randn(2, 7, 40, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    mine, theirs = embeds.clone().requires_grad_(), embeds.requires_grad_()
    labels = tokens(7)
    whole(inputs_embeds=theirs, labels=labels).loss.backward()
    piece = integration.split_batch({"inputs_embeds": mine, "labels": labels}, comm)
    model(**piece).loss.backward()
    dist.all_reduce(mine.grad)
    assert_close(mine.grad, theirs.grad)


@on_ranks(3)
def test_a_bidirectional_model(world):
    from transformers import BertConfig, BertModel

    integration = registered(world.comm)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2}
    config = BertConfig(**sizes, num_attention_heads=4, max_position_embeddings=32)
    results = []
    for mask in (None, padding(10, "right", 4)):
        batch = {"input_ids": tokens(10), "attention_mask": mask, "token_type_ids": tokens(10) % 2}
        for attention in ("sdpa", "pipecomm_ulysses"):
            torch.manual_seed(0)
            model = BertModel._from_config(config, attn_implementation=attention).double().eval()
            given = batch if attention == "sdpa" else integration.split_batch(batch, world.comm)
            results.append(model(**given).last_hidden_state)
        expected, mine = results[-2:]
        assert_close(mine, cut(expected, 1, remainder_first(10, 3), world.rank))


@on_ranks(2)
def test_dropout_of_attention_is_passed_on(world):
    integration = registered(world.comm)
    model = make_model("llama", attention_dropout=0.5)
    piece = integration.split_batch({"input_ids": tokens(8)}, world.comm)
    model.eval()
    first, again = (model(**piece).logits for _ in range(2))
    assert torch.equal(first, again)
    model.train()
    assert not torch.allclose(model(**piece).logits, first)


@on_ranks(2)
def test_the_code_of_the_guide(world):
    training, generation, _ = blocks("docs/transformers.md", "python")
    whole = make_model("llama 8/2", "sdpa").float()
    del whole._loss_function
    batch = {**make_batch(9), "attention_mask": padding(9, "left", 2)}
    names = {"config": config_of("llama 8/2"), "batches": [batch], "weights": whole.state_dict()}
    names |= {"prompt": {name: batch[name] for name in ("input_ids", "attention_mask")}}
    exec(training, names)
    whole(**batch).loss.backward()
    torch.testing.assert_close(names["loss"], whole(**batch).loss.detach(), rtol=1e-5, atol=0)
    for mine, theirs in zip(gradients(names["model"]), gradients(whole), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    names["model"].load_state_dict(whole.state_dict())
    exec(generation, names)
    expected = whole.generate(**names["prompt"], max_new_tokens=20, do_sample=False)
    assert torch.equal(names["tokens"], expected)


@on_ranks(3)
def test_gradients_are_summed_over_the_pieces(world):
    """Several dtypes, more bytes than a bucket holds, strides, a frozen parameter, one with a gradient on
    some ranks only, one with none; and refusals are raised on all ranks."""
    integration = registered(world.comm)
    shapes = [(3,), (2, 2), (300,), (5,), (4,), (4,), (2, 3)]
    model = torch.nn.ParameterList([torch.zeros(shape) for shape in shapes]).double()
    model[1].data = model[1].data.bfloat16()
    expected = []
    for idx, parameter in enumerate(model):
        of_ranks = [
            torch.randn(parameter.shape, generator=torch.Generator().manual_seed(10 * rank + idx))
            for rank in range(world.size)
        ]
        if idx == 6:
            of_ranks = [each.t().contiguous().t() for each in of_ranks]
        present = {4: [], 5: [1]}.get(idx, range(world.size))
        parameter.requires_grad_(idx != 3)
        if world.rank in present and idx != 3:
            parameter.grad = of_ranks[world.rank].to(parameter.dtype)
        total = sum((of_ranks[rank].to(parameter.dtype).double() for rank in present), torch.zeros(()))
        expected.append(None if idx in (3, 4) else total.to(parameter.dtype))
    with mock.patch("pipecomm_ext.integrations.transformers.gradients.BUCKET_BYTES", 1 << 10):
        integration.sum_gradients(model, world.comm)
    for parameter, total in zip(model, expected, strict=True):
        if total is None:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, total)
    if world.rank == 1:
        model[0].grad = model[0].grad.to_sparse()
    kind = TypeError if world.rank == 1 else PipeCommMismatch
    with pytest.raises(kind, match="a gradient that is sparse; it sums dense"):
        integration.sum_gradients(model, world.comm)


# ---- generation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "size"), [("llama 8/2", 3), ("qwen2 with windows", 2), ("gpt2", 3)])
def test_generation(ranks, name, size):
    ranks.run(size, check_generation, name)


def check_generation(world, name):
    integration, comm = registered(world.comm), world.comm
    whole, model = make_model(name, "sdpa"), make_model(name)
    for mask in (padding(9, "left", 0), padding(10, "left", 4)):
        prompt = {"input_ids": tokens(mask.size(1)), "attention_mask": mask}
        options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
        options |= {"output_logits": True, "return_dict_in_generate": True}
        expected = whole.generate(**prompt, **options)
        result = integration.generate(model, **prompt, process_group=comm, **options)
        assert torch.equal(result.sequences, expected.sequences)
        assert_close(torch.stack(result.logits), torch.stack(expected.logits))
    check_equal(world, integration, comm, make_batch(9), whole, model)  # it is split again


@on_ranks(2)
def test_the_logits_of_a_prefill(world):
    """A forward with a cache also returns those of the unsplit model; the cache holds the piece."""
    integration = registered(world.comm)
    batch = {"input_ids": tokens(7), "use_cache": True}
    expected = make_model("llama", "sdpa")(**batch)
    result = make_model("llama")(**integration.split_batch(batch, world.comm))
    sizes = remainder_first(7, 2)
    assert_close(result.logits, cut(expected.logits, 1, sizes, world.rank))
    whole_keys = expected.past_key_values.layers[1].keys
    assert_close(result.past_key_values.layers[1].keys, cut(whole_keys, 2, sizes, world.rank))


# ---- errors -----------------------------------------------------------------------------------------------


def forward_errors(integration, comm):
    """Calls that fail, with the text of the error."""
    model = make_model("llama")
    ids = tokens(8)
    piece = integration.split_batch({"input_ids": ids}, comm)

    def with_cache(kind):
        from transformers import StaticCache

        if kind == "static":
            cache = StaticCache(config=model.config, max_cache_len=32)
        else:
            cache = model(**piece, use_cache=True).past_key_values
        mask = torch.ones(2, 8 if kind == "static" else 9, dtype=torch.bool)
        ids = piece["input_ids"] if kind == "static" else tokens(1)
        positions = piece["position_ids"][:, : ids.size(1)]
        return model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache)

    windows, soft = make_model("qwen2 with windows"), make_model("gemma2")
    hybrid, routed = make_model("llama"), make_model("llama")
    hybrid.config.layer_types = ["linear_attention", "full_attention"]
    routed.config.output_router_logits = True
    packed = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]] * 2)
    packed_piece = integration.split_batch({"input_ids": ids, "position_ids": packed}, comm)
    mine, whole_mask = piece["input_ids"], piece["attention_mask"]
    of_no_form = torch.ones(2, 1, 4, 8, dtype=torch.bool)
    ours = r"generate\(\) of pipecomm_ext.integrations.transformers"
    wrong_size = "this rank passes 4 tokens, where its piece of a sequence of 4 .* has 2"
    return [
        (lambda: model(mine), "needs the attention_mask of the whole sequence"),
        (
            lambda: model(ids, attention_mask=whole_mask),
            "this rank passes 8 tokens, where its piece of a sequence of 8 .* has 4",
        ),
        (lambda: model(mine, attention_mask=whole_mask[:, :4]), wrong_size),
        (
            lambda: model(**piece | {"attention_mask": of_no_form}),
            r"attention_mask is \(2, 1, 4, 8\); it must be that of the whole sequence",
        ),
        # A mask of ones may be dropped.
        (lambda: model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2), ours),
        (
            lambda: model.generate(ids, attention_mask=padding(8, "left", 2), max_new_tokens=2),
            f"{ours} takes whole prompts",
        ),
        (
            lambda: with_cache("piece"),
            "the cache holds 4 tokens already, and pipecomm_ulysses does not split the new ones",
        ),
        (lambda: with_cache("static"), "keys of 32 tokens for queries of 4: .* no static"),
        (lambda: soft(**piece), "does not support soft capping of scores .softcap, of Gemma"),
        (lambda: model(**piece, output_attentions=True), "does not support output_attentions=True"),
        (lambda: hybrid(**piece), "cannot split layers of type linear_attention"),
        (lambda: routed(**piece), "cannot split the router's auxiliary loss"),
        (lambda: windows(**packed_piece), f"has no sliding window of {WINDOW} tokens"),
    ]


@on_ranks(2)
def test_what_cannot_be_split_is_refused_by_name(world):
    integration, comm = registered(world.comm), world.comm
    for call, text in forward_errors(integration, comm):
        with pytest.raises(ValueError, match=text):
            call()
            pytest.fail(text)
    check_works(world, integration, comm)


@on_ranks(3)
def test_an_error_of_one_rank_is_told_to_the_others(world):
    """In the mask, before any layer, and in a layer; and the next call works."""
    integration, comm = registered(world.comm), world.comm
    model = make_model("llama")
    piece = integration.split_batch({"input_ids": tokens(9)}, comm)
    wrong = [
        ({"attention_mask": None}, "needs the attention_mask"),
        ({"attention_mask": torch.ones(2, 1, 3, 9, dtype=torch.bool)}, "must be that of the whole sequence"),
        ({"output_attentions": True}, "does not support output_attentions"),
    ]
    for changed, text in wrong:
        given = piece | changed if world.rank == 1 else piece
        with pytest.raises(ValueError if world.rank == 1 else PipeCommMismatch, match=text):
            model(**given)
        check_works(world, integration, comm)


@on_ranks(2)
def test_wrong_batches(world):
    ids = {"input_ids": tokens(5)}
    for batch, text in [
        ({}, "must hold input_ids"),
        ({"input_ids": torch.ones(5)}, "must hold input_ids"),
        ({"input_ids": tokens(1)}, "a sequence of 1 tokens cannot be split over 2 ranks"),
        (ids | {"labels": tokens(4)}, r"labels is \(2, 4\), where there are 5"),
        (ids | {"attention_mask": torch.ones(2, 4)}, r"attention_mask is \(2, 4\), where there are 5 tokens"),
        (
            ids | {"pixel_values": torch.ones(2, 3)},
            r"does not know how pixel_values, \(2, 3\), is laid out",
        ),
    ]:
        with pytest.raises(ValueError, match=text):
            registered(world.comm).split_batch(batch, world.comm)


@on_ranks(2)
def test_a_piece(world):
    integration = registered(world.comm)
    batch = ignoring(make_batch(5, use_cache=False, num_logits=None))
    piece = integration.split_batch(batch, world.comm)
    mine = slice(0, 3) if world.rank == 0 else slice(3, 5)
    shifted = functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    assert torch.equal(piece["input_ids"], batch["input_ids"][:, mine]) and piece["input_ids"].is_contiguous()
    assert torch.equal(piece["position_ids"], torch.arange(5).expand(2, 5)[:, mine])
    assert torch.equal(piece["shift_labels"], shifted[:, mine]) and piece["labels"] is piece["shift_labels"]
    assert piece["num_items_in_batch"] == 4  # of the second row; the first has none
    assert piece["attention_mask"].shape == (2, 5) and piece["attention_mask"].all()
    assert piece["use_cache"] is False and piece["num_logits"] is None
    again = integration.split_batch({"input_ids": batch["input_ids"], "shift_labels": shifted}, world.comm)
    assert torch.equal(again["labels"], piece["labels"]) and again["num_items_in_batch"] == 4


@pytest.mark.parametrize("installed", [None, types.SimpleNamespace(__version__="5.9.3")])
def test_without_transformers(monkeypatch, installed):
    """The text names what to install, like the extra."""
    integrations = importlib.import_module("pipecomm_ext.integrations")
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", installed)
    for name in [name for name in sys.modules if name.startswith("pipecomm_ext.integrations.transformers")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(vars(integrations), "transformers", raising=False)
    with pytest.raises(ImportError, match="needs Hugging Face transformers from 5.10 on") as raised:
        integrations.__getattr__("transformers")
    [requirement] = re.findall('pip install ("[^"]+")', str(raised.value))
    assert f"transformers = [{requirement}]" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert requirement in (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")
    with pytest.raises(AttributeError):
        integrations.__getattr__("no_such_library")
