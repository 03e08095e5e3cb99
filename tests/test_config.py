"""Config: what YAML and words mean, what is refused and how, what a run writes down.

What words and overrides mean is hydra 1.3.8's table (KNOWN_FAULTS.md, A); what files mean is OmegaConf's.
"""
import ast
import math
import os
import pickle
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml
from omegaconf import OmegaConf

import config as configuration
from config import check, dump, from_command_line, load, options_in
from runs import PATIENCE

ROOT = configuration.BASE.parent
GOOD = ["model.path=org/name", "data.train=reasoning_gym:chain_sum"]
GAE, KL = "algorithm.advantage=gae", "algorithm.kl_in_reward=true"
ONE = ["rollout.n=1", "actor.mini_batch_size=8"]
ROLES = "pools.main.roles=[actor, rollout]"
POOL = "pools.b={nodes: 1, devices_per_node: 1, roles: [critic]}"
WARM = [GAE, "trainer.steps=8", "critic.warmup_steps=2"]  # 8 updates of the critic, 6 of the actor


@pytest.fixture(autouse=True, scope="module")
def config_yaml_is_read_once():
    """OmegaConf takes 20 ms for config.yaml; a pickled copy takes 2."""
    base, read = pickle.dumps(OmegaConf.load(configuration.BASE)), OmegaConf.load
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmegaConf, "load",
                      lambda file: pickle.loads(base) if file == configuration.BASE else read(file))
        yield


