"""The weights of a checkpoint in transformers' own model: its renaming and fusing of tensors, our reading and our checks."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from aioengine.checkpoint.safetensors import SafetensorsTensor
from aioengine.checkpoint.stored_tensor import StoredTensor
from aioengine.errors import ModelError
from aioengine.models.checkpoint_tensors import refuse_other_kinds, some
from aioengine.models.fallback.attention import SERVING, register
from aioengine.models.fallback.config import TransformersConfig, find_class, make_config
from aioengine.models.fallback.packed import Packing, Products, find_family
from aioengine.printable import get_logger

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = get_logger(__name__)

_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks)\.(\d{1,6})\.")
_COMPUTED = re.compile(
    r"(rotary_emb\.inv_freq|\.attn\.bias|\.masked_bias|\.attention\.bias)$"
)  # of old checkpoints: follow from the config
_SLACK = 1 << 20  # numbers that a model may have and no checkpoint: what is computed when it is built


class _Unread:
    """What transformers takes for a tensor of a file that it has not read: `tensor[...]` reads it."""

    def __init__(self, stored: StoredTensor) -> None:
        self._stored = stored

    def __getitem__(self, _: Any) -> torch.Tensor:
        kept = self._stored.dtype if isinstance(self._stored, SafetensorsTensor) else "F32"
        out = torch.empty(self._stored.shape, dtype={"BF16": torch.bfloat16, "F16": torch.float16}.get(kept, torch.float32))
        self._stored.read_into(out)
        return out


def load_transformers_model(
    config: TransformersConfig,
    tensors: Sequence[StoredTensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
    products: Products | None = None,
) -> PreTrainedModel:
    """transformers' model with the tensors in their places, whose attention is `SERVING`.

    products: of the layers whose weights stay packed.

    Raises ModelError for tensors that are missing, of another shape, or that the model's code has no use for in its layers.
    """
    refuse_other_kinds(tensors)
    for stored in tensors:
        if isinstance(stored, SafetensorsTensor):
            stored.check()
    model_class, model_config = find_class(config.raw), make_config(config.raw)
    register()
    with _quiet():
        _check_size(model_class, config, tensors)
        try:
            packing = _plan_packing(model_class, config, tensors, products)
            left = tensors if packing is None else packing.unpacked()
            load: Any = (model_class if packing is None else packing.class_of(model_class)).from_pretrained
            model, info = load(
                None,
                config=model_config,
                state_dict={stored.name: _Unread(stored) for stored in left},
                dtype=dtype,
                attn_implementation=SERVING,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                output_loading_info=True,
            )
        except ModelError:
            raise
        except Exception as error:  # of transformers' code for this model
            raise ModelError(f"transformers cannot load it: {type(error).__name__}: {' '.join(str(error).split()):.300}") from error
    _check_loaded(info, num_layers=config.num_layers)
    loaded: PreTrainedModel = model
    if packing is not None:
        packing.fill()
    loaded.eval()
    nn.Module.to(loaded, device)
    return loaded


def _plan_packing(
    model_class: type[PreTrainedModel], config: TransformersConfig, tensors: Sequence[StoredTensor], products: Products | None
) -> Packing | None:
    """Which tensors will be packed is known once a model has been built, without memory for its weights."""
    family = find_family(config.raw.get("model_type"))
    if products is None or family is None:
        return None
    packing = Packing(family, tensors, products)
    with torch.device("meta"):
        packing.class_of(model_class)(make_config(config.raw))
    return packing


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bar and report: what they say is said here, in one line."""
    from transformers.utils import logging

    level, shows_progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shows_progress:
            logging.enable_progress_bar()


def _check_size(model_class: type[PreTrainedModel], config: TransformersConfig, tensors: Sequence[StoredTensor]) -> None:
    """Before memory is taken: a config.json of a few bytes cannot ask for more than the files hold."""
    layers = {int(match[1]) for stored in tensors if (match := _LAYER.search(stored.name))}
    if len(layers) < config.num_layers:
        raise ModelError(f"config.json: num_hidden_layers is {config.num_layers}, the checkpoint has tensors of {len(layers)} layers")
    with torch.device("meta"):
        try:
            model = model_class(make_config(config.raw))
        except Exception as error:
            raise ModelError(f"transformers cannot build it: {type(error).__name__}: {' '.join(str(error).split()):.300}") from error
    model.tie_weights()
    wanted = sum(parameter.numel() for parameter in model.parameters())
    stored_numbers = sum(torch.Size(stored.shape).numel() for stored in tensors)
    if wanted > stored_numbers + _SLACK:
        raise ModelError(f"config.json implies {wanted} weights, the checkpoint has {stored_numbers}")


def _check_loaded(info: dict[str, Any], *, num_layers: int) -> None:
    if mismatched := sorted(info["mismatched_keys"]):
        name, stored, wanted = mismatched[0]
        raise ModelError(f"tensor {name} has shape {list(stored)}, config.json implies {list(wanted)}")
    if missing := info["missing_keys"]:
        raise ModelError(f"the checkpoint lacks {some(list(missing))}")
    unused = [name for name in info["unexpected_keys"] if not _COMPUTED.search(name)]
    inside = [name for name in unused if (match := _LAYER.search(name)) and int(match[1]) < num_layers]
    if inside:
        raise ModelError(f"transformers' code of this architecture has no use for {some(inside)} of the checkpoint")
    if unused:
        logger.warning("transformers' code of this architecture has no use for %s of the checkpoint", some(unused))
