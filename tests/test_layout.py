"""The layout language, its errors with their positions, and the rules that a layout must keep."""

from __future__ import annotations

import random
import re
from enum import Enum

import pytest

from pipecomm_ext.pipeline_parallel import LayerType, LayoutError, PipelineParallelLayerLayout

NAMES = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}


def stages_of(text: str) -> list[str]:
    """Letters by stage."""
    letters = {LayerType[name]: letter for letter, name in NAMES.items()}
    return [
        "".join(letters[layer] for layer in stage)
        for stage in PipelineParallelLayerLayout.parse_str_to_list(text)
    ]


# ---- the language -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("EtL", "EtL"),
        ("Et*3|(tt|)*29,m|L", "Ettt|" + "tt|" * 29 + "m|L"),
        ("E|*3tL", "E|||tL"),
        ("(t|)*0E", "E"),
        ("(t*2|)*3", "tt|tt|tt|"),
        ("E(t|m|L)*2", "Et|m|Lt|m|L"),
        ("E,(t|)*2L", "Et|t|L"),
        ("E((t|)*2m)*2L", "Et|t|mt|t|mL"),
        (",E,,t,", "Et"),
        ("t*10", "t" * 10),
        ("t*007", "t" * 7),
        ("", ""),
        ("|", "|"),
    ],
)
def test_what_texts_mean(text, expected):
    assert "|".join(stages_of(text)) == expected
    assert PipelineParallelLayerLayout.get_num_stages_from_str(text) == expected.count("|") + 1


def test_the_example_of_the_documentation_has_61_decoders_in_32_stages():
    layout = PipelineParallelLayerLayout("Et*3|(tt|)*29,m|L", 16)
    assert layout.virtual_pipeline_model_parallel_size == 2
    assert layout.flatten_layout.count(LayerType.decoder) == 61
    assert layout.validate_layer_layout(61, 1) is True
    assert layout.layout[14][1] == [LayerType.mtp] and layout.layout[15][1] == [LayerType.loss]


@pytest.mark.parametrize(
    ("text", "position", "problem"),
    [
        ("Et L", 2, "whitespace is not allowed"),
        ("ETL", 1, "'T' is not one of E, t, m, L"),
        ("E(t|)L", 4, "a group needs a count, like (t|)*2"),
        ("E(t|*2L", 1, "this group is not closed"),
        ("Et)*2", 2, "there is no group to close"),
        ("E()*2L", 1, "this group is empty"),
        ("t*2*3", 3, "a repetition is not repeated"),
        ("(tt|)*2*2", 7, "a repetition is not repeated"),
        ("Et*L", 2, "a count of digits must follow *"),
        ("Et*", 2, "a count of digits must follow *"),
        ("*3t", 0, "a count must follow a layer"),
        ("E,*3t", 2, "a count must follow a layer"),
        ("Et*1,2L", 5, "'2' is not one of"),
        ("Et2L", 2, "'2' is not one of"),
        ("t*²", 1, "a count of digits must follow *"),
        ("t*1000001", 2, "more than 1000000"),
        ("((t*1000)*1000)*2", 16, "more than 1000000"),
        ("t*600000t*600000", 8, "more than 1000000"),
    ],
)
def test_errors_point_at_the_character(text, position, problem):
    with pytest.raises(LayoutError) as raised:
        PipelineParallelLayerLayout(text, 1)
    message = str(raised.value)
    assert raised.value.position == position and problem in message and f"position {position}" in message
    shown, caret = message.splitlines()[-2:]
    assert (shown + " ")[caret.index("^")] == (text + " ")[position]


def test_the_caret_stays_in_sight_in_a_long_text():
    text = "t|" * 500 + "x" + "|t" * 500
    with pytest.raises(LayoutError) as raised:
        PipelineParallelLayerLayout(text, 1)
    shown, caret = str(raised.value).splitlines()[-2:]
    assert shown[caret.index("^")] == "x" and len(shown) < 110


def test_random_texts_against_their_expansion():
    """Texts are generated together with their expansion, from the inside out."""
    rng = random.Random(5)

    def make(depth: int) -> tuple[str, str]:
        text = meaning = ""
        for _ in range(rng.randint(1, 4)):
            kind = rng.random()
            if kind < 0.3 and depth:
                inner_text, inner = make(depth - 1)
                count = rng.randint(0, 3)
                text, meaning = text + f"({inner_text})*{count}", meaning + inner * count
            else:
                letter, count = rng.choice("EtmL|"), rng.choice([None, 0, 1, 12])
                text += letter if count is None else f"{letter}*{count}"
                meaning += letter * (1 if count is None else count)
            text += "," * rng.randint(0, 1)
        return text, meaning

    for _ in range(300):
        text, meaning = make(3)
        assert "|".join(stages_of(text)) == meaning, text