@pytest.fixture
def layer(tmp_path):
    """layer(text, name) writes a YAML file and returns its path."""
    def write(text, name="layer.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        return tmp_path / name
    return write


@pytest.fixture
def refusal(capsys):
    """refusal(word, ...) runs the command line in this process and returns the line with which it refuses."""
    def run(*words):
        with pytest.raises(SystemExit) as ended:
            from_command_line("train_ppo.py", [str(word) for word in words])
        shown = capsys.readouterr()
        assert ended.value.code == 2 and shown.out == "" and shown.err.count("\n") == 1
        return shown.err.partition("error: ")[2].strip()
    return run


# ---- what words and files mean ----

WORDS = [
    ("1e-6", 1e-6), ("1E+6", 1e6), (".5", 0.5), ("inf", math.inf), ("nan", math.nan), ("1", 1), ("-1", -1),
    ("tRuE", True), ("null", None), ("'null'", "null"), ("'1e-6'", "1e-6"), ("[1, a, null]", [1, "a", None]),
    ("{x:1,y:2}", {"x": 1, "y": 2}), ("{x: {z: 1e3}}", {"x": {"z": 1e3}}), ("''", ""),
    *((text, text) for text in (
        "on", "off", "yes", "12:30", "007", "0x1F", "1.2.3", "2024-01-01", "e5", "x*", "a:b", "Answer #1",
        "two\nlines", "don't", "x=y", "task?a=1&b=2", "~/x", "a, b", "[1", "", "a: 'b' é"))]


def test_words_and_environment(monkeypatch):
    words, expected = [], {}
    for number, (text, value) in enumerate(WORDS):
        monkeypatch.setenv(f"VALUE{number}", text)
        words += [f"model.overrides.a{number}={text}", f"model.overrides.b{number}=${{env:VALUE{number}}}"]
        expected |= {f"a{number}": value, f"b{number}": value}
    assert repr(load([], words).model.overrides) == repr(expected)


def test_values_in_a_file(layer):
    file = layer("model: {overrides: {x: [1e-6, 1E+6, .inf, 1, true, ~, 'on', 2024-01-01, '1e-6', x=y]}}")
    expected = [1e-6, 1e6, math.inf, 1, True, None, "on", "2024-01-01", "1e-6", "x=y"]
    assert repr(load([file]).model.overrides["x"]) == repr(expected)


def test_layers_in_order(layer):
    first = layer("defaults: [sub/a.yaml, b.yaml]\nactor: {lr: 3e-6}\n", "first.yaml")
    layer("defaults: [../c.yaml]\nactor: {lr: 1e-6, epochs: 2, weight_decay: 0.5}\n", "sub/a.yaml")
    layer("actor: {lr: 9e-6, epochs: 9, clip_grad: 7.0}\n", "c.yaml")
    layer("actor: {weight_decay: 0.25}\n", "b.yaml")
    config = load([first, layer("seed: 5\nactor: {epochs: 4}\n")], ["seed=6"])
    assert (config.actor.lr, config.actor.epochs, config.actor.weight_decay) == (3e-6, 4, 0.25)
    assert (config.actor.clip_grad, config.seed, config.actor.betas) == (7.0, 6, [0.9, 0.999])
    assert load([layer("")]) == load([layer("# nothing\ndefaults: []")]) == load()


MEANING = [  # key, value, words
    ("seed", 3, "seed=2", "seed=3"), ("seed", 0, "++seed=0"), ("trainer.new", 2, "+trainer.new=1",
     "trainer.new=2"),
    ("model.overrides", {"c": 6}, "+model.overrides.c=5", "~model.overrides.c", "+model.overrides.c=6"),
    ("new", {"f": {"g": 2}}, "++new.f.g=1", "new.f.g=2"), ("trainer.name", "a=b", "trainer.name=a=b"),
    ("actor.betas", [0.5, 0.999], "actor.betas=[1, 0.999]", "++actor.betas.0=0.5"),
    ("model.overrides", {"x": {"y": 1, "z": 2}}, "model.overrides={x:{y:1}}", "model.overrides.x.z=2"),
    ("pools", {"main": {"nodes": 2, "devices_per_node": 1, "roles": ["ref"]}}, "+pools.main={nodes:2}",
     "pools.main.roles=[ref]"),
    ("pools", {"b": {"nodes": 1, "devices_per_node": 1, "roles": ["critic"]}}, POOL, "~pools.main"),
    ("trainer.z", 1, "+trainer={name: x, z: 1}"), ("actor.clip_grad", 2.0, "actor.clip_grad=2"),
    ("trainer.steps", 3, "trainer.steps=3"), ("algorithm.kl_target", 1.0, "algorithm.kl_target=1"),
    ("reward.fallback", -1.0, "reward.fallback=-1"), ("rollout.top_k", -1, "rollout.top_k=-1"),
    ("critic.betas", [0.1, 0.2], "critic.betas=${actor.betas}", "actor.betas=[0.1, 0.2]"),
    ("actor.lr", 0.5, "actor.lr=${critic.lr}", "critic.lr=${actor.min_lr_ratio}", "actor.min_lr_ratio=0.5"),
    ("trainer.name", "lr-0.5-1e-05", "trainer.name=lr-${actor.lr}-${env:LR}", "actor.lr=0.5"),
    ("actor.lr", 1e-5, "actor.lr=${env:LR,3.0}"), ("trainer.dir", None, "trainer.dir=${env:UNSET,null}"),
    ("actor.betas", [0.5, 0.6], "actor.betas=${env:UNSET,[0.5, 0.6]}"),
    ("trainer.name", "m", "trainer.name=${model.path}", "model.path=m"),
]


@pytest.mark.parametrize("key, expected, words", [(key, value, words) for key, value, *words in MEANING])
def test_meaning(key, expected, words, monkeypatch, layer):
    monkeypatch.setenv("LR", "1e-5")
    assert repr(options_in(load([], words))[key]) == repr(expected)
    name, _, text = words[0].partition("=")
    if "${" in text:  # means the same in a file
        file = layer(f'{name.partition(".")[0]}: {{{name.partition(".")[2]}: "{text}"}}')
        assert repr(options_in(load([file], words[1:]))[key]) == repr(expected)


def test_written_config_gives_the_same_config(layer, monkeypatch):
    monkeypatch.setenv("NAME", "'1e5'")
    overrides = "{a: [1, {c: '007'}], d: 'true', e: 'null', f: 'yes', g: '', h: '1:30', i: 'inf', 0: x}"
    words = ["trainer.name=${env:NAME}", "actor.clip_grad=inf", "actor.lr=1e-7", "data.val='12'",
     "ref.path=on",
             "data.system=a: 'b' # é\n ☃\t", f"model.overrides={overrides}", "model.path='~'", POOL,
             "critic.path=${model.path}", "critic.betas=${actor.betas}"]
    config = load([], words)
    assert repr(load([layer(dump(config))])) == repr(config) == repr(pickle.loads(pickle.dumps(config)))
    assert config.trainer.name == "1e5" and "&" not in dump(config)


# ---- what is refused ----

@pytest.mark.parametrize("text, message", [
    ("actor: {lrr: 1}", "there is no key actor.lrr, the nearest is actor.lr (+actor.lrr=... would add it)"),
    ("batch_size: 4", "the nearest is data.batch_size "), ("actor:\n", "actor=None must be dict"),
    ("actor: {lr: {x: 1}}", "actor.lr={'x': 1} must be float"), ("seed: 1\nseed: 2\n", "duplicate key seed"),
    ("[1, 2]", "must be keys with values"), ("just text", "no key just text"), ("true", "bool"), ("actor: [1\n", "line 2"),
    ("a: !!python/name:os.system x", "could not determine a constructor"), ("a: &x {b: *x}", "recursive"),
    ("defaults: [layer.yaml]", "`defaults` must be a list of files that do not lead back here"),
    ("defaults: base.yaml", "`defaults` must be a list"), ("defaults: [nowhere.yaml]", "nowhere.yaml"),
    ("rollout: {correction: off}", "rollout.correction=False must be str"), ("seed: caf\xe9", "utf-8"),
    ("ref: {path: None}", "ref.path='None' must be str, like 'text'; None is null"), (None, "No such file"),
])
def test_layer_that_is_refused(text, message, tmp_path, refusal):
    if text:
        (tmp_path / "layer.yaml").write_bytes(text.encode("latin-1"))
    line = refusal("--config", tmp_path / "layer.yaml")
    assert message in line and str(tmp_path) in line


REFUSED = [  # the line has this, words
    ("there is no key actor.lrr, the nearest is actor.lr (+actor.lrr=... would add it)", "actor.lrr=2"),
    ("no key e", "e.f=2"), ("no key trainer.z", "trainer={z: 1}"), ("no key pools.main.x", "pools.main.x=0"),
    ("+seed=2: there is a key seed", "+seed=2"), ("~a.zz: there is no key a.zz", "~a.zz"),
    ("seed is missing", "~seed"), ("actor.betas[5]", "actor.betas.5=1"), ("actor.betas.x", "actor.betas.x=1"),
    *((f"{word}: is not key=value, +new", word) for word in ("~seed=1", "seed", "+a.c", "=1", "a..b=1",
      "seed=None")),
    ("seed={'c': 1} must be int", "seed.c=1"), ("seed={'c': 1} must be int", "+seed.c=1"),
    ("pools.b.devices_per_node is missing", "pools.b.nodes=2"), ("actor.betas='[1' must be list",
      "actor.betas=[1"),
    *((f" must be {right}", word) for right, word in (
        ("int", "data.batch_size=8.0"), ("int", "data.batch_size=true"), ("int", "data.batch_size=null"),
        ("int", "trainer.steps=1e3"), ("int", "data.batch_size=${actor.lr}"), ("float", "actor.lr='1e-6'"),
        ("bool", "data.shuffle=1"), ("bool", "data.shuffle=yes"), ("str", "trainer.name=12"),
        ("str", "pools.main.roles=[1]"), ("str", "critic.path=${model}"), ("float", "actor.betas=[a, b]"),
        ("dict", "++actor=1"), ("dict", "actor=null"), ("dict", "pools.b=2"), ("dict",
         "rollout.engine_args=null"),
        ("at least 1", "rollout.n=-1"), ("at least 1", "trainer.steps=0"), ("at least 1",
         "pools.main.nodes=0"),
        ("at least 0", "seed=-1"), ("int, like 8; None is null", "data.batch_size=${env:WORD}"),
        ("at least 0 and finite", "actor.lr=nan"), ("at least 0 and finite", "critic.lr=inf"),
        ("at least 0", "actor.clip_ratio_low=-0.1"), ("above 1", "actor.clip_ratio_c=1"), ("from 0 to 1", "algorithm.gamma=1.1"),
        ("finite", "actor.entropy_coef=nan"), ("finite", "reward.fallback=-inf"), ("above 0 and finite", "reward.timeout=nan"),
        ("above 0 and finite", "rollout.tool_timeout=0"), ("at least 1", "rollout.bucket_mb=0"),
        ("at most rollout.max_response_length=256", "reward.overlong_buffer=257"),
        ("above 0 and at most 1", "rollout.top_p=0"), ("at least 0.001", "rollout.temperature=0"),
        ("at least 0.001 and finite", "rollout.temperature=1e-300"),
        ("0, or at least 0.001 and finite", "validation.temperature=1e-7"),
        *(("a folder's name", f"trainer.name={name}") for name in ("", "a/b", "../a", "..", "'a\nb'")),
        ("above 0", "actor.clip_grad=0"), ("above 0", "algorithm.kl_target=0"), ("from 1 to 2**31 - 1, or",
         "rollout.top_k=0"), ("from 1 to 2**31 - 1, or", f"rollout.top_k={2**31}"),
        ("a share below 1 or a whole", "actor.warmup=1.5"), ("two numbers in [0, 1)", "critic.betas=[0.9]"),
        *((f"one of {names}", f"{key}=wrong") for key, names in (
            ("launch", "ray, local"), ("rollout.correction", "off, token"), ("algorithm.advantage",
             "gae, grpo"),
            ("actor.policy_loss", "ppo, gspo"), ("critic.loss_agg", "token-mean"), ("data.overlong",
             "filter"),
            ("actor.schedule", "constant, cosine"), ("actor.kl_estimator", "k1, k1+"), ("rollout.dtype",
             "float32"),
            ("ref.compute_dtype", "float32"), ("actor.old_logprobs", "recompute, rollout, skip"))),
        *(("a folder, org/name on the hub, or", word) for word in (
            "model.path=/no/such/folder", "model.path=tests/nowhere", "model.tokenizer=./nowhere")))),
    ("'model.pth' not found full_key: critic.path", "critic.path=${model.pth}"),
    ("Recursive interpolation detected full_key: trainer.dir", "trainer.dir=x${trainer.dir}"),
    ("the environment has no UNSET", "trainer.name=${env:UNSET}"), ("trainer.name",
     "trainer.name=${trainer.dir"),
    ("model.path=None is required", "model.path=null"), ("data.train=None is required", "data.train=null"),
    ("model.path=nowhere.py:build: there is no file", "model.path=nowhere.py:build"),
    ("data.train=nowhere.jsonl", "data.train=nowhere.jsonl"), ("data.val=x.parquet", "data.val=x.parquet"),
    ("reward.function=exactly", "reward.function=exactly"),
    *((f"rollout.n=1 must be above 1 for {name}", *ONE, f"algorithm.advantage={name}")
      for name in ("grpo", "rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus_baseline")),
    *((f"{role}.mini_batch_size=48 must divide data.batch_size * rollout.n = 64",
      f"{role}.mini_batch_size=48", GAE)
      for role in ("actor", "critic")),
    *((f"{role}.max_tokens_per_device=767 must be at least data.max_prompt_length + rollout.max_",
       f"{role}.max_tokens_per_device=767", GAE) for role in ("actor", "critic")),
    ("must place actor, rollout once each, actor and rollout together", "pools.main.roles=[actor]"),
    ("must place actor, critic, rollout once each", ROLES, GAE),
    ("must place actor, ref", ROLES, "actor.kl_coef=1"),
    ("must place actor, rollout", "pools.main.roles=[actor, rollout, critc]"), ("pools={} must",
     "~pools.main"),
    ("must place actor, critic, rollout once each", GAE, POOL),
    *((f"{key}=2 must divide the 3 devices of the pool with role", f"{key}=2", "pools.main.devices_per_node=3")
      for key in ("rollout.tp", "model.sp", "model.fsdp_size")),
    ("model.sp=2 must divide the 1 devices of the pool with role critic", "model.sp=2", GAE, ROLES, POOL,
     "pools.main.devices_per_node=2"),
    ("actor.mini_batch_size=1 must be at least the 2 shares of its pool's devices", "actor.mini_batch_size=1",
     "pools.main.devices_per_node=2"),
    ("must place actor, reward, rollout once each", ROLES, "reward_model.path=org/name"),
    ("actor.warmup=9.0 must be at most the 8 updates of the run", "actor.warmup=9", "trainer.steps=8"),
    *((f"critic.warmup_steps={steps} must be below trainer.steps=8", f"critic.warmup_steps={steps}",
       "trainer.steps=8", GAE) for steps in (8, 9)),
    ("actor.warmup=7.0 must be at most the 6 updates of the run", *WARM, "actor.warmup=7"),
    ("algorithm.kl_horizon=12 must be above data.batch_size * rollout.n / 5 = 12.8", KL, "algorithm.kl_target=1",
     "algorithm.kl_horizon=12"),
    ("trainer.profile_steps=[9, 9] must begin within", "trainer.profile_steps=[9, 9]", "trainer.steps=8"),
    ("reward.function='none' needs reward_model.path or", "reward.function=none"),
    ("algorithm.dynamic_sampling=1 needs rollout.n above 1", "algorithm.dynamic_sampling=1", GAE, "rollout.n=1",
     "actor.mini_batch_size=8", "critic.mini_batch_size=8"),
    *(("trainer.profile_steps", f"trainer.profile_steps={value}") for value in ("[2,1]", "[0,1]", "[1]", "3")),
    ("launch='local' needs one pool of one device", "launch=local", "pools.main.devices_per_node=2"),
    *(("actor.old_logprobs='skip' needs actor.epochs=1, one mini-batch", "actor.old_logprobs=skip", word)
      for word in ("actor.mini_batch_size=32", "actor.epochs=2", "rollout.correction=token", KL)),
]


@pytest.mark.parametrize("message, words", [(message, words) for message, *words in REFUSED])
def test_refused(message, words, refusal, monkeypatch):
    monkeypatch.setenv("WORD", "None")
    line = refusal(*GOOD, *words)
    assert message in line
    if message.startswith(" must be "):  # then key and value stand before it
        assert line.startswith(words[0].partition("=")[0].lstrip("+") + "=")


@pytest.mark.parametrize("words", [
    [], [GAE, "critic.lr=1e-3", "critic.mini_batch_size=8", *ONE], ["algorithm.advantage=remax", *ONE],
    [ROLES],
    ["ref.compute_dtype=bfloat16", "actor.kl_coef=0.1"], ["launch=local"], ["+trainer.mine=1"],
    ["pools.main.devices_per_node=4", "rollout.tp=2", "model.sp=4", "model.fsdp_size=2"],
    ["actor.mini_batch_size=1", "pools.main.devices_per_node=2", "model.sp=2"], ["trainer.profile_steps=[1, 2]"], [ROLES, POOL, GAE], ["actor.old_logprobs=skip"],
    ["model.path=recipes/toy.py:build", "actor.warmup=10", "critic.warmup=0.0", "actor.clip_grad=inf",
     "actor.lr=0"],
    [KL, "algorithm.kl_target=1", "algorithm.kl_horizon=13"], ["actor.clip_ratio_c=inf"],
    [*WARM, "actor.warmup=6", "critic.warmup=8"],
])
def test_check_passes(words):
    check(load([], GOOD + words))


@pytest.mark.parametrize("message, words", [
    ("must be one under torchrun", [ROLES, POOL, GAE]),
    ("model.sp=4 must divide the 2 devices of the pool with role actor", ["model.sp=4"]),
    ("has no effect, because torchrun has --max-restarts", ["trainer.max_restarts=1"]),
])
def test_torchrun_has_one_pool_of_all_its_ranks(message, words, refusal, monkeypatch):
    """train_ppo.py knows it by RANK, too."""
    check(load([], [*GOOD, ROLES, POOL, GAE]))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert message in refusal(*GOOD, *words)
    check(load([], [*GOOD, "model.sp=2"]))


IDLE = [  # a word, what makes it have no effect, what makes it have one, the reason
    ("critic.epochs=2", [], [GAE], "algorithm.advantage is grpo"),
    ("ref.path=org/name", [], ["actor.kl_coef=0.1"],
     "algorithm.kl_in_reward is false and actor.kl_coef is 0"),
    ("algorithm.kl_coef=0.5", [], [KL], "algorithm.kl_in_reward is false"),
    ("algorithm.kl_horizon=50", [KL], [KL, "algorithm.kl_target=1"], "algorithm.kl_target is null"),
    ("actor.kl_estimator=k1+", [], ["actor.kl_coef=0.1"], "actor.kl_coef is 0"),
    ("actor.min_lr_ratio=0.1", [], ["actor.schedule=cosine"], "actor.schedule is constant"),
    ("critic.min_lr_ratio=0.1", [GAE], [GAE, "critic.schedule=cosine"], "critic.schedule is constant"),
    ("rollout.correction=token", ["actor.old_logprobs=rollout"], [], "actor.old_logprobs is rollout"),
    ("rollout.correction_cap=3.0", [], ["rollout.correction=token"], "rollout.correction is off"),
    ("reward.overlong_penalty=0.5", [], ["reward.overlong_buffer=9"], "reward.overlong_buffer is 0"),
    ("validation.n=2", ["validation.temperature=1"], ["validation.temperature=1", "data.val=reasoning_gym:chain_sum"], "data.val is null"),
    ("reward_model.weight=2", [], ["reward_model.path=org/name"], "reward_model.path is null"),
    ("actor.lora_alpha=8", [], ["actor.lora_rank=8"], "actor.lora_rank is 0"),
    ("model.attn_implementation=eager", ["model.sp=2", "pools.main.devices_per_node=2"],
     ["actor.share_prompt=false"], "model.sp is above 1"),
    ("ray.num_cpus=2", ["ray.address=auto"], [], "ray.address is given"),
    *((f"{section}.{option}", [f"{chooser}={idle}"], [f"{chooser}={used}"], f"{chooser} is {idle}")
      for section, chooser, option, used, idle in (
          ("algorithm", "algorithm.advantage", "gamma=0.9", "reinforce_plus_plus", "grpo"),
          ("algorithm", "algorithm.advantage", "lam=0.9", "gae", "grpo"),
          ("algorithm", "algorithm.advantage", "norm_adv_by_std=false", "grpo_passk", "gae"),
          *(("actor", "actor.policy_loss", *row.split()) for row in (
              "clip_ratio_low=0.1 gspo gpg", "clip_ratio_high=0.3 cispo sapo", "clip_ratio_c=4.0 ppo gspo",
              "tau_pos=2.0 sapo ppo", "tau_neg=2.0 sapo ppo", "kl_cov_ratio=0.1 kl_cov ppo",
              "ppo_kl_coef=2.0 kl_cov clip_cov", "clip_cov_ratio=0.1 clip_cov ppo",
              "clip_cov_lb=2.0 clip_cov ppo",
              "clip_cov_ub=6.0 clip_cov kl_cov")))),
]


@pytest.mark.parametrize("word, idle, used, reason", IDLE)
def test_option_without_effect(word, idle, used, reason, refusal):
    check(load([], [*GOOD, *used, word]))
    line = refusal(*GOOD, *idle, word)
    assert line.startswith(word.partition("=")[0] + "=") and line.endswith(f"has no effect, because {reason}")


def test_every_option_of_a_method_is_flipped_above():
    import algos
    read = {option for table in (algos.ADVANTAGES, algos.POLICY_LOSSES) for fn in table.values()
            for option in algos.options_of(fn)}
    assert read <= {word.partition("=")[0].partition(".")[2] for word, *_ in IDLE}


# ---- config.yaml is the reference; tests/test_options.py flips its options ----

def test_a_new_method_whose_option_is_nowhere_is_refused(refusal, monkeypatch):
    import algos

    def mine(token_level_rewards, response_mask, *, group, limit): ...

    monkeypatch.setitem(algos.ADVANTAGES, "mine", mine)
    message = "algorithm.advantage='mine' reads limit, which config.yaml must have under algorithm"
    assert message == refusal(*GOOD, "algorithm.advantage=mine")


def test_every_option_has_a_comment():
    section, comments = "", {}
    for indent, name, rest in re.findall(r"^( *)(\w+):(.*)", configuration.BASE.read_text(), re.MULTILINE):
        section = section if indent else name
        comments[f"{section}.{name}" if indent else name] = rest.partition("#")[2].strip()
    options = options_in(load())
    assert not [key for key in options if len(comments[key].split()) < 2]
    same = {key: comment.split()[1].rstrip(";") for key, comment in comments.items() if comment.startswith("as ")}
    assert len(same) > 15 and all(other in options for other in same.values())


HOLDERS = {  # what a section is called where it is read, besides its own name
    "actor": ["settings"], "critic": ["settings", "settings_of"], "ref": ["settings", "settings_of"],
    "reward_model": ["settings", "settings_of"], "reward": ["options"], "data": ["options"]}


def name_of(holder):
    """The last name of what holds options: config.actor, actor, or settings_of(role, config)."""
    holder = getattr(holder, "func", holder)
    return getattr(holder, "id", getattr(holder, "attr", None))


def reads(tree):
    """(holder, name) of each holder.name and getattr(holder, ...) in a module that is not in its checks."""
    checks = [part for part in tree.body if isinstance(part, ast.FunctionDef) and part.name.startswith("check")]
    left_out = {id(node) for part in checks for node in ast.walk(part)}
    for node in (node for node in ast.walk(tree) if id(node) not in left_out):
        if isinstance(node, ast.Attribute):
            yield name_of(node.value), node.attr
        if isinstance(node, (ast.Call, ast.DictComp)):  # of one name, or of several
            calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
            texts = [text.value for text in ast.walk(node) if isinstance(text, ast.Constant)]
            holders = [call.args[0] for call in calls if getattr(call.func, "id", None) == "getattr"]
            yield from ((name_of(holder), text) for holder in holders for text in texts)


def test_every_option_is_read_outside_the_checks():
    import algos
    found = {pair for file in ROOT.glob("*.py") for pair in reads(ast.parse(file.read_text()))}
    for section, table in (("algorithm", algos.ADVANTAGES), ("actor", algos.POLICY_LOSSES)):
        found |= {(section, option) for method in table.values() for option in algos.options_of(method)}
    for key in options_in(load()):
        section, _, name = key.rpartition(".")
        holders = [section or "config", *HOLDERS.get(section, [])]
        assert any((holder, name) in found for holder in holders), key
    assert ("actor", "lrr") not in found and ("critic", "n") not in found


# ---- the command line ----

def command(*words):
    return subprocess.run([sys.executable, "train_ppo.py", *map(str, words)], cwd=ROOT, text=True,
                          capture_output=True, timeout=PATIENCE)


def test_a_process_refuses_with_one_line_and_shows_the_config(layer):
    wrong = command("actor.lrr=1")
    assert wrong.returncode == 2 and wrong.stdout == "" and wrong.stderr.count("\n") == 1
    assert wrong.stderr.startswith("error: there is no key actor.lrr, the nearest is actor.lr (+actor.lrr=")
    right = command("seed=7", "--config", layer("actor: {lr: 3e-6}"), "--print-config", "+model.added=1")
    shown = yaml.safe_load(right.stdout)
    assert right.returncode == 0
    assert (shown["actor"]["lr"], shown["seed"], shown["model"]["added"]) == (3e-6, 7, 1)


def test_a_misspelt_key_is_answered_without_heavy_imports():
    code = "import sys, train_ppo, config; config.load(); print({'torch', 'ray'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True, timeout=PATIENCE) == "set()\n"


def test_ray_is_not_imported_before_its_environment_is_set():
    """It reads at its import whether to listen on loopback only, and train_ppo.run says so later."""
    code = ("import sys, train_ppo, config; config.from_command_line('train_ppo.py', ['--config', 'recipes/toy.yaml'])\n"
            "print('torch' in sys.modules, 'ray' in sys.modules)")
    shown = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True, timeout=PATIENCE)
    assert shown.splitlines()[-1] == "True False"


