"""`PipelineParallelLayerLayout`: which layers each rank and model chunk of a pipeline holds.

Names and rules: megatron.core.transformer.pipeline_parallel_layer_layout (Megatron Core 0.20). Different on
purpose:

* A parser reads the text; errors are ValueErrors that point at the character. Groups may be nested.
* A pure object: queries are answered from their arguments, nothing global is read; ranks and chunks out of
  range are refused.
* The first stage must hold the embedding and the last one the loss; the first rank holds no m, whatever its
  chunk.
* Rows of a list may be tuples.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

from ..core.checked import whole_number
from .layout_language import Layer, LayerType, LayoutError, parse_layout

logger = logging.getLogger(__name__)


class PipelineParallelLayerLayout:
    """The layers of each pipeline rank and model chunk.

    Args:
        layout: text (see `layout_language`), or a list with the layers of each stage, as `LayerType` or
            their names in any case. Stage vp * PP + pp is chunk vp of pipeline rank pp.
        pipeline_model_parallel_size: PP; the number of stages must be a multiple of it.

    Attributes:
        input_data: the layout as given.
        pipeline_model_parallel_size, virtual_pipeline_model_parallel_size: ranks, and chunks per rank.
        layout: `layout[pp][vp]` is the list of LayerType of that chunk.
        flatten_layout: all of them, in the order of the data flow.

    Raises:
        LayoutError (a ValueError), TypeError: `layout` cannot be read, or has the wrong number of stages.
            `validate_layer_layout` checks whether it fits a model.
    """

    def __init__(self, layout: str | Sequence[Sequence[LayerType | str]], pipeline_model_parallel_size: int):
        pipeline_model_parallel_size = whole_number(
            pipeline_model_parallel_size, "pipeline_model_parallel_size"
        )
        if pipeline_model_parallel_size < 1:
            raise ValueError(
                f"pipeline_model_parallel_size must be at least 1, not {pipeline_model_parallel_size}"
            )
        self.input_data = layout
        self._text = layout if isinstance(layout, str) else None
        self._stages = parse_layout(layout) if isinstance(layout, str) else _stages_of_list(layout)
        if not self._stages or len(self._stages) % pipeline_model_parallel_size:
            raise LayoutError(
                f"{len(self._stages)} stages do not divide over {pipeline_model_parallel_size} pipeline ranks"
            )
        self.pipeline_model_parallel_size = pipeline_model_parallel_size
        self.virtual_pipeline_model_parallel_size = len(self._stages) // pipeline_model_parallel_size
        types = [[layer.type for layer in stage] for stage in self._stages]
        self.layout = [types[pp::pipeline_model_parallel_size] for pp in range(pipeline_model_parallel_size)]
        self.flatten_layout = [layer_type for stage in types for layer_type in stage]

    # ---------------------------------------------------------------- from text

    @staticmethod
    @lru_cache
    def from_str(layout: str, pipeline_model_parallel_size: int) -> PipelineParallelLayerLayout:
        """The layout of a text, made once for each pair of arguments. Its table is logged at level INFO."""
        parsed = PipelineParallelLayerLayout(layout, pipeline_model_parallel_size)
        logger.info("pipeline layout %s:\n%s", layout, parsed.pretty_repr())
        return parsed

    @staticmethod
    def parse_str_to_list(layout_str: str) -> list[list[LayerType]]:
        """The layers of each stage of a text."""
        return [[layer.type for layer in stage] for stage in parse_layout(layout_str)]

    @staticmethod
    def get_num_stages_from_str(layout: str) -> int:
        """Number of stages of a text: ranks times chunks."""
        return len(parse_layout(layout))

    # ---------------------------------------------------------------- queries

    def get_num_layers_to_build(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Number of layers of a type in chunk `vp_stage` of rank `pp_rank`.

        `pp_rank` may be None if there is one rank, `vp_stage` if there is one chunk per rank.
        """
        return self._count(layer_type, self._stage_idx(vp_stage, pp_rank))

    def get_layer_offset(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Number of layers of that type in all stages before this one."""
        return sum(self._count(layer_type, before) for before in range(self._stage_idx(vp_stage, pp_rank)))

    def get_layer_id_list(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> list[int]:
        """The indices of this chunk's layers of that type, counted from 0 over the whole model."""
        offset = self.get_layer_offset(layer_type, vp_stage, pp_rank)
        return list(range(offset, offset + self.get_num_layers_to_build(layer_type, vp_stage, pp_rank)))

    def _count(self, layer_type: LayerType, stage_idx: int) -> int:
        return sum(layer.type is layer_type for layer in self._stages[stage_idx])

    def _stage_idx(self, vp_stage: int | None, pp_rank: int | None) -> int:
        pp = _index("pp_rank", pp_rank, self.pipeline_model_parallel_size)
        vp = _index("vp_stage", vp_stage, self.virtual_pipeline_model_parallel_size)
        return vp * self.pipeline_model_parallel_size + pp

    # ---------------------------------------------------------------- validation

    def validate_layer_layout(
        self, num_layers: int, mtp_num_layers: int | None, *, allow_split_mtp: bool = False
    ) -> bool:
        """Checks the layout against a model. True if some m is not on the last rank; config.mtp_standalone
        must then be set.

        Args:
            num_layers: number of layers of type t.
            mtp_num_layers: number of layers of type m; None is 0.
            allow_split_mtp: layers of type m may be in several stages.

        Raises:
            LayoutError: one of these rules is broken; the message states which one, and where. There is one
                E, the first layer of the first stage, and one L, the last layer of the last stage; the
                numbers of t and m are right; no t follows an m; all m are in one stage, in the last chunk of
                its rank, and not on the first rank.
            NotImplementedError: there is a layer of type encoder.
        """
        for layer_type, number in [
            (LayerType.embedding, 1),
            (LayerType.loss, 1),
            (LayerType.decoder, num_layers),
            (LayerType.mtp, mtp_num_layers or 0),
        ]:
            places = self._places(layer_type)
            if len(places) != number:
                raise self._error(
                    f"there must be {number} of {layer_type.name}, not {len(places)}",
                    places[number:] or places[-1:],
                )
        first, last = self._stages[0], self._stages[-1]
        embedding, loss = self._places(LayerType.embedding), self._places(LayerType.loss)
        if not first or first[0].type is not LayerType.embedding:
            raise self._error("the embedding must be the first layer of the first stage", embedding)
        if not last or last[-1].type is not LayerType.loss:
            raise self._error("the loss must be the last layer of the last stage", loss)
        if encoders := self._places(LayerType.encoder):
            raise NotImplementedError(str(self._error("layers of type encoder are not supported", encoders)))
        return self._validate_mtp(allow_split_mtp)

    def _validate_mtp(self, allow_split: bool) -> bool:
        places = self._places(LayerType.mtp)
        if not places:
            return False
        num_ranks = self.pipeline_model_parallel_size
        behind = [place for place in self._places(LayerType.decoder) if place > places[0]]
        if behind:
            raise self._error("a decoder layer is behind an mtp layer", behind)
        elsewhere = [place for place in places if place[0] != places[0][0]]
        if elsewhere and not allow_split:
            raise self._error("all mtp layers must be in the same stage", elsewhere)
        for place in places:
            vp, pp = divmod(place[0], num_ranks)
            if vp != self.virtual_pipeline_model_parallel_size - 1:
                raise self._error("mtp layers must be in the last chunk of their rank", [place])
            if pp == 0 and num_ranks > 1:
                raise self._error("mtp layers must not be on the first pipeline rank", [place])
        return any(place[0] % num_ranks != num_ranks - 1 for place in places)

    def _places(self, layer_type: LayerType) -> list[tuple[int, int]]:
        """(stage, index in the stage) of every layer of a type, in order."""
        return [
            (stage_idx, layer_idx)
            for stage_idx, stage in enumerate(self._stages)
            for layer_idx, layer in enumerate(stage)
            if layer.type is layer_type
        ]

    def _error(self, problem: str, places: list[tuple[int, int]]) -> LayoutError:
        """The error, with the first of these places if there is one."""
        if not places:
            return LayoutError(f"pipeline layout {self!r}: {problem}")
        stage_idx, layer_idx = places[0]
        vp, pp = divmod(stage_idx, self.pipeline_model_parallel_size)
        where = f"; see stage {stage_idx} (rank {pp}, chunk {vp})"
        return LayoutError(
            f"pipeline layout: {problem}{where}", self._text, self._stages[stage_idx][layer_idx].position
        )

    # ---------------------------------------------------------------- texts

    def __repr__(self) -> str:
        return self.input_data if isinstance(self.input_data, str) else str(self.input_data)

    def pretty_repr(self) -> str:
        """A table: a row for each rank, neighbours that hold the same as one row, a column for each chunk."""
        rows = [[_text_of_chunk(chunk) for chunk in chunks] for chunks in self.layout]
        table = []
        if self.virtual_pipeline_model_parallel_size > 1:
            table.append(["", *(f"VPP rank {vp}" for vp in range(self.virtual_pipeline_model_parallel_size))])
        for row, group in groupby(range(len(rows)), key=lambda pp: rows[pp]):
            ranks = list(group)
            last = f"-{ranks[-1]}" if len(ranks) > 1 else ""
            table.append([f"PP rank {ranks[0]}{last}", *row])
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "    ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table
        ]
        return "\n".join(line.rstrip() for line in lines)