# ---- mapping and queries ----------------------------------------------------------------------------------


def test_stages_go_round_the_ranks():
    layout = PipelineParallelLayerLayout("Et|tt|t||ttt|mL", 3)
    decoder, ranks = LayerType.decoder, range(3)
    assert [[len(chunk) for chunk in chunks] for chunks in layout.layout] == [[2, 0], [2, 3], [1, 2]]
    numbers = [[layout.get_num_layers_to_build(decoder, vp, pp) for pp in ranks] for vp in range(2)]
    assert numbers == [[1, 2, 1], [0, 3, 0]]
    offsets = [[layout.get_layer_offset(vp_stage=vp, pp_rank=pp) for pp in ranks] for vp in range(2)]
    assert offsets == [[0, 1, 3], [4, 4, 7]]
    assert layout.get_layer_id_list(vp_stage=1, pp_rank=1) == [4, 5, 6]
    assert layout.get_layer_id_list(LayerType.mtp, 1, 2) == [0]
    assert layout.get_num_layers_to_build(LayerType.loss, vp_stage=1, pp_rank=2) == 1
    assert "".join(stages_of("Et|tt|t||ttt|mL")) == "".join(
        {value: key for key, value in NAMES.items()}[layer.name] for layer in layout.flatten_layout
    )


def test_one_chunk_and_one_rank_need_not_be_named():
    assert PipelineParallelLayerLayout("Ett|tL", 2).get_layer_offset(pp_rank=1) == 2
    assert PipelineParallelLayerLayout("Ett|tL", 1).get_layer_offset(vp_stage=1) == 2
    assert PipelineParallelLayerLayout("EttL", 1).get_layer_id_list() == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"vp_stage": 0}, ValueError, "pp_rank must be given: it may be 0 to 1"),
        ({"pp_rank": 0}, ValueError, "vp_stage must be given: it may be 0 to 1"),
        ({"vp_stage": 2, "pp_rank": 0}, ValueError, "vp_stage 2 is not in 0..1"),
        ({"vp_stage": 0, "pp_rank": -1}, ValueError, "pp_rank -1 is not in 0..1"),
        ({"vp_stage": 0, "pp_rank": True}, TypeError, "pp_rank must be an int, not bool"),
    ],
)
def test_queries_say_what_they_need(arguments, error, message):
    layout = PipelineParallelLayerLayout("Et|t|t|L", 2)
    with pytest.raises(error, match=re.escape(message)):
        layout.get_layer_offset(**arguments)


def test_lists_of_types_and_names():
    class Foreign(Enum):
        decoder = 40

    given = [["Embedding", " decoder "], (LayerType.decoder, Foreign.decoder), ["LOSS"]]
    layout = PipelineParallelLayerLayout(given, 3)
    assert layout.flatten_layout == PipelineParallelLayerLayout("Et|tt|L", 3).flatten_layout
    assert layout.validate_layer_layout(3, None) is False and repr(layout) == str(given)
    layout.layout[0][0].clear()
    assert given[0] == ["Embedding", " decoder "] and layout.get_num_layers_to_build(pp_rank=0) == 1


@pytest.mark.parametrize(
    ("layout", "size", "error", "message"),
    [
        ("Et|t|L", 2, LayoutError, "3 stages do not divide over 2 pipeline ranks"),
        ([], 1, LayoutError, "0 stages do not divide"),
        ([["decoder"], "tt"], 1, TypeError, "a list of lists of layer types"),
        (7, 1, TypeError, "a text or a list of lists"),
        ([["decoder", "coder"]], 1, LayoutError, "layer 1 of stage 0: 'coder' is not one of embedding, loss"),
        ([[3.5]], 1, TypeError, "layer 0 of stage 0 must be a LayerType or a name, not float"),
        ("EL", 0, ValueError, "must be at least 1, not 0"),
        ("EL", 1.0, TypeError, "must be an int, not float"),
    ],
)
def test_what_is_no_layout(layout, size, error, message):
    with pytest.raises(error, match=re.escape(message)):
        PipelineParallelLayerLayout(layout, size)


