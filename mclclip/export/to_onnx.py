"""An encoder as two ONNX graphs, for onnxruntime and other runtimes without torch.

    image.onnx    pixels float32 [batch, C, H, W]   -> features float32 [batch, E], unit length
    text.onnx     tokens int64 [batch, context]     -> features float32 [batch, E], unit length
    encoder.json  how pixels are made, logit scale, context length, formats
    vocab.json, merges.txt, tokenizer_config.json   CLIP's tokenizer, or that of the model

The batch is of any size. A joined encoder is one image graph: the trunk is in it once, and its
output is the joined feature. With fp16 the weights are stored as fp16 and the runtime computes in
fp32: onnxruntime 1.32 on a CPU ends with a segmentation fault where a graph of convolutions in
fp16 is optimised, as it is by default.

Graphs are traced by torch's exporter on TorchScript. The newer one gives the same features, takes
ten times as long, and needs two further packages.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mclclip import files
from mclclip.export import certificate, libraries, transformers_layout
from mclclip.export.certificate import Certificate
from mclclip.export.target import Material, Source
from mclclip.models.encoder import Encoder, join_image_features, join_text_features
from mclclip.models.model import Model, unit

IMAGE, TEXT, DESCRIPTION = "image.onnx", "text.onnx", "encoder.json"
_OPSET = 18
_MOST_BYTES = 2_000_000_000  # a protobuf message holds 2 GiB
_LEAST_HALVED = 64  # numbers of a tensor from which on halving it saves anything


class _ImageGraph(nn.Module):
    """Pixels -> unit features, of one model or of the stages of a concat."""

    def __init__(self, models: list[Model], joined: Encoder | None) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.joined = () if joined is None else (joined,)  # in a tuple: no module of this one

    def forward(self, pixels: Tensor) -> Tensor:
        models: list[Any] = [*self.models]
        if not self.joined:
            return unit(models[0].encode_image(pixels))
        (joined,) = self.joined
        assert joined.variant is not None
        hidden = models[0].encode_trunk(pixels, joined.num_trunk_blocks)
        features = [model.encode_tail(hidden, joined.num_trunk_blocks) for model in models]
        return join_image_features(features, joined.variant, joined.stage_weights)


class _TextGraph(nn.Module):
    """Tokens -> unit features; ``repeats`` of a shared text tower's."""

    def __init__(
        self, models: list[Model], repeats: int = 1, stage_weights: Sequence[float] = ()
    ) -> None:
        super().__init__()
        self.models, self.repeats = nn.ModuleList(models), repeats
        self.stage_weights = tuple(stage_weights)

    def forward(self, tokens: Tensor) -> Tensor:
        models: list[Any] = [*self.models]
        features = [unit(model.encode_text(tokens)) for model in models] * self.repeats
        if len(features) == 1:
            return features[0]
        return join_text_features(features, self.stage_weights)


def write(source: Source, out: Path) -> None:
    """Writes the graphs; see the module. Raises ValueError without onnx, and for a model that torch
    cannot trace or whose graph is larger than 2 GB."""
    onnx = libraries.needed("onnx", "--to onnx")
    libraries.needed("onnxruntime", "--to onnx")
    models, joined = source.stages, source.encoder
    first = models[0]
    height, width = _sides(first.image_size)
    pixels = torch.zeros(2, first.num_channels, height, width)
    if joined.variant is not None:
        images = _ImageGraph(models, joined)
        towers, repeats = (models[:1], len(models)) if joined.shared_text else (models, 1)
        texts = _TextGraph(towers, repeats, joined.stage_weights)
    else:
        images, texts = _ImageGraph(models, None), _TextGraph(models)
    half = source.precision == "fp16"
    _export(onnx, images, "pixels", pixels, out / IMAGE, half)
    if source.reads_texts:
        _export(onnx, texts, "tokens", first.tokenizer(["a dog", "a"]), out / TEXT, half)
        transformers_layout.write_tokenizer(source.directory, first.tokenizer, out)
    files.write_json(out / DESCRIPTION, _description(source))


def _sides(size: int | tuple[int, int]) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)


