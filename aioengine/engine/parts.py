"""What a started engine consists of."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from aioengine.engine.adapters import LoraAdapters
from aioengine.engine.inputs.admission import Admission
from aioengine.engine.inputs.input_processor import InputProcessor
from aioengine.engine.inputs.submission import Submitter
from aioengine.engine.loop.engine_core import EngineCore
from aioengine.engine.outputs.detokenizer import TextTokenizer
from aioengine.engine.outputs.output_processor import OutputProcessor
from aioengine.resolved_config import ModelInfo, ResolvedConfig
from aioengine.structured_output.manager import StructuredOutputManager


@dataclass(frozen=True, slots=True)
class EngineParts:
    """All of them are there, or the engine is not started."""

    loop: asyncio.AbstractEventLoop  # which the engine was started in, and belongs to
    model_info: ModelInfo
    tokenizer: TextTokenizer | None  # None: the engine works on token ids only
    config: ResolvedConfig
    structured_output: StructuredOutputManager
    admission: Admission
    input: InputProcessor
    output: OutputProcessor
    core: EngineCore
    submitter: Submitter
    loras: LoraAdapters
