"""Decoding on CPU: python bench/decode.py [requests] [tokens] [dtype]  (default 64 32 float32)

Our attention for CPU (sglang_cpu.py, batched over requests) against the one that SGLang has there (torch_native, one
request after the other), with SmolLM2 and prompts of 46 tokens. The two engines live side by side and take turns; the
median of three. Greedy tokens must be the same in float32. Target: 2.5 times.
"""
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import data
from config import load
from rollout import Rollout


def main(requests=64, length=32, dtype="float32"):
    requests, length = int(requests), int(length)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh, engines, seconds, tokens = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp")), {}, {}, {}
    for backend in ("batched_cpu", "torch_native"):
        config = load(["recipes/chain_sum.yaml"], [
            f"rollout.max_response_length={length}", f"rollout.dtype={dtype}", f"rollout.engine_args={{attention_backend: {backend}}}",
        ])
        path = data.resolve_model(config.model.path)
        engine = Rollout(config, path, data.load_tokenizer(path, False), "cpu", mesh)
        engine.resume("weights")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
        engine.update_weights(model.named_parameters())
        engine.resume("kv_cache")
        engines[backend], seconds[backend] = engine, []
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(100, 40000, (46,), generator=generator) for _ in range(requests // 8)]
    batch = {name: [] for name in ("uid", "sample", "prompt_ids")}
    for number in range(requests):
        for name, value in (("uid", number // 8), ("sample", number % 8), ("prompt_ids", prompts[number // 8])):
            batch[name].append(value)
    for _ in range(4):
        for backend, engine in engines.items():
            start = time.perf_counter()
            answered = engine.generate(batch, step=1, sampling={"temperature": 0.0, "ignore_eos": True})
            seconds[backend].append(time.perf_counter() - start)
            tokens[backend] = [ids.tolist() for ids in answered["response_ids"]]
    for backend, engine in engines.items():
        engine.shutdown()
        print(f"{backend}: {requests * length / statistics.median(seconds[backend][1:]):.0f} tokens/s")
    ours, theirs = (statistics.median(seconds[backend][1:]) for backend in engines)
    same = sum(a == b for a, b in zip(*tokens.values()))
    print(f"{theirs / ours:.2f} times, {same} of {requests} greedy responses the same")


if __name__ == "__main__":
    main(*sys.argv[1:])
