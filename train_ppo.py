"""The trainer: config, launch and the step loop. (Stub: the lead writes this paragraph.)"""
import argparse
import difflib
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import yaml

# torch, Ray and transformers are imported where they are needed: a misspelt key is answered at once.


# ---- Config ------------------------------------------------------------------------------------------------
# Layers of YAML and the command line's overrides are laid over config.yaml as one dict, {"actor.lr": 1e-6},
# whose leaves are scalars, lists and {}. Once resolved it becomes a namespace, and nobody changes that.

BASE = Path(__file__).with_name("config.yaml")
FREE = ("model.overrides.", "rollout.engine_args.", "pools.")  # below stand the user's own keys, in dicts
# What fits a key that is null by default has the type given here; text if it is not here.
NULLS = {"ray.num_cpus": 1, "rollout.kv_tokens": 1, "trainer.steps": 1, "algorithm.kl_target": 0.1}
OVERRIDE = re.compile(r"(\+{0,2}|~)([\w-]+(?:\.[\w-]+)*)(?:=(.*))?", re.DOTALL)  # sign, dotted key, value
REFERENCE = re.compile(r"\$\{((?:[^{}]|\$\{[^{}]*\})*)\}")  # ${key}, ${env:NAME,default}, ${env:NAME,${key}}
VALUES = re.compile(r"""(?:\[[^]]*\]|\{[^}]*\}|'[^']*'|"[^"]*"|[^,])+""")  # split by commas, not in brackets
NUMBER = r"[-+]?(([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.?(?i:inf|nan))\Z"


class ConfigError(ValueError):
    """A wrong config or command line, said in one line."""


class Loader(yaml.SafeLoader):
    """YAML with the scalars of YAML 1.2: 1e-6 is a float; on, yes, 12:30, 007 and dates are text."""
    yaml_implicit_resolvers = {}


class Dumper(yaml.SafeDumper):
    """Writes what Loader reads back as it was: text that looks like a number is quoted."""
    yaml_implicit_resolvers = Loader.yaml_implicit_resolvers


def construct_mapping(loader, node):
    """A dict with text keys. PyYAML would keep the last of two equal keys and read {x:1} as {'x:1': None}."""
    keys = [loader.construct_scalar(key) for key, _ in node.value]
    for key in keys:
        if ":" in key or keys.count(key) > 1:
            problem = f"the key {key} stands here twice, or lacks a space after its colon"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    return {key: loader.construct_object(value, deep=True) for key, (_, value) in zip(keys, node.value)}


Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(null|~|)\Z"), None)
Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(?i:true|false)\Z"), None)
Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9][0-9]*)\Z"), None)
Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(NUMBER), None)
Loader.add_constructor("tag:yaml.org,2002:map", construct_mapping)
Dumper.add_representer(SimpleNamespace, lambda dumper, node: dumper.represent_dict(vars(node)))


def parse(text, where):
    """The value that YAML text stands for. Text without quotes is kept to the letter, even after a #."""
    try:
        value = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: {error}") from error
    return text if isinstance(value, str) and text.strip()[:1] not in ("'", '"') else value


def dump(config):
    """YAML that gives the same config when it is a layer."""
    return yaml.dump(config, Dumper=Dumper, sort_keys=False, allow_unicode=True)


def flatten(value, path=""):
    """{dotted key: leaf} of a dict or namespace."""
    value = vars(value) if isinstance(value, SimpleNamespace) else value
    if not isinstance(value, dict) or path and not value:
        return {path: value}
    below = [flatten(item, f"{path}.{key}" if path else key) for key, item in value.items()]
    return {key: leaf for leaves in below for key, leaf in leaves.items()}


def nest(flat, path=""):
    """The namespace (below FREE the dict) of all keys that begin with `path`."""
    tree = {}
    for name in dict.fromkeys(key[len(path):].partition(".")[0] for key in flat if key.startswith(path)):
        here = path + name
        below = any(key.startswith(f"{here}.") for key in flat)
        if below and flat.get(here, {}) != {}:
            raise ConfigError(f"{here}={flat[here]!r}: a key has either a value or keys below it")
        tree[name] = nest(flat, f"{here}.") if below else flat[here]
    return tree if path.startswith(FREE) else SimpleNamespace(**tree)


def find(flat, path, where):
    """The value of a key that has to be there."""
    if path not in flat:
        near = difflib.get_close_matches(path, flat, n=1, cutoff=0)[0]
        raise ConfigError(f"{where}: there is no key {path}, the nearest is {near} (+{path} would add it)")
    return flat[path]


