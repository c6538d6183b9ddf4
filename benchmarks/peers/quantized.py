"""The model's GGUF file with its matrices in another format, made once by the `gguf` package in the peer's environment."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any


def model_file(settings: dict[str, Any]) -> Path:
    """The file to load: the one that is named, the one of `quant=`, or the model's own."""
    options = settings.get("options", {})
    if "gguf" in options:
        return Path(options["gguf"])
    if settings["gguf"] is None:
        raise SystemExit("this engine reads GGUF files alone, and the model is none: name one with gguf=FILE")
    own = Path(settings["gguf"])
    if "quant" not in options:
        return own
    folder = Path(settings["model_folder"]).parent
    return folder / f"{own.stem}-as-{options['quant']}.gguf"


def make_file(settings: dict[str, Any]) -> None:
    """Make the file of `quant=`, if it is not there."""
    target = model_file(settings)
    if "quant" in settings.get("options", {}) and not target.exists():
        partial = target.with_suffix(".partial")
        requantize(Path(settings["gguf"]), partial, settings["options"]["quant"])
        partial.replace(target)


def requantize(source: Path, target: Path, name: str) -> None:
    """Matrices in the format of that name, where a row is a whole number of blocks; vectors and all other facts as they are."""
    gguf: Any = importlib.import_module("gguf")
    kind = gguf.GGMLQuantizationType[name]
    block = gguf.GGML_QUANT_SIZES[kind][0]
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, arch=reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=element)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{name}" if name != "F32" else "ALL_F32"])
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        as_it_is = len(tensor.shape) < 2 or values.shape[-1] % block
        as_kind = gguf.GGMLQuantizationType.F32 if as_it_is else kind
        writer.add_tensor(tensor.name, gguf.quantize(values, as_kind), raw_dtype=as_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
