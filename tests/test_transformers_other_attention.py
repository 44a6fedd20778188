"""Pieces of sequences in models whose attention is not that of the integration: refused, or a wrong loss."""

from __future__ import annotations

import copy

import pytest
import torch
from ranks import on_ranks
from test_transformers_integration import (
    check_equal,
    check_works,
    config_of,
    make_batch,
    make_model,
    padding,
    registered,
    tokens,
)

from pipecomm_ext import PipeCommMismatch

REFUSED = (
    r"got \d tokens of a sequence of \d+, which split_batch\(\) has split, but its attention is \\?'{}\\?'"
)


def register_attention_without_a_mask():
    """As users may write one: transformers then drops the mask."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("no_mask", sdpa_attention_forward)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "no_mask"])
@on_ranks(2, 3)
def test_a_piece_in_a_model_with_another_attention_is_refused(world, attention):
    integration, comm = registered(world.comm), world.comm
    register_attention_without_a_mask()
    masks = [None, padding(9, "left", 4), torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()]
    for name in ("llama", "gpt2", "qwen2 with windows"):
        model = make_model(name, attention)
        for mask in masks:
            for options in ({}, {"use_cache": False}):
                piece = integration.split_batch(make_batch(9, attention_mask=mask, **options), comm)
                with pytest.raises(ValueError, match=REFUSED.format(attention)):
                    model(**piece)
                with pytest.raises(ValueError, match=REFUSED.format(attention)):
                    model.forward(**piece)  # as wrappers like PEFT's call it
                with pytest.raises(ValueError, match=REFUSED.format(attention)):
                    model.base_model(piece["input_ids"], attention_mask=piece["attention_mask"])
    check_works(world, integration, comm)


@on_ranks(2)
def test_a_kernel_of_the_hub_is_not_the_users_own(world):
    """transformers registers "owner/repository:function" with a function of the kernel's own module."""
    from transformers import AttentionInterface

    integration = registered(world.comm)
    kernel = "owner/attention:forward"
    AttentionInterface.register(kernel, lambda module, query, *_, **__: (query.transpose(1, 2), None))
    model = make_model("llama", "sdpa")
    model.config._attn_implementation_internal = kernel  # set_attn_implementation() would download it
    with pytest.raises(ValueError, match=REFUSED.format(kernel)):
        model(**integration.split_batch(make_batch(9), world.comm))


@on_ranks(2)
def test_encoders_and_embeddings_are_refused_too(world):
    from transformers import BertConfig, BertModel

    integration = registered(world.comm)
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = BertModel._from_config(BertConfig(**sizes), attn_implementation="sdpa")
    with pytest.raises(ValueError, match="BertModel " + REFUSED.format("sdpa")):
        model(**integration.split_batch({"input_ids": tokens(7)}, world.comm))
    embeds = torch.randn(2, 7, 40, dtype=torch.float64)
    with pytest.raises(ValueError, match="LlamaForCausalLM " + REFUSED.format("sdpa")):
        make_model("llama", "sdpa")(**integration.split_batch({"inputs_embeds": embeds}, world.comm))


@on_ranks(2)
def test_a_second_model_of_the_same_config(world):
    """transformers shares the config, so that the first model gets the second one's attention."""
    from transformers import AutoModelForCausalLM

    integration, comm = registered(world.comm), world.comm
    whole = make_model("llama", "sdpa")

    def made(config, attention):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).double()
        model.load_state_dict(whole.state_dict())
        model.loss_function = whole.loss_function
        return model

    config = config_of("llama")
    model = made(config, "pipecomm_ulysses")
    check_equal(world, integration, comm, make_batch(9), whole, model)
    made(copy.deepcopy(config), "sdpa")
    check_equal(world, integration, comm, make_batch(9), whole, model)
    made(config, "sdpa")
    with pytest.raises(ValueError, match=r"give each model a config of its own, copy.deepcopy\(config\)"):
        model(**integration.split_batch(make_batch(9), comm))
    model.set_attn_implementation("pipecomm_ulysses")
    check_equal(world, integration, comm, make_batch(9), whole, model)


