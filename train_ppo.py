"""The trainer: config, launch and the step loop. (Stub: the lead writes this paragraph.)"""
import argparse
import contextlib
import difflib
import inspect
import itertools
import json
import math
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import yaml
from tqdm import tqdm

import data

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

# ---- Worker groups: how the trainer speaks to the processes that hold the devices ---------------------------------------


class WorkerGroup:
    """The workers of one pool, spoken to with two verbs: `call` all of them, or `map` a batch over them.

    A subclass has `world`, the number of ranks, and `run(method, args_per_rank)`, which returns a result per rank.
    """

    def call(self, method, *args):
        """Every rank runs `method` with the same arguments. Returns the results in order of rank."""
        return self.run(method, [args] * self.world)

    def share(self, method, batch, *args):
        """Every rank runs `method` on its share of the rows. Returns (row numbers, result) per rank."""
        parts = data.split(batch, self.world)
        return list(zip(parts, self.run(method, [(data.select(batch, part), *args) for part in parts])))

    def map(self, method, batch, *args):
        """`share` for methods that give new columns: returns the batch with them, in the batch's own order."""
        columns = {}
        for part, result in self.share(method, batch, *args):
            for name, values in result.items():
                column = columns.setdefault(name, [None] * len(batch["uid"]))
                for row, value in zip(part, values, strict=True):
                    column[row] = value
        return batch | columns


class SpmdGroup(WorkerGroup):
    """This process is one of the ranks: torchrun starts them all, launch=local has one. Every rank runs the same loop;
    results are gathered on every rank, so that all loops see the same batches and numbers."""

    def __init__(self, config, name, pool):
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local_rank, local_world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        init_method = "env://" if "RANK" in os.environ else f"file://{tempfile.mkdtemp()}/ranks"
        self.worker = Worker(config, self.rank, self.world, local_rank, local_world, init_method)

    def run(self, method, args_per_rank):
        results = [None] * self.world
        torch.distributed.all_gather_object(results, getattr(self.worker, method)(*args_per_rank[self.rank]))
        return results

    def close(self):
        self.worker.shutdown()


