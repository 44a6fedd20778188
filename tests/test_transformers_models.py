"""What models derive from their tokens, over split sequences: right to float64, or refused by name.

Each row of the tables is a model, the changes to the batch or the call, and None or the text of the refusal.
Accepted rows are compared with one process.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from documents import execute
from ranks import on_ranks
from test_transformers_integration import (
    GPT,
    VOCAB,
    assert_close,
    check_equal,
    check_works,
    exact_loss,
    make_batch,
    padding,
    registered,
    tokens,
    with_heads,
)
from torch.nn import functional

ENCODER = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2}
ENCODER |= {"num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0}
ENCODER |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DECODER = with_heads(4, 2) | {"pad_token_id": 0, "max_position_embeddings": 64}
OPT = {"vocab_size": VOCAB, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 16, "pad_token_id": 0}
OPT |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64, "dropout": 0.0}
WHISPER = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "dropout": 0.0,
}
WHISPER |= {"decoder_ffn_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WHISPER |= {"decoder_start_token_id": 1, "max_target_positions": 64, "encoder_layers": 2}
STATE = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1}
STATE |= {"eos_token_id": 2}
EXPERTS = DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2}


def rope(kind, **options):
    return DECODER | {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **options}}


# Factors of each pair of channels. Sequences are longer than what the model was trained for, pieces are not.
LONG = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [4.0, 1.0, 8.0, 2.0], "factor": 4.0}
LONG = rope("longrope", **LONG, original_max_position_embeddings=7)
DYNAMIC = rope("dynamic", factor=4.0) | {"max_position_embeddings": 7}
PHI = LONG | {"hidden_size": 32, "num_key_value_heads": 4, "original_max_position_embeddings": 7}
MODERN = ENCODER | {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 4, "embedding_dropout": 0.0}
MODERN |= {"bos_token_id": 1, "eos_token_id": 2}
BY_LAYER = MODERN | {
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 7,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
        "full_attention": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
    },
}


def llama4(floor_scale):
    options = {**EXPERTS, "intermediate_size_mlp": 16, "no_rope_layers": [0, 1], "attention_chunk_size": 64}
    return options | {"floor_scale": floor_scale, "moe_layers": [1]}


def left(**batch):
    return make_batch(11, attention_mask=padding(11, "left", 4), **batch)


def right(dtype=torch.long):
    batch = make_batch(11, attention_mask=padding(11, "right", 4).to(dtype))
    batch["labels"][1, 7:] = -100
    return batch


def positions(begin):
    return {"position_ids": torch.arange(begin, begin + 11).expand(2, 11)}


plain = functools.partial(make_batch, 11)
OPT_LEFT = {"position_ids": (padding(11, "left", 4).cumsum(1) - 1).clamp(min=0)}

# Class, config, batch, text of the refusal.
TRAINING = {
    "rope yarn": ("Llama", rope("yarn", factor=4.0, original_max_position_embeddings=16), plain, None),
    "rope linear": ("Llama", rope("linear", factor=2.0), plain, None),
    "rope longrope": ("Llama", LONG, plain, None),
    "rope longrope, padded": ("Llama", LONG, left, None),
    "rope longrope, phi3": ("Phi3", PHI, plain, None),
    "rope dynamic": ("Llama", DYNAMIC, plain, None),
    "rope dynamic, recomputed": ("Llama", DYNAMIC | {"recomputed": True}, plain, None),
    "rope dynamic of one layer type": ("ModernBertDecoder", BY_LAYER, plain, None),
    "positions by tokens": (
        "Roberta",
        ENCODER | {"is_decoder": True},
        plain,
        "counts positions by its tokens",
    ),
    "positions by tokens, given": (
        "Roberta",
        ENCODER | {"is_decoder": True},
        lambda: plain(**positions(1)),
        None,
    ),
    "positions by the mask": ("OPT", OPT, plain, None),
    "positions by the mask, right": ("OPT", OPT, right, None),
    "positions by the mask, bool": ("OPT", OPT, lambda: right(torch.bool), None),
    "positions by the mask, left": ("OPT", OPT, left, "counts positions by attention_mask"),
    "positions by the mask, given": ("OPT", OPT, lambda: left(**OPT_LEFT), None),
    "temperature": ("Llama4", llama4(4), plain, "attn_temperature_tuning counts tokens within the piece"),
    "temperature that is 1": ("Llama4", llama4(12), plain, None),
    "loss of its own": ("Whisper", WHISPER, plain, "computes a loss of its own"),
    "router's loss": (
        "Mixtral",
        EXPERTS,
        lambda: plain(output_router_logits=True),
        "cannot split the router's auxiliary loss",
    ),
    "experts": ("Mixtral", EXPERTS | {"experts_implementation": "eager"}, plain, None),
    "logits of one token": (
        "Llama",
        DECODER,
        lambda: plain(logits_to_keep=1),
        "logits_to_keep cannot be given with a piece, .*: leave it out",
    ),
    "state": ("Mamba", STATE, plain, "carry a state along the sequence"),
    "state, mamba2": (
        "Mamba2",
        STATE | {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1},
        plain,
        "carry a state along the sequence",
    ),
    "state, rwkv": ("Rwkv", STATE, plain, "carry a state along the sequence"),
    "convolutions": (
        "Lfm2",
        DECODER | {"layer_types": ["conv", "conv"]},
        lambda: plain(use_cache=False),
        "cannot split layers of type conv|computed its piece without pipecomm_ulysses",
    ),
    "positions of the piece": (
        "Bart",
        {"vocab_size": VOCAB, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4},
        plain,
        "its forward takes no position_ids",
    ),
    "gpt2": ("GPT2", GPT | {"pad_token_id": 0}, plain, None),
    "own attention, bloom": (
        "Bloom",
        STATE | {"n_layer": 2, "n_head": 4},
        plain,
        "computes attention by itself",
    ),
    "own attention, falcon": (
        "Falcon",
        STATE | {"num_attention_heads": 4},
        plain,
        "computes attention by itself",
    ),
    "own attention, gptj": ("GPTJ", GPT | {"rotary_dim": 4}, plain, "computes attention by itself"),
    "own attention, mpt": (
        "Mpt",
        {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4},
        plain,
        "its forward takes no position_ids",
    ),
    "own attention, codegen": ("CodeGen", GPT | {"rotary_dim": 4}, plain, "computes attention by itself"),
}


def make_model(kind, options, attention, head="ForCausalLM"):
    import transformers

    options = dict(options)
    is_recomputed = options.pop("recomputed", False)
    config = getattr(transformers, f"{kind}Config")
    config = config.sub_configs["text_config"](**options) if kind == "Llama4" else config(**options)
    torch.manual_seed(0)
    name = kind + {"RwkvForCausalLM": "ForCausalLM", "GPT2ForCausalLM": "LMHeadModel"}.get(kind + head, head)
    model = getattr(transformers, name)._from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    if head == "ForCausalLM":
        model.loss_function = exact_loss
    if is_recomputed:
        model.gradient_checkpointing_enable()
        model.train()
    else:
        model.eval()
    return model.double()


@pytest.mark.parametrize("name", TRAINING)
def test_training(ranks, name):
    ranks.run(2, check_training, name)


def check_training(world, name):
    import transformers

    kind, options, make, refusal = TRAINING[name]
    integration, comm = registered(world.comm), world.comm
    if name in ("own attention, gptj", "own attention, codegen"):  # no longer from transformers 5.24 on
        supports = getattr(transformers, f"{kind}PreTrainedModel")._supports_attention_backend
        refusal = None if supports else refusal
    if refusal is None:
        models = make_model(kind, options, "sdpa"), make_model(kind, options, "pipecomm_ulysses")
        for _ in range(2):
            check_equal(world, integration, comm, make(), *models, only_tokens=kind == "OPT")
        return
    with pytest.raises(ValueError, match=refusal):
        make_model(kind, options, "pipecomm_ulysses")(**integration.split_batch(make(), comm))
    check_works(world, integration, comm)


# ---- encoders, and other outputs --------------------------------------------------------------------------

MASKED = {
    "bert": ("Bert", ENCODER, "ForMaskedLM", {}),
    "modernbert": ("ModernBert", MODERN, "ForMaskedLM", {}),
    "roberta": ("Roberta", ENCODER, "ForMaskedLM", positions(1)),
    "mobilebert": (
        "MobileBert",
        ENCODER | {"embedding_size": 32, "trigram_input": False, "use_bottleneck": False},
        "ForMaskedLM",
        {},
    ),
    "tokens of llama": ("Llama", DECODER, "ForTokenClassification", {}),
}


@pytest.mark.parametrize("name", MASKED)
@on_ranks(2)
def test_labels_of_the_tokens_themselves(world, name):
    """They are refused, also in a group of one rank and by a direct forward; and right if used as advised."""
    kind, options, head, given = MASKED[name]
    integration = registered(None)
    whole, model = (make_model(kind, options, name, head) for name in ("sdpa", "pipecomm_ulysses"))
    batch = left(**given)
    batch["labels"] = batch["labels"] % whole.config.num_labels if head != "ForMaskedLM" else batch["labels"]
    refused = pytest.raises(ValueError, match="cannot take the labels that split_batch")
    for call in (model, model.forward):
        with refused:
            call(**integration.split_batch(batch))
    labels = batch.pop("labels")
    expected = whole(**batch).logits
    functional.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    names = {"pipecomm_transformers": integration, "batch": {**batch, "labels": labels}, "model": model}
    names = execute("docs/transformers.md", "labels, num_items = ", names | {"torch": torch})
    assert_close(names["logits"], expected.split([6, 5], 1)[world.rank])
    names["loss"].backward()
    for parameter, truth in zip(model.parameters(), whole.parameters(), strict=True):
        if truth.grad is not None:
            dist.all_reduce(parameter.grad)
            assert_close(parameter.grad, truth.grad)
    alone = [dist.new_group([rank]) for rank in range(world.size)][world.rank]
    with refused:
        model(**integration.split_batch({**batch, "labels": labels}, alone))


def loss_without_shifted_labels(logits, labels, vocab_size, **_):
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def with_a_loss_of_ones_own(model, piece):
    model.loss_function = loss_without_shifted_labels
    model(**piece)


def with_more_in_the_loss(model, piece):
    class Regularized(type(model)):
        def forward(self, **kwargs):
            output = super().forward(**kwargs)
            output.loss = output.loss + output.logits.square().mean()
            return output

    model.__class__ = Regularized
    try:
        model(**piece)
    finally:
        model.__class__ = Regularized.__base__


def without(name):
    return lambda model, piece: model(**{key: value for key, value in piece.items() if key != name})


def by_hand(model, piece):
    """As in a script that cuts itself: split_batch() has not made the piece."""
    model(input_ids=tokens(31)[:, :15], attention_mask=torch.ones(2, 31))


CALLS = {
    "a loss without shift_labels": (
        with_a_loss_of_ones_own,
        "its loss_function has no parameter shift_labels",
    ),
    "more in the loss": (with_more_in_the_loss, "computes a loss of its own"),
    "no shift_labels": (without("shift_labels"), "got the labels of a piece without shift_labels"),
    "no positions": (without("position_ids"), "needs the position_ids of its piece"),
    "a piece by hand": (by_hand, "needs the position_ids of its piece"),
}


@pytest.mark.parametrize("name", CALLS)
@on_ranks(2)
def test_calls(world, name):
    call, text = CALLS[name]
    integration, comm = registered(world.comm), world.comm
    model = make_model("Llama", DECODER, "pipecomm_ulysses")
    with pytest.raises(ValueError, match=text):
        call(model, integration.split_batch(plain(), comm))
    model.loss_function = exact_loss
    check_equal(world, integration, comm, plain(), make_model("Llama", DECODER, "sdpa"), model)


@on_ranks(2)
def test_options_of_a_compiled_model(world):
    integration, comm = registered(world.comm), world.comm
    model = make_model("Llama", DECODER | {"num_hidden_layers": 1}, "pipecomm_ulysses")
    model = torch.compile(model, backend="eager")
    piece = integration.split_batch(plain(use_cache=False), comm)
    for changed in ({"position_ids": None}, {"logits_to_keep": 1}, {"output_router_logits": True}):
        with pytest.raises(
            ValueError, match="needs the position_ids|cannot be given with|router's auxiliary"
        ):
            model(**piece | changed)
    torch._dynamo.reset()


@on_ranks(2)
def test_outputs_of_one_token(world):
    integration, comm = registered(world.comm), world.comm
    ids = {"input_ids": tokens(11)}
    whole, model = (make_model("Bert", ENCODER, name, "Model") for name in ("sdpa", "pipecomm_ulysses"))
    result = model(**integration.split_batch(ids, comm))
    assert_close(result.last_hidden_state, whole(**ids).last_hidden_state.split([6, 5], 1)[world.rank])
    assert result.pooler_output is None
    for kind, options in (("Bert", ENCODER), ("Llama", DECODER)):
        model = make_model(kind, options, "pipecomm_ulysses", "ForSequenceClassification")
        with pytest.raises(ValueError, match="its output is made of one token of a row"):
            model(**integration.split_batch(ids, comm))
    with pytest.raises(ValueError, match="returns seq_relationship_logits .*Take the hidden states"):
        make_model("Bert", ENCODER, "pipecomm_ulysses", "ForPreTraining")(
            **integration.split_batch(ids, comm)
        )
    with pytest.raises(
        ValueError, match="without pipecomm_ulysses.*Give this model whole|takes no attention_mask"
    ):
        make_model("FNet", ENCODER, "pipecomm_ulysses", "Model")(**integration.split_batch(ids, comm))
    for kind, text in (("MobileBert", "made of neighbouring tokens"), ("Esm", "take attention_mask")):
        options = ENCODER | {"embedding_size": 32, "mask_token_id": 3}
        with pytest.raises(ValueError, match=f"its embeddings .*{text}"):
            make_model(kind, options, "pipecomm_ulysses", "Model")(**integration.split_batch(ids, comm))
    check_works(world, integration, comm)


# ---- generation -------------------------------------------------------------------------------------------

GENERATION = {
    "no cache in the config": ("Llama", DECODER | {"use_cache": False}, {}, None),
    "no cache": ("Llama", DECODER, {"use_cache": False}, r"generate\(\) takes no use_cache=False"),
    "beams": ("Llama", DECODER, {"num_beams": 2}, r"generate\(\) takes no beam_search"),
    "beams of the model's own config": (
        "Llama",
        DECODER,
        {"generation_config": {"max_new_tokens": 4}},
        r"generate\(\) takes no beam_search",
    ),
    "several sequences": (
        "Llama",
        DECODER,
        {"num_return_sequences": 2, "do_sample": True},
        r"generate\(\) takes no num_return_sequences",
    ),
    "longrope": ("Llama", LONG, {}, None),
    "dynamic": ("Llama", DYNAMIC, {}, None),
    "temperature": ("Llama4", llama4(4), {}, "attn_temperature_tuning counts tokens"),
    "temperature that is 1": ("Llama4", llama4(64), {}, None),
    "opt": ("OPT", OPT, {}, None),
    "whisper, which counts from 0": ("Whisper", WHISPER, {}, None),
    "roberta": ("Roberta", ENCODER | {"is_decoder": True}, {}, None),
    "state": ("Mamba", STATE, {}, "carry a state along the sequence"),
}


@pytest.mark.parametrize("name", GENERATION)
@on_ranks(2)
def test_generation(world, name):
    from transformers import GenerationConfig

    kind, options, changed, refusal = GENERATION[name]
    integration, comm = registered(world.comm), world.comm
    for length, count in ((11, 4), (7, 0)):  # with the new tokens longer than what LONG was trained for
        prompt = {"input_ids": tokens(length), "attention_mask": padding(length, "left", count)}
        options_of = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None} | changed
        options_of |= {"output_logits": True, "return_dict_in_generate": True}
        model = make_model(kind, options, "pipecomm_ulysses")
        if "generation_config" in changed:  # unset options are those of the model
            model.generation_config.num_beams = 2
            options_of = {"generation_config": GenerationConfig(**changed["generation_config"])}
        if refusal is not None:
            with pytest.raises(ValueError, match=refusal):
                integration.generate(model, **prompt, process_group=comm, **options_of)
            continue
        # The reference has a cache: without one, all tokens are rotated again at each step.
        whole = make_model(kind, options | {"use_cache": True}, "sdpa")
        expected = whole.generate(**prompt, **options_of)
        result = integration.generate(model, **prompt, process_group=comm, **options_of)
        assert torch.equal(result.sequences, expected.sequences)
        assert_close(torch.stack(result.logits), torch.stack(expected.logits))
    check_works(world, integration, comm)
