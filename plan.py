"""What a run would do, without starting it: python train_ppo.py --config FILE --dry-run

Prints who does what on which device, the engine's arguments, the arithmetic of a batch and an estimate of
memory, for the config's pools, whether or not their devices are here. Models are built on the meta device:
parameters are counted and no weights are read. Of what is on a hub only a model's config is fetched, and its
tokenizer for tools. Not estimated: the weight sync's buckets, uneven shards, what an allocator cannot use,
what CUDA and NCCL hold.
"""

import torch

import data
import models
from agent import Agent
from config import on_hub, roles_built, roles_needed, updates_of
from engine import engine_arguments
from models import VALUED, settings_of
from rehearsal import activations

TRAINED = ("critic", "actor")
NOTHING = dict.fromkeys(("parameters", "trained", "weights", "gradients", "optimizer", "unsharded",
                         "activations", "logits", "kv cache"), 0)  # the estimate: two counts, then bytes
PASSING = ("gradients", "unsharded", "activations", "logits")  # of one role at a time
MIB = 2**20
LOGITS = 2**24  # so many exist at once, at most: models.HeadLogprobs.chunks
LOGITS_COPIES = 5  # in float32, at the height of their backward pass: measured in tests/test_plan.py
CPU_KV_TOKENS = 32768  # as in sglang_cpu.ENGINE_ARGS, which takes seconds to import
LIBRARIES = {"rank": 1190, "engine": 1180}  # MiB of a process without a model: measured in tests/test_plan.py


def show(config):
    """Print the plan of a checked config. Nothing is started or written, but a recipe may make its model.

    Raises ValueError, before the first line, for a model that cannot be cut as the config says, tools that do
    not go with its chat template, and fewer rows than a batch has.
    """
    steps, device = total_steps(config), planned_device(config)
    if config.rollout.tools or config.rollout.interaction:
        tokenizer = config.model.tokenizer or config.model.path
        Agent(config, data.load_tokenizer(tokenizer, config.model.trust_remote_code))
    needed = roles_needed(config)
    roles = roles_built(config)
    built = {role: meta_model(role, config) for role in roles if role != "rollout"}
    homes = {role: name for role in roles for name, pool in config.pools.items() if role in pool["roles"]}
    worlds = {name: pool["nodes"] * pool["devices_per_node"] for name, pool in config.pools.items()}
    for name, pool in config.pools.items():
        show_ranks(name, pool, [role for role in roles if homes[role] == name], config)
    if "ref" in needed and "ref" not in roles:
        print("ref: the actor with its adapter off\n")
    print("engine arguments besides those above" + "; sglang_cpu.ENGINE_ARGS join" * (device == "cpu"))
    for name, value in engine_arguments(config, data.resolve_model(config.model.path), device).items():
        print(f"  {name}={value!r}")
    show_batch({role: worlds[name] for role, name in homes.items()}, steps, config)
    for name, world in worlds.items():
        parts = {role: memory(role, built, world, config) for role in roles if homes[role] == name}
        show_memory(name, parts, config)


def planned_device(config):
    """GPUs where there are some, or where bfloat16 asks for them."""
    asked = "bfloat16" in (config.rollout.dtype, config.actor.compute_dtype)
    return "cuda" if asked or torch.cuda.is_available() else "cpu"


def meta_model(role, config):
    """The model of a role on the meta device, with the attention of rehearsal.py; only those that are trained
    have gradients."""
    path = data.resolve_model(getattr(settings_of(role, config), "path", None) or config.model.path)
    model = models.meta_model(role, path, config, "fused")
    return model if role in TRAINED else model.requires_grad_(False)


def show_ranks(name, pool, roles, config):
    """A row per rank: where it is, what it shares, and the part of an engine that it starts, if any."""
    nodes, devices, tp = pool["nodes"], pool["devices_per_node"], config.rollout.tp
    shards, serves = config.model.fsdp_size or nodes * devices, "rollout" in roles
    print(f"pool {name}: {nodes} nodes x {devices} devices; starts in this order: {', '.join(roles)}")
    columns = ["rank", "node", "device", "dp", "sp", "copy", "shard", *["engine", "tp"] * serves]
    print(" ".join(f"{column:>6}" for column in columns))
    for rank in range(nodes * devices):
        (node, device), part = divmod(rank, devices), ""
        row = [rank, node, device, *divmod(rank, config.model.sp), *divmod(rank, shards)]
        if serves:
            row += divmod(rank, tp)
            leader = rank - rank % tp  # the engine's first rank
            first, last = leader // devices, (leader + tp - 1) // devices  # and its nodes
            if rank == leader or device == 0:
                end = min(leader + tp, (node + 1) * devices) - node * devices - 1
                part = f"  starts an engine on devices {device}-{end}: nnodes={last - first + 1}"
                part += f" node_rank={node - first}"
                part += f" dist_init_addr=node {first}" * (first < last) + ", serves" * (rank == leader)
        print(" ".join(f"{number:>6}" for number in row) + part)
    print()


