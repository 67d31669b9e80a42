"""ONNX files of graphs: in float32, with weights in float16, or in int8."""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.export import ExportedProgram

from vat.export.graphs import Graph

Precision = Literal["float32", "float16", "int8"]

OPSET = 20  # the first with Gelu
SMALLEST_CAST = 1024  # weights with fewer numbers stay in float32: they save nothing and are the most sensitive
QUANTISED = ("Conv", "Gemm", "MatMul")

Feed = dict[str, np.ndarray]


def write_onnx(graph: Graph, program: ExportedProgram, path: Path) -> None:
    """The graph in float32, its weights inside of the file."""
    with silence():
        converted = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            input_names=list(graph.input_names),
            output_names=list(graph.output_names),
            external_data=False,
            verbose=False,
        )
        assert converted is not None
        converted.save(path)


def halve_weights(path: Path) -> None:
    """Store large weights in float16, in place; they are widened when the file is loaded, and all sums stay float32.

    So the file has half the size and runs everywhere at the same speed, while graphs that compute in float16 do so
    only on some devices.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    model = onnx.load(path)
    casts = []
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.dtype != np.float32 or values.size < SMALLEST_CAST or np.abs(values).max() > np.finfo(np.float16).max:
            continue
        narrow = f"{tensor.name}.float16"
        casts.append(helper.make_node("Cast", [narrow], [tensor.name], to=TensorProto.FLOAT))
        tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float16), narrow))
    for node in reversed(casts):
        model.graph.node.insert(0, node)
    onnx.save(model, path)


def quantise(path: Path, feeds: Iterable[Feed]) -> None:
    """Convolutions and products with weights in int8, in place; ranges of their inputs come from the `feeds`.

    Products of two images' features, norms and softmax stay in float32.
    """
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.feeds = iter(feeds)

        def get_next(self) -> Feed | None:
            return next(self.feeds, None)

    with tempfile.TemporaryDirectory(dir=path.parent) as folder, silence():
        prepared = Path(folder) / "prepared.onnx"
        quant_pre_process(str(path), str(prepared), skip_symbolic_shape=True)
        quantize_static(
            str(prepared),
            str(path),
            Reader(),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=list(QUANTISED),
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            extra_options={"MatMulConstBOnly": True},
        )


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Exporters print progress and warn about their own future; errors come through as exceptions."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
