"""What tools and turns cost beside the engine: python bench/agent_overhead.py

Plays recipes/calculator.yaml's episodes with SmolLM2, with a user who doubts every answer, and then the same
episodes again with the engine's answers from a table. What the second time takes is the share of the rollout that
templates, parsing, tools, seeds and asyncio take; the target is under 10 %.
"""
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import data
from agent import Agent
from config import load
from rollout import Rollout


def doubt(messages, row):
    """A user who asks again until the limit of turns."""
    return "Are you sure?", False


def main():
    config = load(["recipes/calculator.yaml"], ["rollout.max_turns=4", "rollout.max_response_length=256"])
    config.rollout.interaction = {f"{Path(__file__)}:doubt": {}}
    path = data.resolve_model(config.model.path)
    tokenizer = data.load_tokenizer(path, False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    rollout = Rollout(config, path, tokenizer, "cpu", mesh)
    rollout.resume("weights")
    rollout.update_weights(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())
    rollout.resume("kv_cache")
    tools = Agent(config, tokenizer).schemas
    prompts = data.Prompts(config.data.train, tokenizer, config.data, batch_size=config.data.batch_size, tools=tools)
    batch, answers, write = data.repeat(prompts.next(), config.rollout.n), {}, rollout._write

    def key(ids, sampling):
        return tuple(ids), sampling.get("sampling_seed")

    async def recorded(ids, sampling):
        answers[key(ids, sampling)] = await write(ids, sampling)
        return answers[key(ids, sampling)]

    async def from_table(ids, sampling):
        return answers[key(ids, sampling)]

    times = []
    for rollout._write in (recorded, from_table):
        start = time.perf_counter()
        played = rollout.generate(batch, step=1, sampling={"temperature": 1.0})
        times.append(time.perf_counter() - start)
    rollout.shutdown()
    tokens = sum(int(mask.sum()) for mask in played["response_mask"])
    print(f"{len(batch['uid'])} episodes, {sum(played['turns'])} turns, {sum(played['tool_calls'])} tool calls "
          f"({sum(played['tool_errors'])} errors), {tokens} tokens written")
    print(f"with the engine {times[0]:.2f} s, without {times[1]:.2f} s: {times[1] / times[0]:.1%} outside the engine")


if __name__ == "__main__":
    main()
