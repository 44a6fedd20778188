"""Every causal and masked language model of transformers over split sequences, in the smallest form of each.

A type is made from its config class, whose sizes are replaced by small ones wherever they have one of the
names below. Logits, loss and all gradients of two ranks are compared with one process, without padding and
with padding on either side, and generation likewise.
"""

from __future__ import annotations

import re
import warnings

import torch
import torch.distributed as dist
from torch.nn import functional

from pipecomm_ext import PipeCommMismatch, cal_split_sizes
from pipecomm_ext.integrations import transformers as integration

LENGTH, PADDED, NUM_NEW = 11, 4, 3
MAX_PARAMETERS = 15_000_000
TOLERANCE = (
    1e-4  # of float32, which many models and their losses compute in places; wrong ones differ by 1e-2
)
BY_NAME = re.compile(
    r"pipecomm_ulysses|whole sequence|split_batch|split along|a piece|its piece|generate\(\) (takes|needs)"
)

SIZES = """
32 hidden_size d_model n_embd embedding_size emb_dim dim word_embed_proj_dim attention_hidden_size model_dim
32 hidden_size_per_layer_input
48 intermediate_size ffn_dim n_inner decoder_ffn_dim encoder_ffn_dim dim_ff hidden_dim ffn_hidden_size d_ff
48 d_inner intermediate_size_mlp dense_intermediate_size
16 moe_intermediate_size shared_expert_intermediate_size kv_lora_rank q_lora_rank expert_ffn_hidden_size
16 shared_intermediate_size index_head_dim o_lora_rank
8 head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim qk_head_dim global_head_dim rotary_dim dim_head
8 attention_head_dim d_kv swa_head_dim v_swa_head_dim mamba_n_heads mamba_num_heads mamba_d_head
8 mamba_head_dim mamba_d_state ssm_state_size state_size linear_key_head_dim linear_value_head_dim
4 num_attention_heads n_head n_heads decoder_attention_heads encoder_attention_heads num_heads index_n_heads
4 num_experts num_local_experts n_routed_experts moe_num_experts index_topk
2 num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers
2 num_key_value_heads n_head_kv num_kv_heads num_global_key_value_heads swa_num_key_value_heads
2 linear_num_key_heads linear_num_value_heads mamba_expand
2 num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts multi_query_group_num type_vocab_size
1 n_shared_experts n_group topk_group num_hidden_groups num_shared_experts moe_num_shared_experts bos_token_id
1 mamba_n_groups n_groups num_nextn_predict_layers
3 sliding_window eos_token_id
64 max_position_embeddings n_positions max_seq_len n_ctx max_sequence_length
96 vocab_size vocab_size_per_layer_input
0 pad_token_id layerdrop decoder_layerdrop encoder_layerdrop layer_dropout first_k_dense_replace
0 num_kv_shared_layers
"""
SMALL = {name: int(size) for size, *names in map(str.split, SIZES.split("\n")[1:-1]) for name in names}
CHANGED: dict[str, dict] = {  # of types whose sizes depend on each other
    "bamba": {"attn_layer_indices": [1]},
    "esmc": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"qk_head_dim": 16, "head_dim": 8},
    "mamba2": {"num_heads": 8},
    "moshi": {"audio_vocab_size": 96},
    "neomme": {"head_dim": 16},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds": False, "attention_head_size": 8, "feed_forward_size": 48},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}


class NotBuilt(Exception):
    """There is no small model of this type, or none that computes by itself."""


def model_types() -> list[tuple[str, str]]:
    """(type, "causal" or "masked") of all that transformers lists."""
    from transformers.models.auto import modeling_auto as auto

    causal, masked = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return [(name, "causal") for name in causal] + [(name, "masked") for name in masked]


def small(config_class, **changed):
    """With small sizes, also in the configs within."""
    from transformers import AutoConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        known = config_class().to_dict()
    options = {name: value for name, value in SMALL.items() if isinstance(known.get(name), int | None)}
    options = {name: value for name, value in options.items() if name in known}
    if "kv_lora_rank" in options:
        options["num_key_value_heads"] = options["num_attention_heads"]
    options |= of_layers(known)
    options |= {name: 0.0 for name, value in known.items() if "drop" in name and type(value) is float}
    for name, part in config_class.sub_configs.items():
        if not isinstance(known.get(name), dict):
            continue
        if not hasattr(part, "sub_configs"):  # any type: that of the default
            part = type(AutoConfig.for_model(known[name]["model_type"]))
        if part.model_type != "":
            options[name] = small(part).to_dict()
    return config_class(**{**options, **changed})


