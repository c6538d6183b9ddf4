"""Plain transformers: `generate`, one request after the other, in float32. What one gets without an engine."""

from __future__ import annotations

import importlib
import time
from typing import Any

from protocol import Answer, Request, serve


class _Streamer:
    """Called by `generate` with the prompt, and then with each token."""

    def __init__(self, answer: Answer, start: float) -> None:
        self._answer = answer
        self._start = start
        self._is_prompt = True

    def put(self, value: Any) -> None:
        if not self._is_prompt:
            self._answer.add(time.perf_counter() - self._start, value.flatten().tolist())
        self._is_prompt = False

    def end(self) -> None:
        """Nothing is held back."""


class Transformers:
    name = "transformers"
    tells_tokens = True

    def __init__(self, settings: dict[str, Any]) -> None:
        self._torch = importlib.import_module("torch")
        transformers = importlib.import_module("transformers")
        self._torch.set_num_threads(settings["num_threads"])
        self._model = transformers.AutoModelForCausalLM.from_pretrained(settings["model_folder"], dtype=self._torch.float32).eval()
        self._model.generation_config.eos_token_id = None  # as with ignore_eos: it ends by length alone
        self.version = transformers.__version__
        self.precision = "float32 weights and arithmetic"
        self.note = "generate(), one request at a time"

    def run(self, requests: list[Request]) -> list[Answer]:
        start = time.perf_counter()
        answers = []
        for request in requests:
            answer = Answer()
            prompt = self._torch.tensor([request["prompt"]])
            length = request["max_tokens"]
            with self._torch.inference_mode():
                self._model.generate(
                    prompt,
                    attention_mask=self._torch.ones_like(prompt),
                    max_new_tokens=length,
                    do_sample=False,
                    streamer=_Streamer(answer, start),
                )
            answers.append(answer)
        return answers

    def close(self) -> None:
        """It ends with the process."""


if __name__ == "__main__":
    serve(Transformers)
