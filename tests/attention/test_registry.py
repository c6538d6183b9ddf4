from __future__ import annotations

import logging
from typing import Any, ClassVar

import pytest
import torch

from aioengine.attention import registry
from aioengine.attention.base import AttentionConfig
from aioengine.attention.torch_paged import TorchPagedBackend
from aioengine.errors import ConfigError

CPU = torch.device("cpu")
CONFIG = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, block_size=16, dtype=torch.float32, kv_cache_dtype=torch.float32)


class PickyBackend(TorchPagedBackend):
    name: ClassVar[str] = "picky"

    @classmethod
    def supports(cls, config: AttentionConfig, device: torch.device) -> str | None:
        return "the moon is not full"


@pytest.fixture
def picky_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: str) -> Any:
        return PickyBackend if path == "picky" else TorchPagedBackend

    monkeypatch.setattr(registry, "_CANDIDATES", (("picky", "picky"), ("torch_paged", "x")))
    monkeypatch.setattr(registry, "_load", load)


@pytest.mark.parametrize("name", ["auto", "torch_paged"])
def test_finds_the_reference_backend(name: str) -> None:
    backend = registry.select_attention_backend(name, CONFIG, CPU)
    assert isinstance(backend, TorchPagedBackend)
    assert backend.config is CONFIG


def test_every_registered_name_is_the_name_of_its_class() -> None:
    for name, path in registry._CANDIDATES:
        assert registry._load(path).name == name


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'flash'; known: auto, .*torch_paged"):
        registry.select_attention_backend("flash", CONFIG, CPU)


@pytest.mark.usefixtures("picky_first")
def test_auto_asks_in_order_and_logs_the_reasons(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=registry.__name__):
        backend = registry.select_attention_backend("auto", CONFIG, CPU)
    assert type(backend) is TorchPagedBackend
    assert "torch_paged" in caplog.text
    assert "picky: the moon is not full" in caplog.text


@pytest.mark.usefixtures("picky_first")
def test_a_named_backend_that_does_not_fit_says_why() -> None:
    with pytest.raises(ConfigError, match="the moon is not full"):
        registry.select_attention_backend("picky", CONFIG, CPU)