def test_commands_that_are_refused(refusal, monkeypatch, capsys):
    assert "--conf" in refusal("--conf", "recipes/toy.yaml") and "--config" in refusal("--config")
    with pytest.raises(SystemExit):
        from_command_line("train_ppo.py", ["--help"])
    assert "--sweep KEY=V1,V2" in capsys.readouterr().out
    monkeypatch.setattr(subprocess, "Popen", None)  # not one point starts if one is wrong
    for word in ("seed=1,two", "seed", "actor.lrr=1,2", "actor.mini_batch_size=64,48"):
        assert word.partition("=")[0] in refusal(*GOOD, "--sweep", word)
    monkeypatch.setattr("config.check_engine_args", lambda given: load([], [f"bad.{given}=1"]))
    assert "bad.{'x': 0}" in refusal(*GOOD, "rollout.engine_args.x=0")


def test_values_of_a_sweep():
    assert configuration.split_values("1e-6,1e-5") == ["1e-6", "1e-5"] and configuration.split_values("") == [""]
    assert configuration.split_values("[0.9,0.99],[0.8, 0.9]") == ["[0.9,0.99]", "[0.8, 0.9]"]
    assert configuration.split_values("{a:[1,2],b:3},{},x") == ["{a:[1,2],b:3}", "{}", "x"]


