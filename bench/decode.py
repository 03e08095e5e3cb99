"""Decoding on CPU: python bench/decode.py [requests] [tokens] [dtype]  (default 64 32 float32)

Ours (sglang_cpu.py: attention batched over requests, a sampler that draws few numbers and obeys seeds) against what
SGLang itself has on a CPU (torch_native attention, one request after the other; a random number for each token of the
vocabulary, without seeds, for which it needs CUDA), with SmolLM2 and prompts of 46 tokens. The two engines live side by
side and take turns; medians of three. Greedy tells of the attention alone, and in float32 tokens must be the same;
temperature 1 is what training has. Target: 2.5 times.
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
import engine as starting
from config import load
from rollout import Rollout

REPEATS = 4  # the first is not counted


def run_scheduler_as_it_is(*args, **kwargs):
    """A scheduler process with SGLang's own sampler."""
    import sglang_cpu
    from sglang.srt.layers import sampler

    own = sampler.sampling_from_probs_torch, sampler.multinomial_with_seed
    patch = sglang_cpu.patch

    def patch_all_else():
        patch()
        sampler.sampling_from_probs_torch, sampler.multinomial_with_seed = own

    sglang_cpu.patch = patch_all_else
    starting.run_scheduler(*args, **kwargs)


def start(dtype, length, engine_args, scheduler, mesh):
    """A Rollout with SmolLM2's weights that may generate."""
    words = [f"rollout.max_response_length={length}", f"rollout.dtype={dtype}", f"rollout.engine_args={engine_args}"]
    config = load(["recipes/chain_sum.yaml"], words)
    path = data.resolve_model(config.model.path)
    before, starting.run_scheduler = starting.run_scheduler, scheduler
    engine = Rollout(config, path, data.load_tokenizer(path, False), "cpu", mesh)
    starting.run_scheduler = before
    engine.resume("weights")
    engine.update_weights(AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).named_parameters())
    engine.resume("kv_cache")
    return engine


def main(requests=64, length=32, dtype="float32"):
    requests, length = int(requests), int(length)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    own = "{attention_backend: torch_native, enable_deterministic_inference: false}"
    engines = {"ours": start(dtype, length, "{}", starting.run_scheduler, mesh),
               "SGLang's": start(dtype, length, own, run_scheduler_as_it_is, mesh)}
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(100, 40000, (46,), generator=generator) for _ in range(requests // 8)]
    batch = {name: [] for name in ("uid", "sample", "prompt_ids")}
    for number in range(requests):
        for name, value in (("uid", number // 8), ("sample", number % 8), ("prompt_ids", prompts[number // 8])):
            batch[name].append(value)
    print(f"| {requests} requests, {dtype} | ours, tokens/s | SGLang's, tokens/s | ratio | same responses |\n" + "| --- " * 5 + "|")
    for name, temperature in (("greedy", 0.0), ("temperature 1", 1.0)):
        seconds, tokens = {engine: [] for engine in engines}, {}
        for _ in range(REPEATS):
            for which, engine in engines.items():
                begun = time.perf_counter()
                answered = engine.generate(batch, step=1, sampling={"temperature": temperature, "ignore_eos": True})
                seconds[which].append(time.perf_counter() - begun)
                tokens[which] = [ids.tolist() for ids in answered["response_ids"]]
        ours, theirs = (statistics.median(times[1:]) for times in seconds.values())
        same = sum(a == b for a, b in zip(*tokens.values()))
        alike = f"{same} of {requests}" if temperature == 0 else "drawn from other numbers"
        print(f"| {name} | {requests * length / ours:.0f} | {requests * length / theirs:.0f} | {theirs / ours:.2f} | {alike} |",
              flush=True)
    for engine in engines.values():
        engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
