"""Families: the built-in ones resolve, other packages add theirs through an entry point."""

from __future__ import annotations

import sys
import types
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from aioengine.errors import ModelError
from aioengine.models import registry
from aioengine.models.base import CausalLM
from aioengine.models.llama import LlamaForCausalLM
from aioengine.models.registry import BUILT_IN, ENTRY_POINT_GROUP, find_model_class


class Plugin(LlamaForCausalLM):
    """A family of another package."""


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("some_plugin")
    module.Plugin, module.NotAModel = Plugin, int
    monkeypatch.setitem(sys.modules, "some_plugin", module)
    targets = {
        "Good": "some_plugin:Plugin",
        "Wrong": "some_plugin:NotAModel",
        "Gone": "no_such_module:Plugin",
        "Absent": "some_plugin:Other",
    }

    def entry_points(*, group: str) -> list[EntryPoint]:
        assert group == ENTRY_POINT_GROUP
        return [EntryPoint(name, value, group) for name, value in targets.items()]

    monkeypatch.setattr(registry, "entry_points", entry_points)


def test_every_built_in_family_resolves() -> None:
    for architecture in BUILT_IN:
        found = find_model_class(architecture)
        assert issubclass(found, CausalLM)
        assert found.__name__ == architecture


@pytest.mark.usefixtures("plugins")
def test_a_plugin_is_found() -> None:
    assert find_model_class("Good") is Plugin


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("Wrong", "is not a CausalLM"),
        ("Gone", "cannot load no_such_module:Plugin"),
        ("Absent", "cannot load some_plugin:Other"),
    ],
)
def test_what_cannot_be_used_is_named(architecture: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        find_model_class(architecture)


@pytest.mark.usefixtures("plugins")
def test_what_nobody_has_a_class_for_runs_on_the_code_of_transformers() -> None:
    assert find_model_class("Gemma2ForCausalLM").__name__ == "TransformersForCausalLM"