def show_batch(worlds, steps, config):
    """Prompts, responses, updates and tokens of a step. `worlds`: how many devices each role has."""
    rollout, prompts, sp = config.rollout, config.data.batch_size, config.model.sp
    responses = prompts * rollout.n
    longest = config.data.max_prompt_length + rollout.max_response_length
    print(f"\none step: {prompts} prompts x {rollout.n} = {responses} responses, each up to {longest} tokens "
          "with its prompt")
    if "rollout" in worlds:
        engines = worlds["rollout"] // rollout.tp
        print(f"  {engines} engines: about {responses / engines:g} responses each")
    for role in (role for role in TRAINED if role in worlds):
        settings, dp = settings_of(role, config), worlds[role] // sp
        size, epochs, tokens = settings.mini_batch_size, settings.epochs, settings.max_tokens_per_device
        total = f", {updates_of(role, config, steps)} in up to {steps} steps" if steps is not None else ""
        print(f"  {role}: {responses // size} mini-batches x {epochs} epochs = {responses // size * epochs} "
              f"updates{total}\n"
              f"    each of {size} responses, about {size / dp:g} in each of {dp} dp shares, even in tokens\n"
              f"    in forward passes of up to {tokens} tokens, {-(-tokens // sp)} on each device")


def total_steps(config):
    """Steps of the run (at most: rows may be dropped), or None if only a download would tell. Raises
    ValueError where there are not rows enough for one."""
    spec, size = config.data.train, config.data.batch_size + config.rollout.oversample
    if on_hub(spec):
        return config.trainer.steps
    rows = sum(1 for _ in data.load_rows(spec, config.data))
    if rows < size:
        raise ValueError(f"data.train={spec}: {rows} rows; data.batch_size must be at most that")
    return config.trainer.steps or config.trainer.epochs * (rows // size)


def count(module, trained=False):
    """How many numbers a module's parameters are, or those of them that are trained."""
    return sum(tensor.numel() for tensor in module.parameters() if tensor.requires_grad or not trained)


def memory(role, built, world, config):
    """What a role on `world` devices has on each of them: {part: bytes}, and of its model how many parameters
    are there and trained. The engine has the actor's model, with the adapter merged."""
    model, rollout = built["actor" if role == "rollout" else role], config.rollout
    shape, shards = model.config.get_text_config(), config.model.fsdp_size or world
    whole, trained = count(model), count(model, trained=True)
    if role == "rollout":
        whole, size = whole - trained * bool(config.actor.lora_rank), getattr(torch, rollout.dtype).itemsize
        heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
        width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
        token = 2 * shape.num_hidden_layers * -(-heads // rollout.tp) * width * size  # keys and values
        cache = token * (rollout.kv_tokens or CPU_KV_TOKENS * (planned_device(config) == "cpu"))
        return NOTHING | {"parameters": whole, "weights": whole * size / rollout.tp, "kv cache": cache}
    settings, unsharded = settings_of(role, config), 0
    layers = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    for gradients in (False, True):  # of what is outside the layers, of one layer and of the next
        sizes = [count(layer, trained=gradients) for layer in layers]
        unsharded += count(model, trained=gradients) - sum(sizes) + 2 * max(sizes)
    tokens = getattr(settings, "max_tokens_per_device", config.actor.max_tokens_per_device)
    logits = 0 if role in VALUED else min(LOGITS, tokens / config.model.sp * shape.vocab_size)
    return NOTHING | {
        "parameters": whole, "trained": trained, "weights": 4 * whole / shards,
        "gradients": 4 * trained / shards, "optimizer": 8 * trained / shards,  # AdamW: two moments
        "unsharded": unsharded * getattr(torch, settings.compute_dtype).itemsize,
        "activations": activations(model, tokens, config),
        "logits": 4 * LOGITS_COPIES * logits}


def show_memory(name, parts, config):
    """A row per role, and what is there together. `parts`: {role: what `memory` says}."""
    print(f"\nMiB on each device of pool {name}, estimated")
    print(" " * 7, *(f"{column:>11}" for column in NOTHING))
    for role, (whole, trained, *sizes) in ((role, sizes.values()) for role, sizes in parts.items()):
        print(f"{role:<7} {whole:>11} {trained:>11}", *(f"{size / MIB:>11.2f}" for size in sizes))
    engine, models = parts.get("rollout", NOTHING), [parts[role] for role in parts if role != "rollout"]
    engine = engine["weights"] + engine["kv cache"]
    kept = sum(sizes["weights"] + sizes["optimizer"] for sizes in models)
    passing = max((sum(sizes[name] for name in PASSING) for sizes in models), default=0)
    training = kept + passing + engine * (not config.rollout.release)
    generating = engine + kept * (not config.actor.offload)
    print(f"together {training / MIB:.2f} while it trains, {generating / MIB:.2f} while it generates")
    if "rollout" in parts and not parts["rollout"]["kv cache"]:
        print(f"and the kv cache: what rollout.mem_fraction={config.rollout.mem_fraction} leaves")
    print("more, in host memory: {rank} in each rank, {engine} in its engine's process".format(**LIBRARIES))