def put(flat, path, value, where, new=False):
    """Sets `path`, or the leaves below it if `value` is a dict. An index below a list sets an element."""
    for key, leaf in flatten(value, path).items():
        parent, _, last = key.rpartition(".")
        old = flat.get(parent)
        if isinstance(old, list) and last in map(str, range(len(old))):
            flat[parent] = old[:int(last)] + [leaf] + old[int(last) + 1:]
            continue
        if not new and not key.startswith(FREE):
            find(flat, key, where)
        flat[key] = leaf


def add_layer(flat, file, above=(), new=False):
    """Lays a YAML file over `flat`, after the files in its `defaults` list, whose paths start at the file."""
    if file.resolve() in above:
        raise ConfigError(f"{file}: its defaults lead back to it")
    try:
        layer = parse(file.read_bytes(), file) or {}
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    if not isinstance(layer, dict):
        raise ConfigError(f"{file}: must be a mapping of keys to values")
    for name in fit(f"{file}: defaults", layer.pop("defaults", []), ["other.yaml"]):
        add_layer(flat, file.parent / name, (*above, file.resolve()))
    put(flat, "", layer, file, new)


def override(flat, word):
    """A word of the command line: a.b=v sets a key, +a.b=v adds it, ++a.b=v does either, ~a.b deletes it."""
    match = OVERRIDE.fullmatch(word)
    if not match or (match[1] == "~") != (match[3] is None):
        raise ConfigError(f"{word}: an override is key=value, +key=value, ++key=value or ~key")
    sign, path, text = match.groups()
    if sign == "~":
        for key in [key for key in flat if f"{key}.".startswith(f"{path}.")] or [path]:
            find(flat, key, word)
            del flat[key]
    elif sign == "+" and path in flat:
        raise ConfigError(f"{word}: the key is there already, as {flat[path]!r}; ++ would set it")
    else:
        put(flat, path, parse(text, word), word, new=sign != "")


def resolve(value, flat, path, seen=()):
    """`value` with ${key} and ${env:NAME,default} replaced; a reference alone keeps its target's type."""
    if isinstance(value, list):
        return [resolve(item, flat, path, seen) for item in value]
    if not isinstance(value, str):
        return value
    parts = REFERENCE.split(value)  # text, reference, text, ..., reference, text
    for index in range(1, len(parts), 2):
        name, comma, default = parts[index].partition(",")
        where = f"{path}={value}"
        if name in seen:
            raise ConfigError(f"{where}: {name} refers to itself")
        if name.startswith("env:") and (comma or name[4:] in os.environ):
            found = parse(os.environ.get(name[4:], default), where)
        else:
            found = find(flat, name, where)
        parts[index] = resolve(found, flat, path, (*seen, name))
    if len(parts) == 3 and parts[0] == parts[2] == "":
        return parts[1]
    return "".join(part if isinstance(part, str) else json.dumps(part) for part in parts)


def fit(path, value, default):
    """`value`, if its type is the default's. An int fits a float; NULLS says what fits a default of null."""
    if value == "None" or isinstance(value, str) and "${" in value:
        raise ConfigError(f"{path}={value}: None is written null, and ${{ needs its }}")
    if value is default:
        return value
    default = NULLS.get(path, "text") if default is None else default
    if isinstance(value, list) and isinstance(default, list):
        return [fit(path, item, default[0]) for item in value]
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if type(value) is not type(default):
        kind, wanted = type(value).__name__, type(default).__name__
        raise ConfigError(f"{path}={value!r} is of type {kind}, must be {wanted}, like {default!r}")
    return value


def load(files=(), overrides=(), base=BASE):
    """The config: the base file, each layer file, each override; references resolved, types checked."""
    flat = {}
    add_layer(flat, Path(base), new=True)
    defaults = {path: resolve(value, flat, path) for path, value in flat.items()}
    for file in files:
        add_layer(flat, Path(file))
    for word in overrides:
        override(flat, word)
    values = {path: resolve(value, flat, path) for path, value in flat.items()}
    return nest({path: fit(path, value, defaults.get(path, value)) for path, value in values.items()})


# ---- What a config must fulfil. A key goes by its last part where that means the same in every section. ----

LIMITS = (  # what a value must be, the test, the keys; null is always right
    ("at least 1", lambda x: x >= 1,
     "batch_size mini_batch_size max_tokens_per_device max_prompt_length max_response_length n tp bucket_mb "
     "kv_tokens num_workers num_cpus epochs steps keep kl_horizon nodes devices_per_node"),
    ("a finite number from 0 on", lambda x: 0 <= x < math.inf,
     "seed lr weight_decay warmup warmup_steps temperature every save_every samples overlong_buffer kl_coef "
     "dynamic_sampling"),
    ("above 0", lambda x: x > 0,
     "clip_grad timeout kl_target clip_ratio_high cliprange_value tau_pos tau_neg correction_cap"),
    ("above 1", lambda x: x > 1, "clip_ratio_c"),
    ("from 0 to 1", lambda x: 0 <= x <= 1,
     "gamma lam min_p min_lr_ratio clip_ratio_low kl_cov_ratio clip_cov_ratio"),
    ("above 0 and at most 1", lambda x: 0 < x <= 1, "top_p mem_fraction"),
    ("-1 or at least 1", lambda x: x == -1 or x >= 1, "top_k"),
    ("two numbers from 0 to below 1", lambda x: len(x) == 2 and all(0 <= beta < 1 for beta in x), "betas"),
)
GROUPED = {"grpo", "grpo_passk", "rloo", "opo", "reinforce_plus_plus_baseline"}  # compare responses
ROLES = {"actor", "rollout", "critic", "ref", "reward"}