def test_a_sweep_runs_the_grid_and_returns_the_worst_code(layer, monkeypatch):
    commands, codes = [], [3, 0, -9, 0]
    process = SimpleNamespace(wait=lambda: codes[len(commands) - 1], terminate=lambda: None)
    monkeypatch.setattr(subprocess, "Popen", lambda argv, **_: commands.append(argv) or process)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    words = ["--sweep", "model.path=a/b,c/d", "seed=1,2", "--config", str(layer("rollout: {n: 16}"))]
    with pytest.raises(SystemExit) as ended:
        from_command_line("train_ppo.py", [*GOOD, "trainer.name=x", *words])
    assert ended.value.code == 9 and all(argv[:2] == [sys.executable, "train_ppo.py"] for argv in commands)
    points = [load([argv[2].removeprefix("--config=")], argv[3:]) for argv in commands]
    assert [(point.model.path, point.seed, point.rollout.n, point.trainer.dir) for point in points] == [
        (path, seed, 16, f"runs/x/model.path={path.replace('/', '_')},seed={seed}")
        for path in ("a/b", "c/d") for seed in (1, 2)]


@pytest.mark.parametrize("codes, tries, result", [([3, 0], 2, 0), ([3, 9, 4, 0], 3, 4), ([2, 0], 1, 2)])
def test_a_run_that_fails_is_started_again(codes, tries, result, layer, monkeypatch, tmp_path):
    """At most trainer.max_restarts=2 times, and not after wrong input (2)."""
    program = layer("import pathlib, sys; log = pathlib.Path(sys.argv[1]); done = log.read_text().splitlines()\n"
                    "log.write_text('\\n'.join([*done, ' '.join(sys.argv[2:])]))\n"
                    f"sys.exit({codes}[len(done)])", "point.py")
    log = layer("", "log")
    monkeypatch.setattr(sys, "argv", [str(program), str(log), "seed=5"])
    monkeypatch.setattr(configuration, "end_on_signals", lambda: None)  # these are pytest's
    words = "trainer.max_restarts=2", f"trainer.dir={tmp_path}/run"
    assert configuration.supervise(load([], [*GOOD, *words])) == result
    assert log.read_text().splitlines() == [f"seed=5 trainer.dir={tmp_path}/run trainer.max_restarts=0"] * tries


def test_a_sweep_that_is_interrupted_takes_its_point_with_it(layer):
    """The point is a program that shows its pid and waits; SIGINT reaches the sweep alone."""
    program = layer("import os, time; print(os.getpid(), flush=True); time.sleep(60)", "point.py")
    words = str(program), ["--sweep", "seed=1,2"]
    code = f"import config; config.check = id; config.from_command_line(*{words!r})"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL) as sweep:
        point = int(sweep.stdout.readline())
        sweep.send_signal(signal.SIGINT)
        assert sweep.wait(30) != 0 and sweep.stdout.read() == ""
    with pytest.raises(ProcessLookupError):
        os.kill(point, 0)
