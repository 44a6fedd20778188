"""Compiled models of transformers: in part, with an attention of the user's own, or never split at all."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks
from test_transformers_integration import (
    assert_close,
    check_works,
    make_batch,
    make_model,
    registered,
    tokens,
)


def compile_layers(model):
    for layer in model.model.layers:
        layer.compile(backend="eager")


def compile_the_inner_model(model):
    model.model.compile(backend="eager")


def compile_forwards(model):
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend="eager")


def put_in_compiled_layers(model):
    for idx, layer in enumerate(model.model.layers):
        model.model.layers[idx] = torch.compile(layer, backend="eager")


@pytest.mark.parametrize(
    "compile_parts", [compile_layers, compile_the_inner_model, compile_forwards, put_in_compiled_layers]
)
@on_ranks(2)
def test_parts_of_a_model_are_compiled(world, compile_parts):
    integration, comm = registered(world.comm), world.comm
    model = make_model("llama")
    piece = integration.split_batch(make_batch(9, use_cache=False), comm)
    expected = model(**piece)
    compile_parts(model)
    for _ in range(2):
        result = model(**piece)
        assert_close(result.logits, expected.logits)
        assert_close(result.loss, expected.loss)
    torch._dynamo.reset()
    check_works(world, integration, comm)


@on_ranks(2)
def test_an_attention_of_the_users_own_is_trusted(world):
    """It gets the tokens of the piece, also in a graph."""
    from transformers import AttentionInterface

    integration = registered(world.comm)

    def attention(module, query, key, value, attention_mask, **_):
        return value.repeat_interleave(query.size(1) // value.size(1), 1).transpose(1, 2), None

    AttentionInterface.register("own_exchange", attention)
    model = make_model("llama", "own_exchange", num_hidden_layers=1)
    piece = integration.split_batch(make_batch(9, use_cache=False), world.comm)
    expected = model(**piece).logits
    assert expected.size(1) == 5 - world.rank
    assert_close(torch.compile(model, backend="eager", fullgraph=True)(**piece).logits, expected)
    torch._dynamo.reset()


@on_ranks(2)
def test_static_caches_of_a_model_that_nobody_split(world):
    """Prompt and new tokens, each in one graph: the length of such a cache is a tensor that must not be read.

    The mask of the prompt has columns for all tokens that the cache may hold, as generate() makes it.
    """
    from transformers import StaticCache

    registered(world.comm)
    model = make_model("llama", ("sdpa", "eager")[world.rank], num_hidden_layers=1)
    mask = torch.ones(2, 12, dtype=torch.long)
    prompt, new = tokens(8), tokens(1)
    position_ids = torch.arange(9).expand(2, 9)
    results = []
    for call in (model, torch.compile(model, backend="eager", fullgraph=True)):
        cache = StaticCache(config=model.config, max_cache_len=12)
        options = {"attention_mask": mask, "past_key_values": cache}
        prefill = call(input_ids=prompt, position_ids=position_ids[:, :8], **options).logits
        decoded = call(input_ids=new, position_ids=position_ids[:, 8:], **options).logits
        results.append(torch.cat([prefill, decoded], 1))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)  # "eager" rounds to float32
    torch._dynamo.reset()
