"""A folder of `rlmesh export`, LoRA merged, served by vLLM as it is, without anything of this library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmesh.rl.reading.export import export
from rlmesh.rl.trainers.settings import ActorSettings, LoraSettings
from tests.engines.models import save, tiny
from tests.engines.test_rollout_engines import with_vllm
from tests.own_time import HANG_S
from tests.rl.checkpoints.runs import make
from tests.rl.tiny import WORDS, make_tokenizer

PROMPTS = [[2, 3, 4, 10], [5, 10], [6, 7, 2, 3, 10]]
TOKENS = 24
# The process knows vLLM only. The folder has no generation settings that would change greedy decoding.
SCRIPT = f"""
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    engine = LLM(model=sys.argv[1], dtype="float32", max_model_len=256, max_num_seqs=4, enforce_eager=True,
                 kv_cache_memory_bytes=64 << 20)
    params = SamplingParams(temperature=0.0, max_tokens={TOKENS}, ignore_eos=True)
    prompts = [{{"prompt_token_ids": ids}} for ids in json.loads(sys.argv[2])]
    found = [list(one.outputs[0].token_ids) for one in engine.generate(prompts, params, use_tqdm=False)]
    assert not [name for name in sys.modules if name.partition(".")[0] == "rlmesh"]
    print("FOUND" + json.dumps(found), flush=True)
"""


def greedy(folder: Path) -> list[list[int]]:
    """The likeliest tokens by the model of transformers, one forward pass per token."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for ids in PROMPTS:
        tokens = list(ids)
        with torch.no_grad():
            for _ in range(TOKENS):
                tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
        found.append(tokens[len(ids) :])
    return found


@with_vllm
def test_vllm_says_the_same_tokens_as_transformers(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    base = save(tiny(0), tmp_path / "base")
    make_tokenizer(base, words=[*WORDS, *(chr(0x4E00 + number) for number in range(96 - len(WORDS)))])
    actor = ActorSettings(lr=2e-2, lora=LoraSettings(rank=4))
    run = make(base, steps=4, actor=actor)
    run = replace(run, rollout=replace(run.rollout, max_tokens=8))
    run.here(run_dir=tmp_path / "run")
    assert export(tmp_path / "run" / "checkpoints" / "step-000004", tmp_path / "out") == 4
    expected = greedy(tmp_path / "out")
    assert expected != greedy(base)  # the adapter matters
    script = tmp_path / "serve.py"
    script.write_text(SCRIPT)
    environment = {
        "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_HOST_IP": "127.0.0.1",
        "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "out"), json.dumps(PROMPTS)], cwd=tmp_path,
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=4 * HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert json.loads(line.removeprefix("FOUND")) == expected
