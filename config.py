"""The configuration: layers of YAML and overrides from the command line, checked before anything starts.

config.yaml holds every option with its default. OmegaConf reads and merges the layers above it and resolves
references; what is here is the rest: unknown keys, types, and the rules of `check`. Wrong input is refused
with one line that names the key or the file, and quickly: only `check` imports torch and what imports it.
"""

import argparse
import contextlib
import ctypes
import difflib
import importlib.util
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from fnmatch import fnmatch
from math import inf, isfinite, isinf
from pathlib import Path
from types import SimpleNamespace

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

BASE = Path(__file__).with_name("config.yaml")
# Keys that are null by default take text, or what is like the value given here.
NULLS = {"ray.num_cpus": 1, "rollout.kv_tokens": 1, "trainer.steps": 1, "algorithm.kl_target": 0.1,
         "model.fsdp_size": 1, "rollout.max_turn_tokens": 1, "trainer.profile_steps": [2, 3]}
FROM_ZERO = "seed", "validation.samples"  # whole numbers that may be 0 although their default is not
WRONG = ValueError, OSError, YAMLError, OmegaConfBaseException  # what wrong input raises
OVERRIDE = re.compile(r"(\+?\+?|~)([\w-]+(?:\.[\w-]+)*)(?:=(.*))?", re.DOTALL)  # sign, dotted key, value


# ---- Words, files and overrides ----------------------------------------------------------------------------


def decode(text):
    """A word's value, as in hydra: 1e-6, null, true, [1, 2], {a: 1}; on, 12:30, 007 and a=b are text."""
    with contextlib.suppress(OmegaConfBaseException):
        return OmegaConf.create({"text": text, "value": "${oc.decode:${text}}"}).value
    with contextlib.suppress(YAMLError):  # its grammar has no keys like file.py:function
        if text.startswith("{"):
            return OmegaConf.create(text)
    return text


def environment(name, *default):
    """${env:NAME,default}: the variable's value, as a word; without a default it has to be set."""
    if name not in os.environ and len(default) != 1:
        raise ValueError(f"the environment has no {name}; ${{env:{name},...}} would give a default")
    return decode(os.environ[name]) if name in os.environ else default[0]


OmegaConf.register_resolver("env", environment, replace=True)


@contextlib.contextmanager
def blame(source):
    """Errors say that they come from `source`, a file or a word."""
    try:
        yield
    except WRONG as error:
        raise ValueError(f"{source}: {error}") from None


def add_layer(config, file, default, above=()):
    """Lays a YAML file over `config`, after those in its `defaults` list, whose paths start at the file."""
    with blame(file):
        layer = OmegaConf.load(file)
        if not OmegaConf.is_dict(layer):
            raise ValueError("must be keys with values, not a list")
        below = layer.pop("defaults", OmegaConf.create([]))
        if not OmegaConf.is_list(below) or file in above:
            raise ValueError("`defaults` must be a list of files that do not lead back here")
        for name in below:
            add_layer(config, (file.parent / str(name)).resolve(), default, (*above, file))
        config.merge_with(layer)
        fit(OmegaConf.to_container(config), default)


NULL = "; None is null"


def override(config, word):
    """Does to `config` what a word says, whether its key is known or not. Returns {key} if it has a +."""
    match = OVERRIDE.fullmatch(word)
    sign, key, text = match.groups() if match else ("", "", None)
    if (text is None) != (sign == "~") or text == "None":
        raise ValueError("is not key=value, +new=value, ++any=value or ~old" + NULL * (text == "None"))
    section, _, name = key.rpartition(".")
    parent = OmegaConf.select(config, section)
    there = OmegaConf.is_dict(parent) and name in parent
    if sign == "~" and not there or sign == "+" and there and not OmegaConf.is_dict(parent[name]):
        raise ValueError(f"there is {'a' if there else 'no'} key {key}")
    if sign == "~":
        del parent[name]
    else:  # a reference waits until all keys are there
        OmegaConf.update(config, key, text if "${" in text else decode(text))
    return {key} if "+" in sign else set()


