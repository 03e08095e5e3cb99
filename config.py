"""The configuration: layers of YAML and overrides from the command line, checked before anything starts.

config.yaml holds every option with its default. OmegaConf reads and merges the layers above it; what is here is the rest:
types, unknown keys, and the rules of `check`. Wrong input is answered with one line, and quickly: torch and what imports it
are imported by `check` alone.
"""

import argparse
import contextlib
import difflib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

BASE = Path(__file__).with_name("config.yaml")
# What fits a key that is null by default has the type given here; text if it is not here.
NULLS = {"ray.num_cpus": 1, "rollout.kv_tokens": 1, "trainer.steps": 1, "algorithm.kl_target": 0.1}
OVERRIDE = re.compile(r"(\+{0,2}|~)([\w-]+(?:\.[\w-]+)*)(=?)(.*)", re.DOTALL)  # sign, dotted key, =, value


def decode(text):
    """A word's value, as in hydra: 1e-6, null, true, [1, 2], {a: 1}; on, 12:30, 007 and a=b are text."""
    with contextlib.suppress(OmegaConfBaseException):
        return OmegaConf.create({"text": text, "value": "${oc.decode:${text}}"}).value
    return text


# ${env:NAME,default}; without a default the variable has to be set
OmegaConf.register_resolver(
    "env", lambda name, *default: decode((dict(zip([name], default)) | os.environ)[name]), replace=True)


def add_layer(config, file):
    """Lays a YAML file over `config`, after those in its `defaults` list, whose paths start at the file."""
    layer = OmegaConf.load(file)
    for name in layer.pop("defaults") if "defaults" in layer else []:
        add_layer(config, file.parent / name)
    config.merge_with(layer)


def fit(value, default, path=""):
    """`value`, with dicts as namespaces, if keys and types are those of `default`. An int fits a float."""
    default = NULLS.get(path, "text") if default is None and value is not None else default
    value = float(value) if isinstance(default, float) and type(value) is int else value
    if type(value) is not type(default) or value == "None":
        raise ValueError(f"{path}={value!r} must be {type(default).__name__}, like {default!r}; None is null")
    if type(value) is int and value < min(default, 1) and path not in ("seed", "validation.samples"):
        raise ValueError(f"{path}={value!r} must be at least {min(default, 1)}")
    if isinstance(value, list):
        return [fit(item, default[0], path) for item in value]
    if not isinstance(value, dict) or default == {}:
        return value
    default = dict.fromkeys(value, default["main"]) if path == "pools" else default
    paths = {key: f"{path}.{key}".lstrip(".") for key in value.keys() | default.keys()}
    for name in {paths[key] for key in value.keys() ^ default.keys()}:
        near = difflib.get_close_matches(name, options_in(load()), n=1, cutoff=0)[0]
        raise ValueError(f"there is no key {name}, the nearest is {near} (+{name}=... would add it)")
    tree = {key: fit(item, default[key], paths[key]) for key, item in value.items()}
    return tree if path.startswith("pools") else SimpleNamespace(**tree)


def options_in(config):
    """{"actor.lr": 1e-6, "seed": 0, ...}: the options by their dotted keys."""
    sections = {name: getattr(part, "__dict__", {"": part}) for name, part in vars(config).items()}
    return {f"{name}.{key}".rstrip("."): part[key] for name, part in sections.items() for key in part}


def load(files=(), overrides=()):
    """The config: config.yaml, each layer file, each override, in order; keys and types are checked."""
    config, known = OmegaConf.load(BASE), OmegaConf.load(BASE)
    for file in files:
        add_layer(config, Path(file))
    for word in overrides:
        sign, key, equals, text = (OVERRIDE.fullmatch(word) or OVERRIDE.fullmatch("no-override")).groups()
        old = OmegaConf.select(config, key, default=config)  # config itself: there is no such key
        if bool(equals) == (sign == "~") or text == "None" or sign == "+" and not OmegaConf.is_dict(old):
            raise ValueError(f"{word} is not key=value, +new=value, ++any=value or ~old; None is null")
        if sign == "~":
            section, _, name = key.rpartition(".")
            del OmegaConf.select(config, section, default=OmegaConf.create())[name]
        # what a + adds is a known key from then on
        for tree in (config, known)[: bool(equals) + bool(equals and sign and old is config)]:
            OmegaConf.update(tree, key, text if "${" in text else decode(text))
    return fit(*(OmegaConf.to_container(tree, resolve=True) for tree in (config, known)))


