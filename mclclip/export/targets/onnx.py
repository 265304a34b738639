"""Writes an encoder as two ONNX graphs, for onnxruntime and other runtimes without torch.

    image.onnx    pixels float32 [batch, C, H, W]   -> features float32 [batch, E], unit length
    text.onnx     tokens int64 [batch, context]     -> features float32 [batch, E], unit length
                  (rows float32 [batch, W] where ``model.text_rows`` stands for texts)
    *.onnx.data   weights of a graph beside it, if they have more than 2 GB
    encoder.json  preprocessing of pictures, logit scale, context length, number format
    vocab.json, merges.txt, tokenizer_config.json   CLIP's tokenizer, or that of the model, for
                  transformers' AutoTokenizer

The batch may have any size. A joined encoder becomes one image graph: the trunk is in it once, and
its output is the joined feature. Graphs are made by torch's exporter (``torch.export``, opset 18).

fp16    The weights are stored as fp16 and the runtime computes in fp32, because onnxruntime 1.32
        on a CPU, as it is set up, ends with a segmentation fault when it optimises a graph of
        convolutions in fp16.
int8    onnxruntime's dynamic quantization: weights of linear layers and of token embeddings are
        int8, inputs of linear layers become uint8 when the graph runs, with a scale for each batch.
        Convolutions stay fp32: their quantized form took seven times as long for a MobileNetV2,
        and its features had a cosine of 0.3 with those of the source. Weights take 7 of the 8
        bits, so that sums do not overflow on CPUs without VNNI instructions.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mclclip.data.text_rows import TextRows
from mclclip.export import certificate, processors
from mclclip.export.certificate import Certificate, Probes
from mclclip.export.targets import ExportTarget, Precision, Source
from mclclip.models import config_check, weights
from mclclip.models.encoder import Encoder, join_image_features, join_text_features
from mclclip.models.model import unit
from mclclip.models.towers import pair
from mclclip.util import files

CARD = {"library_name": "onnx", "pipeline_tag": "zero-shot-image-classification"}
IMAGE, TEXT, DESCRIPTION = "image.onnx", "text.onnx", "encoder.json"
_OPSET = 18
MOST_BYTES = 2_000_000_000  # of the weights in a graph's file: a protobuf message holds 2 GiB
_LEAST_HALVED = 64  # smaller tensors stay fp32, since fp16 would save nothing
_QUANTIZED = ("MatMul", "Gemm", "Gather")
_NEEDS = ("--to onnx", "pip install 'mclclip[export]'")


class ImageGraph(nn.Module):
    """Pixels -> features of unit length, of one model or of joined stages."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.models = nn.ModuleList(encoder.stages)
        self._encoder = (encoder,)  # the tuple keeps it from becoming a submodule

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, C, H, W] -> unit [B, E]."""
        models: list[Any] = [*self.models]
        (encoder,) = self._encoder
        if encoder.variant is None:
            return unit(models[0].encode_image(pixels))
        shared = encoder.num_trunk_blocks
        hidden = models[0].encode_trunk(pixels, shared)
        features = [model.encode_tail(hidden, shared) for model in models]
        return join_image_features(features, encoder.variant)


class TextGraph(nn.Module):
    """Tokens -> features of unit length; a shared text tower's are repeated for each stage."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.models = nn.ModuleList(encoder.stages[: 1 if encoder.shared_text else None])
        self.repeats = len(encoder.stages) if encoder.shared_text else 1

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, context] -> unit [B, E]."""
        models: list[Any] = [*self.models]
        features = [unit(model.encode_text(tokens)) for model in models] * self.repeats
        if len(features) == 1:
            return features[0]
        return join_text_features(features)


def write(source: Source, out: Path) -> None:
    """Writes all files.

    Raises ValueError if a package is not installed, or torch cannot trace the model.
    """
    for name in ("onnx", "onnxruntime", "onnxscript", "transformers"):
        files.needed(name, *_NEEDS)
    first: Any = source.encoder.stages[0]
    height, width = pair(first.image_size)
    pixels = torch.zeros(2, first.num_channels, height, width)
    _export(ImageGraph(source.encoder), "pixels", pixels, out / IMAGE, source.precision)
    shape = ["batch", first.num_channels, height, width]
    described: dict[str, Any] = {"image": {"file": IMAGE, "input": "pixels", "shape": shape}}
    if first.reads_texts:
        takes_rows = isinstance(first.tokenizer, TextRows)
        tokens = first.empty_texts(2) if takes_rows else first.tokenizer(["a dog", "a"])
        _export(TextGraph(source.encoder), "tokens", tokens, out / TEXT, source.precision)
        if not takes_rows:
            processors.write_tokenizer(source.directory, first, out)
        shape = ["batch", int(tokens.shape[1])]
        bias = getattr(first.clip, "logit_bias", None)
        described["text"] = {"file": TEXT, "input": "tokens", "shape": shape}
        described["logit_scale"] = source.encoder.logit_scale
        described["logit_bias"] = None if bias is None else float(bias)
    settings = first.config["preprocess_cfg"]
    described |= {
        "features": {"output": "features", "width": source.encoder.embed_dim, "unit_length": True},
        "weights": source.precision,
        "preprocess": {
            "size": [height, width],
            "resize_mode": settings.get("resize_mode") or "shortest",
            "interpolation": settings.get("interpolation") or "bicubic",
            "fill_color": settings.get("fill_color") or 0,  # beside pictures of "longest"
            "scale": 1 / 255,
            "mean": list(settings["mean"]),
            "std": list(settings["std"]),
        },
    }
    files.write_json(out / DESCRIPTION, described)


def _export(graph: nn.Module, name: str, example: Tensor, path: Path, precision: Precision) -> None:
    """Writes a graph to ``path``; ``name`` is that of its input, "pixels" or "tokens"."""
    logging.getLogger("onnxscript").setLevel(logging.ERROR)  # it warns of what it does not optimise
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's own deprecated calls
            program = torch.onnx.export(
                graph.eval(),
                (example,),
                input_names=[name],
                output_names=["features"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                opset_version=_OPSET,
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # torch raises any kind for operations that ONNX does not have
        cause: BaseException = error
        while cause.__cause__ is not None:  # torch's own message is a page of advice
            cause = cause.__cause__
        message = files.message_of(cause)
        raise ValueError(f"torch cannot write {path.name} of this model ({message})") from error
    assert program is not None  # torch returns None only if it writes the file itself
    if precision == "int8":
        _save_quantized(program.model, path)
        return
    if precision == "fp16":
        _halve(program.model.graph)
    _save(program.model, path)


def _save(model: Any, path: Path) -> None:
    """Writes a graph; weights that one file cannot hold go into a second, with the suffix .data."""
    onnx, ir = (files.needed(name, *_NEEDS) for name in ("onnx", "onnx_ir"))
    num_bytes = sum(value.const_value.nbytes for value in model.graph.initializers.values())
    if num_bytes > MOST_BYTES:
        ir.save(model, path, external_data=f"{path.name}.data")
    else:
        ir.save(ir.external_data.load_to_model(model), path)
    onnx.checker.check_model(str(path))


def _save_quantized(model: Any, path: Path) -> None:
    """Writes a graph with weights in int8."""
    ir, quantization = (files.needed(n, *_NEEDS) for n in ("onnx_ir", "onnxruntime.quantization"))
    # The quantizer warns on the root logger of a graph without this mark of its preparation,
    # whose work, such as constant folding, torch's exporter has done.
    model.metadata_props["onnx.quant.pre_process"] = "onnxruntime.quant"
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, weights.quiet():
        exact, quantized = (Path(folder, name) for name in ("exact.onnx", "quantized.onnx"))
        ir.save(model, exact, external_data="exact.data")
        quantization.quantize_dynamic(
            exact,
            quantized,
            op_types_to_quantize=_QUANTIZED,
            per_channel=True,
            reduce_range=True,
            use_external_data_format=True,
        )
        exact.with_suffix(".data").unlink()  # up to 10 GB
        _save(ir.load(quantized), path)


def _halve(graph: Any) -> None:
    """Stores the weights as fp16, and adds nodes that convert them to fp32 when the graph runs."""
    ir = files.needed("onnx_ir", *_NEEDS)
    casts = []
    for name, value in [*graph.initializers.items()]:
        if value.dtype != ir.DataType.FLOAT or value.const_value.size < _LEAST_HALVED:
            continue
        values = value.const_value.numpy()
        if np.abs(values).max() > np.finfo(np.float16).max:
            continue  # it would become infinite
        half = ir.tensor(values.astype(np.float16), name=f"{name}.fp16")
        stored = ir.Value(
            name=half.name, shape=half.shape, type=ir.TensorType(half.dtype), const_value=half
        )
        del graph.initializers[name]
        graph.register_initializer(stored)
        value.const_value = None
        attributes = {"to": ir.DataType.FLOAT}
        casts.append(ir.node("Cast", [stored], attributes, outputs=[value]))
    graph.insert_before(graph[0], casts)


class OnnxEncoder:
    """Runs the graphs in a folder by onnxruntime on the CPU, with the methods of an `Encoder`.

    Graphs have no image transform: that of the encoder `like` is used. The tokenizer is read from
    the folder by transformers; where there is none, because rows stand for texts or there is no
    text tower, it is that of `like`.
    """

    def __init__(self, folder: Path, like: Any) -> None:
        runtime = files.needed("onnxruntime", *_NEEDS)
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        self._sessions = {
            name: runtime.InferenceSession(
                str(folder / name), options, providers=["CPUExecutionProvider"]
            )
            for name in (IMAGE, TEXT)
            if (folder / name).is_file()
        }
        described = files.read_model_json(folder / DESCRIPTION)
        self.embed_dim = int(described["features"]["width"])
        self.logit_scale = float(described.get("logit_scale", 1.0))
        self.preprocess_val, self.tokenizer = like.preprocess_val, like.tokenizer
        if (folder / config_check.TOKENIZER_CONFIG).is_file():
            self._reader = config_check.library().AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
            self.tokenizer = self._read

    def encode_image(self, images: Tensor) -> Tensor:
        """[B, C, H, W] -> unit [B, E]."""
        return self._run(IMAGE, "pixels", images.float())

    def encode_text(self, texts: Tensor | list[str]) -> Tensor:
        """N strings, or tokens int64 [N, context] -> unit [N, E]."""
        tokens = texts if isinstance(texts, Tensor) else self.tokenizer(texts)
        return self._run(TEXT, "tokens", tokens)

    def _read(self, texts: list[str]) -> Tensor:
        tokens: Tensor = self._reader(texts, **processors.TEXTS)["input_ids"]
        return tokens

    def _run(self, name: str, input_name: str, rows: Tensor) -> Tensor:
        features = self._sessions[name].run(None, {input_name: rows.cpu().numpy()})[0]
        return torch.from_numpy(features)


def certify(source: Source, out: Path, probes: Probes) -> list[Certificate]:
    """Compares the graphs, in onnxruntime on the CPU. With rounded weights the bounds are wider."""
    version = files.needed("onnxruntime", *_NEEDS).__version__
    name = f"onnxruntime {version}, weights in {source.precision}"
    encoder = source.encoder
    if not encoder.stages[0].reads_texts:
        probes = replace(probes, texts=())
    bound = certificate.BOUNDS[source.precision]
    notes = _unquantized(out) if source.precision == "int8" else []
    other = OnnxEncoder(out, encoder)
    return [certificate.compare(encoder, other, name, probes, bound=bound, notes=notes)]


def _unquantized(out: Path) -> list[str]:
    """Says of each graph in ``out`` which share of its weights is fp32, if it is more than half."""
    ir = files.needed("onnx_ir", *_NEEDS)
    notes = []
    for path in sorted(out.glob("*.onnx")):
        values = [value.const_value for value in ir.load(path).graph.initializers.values()]
        tensors = [tensor for tensor in values if tensor is not None]
        rest = sum(t.size for t in tensors if t.dtype == ir.DataType.FLOAT)
        share = rest / sum(t.size for t in tensors)
        if share > 0.5:
            notes.append(
                f"{share:.0%} of the weights of {path.name} stay fp32: int8 is for linear layers "
                "and token embeddings, not for convolutions"
            )
    return notes


TARGET = ExportTarget(write, certify, CARD, precisions=("fp32", "fp16", "int8"))