@on_ranks(2)
def test_a_model_of_several(world):
    """The config of the text model decides, whatever the attention for images is."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    integration = registered(world.comm)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4}
    text = config_of("llama").to_dict()
    mine, other = "pipecomm_ulysses", "sdpa"

    def logits(batch, text_attention, vision_attention):
        attention = {"text_config": text_attention, "vision_config": vision_attention}
        torch.manual_seed(0)
        config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=60)
        model = LlavaForConditionalGeneration._from_config(config, attn_implementation=attention)
        return model.double().eval()(**batch).logits

    batch = {"input_ids": tokens(8) % 60}
    piece = integration.split_batch(batch, world.comm)
    expected = logits(batch, other, other)[:, 4 * world.rank :][:, :4]
    torch.testing.assert_close(logits(piece, mine, other), expected, rtol=1e-10, atol=1e-10)
    for vision_attention in (other, mine):
        with pytest.raises(ValueError, match=REFUSED.format(other)):
            logits(piece, other, vision_attention)


@on_ranks(3)
def test_one_rank_with_another_attention_is_told_to_the_others(world):
    integration, comm = registered(world.comm), world.comm
    model = make_model("llama", "sdpa" if world.rank == 1 else "pipecomm_ulysses")
    piece = integration.split_batch(make_batch(9), comm)
    error = ValueError if world.rank == 1 else PipeCommMismatch
    with pytest.raises(error, match=REFUSED.format("sdpa")):
        model(**piece)
    check_works(world, integration, comm)


@on_ranks(2)
def test_generation_with_another_attention_is_refused(world):
    integration = registered(world.comm)
    prompt = {"input_ids": tokens(9), "attention_mask": padding(9, "left", 2)}
    with pytest.raises(ValueError, match=REFUSED.format("sdpa")):
        integration.generate(make_model("llama", "sdpa"), **prompt, process_group=world.comm)


@pytest.mark.parametrize("attention", ["sdpa", "no_mask"])
@on_ranks(2)
def test_a_compiled_model_is_refused(world, attention):
    integration, comm = registered(world.comm), world.comm
    register_attention_without_a_mask()
    model = make_model("llama", attention)
    piece = integration.split_batch(make_batch(9, use_cache=False), comm)
    for is_one_graph, error in ((True, torch._dynamo.exc.Unsupported), (False, ValueError)):
        with pytest.raises(error, match=REFUSED.format(attention)):
            torch.compile(model, backend="eager", fullgraph=is_one_graph)(**piece)
    torch._dynamo.reset()


@on_ranks(2)
def test_the_length_of_a_static_cache_is_not_asked_for(world):
    """It is a tensor on the device, for which each model would wait at each new token."""
    from transformers import StaticCache

    class Watched(StaticCache):
        num_asked = 0

        def get_seq_length(self, *args, **kwargs):
            self.num_asked += 1
            return super().get_seq_length(*args, **kwargs)

    integration = registered(world.comm)
    integration.split_batch({"input_ids": tokens(9)}, world.comm)
    model = make_model("llama", "sdpa")
    mask, position_ids = torch.ones(2, 9, dtype=torch.long), torch.arange(8, 9).expand(2, 1)
    cache = Watched(config=model.config, max_cache_len=16)
    model(input_ids=tokens(8), attention_mask=mask[:, :8], past_key_values=cache)
    options = {"input_ids": tokens(1), "attention_mask": mask, "position_ids": position_ids}
    counts = []
    for forward in (type(model.model).forward, type(model.model).forward.__wrapped__):
        cache.num_asked = 0
        forward(model.model, **options, past_key_values=cache)
        counts.append(cache.num_asked)
    assert counts[0] == counts[1]


@on_ranks(2)
def test_what_is_not_split_goes_through_any_attention(world):
    """Even if pieces of the same lengths were made: whole batches, all kinds of caches, no masks."""
    from transformers import DynamicCache, StaticCache

    integration = registered(world.comm)
    for length in (2, 3, 8, 9):
        integration.split_batch({"input_ids": tokens(length)}, world.comm)
    for attention in ("sdpa", "eager"):
        model = make_model("llama", attention)
        ids, mask = tokens(8), torch.ones(2, 8, dtype=torch.long)
        expected = model(ids).logits
        assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, expected)
        for cache in (DynamicCache(), StaticCache(config=model.config, max_cache_len=16)):
            parts = [
                model(input_ids=ids[:, :4], attention_mask=mask[:, :4], past_key_values=cache),
                model(input_ids=ids[:, 4:], attention_mask=mask, past_key_values=cache),
            ]
            result = torch.cat([part.logits for part in parts], 1)
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)  # eager rounds to float32
        options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        for length in (1, 4):
            prompt = {"input_ids": ids[:, :length], "attention_mask": mask[:, :length]}
            plain = model.generate(**prompt, **options)
            assert torch.equal(model.generate(**prompt, **options, use_cache=False), plain)
    model = make_model("llama", "sdpa")
    padded = {"input_ids": ids, "attention_mask": padding(8, "right", 2), "use_cache": False}
    result = torch.compile(model, backend="eager", fullgraph=True)(**padded).logits
    torch.testing.assert_close(result, model(**padded).logits, rtol=1e-10, atol=1e-10)
    torch._dynamo.reset()
