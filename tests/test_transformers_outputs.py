"""What models return for pieces: outputs of all tokens, user-defined types, losses of wrapped models."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from test_transformers_integration import (
    assert_close,
    check_works,
    exact_loss,
    make_batch,
    registered,
    tokens,
)
from test_transformers_models import DECODER, ENCODER, MODERN, make_model
from test_transformers_models import plain as make_plain


@on_ranks(2)
def test_the_pooled_output_of_an_encoder_is_none(world):
    """Although it is as wide as a rank's tokens are many; of another width: test_outputs_of_one_token."""
    integration, comm, hidden_size = registered(world.comm), world.comm, 4
    model = make_model("Bert", ENCODER | {"hidden_size": hidden_size}, "pipecomm_ulysses", "Model")
    piece = integration.split_batch({"input_ids": tokens(8)}, comm)
    result = model(**piece)
    assert result.pooler_output is None and result[0].shape == (2, 4, hidden_size)
    hidden, pooled = model(**piece, return_dict=False)
    assert_close(hidden, result.last_hidden_state)
    assert pooled is None


@dataclasses.dataclass
class OwnOutput:
    loss: torch.Tensor | None
    scores: torch.Tensor


@on_ranks(2)
def test_outputs_of_a_type_of_the_users_own(world):
    from transformers import LlamaForCausalLM

    class Mine(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            return OwnOutput(output.loss, output.logits)

    integration, comm = registered(world.comm), world.comm
    model = make_model("Llama", DECODER, "pipecomm_ulysses")
    expected = model(**integration.split_batch(make_plain(), comm))
    model.__class__ = Mine
    for batch in (make_batch(11), {"input_ids": tokens(11)}):
        result = model(**integration.split_batch(batch, comm))
        assert_close(result.scores, expected.logits)
    result = model(**integration.split_batch(make_batch(11), comm))
    assert_close(result.loss, expected.loss)


def wrapped(make_loss, llm=None):
    """A model around another one, as users write them for their own heads and extra inputs."""
    from transformers import PreTrainedModel

    class Wrapper(PreTrainedModel):
        _supports_attention_backend = True

        def __init__(self, llm):
            super().__init__(llm.config)
            self.llm = llm

        def forward(self, input_ids, attention_mask=None, position_ids=None, **kwargs):
            output = self.llm(input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)
            output.loss = make_loss(output)
            return output

    return Wrapper(llm or make_model("Llama", DECODER, "pipecomm_ulysses"))


@on_ranks(2)
def test_the_loss_of_a_wrapped_model(world):
    integration, comm = registered(world.comm), world.comm
    expected = make_model("Llama", DECODER, "sdpa")(**make_plain()).loss.detach()
    model = wrapped(lambda output: output.loss)
    loss = model(**integration.split_batch(make_plain(), comm)).loss.detach()
    assert "_loss_function" not in vars(model) and model.llm.loss_function is exact_loss
    dist.all_reduce(loss)
    assert_close(loss, expected)
    with pytest.raises(ValueError, match="computes a loss of its own"):
        wrapped(lambda output: 2 * output.loss)(**integration.split_batch(make_plain(), comm))
    masked = make_model("ModernBert", MODERN, "pipecomm_ulysses", "ForMaskedLM")
    with pytest.raises(ValueError, match="computes a loss of its own"):  # of the tokens' own labels
        wrapped(lambda output: output.loss, masked)(**integration.split_batch(make_plain(), comm))
    check_works(world, integration, comm)