def _export(
    onnx: Any, graph: nn.Module, name: str, example: Tensor, path: Path, half: bool
) -> None:
    size = _num_bytes(graph, of_images=name == "pixels")
    if size > _MOST_BYTES:
        raise ValueError(
            f"the weights of {path.name} have {size:,} bytes, and a graph in one file holds at "
            f"most {_MOST_BYTES:,}: convert a smaller model, or one stage instead of a concat"
        )
    rows = {0: "batch"}
    with _traceable():
        try:
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
        except Exception as error:  # of any kind: the model has an operation that ONNX has not
            cause = " ".join(str(error).split())[:200]
            raise ValueError(f"torch cannot write {path.name} of this model ({cause})") from error
    model = onnx.load(str(path))
    if half:
        _halve(onnx, model)
    onnx.checker.check_model(model)
    files.write_bytes(path, model.SerializeToString())


def _num_bytes(graph: nn.Module, of_images: bool) -> int:
    """Bytes of the weights of one tower, which is all that a graph holds of its models; memory
    that stages share is counted once."""
    tower = (p for n, p in graph.named_parameters() if ("visual" in n.split(".")) == of_images)
    return sum({p.data_ptr(): p.numel() * p.element_size() for p in tower}.values())


@contextmanager
def _traceable() -> Iterator[None]:
    """Without torch's fused attention for inference, which ONNX has not, and without the
    exporter's warnings: that it is the older one, and of constants, which certificates find."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _halve(onnx: Any, model: Any) -> None:
    """Stores the weights as fp16, with a conversion to fp32 before their first use."""
    graph, casts = model.graph, []
    for tensor in graph.initializer:
        if tensor.data_type != onnx.TensorProto.FLOAT or np.prod(tensor.dims) < _LEAST_HALVED:
            continue
        name, values = tensor.name, onnx.numpy_helper.to_array(tensor)
        if np.abs(values).max() > np.finfo(np.float16).max:
            continue  # it would become infinite
        stored = f"{name}.fp16"
        tensor.CopyFrom(onnx.numpy_helper.from_array(values.astype(np.float16), stored))
        cast = onnx.helper.make_node("Cast", [stored], [name], to=onnx.TensorProto.FLOAT)
        casts.append(cast)
    nodes = [*casts, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)


def _description(source: Source) -> dict[str, Any]:
    """The fields of `encoder.json`: inputs and outputs of the graphs, logit scale and bias, and the
    settings of the image transform."""
    first: Any = source.stages[0]
    height, width = _sides(first.image_size)
    look = first.config["preprocess_cfg"]
    shape = ["batch", first.num_channels, height, width]
    parts: dict[str, Any] = {"image": {"file": IMAGE, "input": "pixels", "shape": shape}}
    if source.reads_texts:
        context = int(first.tokenizer(["a"]).shape[1])
        parts["text"] = {"file": TEXT, "input": "tokens", "shape": ["batch", context]}
        bias = getattr(first.clip, "logit_bias", None)
        parts["logit_scale"] = source.encoder.logit_scale
        parts["logit_bias"] = None if bias is None else float(bias)
    return parts | {
        "features": {"output": "features", "width": source.encoder.embed_dim, "unit_length": True},
        "weights": source.precision,
        "preprocess": {
            "size": [height, width],
            "resize_mode": look.get("resize_mode") or "shortest",
            "interpolation": look.get("interpolation") or "bicubic",
            "scale": 1 / 255,
            "mean": list(look["mean"]),
            "std": list(look["std"]),
        },
    }


class OnnxEncoder:
    """The graphs in a folder as an `Encoder`, run by onnxruntime on the CPU.

    Image transform and tokenizer are those of `like`, for graphs have none.
    """

    def __init__(self, folder: Path, like: Any) -> None:
        runtime = libraries.needed("onnxruntime", "an ONNX graph")
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

    def _run(self, name: str, given: str, rows: Tensor) -> Tensor:
        found = self._sessions[name].run(None, {given: rows.cpu().numpy()})[0]
        return torch.from_numpy(found)


def certify(source: Source, out: Path, material: Material) -> list[Certificate]:
    """The graphs in onnxruntime on the CPU. In fp16 features may differ by more than in fp32."""
    runtime = libraries.needed("onnxruntime", "--to onnx")
    own, other = source.encoder, OnnxEncoder(out, source.encoder)
    half = source.precision == "fp16"
    name = f"onnxruntime {runtime.__version__}, weights in {source.precision}"
    texts = material.texts if source.reads_texts else []
    bound = certificate.HALF_BOUND if half else certificate.BOUND
    return [certificate.compare(own, other, name, material.images, texts, bound, False)]