# ---- validation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size", "num_layers", "mtp_num_layers", "options", "is_standalone"),
    [
        ("EttL", 1, 2, None, {}, False),
        ("EttmL", 1, 2, 1, {}, False),
        ("Ett||tL", 3, 3, 0, {}, False),
        ("E|t|t|mmL", 4, 2, 2, {}, False),
        ("E|t|mm|L", 4, 1, 2, {}, True),
        ("E|t|t|t|m|L", 3, 3, 1, {}, True),
        ("E|t|m|mL", 4, 1, 2, {"allow_split_mtp": True}, True),
    ],
)
def test_valid_layouts(text, size, num_layers, mtp_num_layers, options, is_standalone):
    layout = PipelineParallelLayerLayout(text, size)
    assert layout.validate_layer_layout(num_layers, mtp_num_layers, **options) is is_standalone


@pytest.mark.parametrize(
    ("text", "size", "num_layers", "mtp_num_layers", "problem", "position"),
    [
        ("ttL", 1, 2, None, "1 of embedding, not 0", None),
        ("Ett", 1, 2, None, "1 of loss, not 0", None),
        ("EtEL", 1, 1, None, "1 of embedding, not 2", 2),
        ("EtLL", 1, 1, None, "1 of loss, not 2", 3),
        ("EtttL", 1, 2, None, "2 of decoder, not 3", 3),
        ("EtL", 1, 2, None, "2 of decoder, not 1", 1),
        ("EtmL", 1, 1, None, "0 of mtp, not 1", 2),
        ("EtmL", 1, 1, 2, "2 of mtp, not 1", 2),
        ("tEL", 1, 1, None, "the embedding must be the first layer of the first stage", 1),
        ("|EtL", 2, 1, None, "the embedding must be the first layer of the first stage", 1),
        ("ELt", 1, 1, None, "the loss must be the last layer of the last stage", 1),
        ("Et|tL|", 3, 2, None, "the loss must be the last layer of the last stage", 4),
        ("E|tmt|L", 3, 2, 1, "a decoder layer is behind an mtp layer", 4),
        ("E|t|m|mL", 4, 1, 2, "all mtp layers must be in the same stage", 6),
        ("E|t|m|L", 2, 1, 1, "mtp layers must not be on the first pipeline rank", 4),
        ("E|tm||L", 2, 1, 1, "mtp layers must be in the last chunk of their rank", 3),
    ],
)
def test_invalid_layouts(text, size, num_layers, mtp_num_layers, problem, position):
    layout = PipelineParallelLayerLayout(text, size)
    with pytest.raises(LayoutError) as raised:
        layout.validate_layer_layout(num_layers, mtp_num_layers)
    assert problem in str(raised.value) and raised.value.position == position


def test_a_list_is_pointed_at_by_stage_and_has_no_encoders():
    for layout, size, num_layers, error, text in [
        ([["embedding"], ["decoder", "loss"], ["decoder"]], 3, 2, LayoutError,
         r"the loss must be the last layer .* see stage 1 \(rank 1, chunk 0\)"),
        ([["embedding", "encoder", "loss"]], 1, 0, NotImplementedError, "encoder"),
    ]:  # fmt: skip
        with pytest.raises(error, match=text):
            PipelineParallelLayerLayout(layout, size).validate_layer_layout(num_layers, None)


# ---- texts ------------------------------------------------------------------------------------------------


def test_the_table_merges_equal_rows_and_marks_empty_stages():
    layout = PipelineParallelLayerLayout("Et*2|(tt|)*3|t|tt|tt||L", 5)
    lines = [re.split(r" {4,}", line) for line in layout.pretty_repr().splitlines()]
    assert lines == [
        ["", "VPP rank 0", "VPP rank 1"],
        ["PP rank 0", "embedding,decoder*2", "decoder"],
        ["PP rank 1-2", "decoder*2", "decoder*2"],
        ["PP rank 3", "decoder*2", "(empty stage)"],
        ["PP rank 4", "(empty stage)", "loss"],
    ]
    plain = PipelineParallelLayerLayout("Et|t|t|L", 4).pretty_repr().splitlines()
    assert [line.split() for line in plain] == [
        ["PP", "rank", "0", "embedding,decoder"],
        ["PP", "rank", "1-2", "decoder"],
        ["PP", "rank", "3", "loss"],
    ]


def test_from_str_is_made_once_and_logged(caplog):
    PipelineParallelLayerLayout.from_str.cache_clear()
    with caplog.at_level("INFO"):
        first = PipelineParallelLayerLayout.from_str("Et|L", 2)
        assert PipelineParallelLayerLayout.from_str("Et|L", 2) is first
    assert caplog.text.count("pipeline layout Et|L:") == 1 and "PP rank 1" in caplog.text
    assert repr(first) == "Et|L"