def fit(value, default, added=(), path=""):
    """`value`, dicts as namespaces, if keys and types are those of `default` or the keys are in `added`.

    An int fits a float. A pool may have any name, but has the keys of the main one. Pools, what is {} by
    default and what is added stay dicts. Raises ValueError.
    """
    if isinstance(value, str) and "${" in value:
        return value  # a reference in a file: its type is known when all layers are there
    if default is None and value is not None:
        default = NULLS.get(path, "text")
    if isinstance(default, float) and type(value) is int:
        value = float(value)
    if type(value) is not type(default) or value == "None":
        shown = "{key: value}" if isinstance(default, dict) else repr(default)
        wanted = f"{type(default).__name__}, like {shown}" + NULL * (value == "None")
        raise ValueError(f"{path}={value!r} must be {wanted}")
    least = 0 if path in FROM_ZERO else 1
    if type(value) is int and value < min(default, least):
        raise ValueError(f"{path}={value!r} must be at least {min(default, least)}")
    if isinstance(value, list):
        return [fit(item, default[0], path=path) for item in value]
    if not isinstance(value, dict) or default == {}:
        return value
    if path == "pools":
        main = default["main"]
        return {name: vars(fit(pool, main, added, f"pools.{name}")) for name, pool in value.items()}
    tree = {}
    for key in default | value:
        name = f"{path}.{key}".lstrip(".")
        if key not in value:
            raise ValueError(f"{name} is missing")
        if key in default:
            tree[key] = fit(value[key], default[key], added, name)
        elif any(f"{name}.".startswith(f"{new}.") or new.startswith(f"{name}.") for new in added):
            tree[key] = value[key]
        else:
            near = difflib.get_close_matches(name, options_in(load()), n=1, cutoff=0)[0]
            raise ValueError(f"there is no key {name}, the nearest is {near} (+{name}=... would add it)")
    return SimpleNamespace(**tree)


def load(files=(), overrides=()):
    """The config: config.yaml, each layer file, each override, in order, as nested namespaces.

    Raises ValueError for a file that cannot be read, an unknown key, a wrong type or a malformed override.
    What OmegaConf raises of references comes through.
    """
    config = OmegaConf.load(BASE)
    default, added = OmegaConf.to_container(config), set()
    for file in files:
        add_layer(config, Path(file), default)
    for word in overrides:
        with blame(word):
            added |= override(config, word)
    return fit(OmegaConf.to_container(config, resolve=True), default, added)


def plain(config):
    """The config with dicts for namespaces."""
    if not isinstance(config, SimpleNamespace):
        return config
    return {name: plain(part) for name, part in vars(config).items()}


def dump(config):
    """YAML that gives the same config when it is a layer."""
    return OmegaConf.to_yaml(plain(config))


def options_in(config):
    """{"seed": 0, "actor.lr": 1e-6, ...}: every option's value by its dotted key."""
    options = {}
    for name, part in vars(config).items():
        inside = vars(part) if isinstance(part, SimpleNamespace) else {}
        options |= {f"{name}.{key}": value for key, value in inside.items()} or {name: part}
    return options


# ---- What must hold, besides keys and types ----------------------------------------------------------------


ROLES = ("critic", "ref", "reward", "actor", "rollout")  # in order of their start


def roles_needed(config):
    """The set of roles that this config has work for: actor, mostly rollout, perhaps critic, ref, reward."""
    needed = roles_described(config)
    if config.trainer.replay:
        needed -= {"rollout", "reward"}
    if config.rollout.only:
        needed -= {"critic", "ref"}
    return needed


def roles_described(config):
    """The same, but for `trainer.replay` and `rollout.only`, which take roles out for one run."""
    import algos

    needed = {"actor", "rollout"}
    if config.reward_model.path:
        needed.add("reward")
    if "values" in inspect.signature(algos.ADVANTAGES[config.algorithm.advantage]).parameters:
        needed.add("critic")
    if config.algorithm.kl_in_reward or config.actor.kl_coef:
        needed.add("ref")
    return needed


def roles_built(config):
    """Those that have a model of their own, in order: a reference may be the actor with its adapter off."""
    borrowed = {"ref"} if config.actor.lora_rank and not config.ref.path else set()
    return [role for role in ROLES if role in roles_needed(config) - borrowed]


def roles_trained(config):
    """Those that learn, and are saved."""
    return [] if config.rollout.only else sorted({"actor", "critic"} & roles_needed(config))


