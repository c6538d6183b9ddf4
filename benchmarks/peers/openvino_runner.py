"""OpenVINO GenAI's continuous batching pipeline. Run with its own Python.

The model is converted once, by optimum-intel, into a folder beside the float32 one.
"""

from __future__ import annotations

import importlib
import itertools
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from protocol import Answer, Request, serve


def _weight_format(settings: dict[str, Any]) -> str:
    return str(settings.get("options", {}).get("weight_format", "fp32"))


def _converted(settings: dict[str, Any]) -> Path:
    folder = Path(settings["model_folder"])
    return folder.with_name(f"{folder.name}-openvino-{_weight_format(settings)}")


def convert(settings: dict[str, Any]) -> None:
    """Make the folder with the model as OpenVINO reads it, if it is not there."""
    target = _converted(settings)
    if not (target / "openvino_model.xml").exists():
        exporter = str(Path(sys.executable).with_name("optimum-cli"))
        command = [exporter, "export", "openvino", "--model", settings["model_folder"], "--task", "text-generation-with-past"]
        weight_format = _weight_format(settings)
        if weight_format == "int4":
            command += ["--group-size", "64"]  # the default, 128, does not divide the width of the smallest models
        subprocess.run([*command, "--weight-format", weight_format, str(target)], check=True)


class OpenVino:
    name = "openvino"
    tells_tokens = True

    def __init__(self, settings: dict[str, Any]) -> None:
        weight_format = _weight_format(settings)
        folder = _converted(settings)
        self._openvino = importlib.import_module("openvino")
        self._numpy = importlib.import_module("numpy")
        self._genai = importlib.import_module("openvino_genai")
        scheduler = self._genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = settings["max_num_batched_tokens"]
        scheduler.max_num_seqs = settings["max_num_seqs"]
        scheduler.cache_size = 2
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": settings["num_threads"]}
        # Of the activations. OpenVINO's own choice for quantized weights is bfloat16 where the CPU has instructions for it.
        precision = settings.get("options", {}).get("precision", "f32" if weight_format == "fp32" else None)
        if precision is not None:
            properties["INFERENCE_PRECISION_HINT"] = precision
        group_size = settings.get("options", {}).get("dynamic_group_size")
        if group_size is not None:
            properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = group_size
        self._pipeline = self._genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)
        self._numbers = itertools.count()
        self.version = self._genai.__version__
        self.precision = f"{weight_format} weights" + (f", {precision} activations" if precision else "")
        self.precision += f" in groups of {group_size}" if group_size is not None else ""
        self.note = "ContinuousBatchingPipeline, in process"

    def run(self, requests: list[Request]) -> list[Answer]:
        answers = [Answer() for _ in requests]
        start = time.perf_counter()
        handles = [self._add(request) for request in requests]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.perf_counter() - start
            for handle, answer in zip(handles, answers, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        answer.add(now, list(output.generated_ids))
        return answers

    def _add(self, request: Request) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = request["max_tokens"]
        config.ignore_eos = True
        config.do_sample = False
        prompt = self._numpy.array([request["prompt"]], dtype=self._numpy.int64)
        return self._pipeline.add_request(next(self._numbers), self._openvino.Tensor(prompt), config)

    def close(self) -> None:
        """It ends with the process."""


if __name__ == "__main__":
    serve(OpenVino, prepare=convert)