def _text_of_chunk(chunk: list[LayerType]) -> str:
    runs = [(layer_type.name, len(list(run))) for layer_type, run in groupby(chunk)]
    return ",".join(name if length == 1 else f"{name}*{length}" for name, length in runs) or "(empty stage)"


def _stages_of_list(layout: Any) -> list[list[Layer]]:
    if not isinstance(layout, (list, tuple)) or not all(isinstance(stage, (list, tuple)) for stage in layout):
        raise TypeError("a pipeline layout must be a text or a list of lists of layer types")
    return [
        [Layer(_layer_type(value, stage_idx, layer_idx), None) for layer_idx, value in enumerate(stage)]
        for stage_idx, stage in enumerate(layout)
    ]


def _layer_type(value: Any, stage_idx: int, layer_idx: int) -> LayerType:
    if isinstance(value, LayerType):
        return value
    where = f"pipeline layout: layer {layer_idx} of stage {stage_idx}"
    if not isinstance(value, str):
        # Megatron's own LayerType has the same names.
        value = getattr(value, "name", value)
        if not isinstance(value, str):
            raise TypeError(f"{where} must be a LayerType or a name, not {type(value).__name__}")
    name = value.strip().lower()
    if name not in LayerType.__members__:
        raise LayoutError(f"{where}: {value!r} is not one of {', '.join(LayerType.__members__)}")
    return LayerType[name]


def _index(name: str, value: int | None, size: int) -> int:
    if value is None:
        if size > 1:
            raise ValueError(f"{name} must be given: it may be 0 to {size - 1}")
        return 0
    value = whole_number(value, name)
    if not 0 <= value < size:
        raise ValueError(f"{name} {value} is not in 0..{size - 1}")
    return value
