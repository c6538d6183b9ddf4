"""Writes the folders beside this file, each by the package whose layout it has. Run once; what it wrote is committed.

    pip install --no-deps auto-gptq==0.7.1 compressed-tensors==0.20.1 bitsandbytes==0.50.2 loguru psutil
    PYTHONPATH=. python tests/models/quantized/make.py AUTOAWQ        # AUTOAWQ: a checkout of github.com/casper-hansen/AutoAWQ

`expected.json` has, of each quantized matrix, the sha256 of the float32 numbers that the package itself reads from it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

HERE = Path(__file__).parent
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
Tensors = dict[str, torch.Tensor]
Quantize = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]  # weight -> what is stored, by the end of its name, and float32 numbers


def minmax(weight: torch.Tensor, group: int, *, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points [rows, groups], as the quantizers of all these packages begin."""
    by_group = weight.view(weight.shape[0], -1, group)
    if symmetric:
        scales = (by_group.abs().amax(-1) / 7.5).half().float()
        return scales, torch.full_like(scales, 8.0)
    low, high = by_group.amin(-1).clamp(max=0), by_group.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).half().float()
    return scales, (-low / scales).round().clamp(1, 15)


def load_file(name: str, path: Path) -> Any:
    """One module of a package that asks for more than is installed."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def gptq(group: int, *, symmetric: bool, act_order: bool = False, version: int = 1) -> Quantize:
    package = importlib.util.find_spec("auto_gptq")
    assert package is not None
    assert package.origin is not None
    layers = load_file("qlinear_cuda", Path(package.origin).parent / "nn_modules/qlinear/qlinear_cuda.py")

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        order = torch.randperm(columns) if act_order else torch.arange(columns)
        scales, zeros = minmax(weight[:, order], group, symmetric=symmetric)
        linear = torch.nn.Linear(columns, rows, bias=False)
        linear.weight.data = weight.clone()
        layer = layers.QuantLinear(4, group, columns, rows, bias=True, weight_dtype=torch.float16)
        g_idx = torch.empty(columns, dtype=torch.int32)
        g_idx[order] = (torch.arange(columns) // group).int()
        linear.weight.data = linear.weight.data.half()
        layer.pack(linear, scales.clone(), zeros.clone(), g_idx.clone())
        stored = {name: value.clone() for name, value in layer.state_dict().items()}
        layer.scales, layer.bias = layer.scales.float(), None
        numbers = layer(torch.eye(columns)).t().contiguous()
        if version == 2:  # gptqmodel: convert_gptq_v1_to_v2_format_module adds 1 to each
            stored["qzeros"] = (stored["qzeros"].long() + 0x11111111).to(torch.int32)
        return stored, numbers

    return quantize


def awq(checkout: Path, group: int) -> Quantize:
    for name in ("awq", "awq.utils", "awq.modules", "awq.modules.linear"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    sys.modules["awq.utils.utils"] = types.ModuleType("awq.utils.utils")
    sys.modules["awq.utils.utils"].get_best_device = lambda: "cpu"  # type: ignore[attr-defined]
    sys.modules["awq.utils.module"] = types.ModuleType("awq.utils.module")
    sys.modules["awq.utils.module"].try_import = lambda name: (None, "")  # type: ignore[attr-defined]
    packing = load_file("awq.utils.packing_utils", checkout / "awq/utils/packing_utils.py")
    module = load_file("awq.modules.linear.gemm", checkout / "awq/modules/linear/gemm.py")

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        scales, zeros = minmax(weight, group, symmetric=False)
        linear = torch.nn.Linear(columns, rows, bias=False)
        linear.weight.data = weight.clone()
        layer = module.WQLinear_GEMM.from_linear(linear, 4, group, scales=scales.t().contiguous(), zeros=zeros.t().contiguous())
        numbers = packing.dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, group)
        return dict(layer.state_dict()), numbers.t().contiguous()

    return quantize


def compressed(weights: dict[str, Any], scale_dtype: torch.dtype) -> Quantize:
    compressors: Any = importlib.import_module("compressed_tensors.compressors")
    quantization: Any = importlib.import_module("compressed_tensors.quantization")
    utils: Any = importlib.import_module("compressed_tensors.quantization.utils")

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scheme = quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**weights))
        args = scheme.weights
        by_group = weight.view(weight.shape[0], -1, args.group_size or weight.shape[1])
        scale, zero = utils.calculate_qparams(by_group.amin(-1), by_group.amax(-1), args)
        state = {"weight": weight, "weight_scale": scale.to(scale_dtype), "weight_zero_point": zero}
        packed = compressors.BaseCompressor.get_value_from_registry("pack-quantized" if args.type == "int" else "float-quantized")
        stored = packed.compress(state, scheme)
        numbers = packed.decompress({**stored, "weight_scale": stored["weight_scale"].float()}, scheme)["weight"]
        return {name: value for name, value in stored.items() if name != "weight_zero_point" or not args.symmetric}, numbers.float()

    return quantize


def float8(block: list[int]) -> Quantize:
    finegrained: Any = importlib.import_module("transformers.integrations.finegrained_fp8")

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        config = types.SimpleNamespace(weight_block_size=block, scale_fmt="float")
        quantizer = types.SimpleNamespace(quantization_config=config)
        stored = finegrained.Fp8Quantize(quantizer).convert({"q.weight": weight})
        stored = {name.removeprefix("q."): value for name, value in stored.items()}
        numbers = finegrained._dequantize_fp8_weight(stored["weight"], stored["weight_scale_inv"], block, torch.float32)
        return stored, numbers

    return quantize


def nf4(*, double: bool) -> Quantize:
    functional: Any = importlib.import_module("bitsandbytes.functional")

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, state = functional.quantize_4bit(weight.bfloat16(), blocksize=64, quant_type="nf4", compress_statistics=double)
        stored = {"weight": codes, **{f"weight.{name}": value for name, value in state.as_dict(packed=True).items()}}
        return stored, functional.dequantize_4bit(codes, state).float()

    return quantize


def write(name: str, quantization: dict[str, Any], quantize: Quantize) -> None:
    torch.manual_seed(len(name))
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    config = transformers.LlamaConfig(**SHAPE, dtype="float16")
    tensors: Tensors = {}
    expected: dict[str, str] = {}
    for key, value in transformers.LlamaForCausalLM(config).state_dict().items():
        weight = torch.randn_like(value) * 0.15 + (1.0 if "norm" in key else 0.0)
        if "_proj" not in key:
            tensors[key] = weight.half()
            continue
        stored, numbers = quantize(weight)
        tensors.update({f"{key.removesuffix('.weight')}.{end}": part.contiguous() for end, part in stored.items()})
        expected[key] = hashlib.sha256(numbers.contiguous().numpy().tobytes()).hexdigest()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    written = {**config.to_dict(), "architectures": ["LlamaForCausalLM"], "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(written, indent=1, sort_keys=True) + "\n")
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def main(autoawq: Path) -> None:
    def of_gptq(**more: Any) -> dict[str, Any]:
        return {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False, **more}

    def of_compressed(kind: str, **weights: Any) -> dict[str, Any]:
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups, "ignore": ["lm_head"]}

    write("gptq", of_gptq(), gptq(32, symmetric=False))
    write("gptq-v2", of_gptq(checkpoint_format="gptq_v2"), gptq(32, symmetric=False, version=2))
    write("gptq-sym", of_gptq(sym=True, group_size=64), gptq(64, symmetric=True))
    write("gptq-act-order", of_gptq(desc_act=True), gptq(32, symmetric=False, act_order=True))
    write("awq", {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}, awq(autoawq, 64))
    group = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    write("compressed-sym", of_compressed("pack-quantized", **group), compressed(group, torch.bfloat16))
    channel = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "channel"}
    write("compressed-channel", of_compressed("pack-quantized", **channel), compressed(channel, torch.bfloat16))
    rows = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    write("compressed-fp8", of_compressed("float-quantized", **rows), compressed(rows, torch.bfloat16))
    write("fp8", {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}, float8([32, 32]))
    stated = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    write("nf4", stated, nf4(double=False))
    write("nf4-double", {**stated, "bnb_4bit_use_double_quant": True}, nf4(double=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