def check(config):
    """Refuses what cannot run or has no effect. Raises ConfigError, or data's ValueError, with one line."""
    import algos
    import data

    now, default = flatten(config), flatten(load())

    def refuse(wrong, key, reason):
        if wrong:
            raise ConfigError(f"{key}={now.get(key)!r}: {reason}")

    for key in now:
        refuse(key not in default and not key.startswith(FREE), key, "nothing reads this key")
    for key in [key for key in default if not key.startswith(FREE)] + ["pools"]:
        refuse(not any(f"{other}.".startswith(f"{key}.") for other in now), key, "needed, and was deleted")
    for name, pool in config.pools.items():
        if not isinstance(pool, dict) or pool.keys() != {"nodes", "devices_per_node", "roles"}:
            raise ConfigError(f"pools.{name}={pool!r}: must have nodes, devices_per_node and roles, no more")
        for key, value in pool.items():
            fit(f"pools.{name}.{key}", value, default[f"pools.main.{key}"])
    choices = {
        "launch": ["ray", "local"], "overlong": ["filter", "left", "right", "error"],
        "schedule": ["constant", "cosine"], "loss_agg": algos.AGGREGATIONS,
        "compute_dtype": ["float32", "bfloat16"], "dtype": ["float32", "bfloat16"],
        "advantage": algos.ADVANTAGES, "policy_loss": algos.POLICY_LOSSES,
        "correction": ["off", "token", "sequence", "token-mask", "sequence-mask"],
        "kl_estimator": [name + sign for name in algos.KL_ESTIMATORS for sign in ("", "+")],
    }
    for key, value in now.items():
        name = key.rpartition(".")[2]
        if value is None or key.startswith(FREE[:2]):
            continue
        refuse(value not in choices.get(name, [value]), key, f"must be {', '.join(choices.get(name, []))}")
        for must, test, names in LIMITS:
            refuse(name in names.split() and not test(value), key, f"must be {must}")

    algorithm, actor, rollout = config.algorithm, config.actor, config.rollout
    gae, with_ref = algorithm.advantage == "gae", algorithm.kl_in_reward or actor.kl_coef > 0
    uses = [  # keys that begin so; are they read?; if they are not, why
        ("critic.", gae, "algorithm.advantage is not gae"),
        ("ref.", with_ref, "algorithm.kl_in_reward is false and actor.kl_coef is 0"),
        ("actor.kl_estimator", actor.kl_coef > 0, "actor.kl_coef is 0"),
        ("algorithm.kl_", algorithm.kl_in_reward, "algorithm.kl_in_reward is false"),
        ("algorithm.kl_horizon", algorithm.kl_target, "algorithm.kl_target is null"),
        ("reward.overlong_penalty", config.reward.overlong_buffer, "reward.overlong_buffer is 0"),
        ("rollout.correction_cap", rollout.correction != "off", "rollout.correction is off"),
        ("actor.min_lr_ratio", actor.schedule == "cosine", "actor.schedule is constant"),
        ("critic.min_lr_ratio", config.critic.schedule == "cosine", "critic.schedule is constant"),
        ("validation.", config.data.val, "data.val is null"),
        ("ray.", config.launch == "ray", "launch is local"),
    ]
    for chosen in "algorithm.advantage", "actor.policy_loss":
        methods = choices[chosen.partition(".")[2]]
        section, read = chosen.partition(".")[0], algos.options_of(methods[now[chosen]])
        options = {option for method in methods.values() for option in algos.options_of(method)}
        uses += [(f"{section}.{option}", option in read, f"{chosen} is {now[chosen]}") for option in options]
    for prefix, used, why in uses:
        for key in now:
            unused = key.startswith(prefix) and not used
            refuse(unused and now[key] != default[key], key, f"has no effect, because {why}")

    in_group = algorithm.advantage in GROUPED
    refuse(in_group and rollout.n == 1, "rollout.n", f"must be above 1 for {algorithm.advantage}")
    refuse(rollout.temperature == 0, "rollout.temperature", "must be above 0 (validation's may be 0)")
    longest = config.data.max_prompt_length + rollout.max_response_length
    responses = config.data.batch_size * rollout.n
    for role in ["actor", "critic"] if gae else ["actor"]:
        settings = getattr(config, role)
        refuse(responses % settings.mini_batch_size, f"{role}.mini_batch_size",
               f"must divide data.batch_size * rollout.n = {responses}")
        refuse(settings.max_tokens_per_device < longest, f"{role}.max_tokens_per_device",
               f"must be at least data.max_prompt_length + rollout.max_response_length = {longest}")
        refuse(settings.warmup > 1 and settings.warmup % 1, f"{role}.warmup", "must be whole or below 1")

    placed = [role for pool in config.pools.values() for role in pool["roles"]]
    needed = ["actor", "rollout"] + ["critic"] * gae + ["ref"] * bool(with_ref)
    homes = [pool for pool in config.pools.values() if {"actor", "rollout"} <= set(pool["roles"])]
    if not homes or len(set(placed)) < len(placed) or not set(needed) <= set(placed) <= ROLES:
        raise ConfigError(f"pools={config.pools!r}: {', '.join(needed)} must each be in one pool, actor and "
                          f"rollout in the same; other roles: {', '.join(sorted(ROLES - set(needed)))}")
    world = homes[0]["nodes"] * homes[0]["devices_per_node"]
    refuse(world % rollout.tp, "rollout.tp", f"must divide the {world} devices of its pool")

    for key in ("model.path", "data.train"):
        refuse(now[key] is None, key, "is required")
    for key in ("model.path", "model.tokenizer", "critic.path", "ref.path"):
        path = now[key] or "org/name"
        if ".py:" in path:
            data.load_function(path, key)
        elif path.count("/") != 1 or Path(path).parent.is_dir():  # what is left is a name on the hub
            refuse(not Path(path).is_dir(), key, "must be a folder, org/name on the hub, or file.py:function")
    data.check(config.data, config.reward)