def dump(config):
    """YAML that gives the same config when it is a layer."""
    return OmegaConf.to_yaml(json.loads(json.dumps(config, default=vars)))


# ---- What must hold, besides keys and types ----------------------------------------------------------------


def roles_needed(config):
    """The roles that this config has work for."""
    import algos

    reads = inspect.signature(algos.ADVANTAGES[config.algorithm.advantage]).parameters
    needed = {"actor", "rollout"}
    if "values" in reads:
        needed.add("critic")
    if config.algorithm.kl_in_reward or config.actor.kl_coef:
        needed.add("ref")
    return needed


def check(config):
    """Refuses what cannot run or has no effect, with one line: the key, its value, and what would be right."""
    import algos
    import data

    now, default = options_in(config), options_in(load())

    def require(holds, key, right):
        if not holds:
            raise ValueError(f"{key}={now.get(key)!r} {right}")

    precisions, schedules = ["float32", "bfloat16"], ["constant", "cosine"]
    choices = {
        "launch": ["ray", "local"], "data.overlong": ["filter", "left", "right", "error"],
        "algorithm.advantage": algos.ADVANTAGES, "algorithm.kl_estimator": algos.KL_ESTIMATORS,
        "rollout.correction": algos.ROLLOUT_CORRECTIONS, "rollout.dtype": precisions,
        "actor.policy_loss": algos.POLICY_LOSSES, "actor.old_logprobs": ["recompute", "rollout", "skip"],
        "actor.kl_estimator": [name + plus for name in algos.KL_ESTIMATORS for plus in ("", "+")],
        "actor.loss_agg": algos.AGGREGATIONS, "critic.loss_agg": algos.AGGREGATIONS,
        "actor.schedule": schedules, "critic.schedule": schedules, "actor.compute_dtype": precisions,
        "critic.compute_dtype": precisions, "ref.compute_dtype": precisions,
    }
    for key, names in choices.items():
        require(now[key] in names, key, f"must be one of {', '.join(names)}")

    algorithm, actor, rollout, needed = config.algorithm, config.actor, config.rollout, roles_needed(config)
    idle = {  # options that begin so have no effect: why
        "critic.": "critic" not in needed and "algorithm.advantage is not gae",
        "ref.": "ref" not in needed and "algorithm.kl_in_reward is false and actor.kl_coef is 0",
        "algorithm.kl_": not algorithm.kl_in_reward and "algorithm.kl_in_reward is false",
        "algorithm.kl_horizon": algorithm.kl_target is None and "algorithm.kl_target is null",
        "actor.kl_estimator": actor.kl_coef == 0 and "actor.kl_coef is 0",
        "actor.min_lr_ratio": actor.schedule == "constant" and "actor.schedule is constant",
        "critic.min_lr_ratio": config.critic.schedule == "constant" and "critic.schedule is constant",
        "rollout.correction_cap": rollout.correction == "off" and "rollout.correction is off",
        "reward.overlong_penalty": config.reward.overlong_buffer == 0 and "reward.overlong_buffer is 0",
        "validation.": config.data.val is None and "data.val is null",
    }
    for chosen, methods in ("algorithm.advantage", algos.ADVANTAGES), ("actor.policy_loss", algos.POLICY_LOSSES):
        read = algos.options_of(methods[now[chosen]])
        for option in {option for method in methods.values() for option in algos.options_of(method)}:
            idle[f"{chosen.split('.')[0]}.{option}"] = option not in read and f"{chosen} is {now[chosen]}"
    for start, why in idle.items():
        for key in now:
            unused = key.startswith(start) and why
            require(not unused or now[key] == default[key], key, f"has no effect, because {why}")

    grouped = "group" in inspect.signature(algos.ADVANTAGES[algorithm.advantage]).parameters
    require(rollout.n > 1 or not grouped, "rollout.n", f"must be above 1 for {algorithm.advantage}")
    require(rollout.temperature > 0, "rollout.temperature", "must be above 0 (validation's may be 0)")
    responses = config.data.batch_size * rollout.n
    longest = config.data.max_prompt_length + rollout.max_response_length
    for role in needed & {"actor", "critic"}:
        settings, what = getattr(config, role), "data.max_prompt_length + rollout.max_response_length"
        require(responses % settings.mini_batch_size == 0, f"{role}.mini_batch_size",
                f"must divide data.batch_size * rollout.n = {responses}")
        require(settings.max_tokens_per_device >= longest, f"{role}.max_tokens_per_device",
                f"must be at least {what} = {longest}")
    if actor.old_logprobs == "skip":
        once = actor.mini_batch_size == responses and actor.epochs == 1 and not algorithm.kl_in_reward
        require(once and rollout.correction == "off", "actor.old_logprobs",
                "needs one mini-batch and one epoch per step, no kl_in_reward and no rollout.correction")

    homes = {role: pool for pool in config.pools.values() for role in pool["roles"]}
    placed = [role for pool in config.pools.values() for role in pool["roles"]]
    require(needed <= set(placed) and len(set(placed)) == len(placed) and homes["actor"] is homes["rollout"],
            "pools", f"must place {', '.join(sorted(needed))} once each, actor and rollout together")
    world = homes["actor"]["nodes"] * homes["actor"]["devices_per_node"]
    require(world % rollout.tp == 0, "rollout.tp", f"must divide the {world} devices of its pool")
    require(config.launch == "ray" or world == len(config.pools) == 1, "launch", "needs one pool with one device")
    require(config.data.train, "data.train", "is required")
    require(config.model.path, "model.path", "is required")
    for key in ("model.path", "model.tokenizer", "critic.path", "ref.path"):
        path = now[key] or "org/name"
        if ".py:" in path:
            data.load_function(path, key)
        elif path.count("/") != 1 or Path(path).parent.is_dir():  # what is left is a name on the hub
            require(Path(path).is_dir(), key, "must be a folder, org/name on the hub, or file.py:function")
    data.check(config.data, config.reward)
    if rollout.engine_args:
        from rollout import check_engine_args

        check_engine_args(rollout.engine_args)