class RayGroup(WorkerGroup):
    """One Ray actor per device and one placement-group bundle per node."""

    def __init__(self, config, name, pool):
        nodes, devices = pool["nodes"], pool["devices_per_node"]
        self.world = nodes * devices
        resources = {"CPU": 1} | ({"GPU": 1} if torch.cuda.is_available() else {})
        have = ray.available_resources()
        for kind in resources:
            if self.world > have.get(kind, 0):
                raise RuntimeError(f"pools.{name} wants {self.world} {kind}s and Ray has {have.get(kind, 0):g}")
        bundle = {kind: devices for kind in resources}
        group = ray.util.placement_group([bundle] * nodes, strategy="STRICT_SPREAD")
        if not group.wait(30):
            raise RuntimeError(f"pools.{name} wants {nodes} nodes with {bundle} each, not found within 30 s")
        places = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node) for node in range(nodes)]
        init_method = f"file://{tempfile.mkdtemp()}/ranks"
        if nodes > 1:
            init_method = ray.get(ray.remote(free_address).options(num_cpus=0, scheduling_strategy=places[0]).remote())
        self.actors = []
        for rank in range(self.world):
            options = {"scheduling_strategy": places[rank // devices], "num_cpus": 1, "num_gpus": resources.get("GPU", 0)}
            actor = ray.remote(Worker).options(**options)
            self.actors.append(actor.remote(config, rank, self.world, 0, devices, init_method))

    def run(self, method, args_per_rank):
        futures = [getattr(actor, method).remote(*args) for actor, args in zip(self.actors, args_per_rank)]
        waiting = futures
        while waiting:
            done, waiting = ray.wait(waiting)
            ray.get(done)  # the first failure is raised here, while other ranks may wait for the one that failed
        return ray.get(futures)

    def close(self):
        ray.wait([actor.shutdown.remote() for actor in self.actors], num_returns=self.world, timeout=10)


def free_address():
    """tcp://host:port of a free port on the node where this runs."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"


# ---- The trainer -------------------------------------------------------------------------------------------------------


class Trainer:
    """The step loop. It holds batches and numbers; everything on a device happens in the worker groups.

    `launch` is ray, local or torchrun. Only the `main` process (rank 0 under torchrun) writes files and to the screen.
    """

    def __init__(self, config, launch, main):
        self.config, self.launch, self.main = config, launch, main
        model_path = data.resolve_model(config.model.path)
        self.paths = {"actor": model_path, "rollout": model_path}
        self.paths |= {role: data.resolve_model(getattr(config, role).path or model_path) for role in ("critic", "ref")}
        trust = config.model.trust_remote_code
        self.tokenizer = AutoTokenizer.from_pretrained(config.model.tokenizer or model_path, trust_remote_code=trust)
        self.val_prompts = None
        if config.data.val:
            self.val_prompts = data.Prompts(config.data.val, self.tokenizer, config.data, key="data.val")
        held_out = self.val_prompts if config.data.val != config.data.train else None
        order = config.seed, config.data.batch_size
        self.prompts = data.Prompts(config.data.train, self.tokenizer, config.data, *order, exclude=held_out)
        self.rewards = None
        if main:
            scoring = self.tokenizer, config.rollout.max_response_length, config.data.num_workers
            self.rewards = data.Rewards(config.reward, *scoring)
        self.total = config.trainer.steps or config.trainer.epochs * self.prompts.steps_per_epoch
        self.step, self.kl_coef, self.awake, self.metrics = 0, config.algorithm.kl_coef, False, {}
        self.pools, self.groups = [], {}

    def start(self):
        """Start every pool's workers and load the roles; the engine comes last, when the memory that is left is known."""
        config = self.config
        group_class = RayGroup if self.launch == "ray" else SpmdGroup
        for name, pool in config.pools.items():
            self.pools.append(group_class(config, name, pool))
        responses = config.data.batch_size * config.rollout.n
        updates = {
            role: self.total * settings.epochs * math.ceil(responses / settings.mini_batch_size)
            for role, settings in (("actor", config.actor), ("critic", config.critic))
        }
        for role in ("critic", "ref", "actor", "rollout"):
            if role in roles_needed(config):
                home = [role in pool["roles"] for pool in config.pools.values()].index(True)
                self.groups[role] = self.pools[home]
                self.groups[role].call("build", role, self.paths[role], updates)
        self.directory = self.once(self.open_directory)
        self.board = None
        if config.trainer.tensorboard and self.main:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(self.directory)

    def open_directory(self):
        name, now = self.config.trainer.name, time.strftime("%Y-%m-%d_%H-%M-%S")
        directory = Path(self.config.trainer.dir or f"runs/{name}/{now}").resolve()
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.yaml").write_text(dump(self.config))
        return directory

    def close(self):
        """End the workers and their engines. Ray's and the engines' processes end with this one in any case."""
        if self.main:
            self.rewards.close()
        for group in self.pools:
            group.close()

    def fit(self):
        """The run: validate, then train, validate and save step by step."""
        every = self.config.validation.every
        self.resume()
        if self.step == 0 and self.config.validation.before and self.val_prompts:
            self.validate()
            self.write_metrics()
        progress = tqdm(total=self.total, initial=self.step, disable=not self.main, unit="step", dynamic_ncols=True)
        while self.step < self.total:
            self.step += 1
            self.train_step()
            last = self.step == self.total
            if self.val_prompts and (last or (every and self.step % every == 0)):
                self.validate()
            self.write_metrics(progress)
            if last or (self.config.trainer.save_every and self.step % self.config.trainer.save_every == 0):
                self.save()
        progress.close()

    def train_step(self):
        """One step, in the order of DESIGN.md's diagram; every line adds columns to the batch."""
        config, start = self.config, time.perf_counter()
        self.wake()
        batch = self.collect()
        self.sleep()
        if config.actor.old_logprobs == "recompute":
            with self.phase("old_logprobs"):
                batch = self.groups["actor"].map("score", batch, "actor")
        if "ref" in self.groups:
            with self.phase("ref"):
                batch = self.groups["ref"].map("score", batch, "ref")
        if "critic" in self.groups:
            with self.phase("values"):
                batch = self.groups["critic"].map("score", batch, "critic")
        with self.phase("advantage"):
            batch = self.add_advantages(batch)
        if "critic" in self.groups:
            with self.phase("update_critic"):
                self.update("critic", batch)
        if self.step > config.critic.warmup_steps or "critic" not in self.groups:
            with self.phase("update_actor"):
                self.update("actor", batch)
        tokens = sum(len(p) + len(r) for p, r in zip(batch["prompt_ids"], batch["response_ids"]))
        seconds = time.perf_counter() - start
        self.metrics |= {"time/step": seconds, "perf/tokens": tokens, "perf/tokens_per_second": tokens / seconds}

    # -- rollout and rewards

    def wake(self):
        """Bring the engine back with the actor's present weights, unless it has them already (after a validation)."""
        with self.phase("sync"):
            if not self.awake:
                self.groups["actor"].call("wake")
        self.awake = True

    def sleep(self):
        with self.phase("sleep"):
            self.groups["actor"].call("sleep")
        self.awake = False

    def collect(self):
        """The step's scored responses: one draw of prompts, or with dynamic sampling (DAPO) as many as it takes, up to
        `algorithm.dynamic_sampling` draws, to fill the batch with groups whose rewards differ."""
        config, kept, thrown = self.config, [], 0
        sampling = {name: getattr(config.rollout, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        wanted = config.data.batch_size * config.rollout.n
        for draw in range(max(1, config.algorithm.dynamic_sampling)):
            prompts = self.prompts.next()
            with self.phase("rollout"):
                batch = self.groups["actor"].map("generate", data.repeat(prompts, config.rollout.n), self.step, sampling)
            with self.phase("reward"):
                batch, metrics = self.once(self.rewards, batch)
            if config.algorithm.advantage == "remax":
                batch = self.add_greedy_baseline(prompts, batch)
            if draw == 0:
                self.metrics |= metrics
            if not config.algorithm.dynamic_sampling:
                return batch
            informative = algos.informative_groups(torch.tensor(batch["scores"]), torch.tensor(batch["uid"])).nonzero()[:, 0]
            thrown += len(batch["uid"]) - len(informative)
            kept.append(data.select(batch, informative.tolist()))
            if sum(len(part["uid"]) for part in kept) >= wanted:
                break
        self.metrics |= {"dynamic/draws": draw + 1, "dynamic/thrown_responses": thrown}
        whole = data.concat(kept)
        if not whole["uid"]:
            raise RuntimeError(f"algorithm.dynamic_sampling={draw + 1}: no group of {draw + 1} draws has differing rewards")
        return data.select(whole, range(min(wanted, len(whole["uid"]))))

    def add_greedy_baseline(self, prompts, batch):
        """ReMax: the score of one greedy response per prompt, a column of the prompt's samples and nothing else."""
        with self.phase("rollout_greedy"):
            greedy = self.groups["actor"].map("generate", data.repeat(prompts, 1), self.step, {"temperature": 0.0})
        greedy, _ = self.once(self.rewards, greedy)
        scores = dict(zip(greedy["uid"], greedy["scores"]))
        return batch | {"reward_baselines": [scores[uid] for uid in batch["uid"]]}

    def validate(self):
        """Answer every validation prompt `validation.n` times; accuracies by source, all samples to samples.jsonl."""
        validation = self.config.validation
        self.wake()
        with self.phase("validate"):
            prompts = data.repeat(self.val_prompts.all(), validation.n)
            sampling = {"temperature": validation.temperature}
            batch = self.groups["actor"].map("generate", prompts, 0, sampling)
            batch, _ = self.once(self.rewards, batch, False)
        for source in sorted(set(batch["source"])):
            scores = [score for score, name in zip(batch["scores"], batch["source"]) if name == source]
            self.metrics[f"val/{source}/mean@{validation.n}"] = statistics.fmean(scores)
        if self.main:
            columns = ("uid", "sample", "source", "prompt", "response", "answer", "scores", "finish_reason")
            rows = [dict(zip(columns, row)) for row in zip(*(batch[name] for name in columns))]
            with open(self.directory / "samples.jsonl", "a") as file:
                file.writelines(json.dumps({"step": self.step, **row}, default=str) + "\n" for row in rows)
            for row in rows[: validation.samples]:
                prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
                tqdm.write(f"  {row['scores']:5.2f} | {prompt[-60:]!r} -> {row['response'][:60]!r} ({row['answer']!r})")

    # -- advantages and updates

    def add_advantages(self, batch):
        """Columns old_logprobs (if not yet there), token_level_rewards, advantages, returns, rollout_weights."""
        algorithm = self.config.algorithm
        batch.setdefault("old_logprobs", batch["rollout_logprobs"])
        columns = ("response_mask", "token_level_scores", "old_logprobs", "rollout_logprobs", "ref_logprobs", "values", "entropy")
        tensors = {name: data.pad(batch[name]) for name in columns if name in batch}
        tensors["group"] = torch.tensor(batch["uid"])
        if "reward_baselines" in batch:
            tensors["reward_baselines"] = torch.tensor(batch["reward_baselines"])
        mask, rewards = tensors["response_mask"], tensors["token_level_scores"]
        if algorithm.kl_in_reward:
            token_kl = algos.kl(tensors["old_logprobs"], tensors["ref_logprobs"], algorithm.kl_estimator)
            rewards = algos.apply_kl_penalty(rewards, token_kl, mask, self.kl_coef)
            observed = algos.masked_mean(token_kl, mask).item()
            self.metrics |= {"reward/kl": observed, "reward/kl_coef": self.kl_coef}
            n = len(batch["uid"])
            self.kl_coef = algos.kl_controller(self.kl_coef, observed, n, algorithm.kl_target, algorithm.kl_horizon)
        tensors["token_level_rewards"] = rewards
        advantages, returns = algos.advantage(algorithm.advantage, tensors, vars(algorithm))
        rollout = self.config.rollout
        pair = tensors["old_logprobs"], tensors["rollout_logprobs"]
        weights, gap = algos.rollout_correction(*pair, mask, rollout.correction, rollout.correction_cap)
        self.metrics |= {f"rollout/{name}": value.item() for name, value in gap.items()}
        if "entropy" in tensors:
            self.metrics["actor/entropy"] = algos.masked_mean(tensors["entropy"], mask).item()
        if "values" in tensors:
            explained = algos.explained_variance(tensors["values"], returns, mask)
            self.metrics["critic/explained_variance"] = explained.item()
        new = {"advantages": advantages, "returns": returns, "rollout_weights": weights}
        lengths = [len(ids) for ids in batch["response_ids"]]
        return batch | {name: data.unpad(tensor, lengths) for name, tensor in new.items()}

    def update(self, role, batch):
        """Mini-batches times epochs of one role's updates; metrics are means over the updates."""
        settings, rows, history = getattr(self.config, role), len(batch["uid"]), []
        for _ in range(settings.epochs):
            for start in range(0, rows, settings.mini_batch_size):
                mini_batch = data.select(batch, range(start, min(start + settings.mini_batch_size, rows)))
                norm = algos.normaliser(mini_batch["response_mask"], self.config.rollout.max_response_length)
                history.append(self.groups[role].share("update", mini_batch, role, norm)[0][1])
        self.metrics |= {name: statistics.fmean(update[name] for update in history) for name in history[0]}

    # -- records

    @contextlib.contextmanager
    def phase(self, name):
        """Time what stands inside as time/<name>, and note what each process of the pools holds after it."""
        start = time.perf_counter()
        yield
        key = f"time/{name}"
        self.metrics[key] = self.metrics.get(key, 0.0) + time.perf_counter() - start
        for group in self.pools:
            for memory in group.call("memory"):
                self.metrics |= {f"mem/{name}/{process}": mib for process, mib in memory.items()}

    def once(self, function, *args):
        """Run something on the main process only; all loops get its result."""
        if self.launch == "ray":
            return function(*args)
        result = [function(*args) if self.main else None]
        torch.distributed.broadcast_object_list(result)
        return result[0]

    def write_metrics(self, progress=None):
        """Append the step's row to metrics.jsonl and show it."""
        metrics, self.metrics = self.metrics, {}
        if not self.main:
            return
        with open(self.directory / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": self.step, **metrics}) + "\n")
        if self.board:
            for name, value in metrics.items():
                self.board.add_scalar(name, value, self.step)
        shown = {"reward": "reward/mean", "length": "response/length_mean", "kl": "actor/ppo_kl",
                 "tokens/s": "perf/tokens_per_second"}
        shown |= {name: name for name in metrics if name.startswith("val/")}
        texts = {label: f"{metrics[name]:.4g}" for label, name in shown.items() if name in metrics}
        tqdm.write(f"step {self.step}: " + ", ".join(f"{label} {text}" for label, text in texts.items()))
        if progress is not None:
            progress.set_postfix(texts, refresh=False)
            progress.update()

    # -- checkpoints

    def save(self):
        """Write a checkpoint beside, then rename it: it is whole or absent. Older ones are deleted only then."""
        folder = self.directory / "checkpoints"
        beside = folder / f"unfinished_{self.step}"
        with self.phase("save"):
            self.once(shutil.rmtree, beside, True)
            for group in self.pools:
                group.call("save", str(beside))
            self.once(self.finish_save, beside, folder / f"step_{self.step}")

    def finish_save(self, beside, final):
        state = {"step": self.step, "kl_coef": self.kl_coef, "prompts": self.prompts.state_dict()}
        (beside / "trainer.json").write_text(json.dumps(state))
        shutil.rmtree(final, ignore_errors=True)
        beside.rename(final)
        for old in checkpoints(self.directory)[: -self.config.trainer.keep]:
            shutil.rmtree(old)

    def resume(self):
        """Continue from the newest whole checkpoint, if there is one; later rows of the records are of no run any more."""
        found = checkpoints(self.directory)
        if found:
            state = json.loads((found[-1] / "trainer.json").read_text())
            self.step, self.kl_coef = state["step"], state["kl_coef"]
            self.prompts.load_state_dict(state["prompts"])
            for group in self.pools:
                group.call("load", str(found[-1]))
            tqdm.write(f"resumed from {found[-1]}")
        self.once(self.trim_records)

    def trim_records(self):
        for name in ("metrics.jsonl", "samples.jsonl"):
            path = self.directory / name
            if path.exists():
                lines = [line for line in path.read_text().splitlines(True) if json.loads(line)["step"] <= self.step]
                path.write_text("".join(lines if checkpoints(self.directory) else []))


def checkpoints(directory):
    """The whole checkpoints of a run directory, oldest first."""
    return sorted((directory / "checkpoints").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))


def roles_needed(config):
    """The roles that this config has work for."""
    reads = inspect.signature(algos.ADVANTAGES[config.algorithm.advantage]).parameters
    needed = {"actor", "rollout"}
    if "values" in reads:
        needed.add("critic")
    if config.algorithm.kl_in_reward or config.actor.kl_coef:
        needed.add("ref")
    return needed


# ---- One run -----------------------------------------------------------------------------------------------------------


def run(config):
    """Train as `config` (already checked) says. Whatever ends it, no process of the run stays behind."""
    # Seconds of imports, made only when there is something to run.
    global AutoTokenizer, PlacementGroupSchedulingStrategy, Worker, algos, ray, torch
    if config.ray.address is None:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray's servers then listen on loopback only
    import ray
    import torch
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    from transformers import AutoTokenizer

    import algos
    import report
    from workers import Worker

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # run what stands under `finally`
    launch = "torchrun" if "RANK" in os.environ else config.launch
    trainer = Trainer(config, launch, main=int(os.environ.get("RANK", 0)) == 0)
    try:
        if launch == "ray":
            start_ray(config.ray)
        trainer.start()
        trainer.fit()
        if trainer.main:
            print(f"report: {report.write(trainer.directory)}")
    finally:
        trainer.close()
        if launch == "ray":
            ray.shutdown()


def start_ray(settings):
    """Join the cluster at ray.address, or start a private one on this machine."""
    if settings.address:
        ray.init(address=settings.address, logging_level="ERROR")
    else:
        ray.init(num_cpus=settings.num_cpus, include_dashboard=False, logging_level="ERROR")


if __name__ == "__main__":
    sys.exit(main())
