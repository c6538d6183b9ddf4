"""ik_llama.cpp by its own llama-bench: one stream, no sampling, no HTTP. Its weights are repacked while they load (`-rtr`).

Standard library only. llama-bench makes up its tokens and times the prompt and the answer apart: the answer to a request is
said to come at the end of both.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from protocol import Answer, Request, serve
from quantized import make_file, model_file


class IkLlamaCpp:
    name = "ik_llama.cpp"
    tells_tokens = False

    def __init__(self, settings: dict[str, Any]) -> None:
        options = settings.get("options", {})
        self._model = model_file(settings)
        bench = str(options.get("bench") or Path(sys.executable).with_name("llama-bench"))
        self._command = [bench, "-m", str(self._model), "-t", str(settings["num_threads"]), "-rtr", "1", "-r", "1", "-o", "json"]
        self.version = str(self._measure(1, 1)[0].get("build_commit", "unknown"))
        self.precision = f"weights of {self._model.name}, float16 KV cache"
        self.note = "llama-bench: made-up tokens, no sampling, the model loaded anew each turn outside the time"

    def run(self, requests: list[Request]) -> list[Answer]:
        answers = []
        for request in requests:
            num_prompt, num_output = len(request["prompt"]), request["max_tokens"]
            tests = {(one["n_prompt"], one["n_gen"]): one["avg_ns"] / 1e9 for one in self._measure(num_prompt, num_output)}
            prompt_s, output_s = tests[num_prompt, 0], tests[0, num_output]
            answer = Answer()
            answer.chunks = [(prompt_s + output_s * (index + 1) / num_output, 1) for index in range(num_output)]
            answers.append(answer)
        return answers

    def wall_s(self, answers: list[Answer]) -> float:
        """What llama-bench timed: its process also loads the model."""
        return sum(answer.chunks[-1][0] for answer in answers)

    def _measure(self, num_prompt: int, num_output: int) -> list[dict[str, Any]]:
        command = [*self._command, "-p", str(num_prompt), "-n", str(num_output)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"llama-bench ended with status {done.returncode}: {done.stderr[-500:]}")
        tests: list[dict[str, Any]] = json.loads(done.stdout)
        return tests

    def close(self) -> None:
        """Nothing runs between the turns."""


if __name__ == "__main__":
    serve(IkLlamaCpp, prepare=make_file)