# ---- The command line --------------------------------------------------------------------------------------


def sweep(program, arguments):
    """Runs the points of the grid one by one, each a process with its own run directory: it can resume."""
    points, commands = [arguments.overrides], []
    for key, _, values in (word.partition("=") for word in arguments.sweep):
        points = [[*point, f"{key}={value}"] for point in points for value in values.split(",")]
    for point in points:
        trainer, label = load(arguments.config, point).trainer, ",".join(point[-len(arguments.sweep):])
        place = f"trainer.dir={trainer.dir or 'runs/' + trainer.name}/{label.replace('/', '_')}"
        files = [f"--config={file}" for file in arguments.config]
        commands.append([sys.executable, program, *files, *point, place])
    return int(any([subprocess.Popen(command).wait() for command in commands]))

def from_command_line(program, words=None):
    """The checked config that the command line asks for. Exits with 2 if it is wrong, and after --sweep.

    Usage: python train_ppo.py [--config FILE]... [--print-config] [OVERRIDE]... [--sweep KEY=V1,V2...]

    Overrides come after all files, in order; config.yaml lists the keys:
      actor.lr=1e-5      sets a key, actor.betas.0=0.8 an item; [1, 2] replaces a list, {a: 1} joins a dict
      +pools.b={...}     adds a key; ++key=value sets or adds it; ~pools.main deletes it
      ref.path='${model.path}' and trainer.name='${env:USER,nobody}' refer to a key and to the environment
    All words after --sweep, up to the next option, span a grid of runs, each with a run directory of its own.
    """
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=from_command_line.__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", action="append", default=[], metavar="FILE", help="a YAML layer")
    parser.add_argument("--print-config", action="store_true", help="show the resolved config and exit")
    parser.add_argument("--sweep", nargs="+", metavar="KEY=VALUES", help="like actor.lr=1e-6,1e-5 seed=1,2")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE")
    arguments = parser.parse_intermixed_args(words)
    try:
        config = load(arguments.config, arguments.overrides)
        if arguments.print_config:
            parser.exit(0, dump(config))
        if arguments.sweep:
            parser.exit(sweep(program, arguments))
        check(config)
    except (ValueError, OSError, YAMLError, OmegaConfBaseException, RecursionError) as error:
        parser.exit(2, f"error: {' '.join(str(error).split())}\n")
    return config