def updates_of(role, config, steps):
    """Optimizer updates of the actor or the critic in so many steps. The critic may begin alone."""
    settings, responses = getattr(config, role), config.data.batch_size * config.rollout.n
    learning = max(0, steps - config.critic.warmup_steps * (role == "actor"))
    return learning * settings.epochs * (responses // settings.mini_batch_size)


def devices_of(config):
    """{role: how many devices its pool has}, of pools that have each role once."""
    devices = {role: pool["nodes"] * pool["devices_per_node"]
               for pool in config.pools.values() for role in pool["roles"]}
    if "RANK" in os.environ:  # torchrun has said how many there are
        devices = dict.fromkeys(devices, int(os.environ["WORLD_SIZE"]))
    return devices


MODELS = "model.path", "critic.path", "ref.path", "reward_model.path"
PATHS = *MODELS, "model.tokenizer", "reward_model.tokenizer"
RANGES = [  # patterns of keys, what holds for their values, and that in words
    ("*.lr *.weight_decay *kl_coef", lambda x: 0 <= x < inf, "must be at least 0 and finite"),
    ("*.clip_ratio_* *.cliprange_value", lambda x: x >= 0, "must be at least 0"),
    ("actor.clip_ratio_c", lambda x: x > 1, "must be above 1"),
    # What is below 1e-6 SGLang takes for greedy.
    ("validation.temperature", lambda x: x == 0 or 0.001 <= x < inf,
     "must be 0, or at least 0.001 and finite"),
    ("*.gamma *.lam *.min_lr_ratio *.min_p *_cov_ratio", lambda x: 0 <= x <= 1, "must be from 0 to 1"),
    ("*.top_p *.mem_fraction", lambda x: 0 < x <= 1, "must be above 0 and at most 1"),
    ("*.clip_grad *.kl_target *.correction_cap *.tau_*", lambda x: x is None or x > 0, "must be above 0"),
    ("*timeout *.lora_alpha", lambda x: 0 < x < inf, "must be above 0 and finite"),
    ("rollout.temperature", lambda x: 0.001 <= x < inf, "must be at least 0.001 and finite"),
    ("*.overlong_penalty", lambda x: 0 <= x < inf, "must be at least 0 and finite"),
    ("*.entropy_coef *.weight *.clip_cov_?b", isfinite, "must be finite"),
    ("*.fallback", lambda x: not isinf(x), "must be finite, or nan for no score"),
    ("seed", lambda x: x < 2**63, "must be below 2**63"),
    ("*.top_k", lambda x: x == -1 or 0 < x < 2**31, "must be from 1 to 2**31 - 1, or -1 for off"),
    ("trainer.name", lambda x: re.fullmatch(r"\w[^/\n]*", x),
     "must be a folder's name that begins with a letter, a digit or _"),
    ("*.warmup", lambda x: 0 <= x < 1 or x >= 1 and x % 1 == 0, "must be a share below 1 or a whole number"),
    ("trainer.profile_steps", lambda x: x is None or len(x) == 2 and 0 < x[0] <= x[1],
     "must be [first, last]"),
    ("*.betas", lambda x: len(x) == 2 and 0 <= min(x) <= max(x) < 1, "must be two numbers in [0, 1)"),
]


OURS = {  # SGLang's names of what the config has options for
    "model_path": "model.path", "trust_remote_code": "model.trust_remote_code", "random_seed": "seed",
    "dtype": "rollout.dtype", "tp_size": "rollout.tp", "nnodes": "pools.main.nodes",
    "mem_fraction_static": "rollout.mem_fraction", "enable_memory_saver": "rollout.release",
    "max_total_tokens": "rollout.kv_tokens", "context_length": "rollout.max_response_length",
}


def check_engine_args(engine_args):
    """Raises ValueError, one line, for a name in `rollout.engine_args` (a dict) that SGLang does not know, or
    for which there is an option."""
    if engine_args:
        from sglang.srt.server_args import ServerArgs  # seconds of imports, for nothing in most runs

        for name in sorted(OURS.keys() & engine_args):
            raise ValueError(f"rollout.engine_args.{name}={engine_args[name]!r}: the option for that is "
                             f"{OURS[name]}")
        for name in sorted(set(engine_args) - set(ServerArgs.__struct_fields__)):
            raise ValueError(f"rollout.engine_args.{name}: SGLang's Engine has no such argument")


def check(config):
    """Raises ValueError for what cannot run or has no effect: one line with key, value and what is right.

    Imports torch, and the file of every function that the config names.
    """
    now = options_in(config)

    def require(holds, key, right):
        if not holds:
            raise ValueError(f"{key}={now[key]!r} {right}")

    for part in (check_values, check_effects, check_methods, check_devices, check_sizes, check_files):
        part(config, now, require)


def matching(patterns, names):
    """Those of the names that one of the patterns, apart by spaces, is for."""
    return [name for name in names if any(fnmatch(name, pattern) for pattern in patterns.split())]


def check_values(config, now, require):
    """Each number in its range, each name among those there are."""
    import algos

    default = options_in(load())
    for patterns, holds, right in RANGES:
        for key in matching(patterns, default):
            require(holds(now[key]), key, right)
    for key, value in now.items():
        require(not str(value).startswith("~/"), key, "must not begin with ~, which only a shell knows")
    choices = {
        "launch": ["ray", "local"],
        "data.overlong": ["filter", "left", "right", "error"],
        "algorithm.advantage": algos.ADVANTAGES,
        "algorithm.kl_estimator": algos.KL_ESTIMATORS,
        "rollout.correction": algos.ROLLOUT_CORRECTIONS,
        "actor.policy_loss": algos.POLICY_LOSSES,
        "actor.old_logprobs": ["recompute", "rollout", "skip"],
        "actor.kl_estimator": [name + plus for name in algos.KL_ESTIMATORS for plus in ("", "+")],
        "*.loss_agg": algos.AGGREGATIONS,
        "*.schedule": ["constant", "cosine"],
        "*dtype": ["float32", "bfloat16"],
    }
    for pattern, names in choices.items():
        for key in matching(pattern, default):
            require(now[key] in names, key, f"must be one of {', '.join(names)}")


def check_effects(config, now, require):
    """No option is set that this run would not look at."""
    import algos

    default, described = options_in(load()), roles_described(config)
    algorithm, actor, critic, rollout = config.algorithm, config.actor, config.critic, config.rollout
    talks, replay = rollout.tools or rollout.interaction, config.trainer.replay
    idle = {  # these options have no effect: the reason, if it is so
        "critic.*": "critic" not in described and f"algorithm.advantage is {algorithm.advantage}",
        "ref.*": "ref" not in described and "algorithm.kl_in_reward is false and actor.kl_coef is 0",
        "algorithm.kl_*": not algorithm.kl_in_reward and "algorithm.kl_in_reward is false",
        "algorithm.kl_horizon": algorithm.kl_target is None and "algorithm.kl_target is null",
        "actor.kl_estimator": actor.kl_coef == 0 and "actor.kl_coef is 0",
        "actor.min_lr_ratio": actor.schedule == "constant" and "actor.schedule is constant",
        "critic.min_lr_ratio": critic.schedule == "constant" and "critic.schedule is constant",
        "rollout.tool_parser": not rollout.tools and "rollout.tools is {}",
        "rollout.max_turn*": not talks and "rollout.tools and rollout.interaction are {}",
        "rollout.tool_timeout": not talks and "rollout.tools and rollout.interaction are {}",
        "rollout.only": replay and "trainer.replay has no rollout",
        "trainer.record": replay and "trainer.replay has the records",
        "rollout.correction": actor.old_logprobs == "rollout" and "actor.old_logprobs is rollout",
        "rollout.correction_cap": rollout.correction == "off" and "rollout.correction is off",
        "reward.overlong_penalty": config.reward.overlong_buffer == 0 and "reward.overlong_buffer is 0",
        "reward_model.*": "reward" not in described and "reward_model.path is null",
        "actor.lora_*": actor.lora_rank == 0 and "actor.lora_rank is 0",
        "model.attn_implementation": config.model.sp > 1 and "model.sp is above 1",
        "trainer.max_restarts": "RANK" in os.environ and "torchrun has --max-restarts",
        "ray.num_cpus": config.ray.address is not None and "ray.address is given",
        "validation.*": config.data.val is None and "data.val is null",
    }
    methods = [("algorithm", "advantage", algos.ADVANTAGES), ("actor", "policy_loss", algos.POLICY_LOSSES)]
    for section, chooser, table in methods:
        chosen = now[f"{section}.{chooser}"]
        for option in algos.options_of(table[chosen]):
            require(f"{section}.{option}" in default, f"{section}.{chooser}",
                    f"reads {option}, which config.yaml must have under {section}")
        for option in {option for method in table.values() for option in algos.options_of(method)}:
            unread = option not in algos.options_of(table[chosen])
            idle[f"{section}.{option}"] = unread and f"{section}.{chooser} is {chosen}"
    for pattern, reason in idle.items():
        for key in matching(pattern, default):
            require(not reason or now[key] == default[key], key, f"has no effect, because {reason}")


def check_methods(config, now, require):
    """What one method asks of others."""
    import algos

    algorithm, actor, rollout = config.algorithm, config.actor, config.rollout
    grouped = "group" in inspect.signature(algos.ADVANTAGES[algorithm.advantage]).parameters
    require(rollout.n > 1 or not grouped, "rollout.n", f"must be above 1 for {algorithm.advantage}")
    require(rollout.n > 1 or not algorithm.dynamic_sampling, "algorithm.dynamic_sampling",
            "needs rollout.n above 1: the rewards of a group of one are always equal")
    if actor.old_logprobs == "skip":
        responses = config.data.batch_size * rollout.n
        once = actor.mini_batch_size == responses and actor.epochs == 1
        require(once and not algorithm.kl_in_reward and rollout.correction == "off", "actor.old_logprobs",
                "needs actor.epochs=1, one mini-batch, no algorithm.kl_in_reward and no rollout.correction")
    sampled = config.validation.n == 1 or config.validation.temperature > 0
    require(sampled, "validation.n", "must be 1 with validation.temperature=0: all samples would be the same")
    scored = config.reward.function != "none" or config.reward_model.path or rollout.interaction
    require(scored, "reward.function", "needs reward_model.path or rollout.interaction")
    masked = config.model.attn_implementation in ("sdpa", "flex_attention")
    require(masked or not actor.share_prompt or rollout.n == 1, "model.attn_implementation",
            "must be sdpa or flex_attention for packed prompts; or set actor.share_prompt=false")
    remax = algorithm.advantage == "remax"
    require(not rollout.oversample or not remax, "rollout.oversample", "must be 0 for remax")


def check_devices(config, now, require):
    """Every role has a place, and what is shared is shared evenly."""
    needed, rollout = roles_needed(config), config.rollout
    placed = [(role, pool) for pool in config.pools.values() for role in pool["roles"]]
    homes = dict(placed)
    once = len(placed) == len(homes) and needed <= homes.keys() <= set(ROLES)
    together = homes.get("actor") is homes.get("rollout", homes.get("actor"))
    require(once and together, "pools",
            f"must place {', '.join(sorted(needed))} once each, actor and rollout together")
    devices = devices_of(config)
    require("RANK" not in os.environ or len(config.pools) == 1, "pools", "must be one under torchrun")
    single = devices["actor"] == len(config.pools) == 1
    require(config.launch == "ray" or single, "launch", "needs one pool of one device")
    for key, roles in (("rollout.tp", {"rollout"}), ("model.sp", needed), ("model.fsdp_size", needed)):
        for role in sorted(needed & roles):
            right = f"must divide the {devices[role]} devices of the pool with role {role}"
            require(devices[role] % (now[key] or 1) == 0, key, right)
    tp, local = rollout.tp, homes["actor"]["devices_per_node"]
    require(tp % local == 0 or local % tp == 0, "rollout.tp",
            f"must divide the {local} devices of a node or be a multiple of them")
    engines, prompts = devices["actor"] // rollout.tp, config.data.batch_size
    require(not rollout.oversample or prompts >= engines, "rollout.oversample",
            f"needs at least as many prompts (data.batch_size={prompts}) as there are engines ({engines})")


def check_sizes(config, now, require):
    """Batches divide, the longest response has room, and what shall begin begins before the end."""
    needed, rollout, devices = roles_needed(config), config.rollout, devices_of(config)
    responses, steps = config.data.batch_size * rollout.n, config.trainer.steps or inf
    longest = config.data.max_prompt_length + rollout.max_response_length
    room = "must be at least data.max_prompt_length + rollout.max_response_length"
    cached = longest + 8  # the engine keeps some for itself, as of its context_length in engine.py
    require((rollout.kv_tokens or cached) >= cached, "rollout.kv_tokens", f"{room} + 8 = {cached}")
    require(config.reward.overlong_buffer <= rollout.max_response_length, "reward.overlong_buffer",
            f"must be at most rollout.max_response_length={rollout.max_response_length}")
    require(config.critic.warmup_steps < steps, "critic.warmup_steps",
            f"must be below trainer.steps={steps}, or the actor learns nothing")
    for role in sorted(needed & {"actor", "critic"}):
        size, tokens, warmup = f"{role}.mini_batch_size", f"{role}.max_tokens_per_device", f"{role}.warmup"
        require(responses % now[size] == 0, size, f"must divide data.batch_size * rollout.n = {responses}")
        shares = devices[role] // config.model.sp
        require(now[size] >= shares, size, f"must be at least the {shares} shares of its pool's devices")
        require(now[tokens] >= longest, tokens, f"{room} = {longest}")
        updates = updates_of(role, config, steps)
        require(now[warmup] <= updates, warmup, f"must be at most the {updates} updates of the run")
    kept = 5 * config.algorithm.kl_horizon > responses  # of kl_coef, see algos.kl_controller
    require(kept or config.algorithm.kl_target is None, "algorithm.kl_horizon",
            f"must be above data.batch_size * rollout.n / 5 = {responses / 5:g}, or kl_coef may fall to 0")
    first = (config.trainer.profile_steps or [1])[0]
    require(first <= steps, "trainer.profile_steps", f"must begin within trainer.steps={steps}")


def on_hub(spec):
    """Whether a data spec, if it is right, names a dataset on the hub: org/name without a folder org."""
    name = spec.partition("?")[0]
    here = ":" in name or name.endswith((".jsonl", ".parquet")) or Path(name).parent.is_dir()
    return name.count("/") == 1 and not here


def check_data(options):
    """Refuses a config's `data` section whose rows cannot be read, by reading the first of each source that
    need not be fetched."""
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")  # its errors say the same, in one line
    import data

    for key, spec in (("data.train", options.train), ("data.val", options.val)):
        if spec is not None and not on_hub(spec):
            next(data.load_rows(spec, options, key), None)


def check_files(config, now, require):
    """Models, tools, data and functions are there; the first row of each source is read."""
    import agent
    import data
    import scoring

    rollout, replay = config.rollout, config.trainer.replay
    require(config.data.train, "data.train", "is required")
    require(config.model.path, "model.path", "is required")
    require(not config.model.liger or importlib.util.find_spec("liger_kernel"), "model.liger",
            "needs the package liger-kernel")
    for key in filter(now.get, PATHS):
        path = now[key]
        if ".py:" in path:
            data.load_function(path, key)
        elif path.count("/") != 1 or Path(path).parent.is_dir():  # what is left may be a name on the hub
            right = "must be a folder, org/name on the hub, or file.py:function"
            require(Path(path).is_dir(), key, right)
    for key in ("rollout.tools", "rollout.interaction"):
        for spec, arguments in now[key].items():
            require(isinstance(arguments, dict), key, "must be {path/to/file.py:name: {argument: value}}")
            agent.maker(spec, arguments, key)
    require(len(rollout.interaction) < 2, "rollout.interaction",
            "must be one; a dict joins that of a layer, which ~rollout.interaction would delete")
    right = "must be a folder with step_1.pt, as trainer.record leaves it"
    require(not replay or Path(replay, "step_1.pt").is_file(), "trainer.replay", right)
    check_data(config.data)
    scoring.reward_function(config.reward.function)
    check_engine_args(rollout.engine_args)


# What a run keeps when it is started again: its checkpoints have this inside.
KEPT = ("seed model.path model.overrides critic.path *.lora_rank *.lora_targets *.lr *.betas *.weight_decay "
        "algorithm.kl_coef")


def check_start(config):
    """Raises ValueError, one line, if this machine or the run that `trainer.dir` continues is not fit for the
    config. A dry run does not ask for this."""
    directory = run_directory(config)
    with blame("trainer.dir"):
        there = next(path for path in (directory, *directory.parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise ValueError(f"trainer.dir={directory}: {there} must be a folder that can be written")
    now, tokenizer = options_in(config), "model.tokenizer" if config.model.tokenizer else "model.path"
    wanted = [*((key, "*.safetensors *.bin") for key in MODELS), (tokenizer, "tokenizer* vocab*")]
    for key, files in wanted:
        if now[key] and Path(now[key]).is_dir() and not matching(files, os.listdir(now[key])):
            raise ValueError(f"{key}={now[key]} must have files like {files}")
    begun = directory / "config.yaml"
    if begun.is_file() and any(directory.glob("checkpoints/step_*")):
        before = OmegaConf.load(begun)
        for key in matching(KEPT, now):
            then = OmegaConf.select(before, key)
            if now[key] != then:  # OmegaConf compares its lists and dicts with plain ones
                raise ValueError(f"{key}={now[key]!r} was {then!r} when {directory} was begun: continue with "
                                 "that, or begin in a new trainer.dir")
    check_model(config)
    check_vocabularies(config)
    if config.launch == "ray" and "RANK" not in os.environ:
        check_cluster(config)


def check_model(config):
    """Raises ValueError if the engine cannot run the actor's model on this machine, where that is known."""
    import torch

    import data
    import engine

    path = data.resolve_model(config.model.path)
    described = Path(path, "config.json")
    if "rollout" in roles_needed(config) and not torch.cuda.is_available() and described.is_file():
        with data.blame("model.path", path):
            engine.check_architectures(json.loads(described.read_text("utf-8"))["architectures"])


def check_vocabularies(config):
    """Raises ValueError if a model has fewer words than the tokenizer whose ids it will read, where the two
    are not of one folder. Their numbers need not be equal: many models are padded."""
    import data

    now = options_in(config)
    readers = ["model.path", "critic.path", "ref.path"]
    readers += ["reward_model.path"] * (config.reward_model.tokenizer is None)
    if not any(now[key] for key in ("model.tokenizer", *readers[1:])):
        return
    name = config.model.tokenizer or config.model.path
    words = data.load_tokenizer(name, config.model.trust_remote_code).vocab_size
    for key in filter(now.get, readers):
        described = Path(data.resolve_model(now[key]), "config.json")
        shape = json.loads(described.read_text("utf-8")) if described.is_file() else {}
        size = shape.get("text_config", shape).get("vocab_size") or words
        if size < words:
            raise ValueError(f"{key}={now[key]} has {size} words, and the tokenizer of {name} has {words}")


def check_cluster(config):
    """Raises ValueError if no Ray answers at `ray.address`, or if one of our own has too few devices."""
    address = config.ray.address
    if address is None:
        import torch

        for name, pool in config.pools.items():
            if pool["nodes"] > 1:
                raise ValueError(f"pools.{name}.nodes={pool['nodes']} needs ray.address: a Ray of our own is "
                                 "one node")
        cpus = config.ray.num_cpus or os.cpu_count()
        devices = min(cpus, torch.cuda.device_count() or cpus)
        wanted = sum(pool["nodes"] * pool["devices_per_node"] for pool in config.pools.values())
        if wanted > devices:
            raise ValueError(f"pools={config.pools} wants {wanted} devices, this machine has {devices}; "
                             "ray.address would join a cluster")
    elif address != "auto":
        host, _, port = address.removeprefix("ray://").rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except (OSError, ValueError) as error:  # no such host, no such port, no number
            raise ValueError(f"ray.address={address} must be auto, or host:port of a Ray: {error}") from error


# ---- The command line --------------------------------------------------------------------------------------


@contextlib.contextmanager
def one_line_errors():
    """Wrong input ends the process: exit code 2 and one line on stderr. A traceback is for bugs."""
    try:
        yield
    except WRONG as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)


def end(number, _):
    print(f"ended by {signal.Signals(number).name}", file=sys.stderr)
    sys.exit(128 + number)


def end_on_signals():
    """Ctrl-C and SIGTERM end the process through its `finally` clauses, also where a shell ignores them."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


def split_values(text):
    """The values of a word of --sweep: cut at its commas, but for those within brackets."""
    values = []
    for piece in text.split(","):
        inside = values and any(values[-1].count(a) > values[-1].count(b) for a, b in ("[]", "{}"))
        if inside:
            values[-1] += f",{piece}"
        else:
            values.append(piece)
    return values


def sweep(program, files, overrides, grid):
    """Runs the points of a grid one by one, each a process with its own run directory: the sweep can resume.

    `grid` has "key=value,value,..." words. Every point is checked before the first starts. Returns 0 or the
    largest exit code; a point that fails does not keep the others from running.
    """
    points, commands, codes = [[]], [], []
    for key, _, values in (word.partition("=") for word in grid):
        points = [[*point, f"{key}={value}"] for point in points for value in split_values(values)]
    for point in points:
        config = load(files, [*overrides, *point])
        check(config)
        place = Path(config.trainer.dir or f"runs/{config.trainer.name}", ",".join(point).replace("/", "_"))
        layers = [f"--config={file}" for file in files]
        commands.append([sys.executable, program, *layers, *overrides, *point, f"trainer.dir={place}"])
    end_on_signals()
    for command in commands:
        codes.append(run_process(command))
    return max(map(abs, codes))


def supervise(config):
    """Runs this command as a process, and again when it fails, up to `trainer.max_restarts` times: it
    continues from its newest checkpoint. Returns the last exit code; wrong input (2) is not tried again."""
    directory = run_directory(config)
    command = [sys.executable, *sys.argv, f"trainer.dir={directory}", "trainer.max_restarts=0"]
    end_on_signals()
    for attempt in range(config.trainer.max_restarts + 1):
        if attempt:
            print(f"restart {attempt} of {config.trainer.max_restarts}: {directory}", file=sys.stderr)
        code = run_process(command)
        if code in (0, 2):
            break
    return abs(code)


def run_process(command):
    """The exit code of a process in a session of its own: Ctrl-C does not reach it there, but it is told to
    end when we end, once, and can clean up."""
    tied = lambda: ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    process = subprocess.Popen(command, start_new_session=True, preexec_fn=tied)
    try:
        return process.wait()
    finally:
        process.terminate()
        process.wait()


def run_directory(config):
    """Where a run keeps its records and checkpoints."""
    now = time.strftime("%Y-%m-%d_%H-%M-%S")
    return Path(config.trainer.dir or f"runs/{config.trainer.name}/{now}").resolve()


# Returns the checked config, and exits where there is none or nothing to train. The docstring is the help.
def from_command_line(program, words=None):
    """Train as config.yaml, the FILEs and the OVERRIDEs say. Wrong input ends with one line and exit code 2.

    Usage: python train_ppo.py [--config FILE]... [--print-config | --dry-run] [OVERRIDE]...
           python train_ppo.py [--config FILE]... [OVERRIDE]... --sweep KEY=V1,V2...

    Overrides come after all files, in order; config.yaml lists the keys:
      actor.lr=1e-5      sets a key, actor.betas.0=0.8 an item; [1, 2] replaces a list, {a: 1} joins a dict
      pools.b={...}      adds a pool; +trainer.new=1 adds a key, ++ sets or adds one; ~pools.main deletes one
      ref.path='${model.path}' and trainer.name='${env:USER,nobody}' refer to a key and to the environment
    All words after --sweep, up to the next option, span a grid of runs, each with a run directory of its own;
    a comma within brackets does not part two values.
    """
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=inspect.getdoc(from_command_line),
                                     formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--config", action="append", default=[], metavar="FILE", help="a YAML layer")
    parser.add_argument("--print-config", action="store_true", help="show the resolved config and exit")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--dry-run", action="store_true", help="show the plan, start nothing and exit")
    either.add_argument("--sweep", nargs="+", metavar="KEY=VALUES", help="like actor.lr=1e-6,1e-5 seed=1,2")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE")
    arguments = parser.parse_intermixed_args(words)
    with one_line_errors():
        config = load(arguments.config, arguments.overrides)
        if arguments.print_config:
            print(dump(config), end="")
            parser.exit(0)
        if arguments.sweep:
            parser.exit(sweep(program, arguments.config, arguments.overrides, arguments.sweep))
        check(config)
        if arguments.dry_run:
            import plan  # seconds of imports

            plan.show(config)
            parser.exit(0)
        check_start(config)
    return config
