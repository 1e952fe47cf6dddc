"""A program that has vLLM generate tokens: run as a file, in a process of its own.

It and its imports are nothing of ours, since vLLM's processes import it again: what is ours in them is there because
vLLM called our plug-in.

Reads a JSON object on stdin: ``model`` (a folder), ``prompts`` (token ids), ``tokens`` (so many are generated),
``settings`` (of ``vllm.LLM``), ``look`` (whether each worker tells which of our modules it has imported) and ``kill``
(whether the worker is killed afterwards, and asked for more). Writes one on stdout: ``tokens``, ``version`` and
``modules`` (of each worker).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any


def imported(worker: Any) -> list[str]:
    """Runs in a worker: the modules of this project that were imported there."""
    return sorted(name for name in sys.modules if name.partition(".")[0] in ("twinkle", "ops"))


def number(worker: Any) -> int:
    """Runs in a worker: the number of its process."""
    return os.getpid()


def main() -> None:
    """Greedy decoding of all prompts in one batch."""
    task = json.load(sys.stdin)
    import vllm

    engine = vllm.LLM(model=task["model"], skip_tokenizer_init=True, **task["settings"])
    greedy = {"temperature": 0, "detokenize": False, "ignore_eos": True}
    prompts = [{"prompt_token_ids": prompt} for prompt in task["prompts"]]
    done = engine.generate(prompts, vllm.SamplingParams(max_tokens=task["tokens"], **greedy), use_tqdm=False)
    told = {
        "tokens": [list(request.outputs[0].token_ids) for request in done],
        "version": vllm.__version__,
        "modules": engine.collective_rpc(imported) if task["look"] else [],
    }
    print(json.dumps(told), flush=True)
    if task["kill"]:
        (worker,) = engine.collective_rpc(number)
        os.kill(worker, signal.SIGKILL)
        engine.generate(prompts, vllm.SamplingParams(max_tokens=task["tokens"], **greedy), use_tqdm=False)


if __name__ == "__main__":
    main()