def of_layers(known):
    """One layer of each kind, of two at least."""
    number = known.get("num_hidden_layers")
    lists = {name: value for name, value in known.items() if isinstance(value, list) and len(value) == number}
    if not lists:
        return {}
    kinds = [name for name in lists if "type" in name] or list(lists)
    values = lists[kinds[0]]
    places = sorted({values.index(value) for value in values})
    places = places if len(places) > 1 else [0, 1]
    return {"num_hidden_layers": len(places)} | {
        name: [value[place] for place in places] for name, value in lists.items()
    }


def config_of(model_type, kind):
    from transformers import AutoConfig

    config_class = type(AutoConfig.for_model(model_type))
    config = small(config_class, **CHANGED.get(model_type, {}))
    if kind == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    if kind == "masked":
        config.is_decoder = False
    return config


def make_model(model_type, kind, attention, dtype):
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    auto = AutoModelForCausalLM if kind == "causal" else AutoModelForMaskedLM
    torch.manual_seed(0)
    config = config_of(model_type, kind)
    config._experts_implementation = "eager"  # others compute no float64
    with torch.device("meta"):
        number = sum(p.numel() for p in auto.from_config(config, attn_implementation=attention).parameters())
    if number > MAX_PARAMETERS:
        raise NotBuilt(f"{number} parameters")
    model = auto.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    return model.to(dtype).eval()


def whole_model(model_type, kind):
    """In float64, or in float32 if it computes nothing else; it has made a step."""
    errors = []
    for dtype in (torch.float64, torch.float32):
        for attention in ("sdpa", "eager"):
            try:
                model = make_model(model_type, kind, attention, dtype)
                whole_step(model, batch_of(None), kind)
                return model
            except Exception as error:
                errors.append(error)
    raise NotBuilt(first_line(errors[0])) from errors[0]


def batch_of(side):
    ids = torch.randint(4, 90, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if side is not None:
        mask[1, slice(PADDED) if side == "left" else slice(LENGTH - PADDED, None)] = 0
    ids = ids.masked_fill(mask == 0, 0)
    labels = ids.roll(1, 1).masked_fill(mask == 0, -100)
    labels[1, PADDED] = -100  # which a token of the padding would predict
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def step(model, given, by_hand):
    """Logits, loss and gradients; the loss by hand, of (labels, number that counts), for masked models."""
    model.zero_grad()
    output = model(**given)
    loss = output.loss
    if by_hand is not None:
        labels, number = by_hand
        loss = (
            functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), reduction="sum") / number
        )
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return output.logits.detach(), loss.detach(), gradients


def whole_step(model, batch, kind):
    given, by_hand = dict(batch), None
    if kind == "masked":
        labels = given.pop("labels")
        by_hand = labels, (labels != -100).sum()
    result = step(model, given, by_hand)
    if not all(tensor.isfinite().all() for tensor in (*result[:2], *result[2].values())):
        raise ValueError("not finite")
    return result


def split_step(model, batch, kind, comm):
    if kind == "causal":
        return step(model, integration.split_batch(batch, comm), None)
    batch = {**batch, "shift_labels": batch["labels"]}
    piece = integration.split_batch(batch, comm)
    del piece["labels"]
    by_hand = piece.pop("shift_labels"), piece.pop("num_items_in_batch")
    return step(model, piece, by_hand)


def compared(result, expected, mask, rank, size):
    """ "" or what differs."""
    (logits, loss, gradients), (all_logits, whole_loss, whole_gradients) = result, expected
    sizes = cal_split_sizes(LENGTH, size)
    is_token = mask.bool().split(sizes, 1)[rank]
    worst = {"logits": difference(logits[is_token], all_logits.split(sizes, 1)[rank][is_token])}
    dist.all_reduce(loss)
    worst["loss"] = difference(loss, whole_loss)
    largest = max(gradient.abs().max().item() for gradient in whole_gradients.values() if gradient.numel())
    for name, whole in whole_gradients.items():
        gradient = gradients.get(name, torch.zeros_like(whole))
        dist.all_reduce(gradient)
        worst[name] = difference(gradient, whole, 1e-3 * largest)
    return ", ".join(f"{name} {error:.0e}" for name, error in worst.items() if error > TOLERANCE)


def difference(actual, expected, scale=0.0):
    if actual.numel() == 0:
        return 0.0
    result = ((actual - expected).abs().max() / max(expected.abs().max().item(), scale, 1e-30)).item()
    return result if result == result else float("inf")


def first_line(error):
    return f"{type(error).__name__}: {error}".partition("\n")[0]