# ---- The command line --------------------------------------------------------------------------------------


def parse_arguments():
    """Usage: python train_ppo.py [--config FILE]... [--print-config] [OVERRIDE]... [--sweep KEY=V1,V2...]

    Overrides come after all files, in order; config.yaml lists the keys:
      actor.lr=1e-5      sets a key, actor.betas.0=0.8 an item; [1, 2] replaces a list, {a: 1} joins a dict
      +pools.b={...}     adds a key; ++key=value sets or adds it; ~pools.main deletes it
      ref.path='${model.path}' and trainer.name='${env:USER,nobody}' refer to a key and to the environment
    All words after --sweep, up to the next option, span a grid of runs, each with a run directory of its own.
    """
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=parse_arguments.__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--config", action="append", default=[], metavar="FILE", help="a YAML layer")
    parser.add_argument("--print-config", action="store_true", help="show the resolved config and exit")
    parser.add_argument("--sweep", nargs="+", metavar="KEY=VALUES", help="like actor.lr=1e-6,1e-5 seed=1,2")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE")
    return parser.parse_intermixed_args()


def sweep(arguments):
    """Runs the points of the grid one by one, each a process; returns the first exit code that is not 0."""
    command = [sys.executable, __file__, *(f"--config={file}" for file in arguments.config)]
    axes, points, code = [], [], 0
    for word in arguments.sweep:
        key, _, values = word.partition("=")
        axes.append([f"{key}={value}" for value in VALUES.findall(values)] or [word])
    for point in itertools.product(*axes):
        trainer = load(arguments.config, [*arguments.overrides, *point]).trainer
        label = re.sub(r"[^\w.=,+-]", "_", ",".join(point))
        name = f"trainer.name={trainer.name}-{label}"
        place = f"trainer.dir={trainer.dir}/{label}" if trainer.dir else name
        points.append([*arguments.overrides, *point, place])
    if len({point[-1] for point in points}) < len(points):
        raise ConfigError(f"--sweep {' '.join(arguments.sweep)}: two points would share a run directory")
    for point in points:
        child = subprocess.Popen([*command, *point], start_new_session=True)
        try:
            child.wait()
        finally:  # Ctrl-C reaches the run once, from here; a run that has ended gets no signal
            child.send_signal(signal.SIGINT)
            child.wait()
        code = code or child.returncode
    return code


def main():
    arguments = parse_arguments()
    try:
        config = load(arguments.config, arguments.overrides)
        if arguments.print_config:
            print(dump(config), end="")
            return 0
        if arguments.sweep:
            return sweep(arguments)
        check(config)
    except ValueError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    return run(config)


# ==== The lead's part begins here ===========================================================================


def run(config):
    raise NotImplementedError


if __name__ == "__main__":
    sys.exit(main())
