"""Writes an encoder as two ONNX graphs, for onnxruntime and other runtimes without torch.

    image.onnx    pixels float32 [batch, C, H, W]   -> features float32 [batch, E], unit length
    text.onnx     tokens int64 [batch, context]     -> features float32 [batch, E], unit length
                  (rows float32 [batch, W] where ``model.text_rows`` stands for texts)
    encoder.json  preprocessing of pictures, logit scale, context length, number format
    vocab.json, merges.txt, tokenizer_config.json   CLIP's tokenizer, or that of the model

The batch may have any size. A joined encoder becomes one image graph: the trunk is in it once, and
its output is the joined feature. With fp16 the weights are stored as fp16 and the runtime computes
in fp32, because onnxruntime 1.32 on a CPU, as it is set up, ends with a segmentation fault when it
optimises a graph of convolutions in fp16.

Graphs are traced by torch's exporter on TorchScript. The newer exporter gives the same features,
takes ten times as long, and needs two more packages.
"""

from __future__ import annotations

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
from mclclip.export.targets import ExportTarget, Source
from mclclip.models.encoder import Encoder, join_image_features, join_text_features
from mclclip.models.model import unit
from mclclip.models.towers import pair
from mclclip.util import files

CARD = {"library_name": "onnx", "pipeline_tag": "zero-shot-image-classification"}
IMAGE, TEXT, DESCRIPTION = "image.onnx", "text.onnx", "encoder.json"
_OPSET = 18
MOST_BYTES = 2_000_000_000  # a protobuf message holds 2 GiB
_LEAST_HALVED = 64  # smaller tensors stay fp32, since fp16 would save nothing
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

    Raises ValueError if onnx is not installed, torch cannot trace the model, or a graph is larger
    than 2 GB.
    """
    onnx, _ = (files.needed(name, *_NEEDS) for name in ("onnx", "onnxruntime"))
    first: Any = source.encoder.stages[0]
    height, width = pair(first.image_size)
    half = source.precision == "fp16"
    pixels = torch.zeros(2, first.num_channels, height, width)
    _export(onnx, ImageGraph(source.encoder), "pixels", pixels, out / IMAGE, half)
    shape = ["batch", first.num_channels, height, width]
    described: dict[str, Any] = {"image": {"file": IMAGE, "input": "pixels", "shape": shape}}
    if first.reads_texts:
        tokens, takes_rows = first.empty_texts(2), isinstance(first.tokenizer, TextRows)
        _export(onnx, TextGraph(source.encoder), "tokens", tokens, out / TEXT, half)
        if not takes_rows:
            tokens = first.tokenizer(["a dog", "a"])
            processors.write_tokenizer(source.directory, first.tokenizer, out)
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
            "scale": 1 / 255,
            "mean": list(settings["mean"]),
            "std": list(settings["std"]),
        },
    }
    files.write_json(out / DESCRIPTION, described)


def _export(
    onnx: Any, graph: nn.Module, name: str, example: Tensor, path: Path, half: bool
) -> None:
    """Writes a graph to ``path``; ``name`` is that of its input, "pixels" or "tokens"."""
    size = num_bytes(graph, of_images=name == "pixels")
    if size > MOST_BYTES:
        raise ValueError(
            f"the weights of {path.name} have {size:,} bytes, and a graph in one file holds at "
            f"most {MOST_BYTES:,}: convert a smaller model, or one stage instead of a concat"
        )
    rows = {0: "batch"}
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # ONNX has no operator for fused attention
    try:
        with torch.no_grad(), warnings.catch_warnings():
            # The exporter warns that it is the older one, and of constants in the graph; the
            # certificate finds wrong constants.
            warnings.simplefilter("ignore")
            torch.onnx.export(
                graph.eval(),
                (example,),
                str(path),
                input_names=[name],
                output_names=["features"],
                dynamic_axes={name: rows, "features": rows},
                opset_version=_OPSET,
                dynamo=False,
            )
    except Exception as error:  # torch raises any kind for operations that ONNX does not have
        cause = files.message_of(error)
        raise ValueError(f"torch cannot write {path.name} of this model ({cause})") from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    model = onnx.load(str(path))
    # Runtimes read the width of features from the graph; the exporter may not know it.
    with torch.no_grad():
        width = graph(example).shape[1]
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = width
    if half:
        _halve(onnx, model.graph)
    onnx.checker.check_model(model)
    files.write_bytes(path, model.SerializeToString())


def num_bytes(graph: nn.Module, of_images: bool) -> int:
    """Returns the bytes of the weights in a graph: those of the image towers or the text towers.

    Memory that stages share is counted once.
    """
    tower = (p for n, p in graph.named_parameters() if ("visual" in n.split(".")) == of_images)
    return sum({p.data_ptr(): p.numel() * p.element_size() for p in tower}.values())


def _halve(onnx: Any, graph: Any) -> None:
    """Stores the weights as fp16, and adds nodes that convert them to fp32 when the graph runs."""
    casts = []
    for tensor in graph.initializer:
        if tensor.data_type != onnx.TensorProto.FLOAT or np.prod(tensor.dims) < _LEAST_HALVED:
            continue
        name, values = tensor.name, onnx.numpy_helper.to_array(tensor)
        if np.abs(values).max() > np.finfo(np.float16).max:
            continue  # it would become infinite
        stored = f"{name}.fp16"
        tensor.CopyFrom(onnx.numpy_helper.from_array(values.astype(np.float16), stored))
        casts.append(onnx.helper.make_node("Cast", [stored], [name], to=onnx.TensorProto.FLOAT))
    nodes = [*casts, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)


class OnnxEncoder:
    """Runs the graphs in a folder by onnxruntime on the CPU, with the methods of an `Encoder`.

    Graphs have no image transform and no tokenizer: those of the encoder `like` are used.
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

    def encode_image(self, images: Tensor) -> Tensor:
        """[B, C, H, W] -> unit [B, E]."""
        return self._run(IMAGE, "pixels", images.float())

    def encode_text(self, tokens: Tensor) -> Tensor:
        """[B, context] int64 -> unit [B, E]."""
        return self._run(TEXT, "tokens", tokens)

    def _run(self, name: str, input_name: str, rows: Tensor) -> Tensor:
        features = self._sessions[name].run(None, {input_name: rows.cpu().numpy()})[0]
        return torch.from_numpy(features)


def certify(source: Source, out: Path, probes: Probes) -> list[Certificate]:
    """Compares the graphs, in onnxruntime on the CPU. With fp16 weights the bound is higher."""
    version = files.needed("onnxruntime", *_NEEDS).__version__
    name = f"onnxruntime {version}, weights in {source.precision}"
    encoder = source.encoder
    if not encoder.stages[0].reads_texts:
        probes = replace(probes, texts=())
    bound = certificate.HALF_BOUND if source.precision == "fp16" else certificate.BOUND
    return [certificate.compare(encoder, OnnxEncoder(out, encoder), name, probes, bound=bound)]


TARGET = ExportTarget(write, certify, CARD, precisions=("fp32", "fp16"))