class Sweep:
    """The types on the ranks of a world."""

    def __init__(self, world):
        self.world = world
        self.comm = self.register()

    def register(self):
        comm = self.world.fresh_comm(timeout=30)
        integration.register(comm)
        return comm

    def agreed(self, verdict):
        """The worst of the ranks'."""
        verdicts = [None] * self.world.size
        dist.all_gather_object(verdicts, verdict)
        return max(verdicts, key=lambda verdict: ORDER.index(verdict.partition(":")[0]))

    def attempt(self, function, *args):
        """(result, None), or (None, verdict) on all ranks, if one raised."""
        result, verdict = None, "right"
        try:
            result = function(*args)
        except Exception as error:
            is_named = isinstance(error, ValueError | PipeCommMismatch) and BY_NAME.search(str(error))
            verdict = ("refused: " if is_named else "nameless: ") + first_line(error)
        verdict = self.agreed(verdict)
        if verdict.startswith("nameless"):
            self.comm.abort("next type")
            self.comm = self.register()
        return (result, None) if verdict == "right" else (None, verdict)

    def verdicts(self, model_type, kind):
        """Of each case."""
        try:
            whole = whole_model(model_type, kind)
        except NotBuilt as error:  # which may be refused all the same
            _, verdict = self.attempt(self.refused_step, model_type, kind)
            is_refused = verdict is not None and verdict.startswith("refused")
            return {"plain": verdict if is_refused else f"not built: {error}"}
        model, verdict = self.attempt(make_model, model_type, kind, "pipecomm_ulysses", whole.dtype)
        if verdict is not None:
            return {"plain": verdict}
        cases = {}
        for side in (None, "left", "right"):
            batch = batch_of(side)
            cases[side or "plain"] = verdict = self.step(whole, model, batch, kind)
            if "a loss of its own" in verdict:
                cases["labels"] = verdict
                cases[side or "plain"] = self.step(whole, model, batch, "masked")
        if kind == "masked":
            given = integration.split_batch(batch_of(None), self.comm)
            cases["labels"] = self.attempt(lambda: model(**given))[1] or "wrong: labels taken"
        else:
            for side in (None, "left"):
                cases[f"generate {side or 'plain'}"] = self.generate(whole, model, batch_of(side))
        return cases

    def refused_step(self, model_type, kind):
        """Of a type that has none in one process."""
        model = make_model(model_type, kind, "pipecomm_ulysses", torch.float64)
        split_step(model, batch_of(None), kind, self.comm)
        raise NotBuilt

    def step(self, whole, model, batch, kind):
        try:
            expected = whole_step(whole, batch, kind)
        except Exception as error:
            return "not built: " + first_line(error)
        result, verdict = self.attempt(split_step, model, batch, kind, self.comm)
        if verdict is not None and "counts positions" in verdict:
            batch = batch | {"position_ids": counted_positions(model, batch)}
            result, verdict = self.attempt(split_step, model, batch, kind, self.comm)
        if verdict is None:
            wrong = compared(result, expected, batch["attention_mask"], self.world.rank, self.world.size)
            verdict = self.agreed(f"wrong: {wrong}" if wrong else "right")
        return verdict

    def generate(self, whole, model, batch):
        prompt = {name: batch[name] for name in ("input_ids", "attention_mask")}
        options = {"max_new_tokens": NUM_NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        options |= {"output_logits": True, "return_dict_in_generate": True}
        try:
            expected = whole.generate(**prompt, **options)
            if not torch.stack(expected.logits).isfinite().all():
                raise ValueError("not finite")
        except Exception as error:
            return "not built: " + first_line(error)
        result, verdict = self.attempt(
            lambda: integration.generate(model, **prompt, process_group=self.comm, **options)
        )
        if verdict is None:
            error = difference(torch.stack(result.logits), torch.stack(expected.logits))
            verdict = "right"
            if error > TOLERANCE:
                uncached = whole.generate(**prompt, **options, use_cache=False)
                itself = difference(torch.stack(uncached.logits), torch.stack(expected.logits))
                verdict = (
                    f"wrong: logits {error:.0e}" if itself < TOLERANCE else "not built: its cache is wrong"
                )
            verdict = self.agreed(verdict)
        return verdict


def counted_positions(model, batch):
    """As the models count that do not count from 0."""
    positions = batch["attention_mask"].cumsum(1) * batch["attention_mask"]
    for module in model.modules():
        if hasattr(module, "position_embeddings"):
            return positions + module.position_embeddings.padding_idx
    return (positions - 1).clamp(min=0)


ORDER = ["right", "not built", "refused", "wrong", "nameless"]
