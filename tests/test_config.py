"""Config: what YAML and the command line mean, what is refused and with which words, what a run writes down.

The semantics of overrides and of words are hydra 1.3.8's table (KNOWN_FAULTS.md A),
    those of files OmegaConf's."""
import math
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from omegaconf import OmegaConf

import train_ppo
from train_ppo import check, dump, load, options_in

ROOT = Path(train_ppo.__file__).parent
TABLE = "{a: {b: 1, l: [1, 2, 3]}, d: {driver: x, user: u}, model: {overrides: {}}}"
GOOD = ["model.path=org/name", "data.train=reasoning_gym:chain_sum"]
GAE = "algorithm.advantage=gae"


@pytest.fixture(autouse=True, scope="module")
def config_yaml_is_read_once():
    """OmegaConf takes 20 ms for config.yaml, which every `load` reads twice; a pickled copy takes 2."""
    base, read = pickle.dumps(OmegaConf.load(train_ppo.BASE)), OmegaConf.load
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmegaConf, "load",
            lambda file: pickle.loads(base) if file == ROOT / "config.yaml" else read(file))
        yield


@pytest.fixture
def layer(tmp_path):
    """layer(text, name) writes a YAML file and returns its path."""
    def write(text, name="layer.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path
    return write


@pytest.fixture
def table(layer, monkeypatch):
    """Puts TABLE in the place of config.yaml."""
    monkeypatch.setattr(train_ppo, "BASE", layer(TABLE, "base.yaml"))


@pytest.fixture
def refusal(capsys):
    """refusal(word, ...) runs the command line in this process and returns the line with which it refuses."""
    def run(*words):
        with pytest.raises(SystemExit) as ended:
            train_ppo.main([str(word) for word in words])
        shown = capsys.readouterr()
        assert ended.value.code == 2 and shown.out == ""
        assert len(shown.err.splitlines()) == 1 and "error: " in shown.err
        return shown.err.partition("error: ")[2]
    return run


def get(words, key, files=()):
    """What key is after these words; a plain dict where there is a section."""
    value = load(files, words)
    for part in key.split("."):
        value = (value if isinstance(value, dict) else vars(value))[part]
    return vars(value) if isinstance(value, SimpleNamespace) else value


def same(value, expected):
    return type(value) is type(expected) and (value == expected or value != value and expected != expected)


def command(*words):
    return subprocess.run([sys.executable, ROOT / "train_ppo.py", *map(str, words)], cwd=ROOT, text=True,
                          capture_output=True, timeout=120)


# ---- words ----

WORDS = [
    ("1e-6", 1e-6), ("2e-5", 2e-5), ("5e-7", 5e-7), ("1e6", 1e6), ("1E+6", 1e6), ("-1e-6", -1e-6),
    ("1.5", 1.5), (".5", 0.5), ("1.", 1.0), ("inf", math.inf), ("-inf", -math.inf), ("nan", math.nan),
    ("1", 1), ("-1", -1), ("+3", 3), ("0", 0), ("1000000", 1000000), ("true", True), ("True", True),
    ("tRuE", True), ("FALSE", False), ("null", None), ("on", "on"), ("off", "off"), ("yes", "yes"), ("no",
     "no"),
    ("y", "y"), ("12:30", "12:30"), ("007", "007"), ("0123", "0123"), ("0x1F", "0x1F"), ("1.2.3", "1.2.3"),
    ("2024-01-01", "2024-01-01"), ("e5", "e5"), ("'1e-6'", "1e-6"), ('"12"', "12"), ("'null'", "null"),
    ("x*", "x*"), ("''", ""), ("a:b", "a:b"), ("org/name", "org/name"), ("[1, a, null]", [1, "a", None]),
    ("{x: 1, y: {z: 1e3}}", {"x": 1, "y": {"z": 1000.0}}), ("{x:1,y:2}", {"x": 1, "y": 2}), ("{}", {}),
     ("[]", []),
]
TEXTS = ["Answer #1", "a #b", "two\nlines", "don't", "x=y", "task?a=1&b=2", "~/x", "a, b", "[1", "",
    "a: 'b' é"]


def test_words(monkeypatch):
    section, pairs, words = "rollout.engine_args", WORDS + [(text, text) for text in TEXTS], []
    for number, (text, _) in enumerate(pairs):
        monkeypatch.setenv(f"VALUE{number}", text)
        words += [f"{section}.word{number}={text}", f"{section}.env{number}=${{env:VALUE{number}}}"]
    found = get(words, section)
    for number, (text, expected) in enumerate(pairs):
        assert same(found[f"word{number}"], expected), text
        assert same(found[f"env{number}"], expected), text


FILED = [
    ("1e-6", 1e-6), ("2e-5", 2e-5), ("1e6", 1e6), ("1E+6", 1e6), ("-1e-6", -1e-6), ("1.5", 1.5), (".inf",
     math.inf),
    ("1", 1), ("-1", -1), ("true", True), ("FALSE", False), ("null", None), ("~", None), ("'on'", "on"),
    ("2024-01-01", "2024-01-01"), ("1.2.3", "1.2.3"), ("'1e-6'", "1e-6"), ("'null'", "null"), ("x=y", "x=y"),
]


def test_values_in_a_file(layer):
    values = ", ".join(text for text, _ in FILED)
    found = get([], "rollout.engine_args.x", [layer(f"rollout: {{engine_args: {{x: [{values}]}}}}")])
    for value, (text, expected) in zip(found, FILED, strict=True):
        assert same(value, expected), text


@pytest.mark.parametrize("text", ["rollout: {correction: off}", "trainer: {name: 12:30}",
    "trainer: {name: 007}",
                                  "data: {train: yes}", "ref: {path: None}"])
def test_what_yaml_takes_for_something_else_is_refused_where_text_belongs(text, layer, refusal):
    assert "must be str" in refusal("--config", layer(text))


@pytest.mark.parametrize("word", ["ref.path=None", "model.path=None", "pools.main.roles=[None]",
                                  "rollout.engine_args.x=None"])
def test_the_word_none_is_refused(word, refusal):
    assert word.partition("=")[0] in refusal(word) and "None is null" in refusal(word)


# ---- overrides: hydra's table ----

@pytest.mark.parametrize("words, key, expected", [
    (["a.b=2"], "a.b", 2),
    (["+a.c=2"], "a.c", 2),
    (["++a.b=2"], "a.b", 2),
    (["++a.c=2"], "a.c", 2),
    (["+e.f.g=1"], "e.f.g", 1),
    (["++e.f.g=1", "e.f.g=2"], "e.f.g", 2),
    (["a.l=[9]"], "a.l", [9]),
    (["a.l.0=7"], "a.l", [7, 2, 3]),
    (["a.l.2=7", "++a.l.0=5"], "a.l", [5, 2, 7]),
    (["d={user: root}"], "d", {"driver": "x", "user": "root"}),
    (["d={user:root}"], "d", {"driver": "x", "user": "root"}),
    (["+d={user: root}"], "d", {"driver": "x", "user": "root"}),
    (["+d.z=1"], "d", {"driver": "x", "user": "u", "z": 1}),
    (["+a.c=5", "~a.c", "+a.c=6"], "a.c", 6),
    (["a.b=2", "a.b=3"], "a.b", 3),
    (["d.user=a=b"], "d.user", "a=b"),
    (["model.overrides.x=1"], "model.overrides", {"x": 1}),
    (["model.overrides={x: {y: 1}}", "model.overrides.x.z=2"], "model.overrides.x", {"y": 1, "z": 2}),
    (["+model.overrides={x: {y: 1}}", "~model.overrides.x"], "model.overrides", {}),
])
def test_override(words, key, expected, table):
    assert get(words, key) == expected


@pytest.mark.parametrize("words, message", [
    (["a.c=2"], "there is no key a.c, the nearest is a."),
    (["a.bb=2"], "the nearest is a.b (+a.bb=... would add it)"),
    (["e.f=2"], "no key e"),
    (["d={z: 1}"], "no key d.z"),
    (["+a.b=2"], "+a.b=2 is not key=value, +new=value"),
    (["a.l.5=1"], "a.l[5]"),
    (["a.l.x=1"], "a.l"),
    (["~a.zz"], "a.zz"),
    (["~zz.a"], "'a'"),
    (["~a.b"], "no key a.b"),
    (["~a.b=1"], "is not key=value"),
    (["a.b.c=1"], "a.b={'c': 1} must be int"),
    (["a=1"], "a=1 must be dict"),
    (["++a=1"], "a=1 must be dict"),
    (["a=null"], "a=None must be dict"),
    (["a.b"], "a.b is not key=value"),
    (["+a.c"], "is not key=value"),
    (["=1"], "is not key=value"),
    (["a..b=1"], "is not key=value"),
    (["a.l=[1"], "a.l='[1' must be list"),
    (["++a.b=x"], "a.b='x' must be int"),
])
def test_override_that_is_refused(words, message, table, refusal):
    assert message in refusal(*words)


# ---- types ----

@pytest.mark.parametrize("word, expected", [
    ("actor.clip_grad=2", 2.0), ("actor.lr=1", 1.0), ("data.batch_size=16", 16), ("actor.betas=[0, 0.5]",
     [0.0, 0.5]),
    ("trainer.steps=3", 3), ("trainer.steps=null", None), ("algorithm.kl_target=1", 1.0),
    ("actor.clip_grad=inf", math.inf), ("trainer.dir=/tmp/x", "/tmp/x"), ("reward.fallback=-1", -1.0),
])
def test_type_that_fits(word, expected):
    assert same(get([word], word.partition("=")[0]), expected)


@pytest.mark.parametrize("word, wanted", [
    ("data.batch_size=8.0", "int"), ("data.batch_size=true", "int"), ("data.batch_size='8'", "int"),
    ("data.batch_size=null", "int"), ("actor.lr=true", "float"), ("actor.lr='1e-6'", "float"),
     ("actor.lr={}", "float"),
    ("data.shuffle=1", "bool"), ("data.shuffle=yes", "bool"), ("trainer.name=12", "str"),
     ("trainer.name=true", "str"),
    ("actor.betas=0.9", "list"), ("actor.betas=[a, b]", "float"), ("actor.betas.0=true", "float"),
    ("pools.main.nodes=two", "int"), ("pools.main.roles=[1]", "str"), ("pools=3", "dict"), ("pools.b=2",
     "dict"),
    ("trainer.steps=1e3", "int"), ("trainer.steps=many", "int"), ("model.path=7", "str"),
     ("rollout.kv_tokens=1.5", "int"),
    ("model.overrides=5", "dict"), ("rollout.engine_args=null", "dict"), ("data.batch_size=${actor.lr}",
     "int"),
])
def test_type_that_does_not_fit(word, wanted, refusal):
    line, key = refusal(word), word.partition("=")[0].removesuffix(".0")
    assert line.startswith(f"{key}=") and f"must be {wanted}" in line


@pytest.mark.parametrize("word", ["data.batch_size=0", "rollout.n=-1", "trainer.steps=0", "rollout.tp=0",
                                  "pools.main.nodes=0", "rollout.kv_tokens=0", "actor.mini_batch_size=0"])
def test_size_that_is_not_positive(word, refusal):
    assert refusal(word).strip() == f"{word} must be at least 1"


def test_zero_where_the_default_is_zero():
    assert load([], ["seed=0", "trainer.save_every=0", "rollout.top_k=-1"]).rollout.top_k == -1


# ---- layers ----

def test_layers_in_order(layer):
    first = layer("defaults: [sub/a.yaml, b.yaml]\nactor: {lr: 3e-6}\n", "first.yaml")
    layer("defaults: [c.yaml]\nactor: {lr: 1e-6, epochs: 2, weight_decay: 0.5}\n", "sub/a.yaml")
    layer("actor: {lr: 9e-6, epochs: 9, clip_grad: 7.0}\n", "sub/c.yaml")
    layer("actor: {weight_decay: 0.25}\n", "b.yaml")
    second = layer("seed: 5\nactor: {epochs: 4}\n", "second.yaml")
    config = load([first, second], ["seed=6"])
    assert (config.actor.lr, config.actor.epochs, config.actor.weight_decay) == (3e-6, 4, 0.25)
    assert (config.actor.clip_grad, config.seed, config.actor.betas) == (7.0, 6, [0.9, 0.999])


@pytest.mark.parametrize("text, message", [
    ("actor: {lrr: 1}", "there is no key actor.lrr, the nearest is actor.lr "),
    ("actr: {lr: 1}", "there is no key actr, the nearest is "),
    ("batch_size: 4", "the nearest is data.batch_size "),
    ("actor:\n", "actor=None must be dict"),
    ("actor: {lr: {x: 1}}", "actor.lr={'x': 1} must be float"),
    ("actor:\n  lr: 1.0\n  lr: 2.0\n", "duplicate key lr"),
    ("- 1\n- 2\n", "Cannot merge"),
    ("just text", "no key just text"),
    ("actor: [1\n", 'layer.yaml", line 2'),
    ("a: !!python/name:os.system x", "could not determine a constructor"),
    ("a: &x {b: *x}", "recursive"),
    ("defaults: [layer.yaml]", "recursion"),
    ("defaults: [nowhere.yaml]", "nowhere.yaml"),
])
def test_layer_that_is_refused(text, message, layer, refusal):
    assert message in refusal("--config", layer(text))


@pytest.mark.parametrize("text", ["", "# nothing\n", "defaults: []\n", "model: {overrides: {}}"])
def test_layer_that_says_nothing(text, layer):
    assert load([layer(text)]) == load()


def test_files_that_cannot_be_read(tmp_path, refusal):
    for path in (tmp_path / "none.yaml", tmp_path):
        assert str(path) in refusal("--config", path)
    (tmp_path / "latin.yaml").write_bytes(b"trainer: {name: caf\xe9}")
    assert "utf-8" in refusal("--config", tmp_path / "latin.yaml")


def test_what_workers_get():
    other = "{nodes: 1, devices_per_node: 2, roles: [critic]}"
    words = ["model.overrides={rope: {theta: 1e6}}", "rollout.engine_args.dtype=half", f"pools.b={other}"]
    config = pickle.loads(pickle.dumps(load([], words)))
    assert dict(config.model.overrides) == {"rope": {"theta": 1e6}}
    assert type(config.model.overrides["rope"]) is dict and type(config.actor.betas) is list
    assert config.rollout.engine_args == {"dtype": "half"}
    assert [(name, pool["nodes"] * pool["devices_per_node"]) for name, pool in config.pools.items()] == [
        ("main", 1), ("b", 2)]
    assert vars(config.actor)["lr"] == config.actor.lr == 1e-6


def test_pools_can_be_replaced():
    config = load([], ["pools.b={nodes: 2, devices_per_node: 1, roles: [actor]}", "~pools.main"])
    assert config.pools == {"b": {"nodes": 2, "devices_per_node": 1, "roles": ["actor"]}}


@pytest.mark.parametrize("word, key", [("pools.b.nodes=2", "pools.b."), ("pools.main.x=0", "pools.main.x"),
                                       ("~pools.main.roles", "pools.main.roles")])
def test_pool_that_is_not_whole(word, key, refusal):
    assert f"no key {key}" in refusal(word)


def test_yaml_anchors_share_nothing(layer):
    file = layer("actor: {betas: &b [0.5, 0.6]}\ncritic: {betas: *b}\n")
    config = load([file], ["actor.betas.0=0.1"])
    assert config.actor.betas == [0.1, 0.6] and config.critic.betas == [0.5, 0.6]
    assert "&" not in dump(load([file]))


# ---- references ----

@pytest.mark.parametrize("words, key, expected", [
    (["critic.path=${model.path}", "model.path=m"], "critic.path", "m"),
    (["critic.lr=${actor.lr}", "actor.lr=3e-6"], "critic.lr", 3e-6),
    (["critic.betas=${actor.betas}", "actor.betas=[0.1, 0.2]"], "critic.betas", [0.1, 0.2]),
    (["actor.lr=${critic.lr}", "critic.lr=${actor.min_lr_ratio}", "actor.min_lr_ratio=0.5"], "actor.lr", 0.5),
    (["trainer.name=lr-${actor.lr}-n${rollout.n}", "actor.lr=1e-6"], "trainer.name", "lr-1e-06-n8"),
    (["trainer.name=${trainer.dir}x${trainer.dir}", "trainer.dir=a"], "trainer.name", "axa"),
    (["actor.lr=${env:LR}"], "actor.lr", 1e-5),
    (["actor.lr=${env:LR,3.0}"], "actor.lr", 1e-5),
    (["actor.lr=${env:UNSET,3e-6}"], "actor.lr", 3e-6),
    (["actor.lr=${env:UNSET,${critic.lr}}", "critic.lr=0.25"], "actor.lr", 0.25),
    (["actor.betas=${env:UNSET,[0.5, 0.6]}"], "actor.betas", [0.5, 0.6]),
    (["trainer.name=run-${env:LR}"], "trainer.name", "run-1e-05"),
    (["trainer.dir=${env:UNSET,null}"], "trainer.dir", None),
    (["+model.overrides.theta=${env:LR}"], "model.overrides", {"theta": 1e-5}),
])
def test_reference(words, key, expected, monkeypatch, layer):
    monkeypatch.setenv("LR", "1e-5")
    monkeypatch.delenv("UNSET", raising=False)
    assert same(get(words, key), expected)
    if words[0][0] != "+":
        path, _, value = words[0].partition("=")
        section, name = path.split(".")
        file = layer(f'{section}: {{{name}: "{value}"}}')
        assert same(get(words[1:], key, [file]), expected)


@pytest.mark.parametrize("words, messages", [
    (["critic.path=${model.pth}"], ["critic.path", "'model.pth' not found"]),
    (["critic.path=${model}"], ["critic.path=", "must be str"]),
    (["trainer.dir=${trainer.dir}"], ["trainer.dir", "Recursive"]),
    (["trainer.dir=${ref.path}", "ref.path=${critic.path}", "critic.path=x${ref.path}"], ["Recursive"]),
    (["trainer.name=${env:UNSET}"], ["trainer.name", "UNSET"]),
    (["trainer.name=${trainer.dir"], ["trainer.name", "${trainer.dir"]),
    (["data.batch_size=${env:WORD}"], ["data.batch_size='None' must be int"]),
])
def test_reference_that_is_refused(words, messages, monkeypatch, refusal):
    monkeypatch.setenv("WORD", "None")
    monkeypatch.delenv("UNSET", raising=False)
    line = refusal(*words)
    assert all(message in line for message in messages), line


# ---- the written config ----

def test_written_config_gives_the_same_config(layer, monkeypatch):
    monkeypatch.setenv("NAME", "'1e5'")
    overrides = "{a: {b: [1, {c: '007'}]}, d: 'true', e: 'null', f: 'yes', g: '', h: '1:30', i: 'inf'}"
    words = ["trainer.name=${env:NAME}", "actor.clip_grad=inf", "actor.lr=1e-7", "data.val='12'", "ref.path=on",
             "data.system=a: 'b' # é\n ☃\t", f"model.overrides={overrides}", "model.path='~'",
             "pools.b={nodes: 1, devices_per_node: 2, roles: [critic]}", "critic.path=${model.path}"]
    config = load([], words)
    again = load([layer(dump(config))])
    assert again == config and repr(again) == repr(config)
    assert again.trainer.name == "1e5" and again.actor.clip_grad == math.inf
    assert yaml.safe_load(dump(config))["actor"]["lr"] == 1e-7
    assert list(options_in(again)) == list(options_in(config))


def test_loading_leaves_no_trace():
    before = dump(load())
    load([], ["actor.betas.0=0.1", "model.overrides.x=1", "pools.main.nodes=2", "+trainer.x=1"])
    assert dump(load()) == before


# ---- cross-checks ----

@pytest.mark.parametrize("words", [
    [],
    [GAE, "critic.lr=1e-3", "algorithm.lam=0.9", "rollout.n=1", "actor.mini_batch_size=8",
        "critic.mini_batch_size=8"],
    ["algorithm.advantage=rloo"], ["algorithm.advantage=remax", "rollout.n=1", "actor.mini_batch_size=8"],
    ["actor.policy_loss=gspo"], ["actor.kl_coef=0.1", "ref.compute_dtype=bfloat16", "actor.kl_estimator=k1+"],
    ["algorithm.kl_in_reward=true", "algorithm.kl_target=0.1"], ["pools.main.devices_per_node=4",
        "rollout.tp=2"],
    ["pools.main.roles=[actor, rollout]"], ["model.overrides.n=0"], ["+trainer.mine=1"], ["launch=local"],
    ["pools.main.roles=[actor, rollout]", "pools.x={nodes: 1, devices_per_node: 1, roles: [critic]}", GAE],
    ["actor.old_logprobs=skip"], ["actor.old_logprobs=rollout", "actor.mini_batch_size=32", "actor.epochs=2"],
    ["rollout.correction=off"], ["rollout.correction=token", "rollout.correction_cap=3"],
    ["model.path=recipes/toy.py:build"],
])
def test_check_passes(words):
    check(load([], GOOD + words))


@pytest.mark.parametrize("words, messages", [
    (["model.path=null"], ["model.path=None"]),
    (["data.train=null"], ["data.train=None"]),
    (["model.path=/no/such/folder"], ["model.path='/no/such/folder'", "is_dir"]),
    (["model.path=tests/nowhere"], ["model.path='tests/nowhere'"]),
    (["critic.path=./nowhere", GAE], ["critic.path='./nowhere'"]),
    (["model.tokenizer=/nowhere"], ["model.tokenizer='/nowhere'"]),
    (["model.path=nowhere.py:build"], ["model.path=nowhere.py:build", "no file"]),
    (["model.path=recipes/toy.py:nothing"], ["model.path=", "no function"]),
    (["data.train=nowhere.jsonl"], ["data.train=nowhere.jsonl"]),
    (["data.val=nowhere.parquet"], ["data.val=nowhere.parquet"]),
    (["reward.function=exactly"], ["reward.function=exactly"]),
    *((["rollout.n=1", "actor.mini_batch_size=8", f"algorithm.advantage={name}"], ["rollout.n=1",
        "rollout.n > 1"])
      for name in ("grpo", "rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus_baseline")),
    (["rollout.temperature=0"], ["rollout.temperature=0.0", "rollout.temperature > 0"]),
    (["actor.mini_batch_size=48"], ["actor.mini_batch_size=48", "data.batch_size=8", "rollout.n=8"]),
    (["actor.mini_batch_size=128"], ["actor.mini_batch_size=128"]),
    (["critic.mini_batch_size=48", GAE], ["critic.mini_batch_size=48"]),
    (["actor.max_tokens_per_device=767"], ["actor.max_tokens_per_device=767", "data.max_prompt_length=512"]),
    (["critic.max_tokens_per_device=767", GAE], ["critic.max_tokens_per_device=767"]),
    (["rollout.correction=mask"], ["rollout.correction='mask'", "sequence-mask"]),
    (["launch=slurm"], ["launch='slurm'", "'ray', 'local'"]),
    (["algorithm.advantage=grop"], ["algorithm.advantage='grop'", "grpo"]),
    (["actor.policy_loss=pop"], ["actor.policy_loss='pop'", "ppo"]),
    (["actor.loss_agg=mean"], ["actor.loss_agg='mean'", "token-mean"]),
    (["data.overlong=drop"], ["data.overlong='drop'", "filter"]),
    (["actor.schedule=linear"], ["actor.schedule='linear'", "cosine"]),
    (["actor.kl_estimator=k4"], ["actor.kl_estimator='k4'", "k3"]),
    (["algorithm.lam=0.9"], ["algorithm.lam=0.9", "algorithm.advantage='grpo'", "['gae']"]),
    (["algorithm.gamma=0.9"], ["algorithm.gamma=0.9", "reinforce_plus_plus"]),
    (["algorithm.advantage=rloo", "algorithm.norm_adv_by_std=false"], ["algorithm.norm_adv_by_std=False"]),
    (["actor.policy_loss=gspo", "actor.clip_ratio_c=4.0"], ["actor.clip_ratio_c=4.0",
     "actor.policy_loss='gspo'"]),
    (["actor.policy_loss=gpg", "actor.clip_ratio_high=0.28"], ["actor.clip_ratio_high=0.28"]),
    (["critic.lr=1e-3"], ["critic", "algorithm.advantage='grpo'"]),
    (["ref.path=org/name"], ["ref == default.ref"]),
    (["pools.main.roles=[actor]"], ["pools=", "'rollout'"]),
    (["pools.main.roles=[actor, rollout]", GAE], ["'critic'"]),
    (["pools.main.roles=[actor, rollout]", "actor.kl_coef=0.1"], ["'ref'"]),
    (["pools.b={nodes: 1, devices_per_node: 1, roles: [actor]}"], ["'actor'"]),
    (["~pools.main"], ["pools={}"]),
    (["rollout.tp=2"], ["rollout.tp=2"]),
    (["rollout.tp=2", "pools.main.devices_per_node=3"], ["rollout.tp=2", "'devices_per_node': 3"]),
    (["launch=local", "pools.main.devices_per_node=2"], ["launch='local'"]),
    (["actor.old_logprobs=engine"], ["actor.old_logprobs='engine'", "'recompute', 'rollout', 'skip'"]),
    (["actor.old_logprobs=skip", "actor.mini_batch_size=32"], ["actor.old_logprobs='skip'",
     "actor.mini_batch_size=32"]),
    (["actor.old_logprobs=skip", "actor.epochs=2"], ["actor.old_logprobs='skip'", "actor.epochs=2"]),
    (["actor.old_logprobs=skip", "rollout.correction=token"], ["actor.old_logprobs='skip'",
     "rollout.correction='token'"]),
    (["actor.old_logprobs=skip", "algorithm.kl_in_reward=true"], ["algorithm.kl_in_reward=True"]),
])
def test_check_refuses(words, messages, refusal):
    line = refusal(*GOOD, *words)
    assert all(message in line for message in messages), line


# ---- the command line ----

def test_print_config(layer, capsys):
    words = ["seed=7", "--config", str(layer("actor: {lr: 3e-6}")), "--print-config", "+model.added=1",
        "rollout.top_k=-1"]
    assert not train_ppo.main(words)
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["actor"]["lr"] == 3e-6 and shown["seed"] == 7 and shown["model"]["added"] == 1


@pytest.mark.parametrize("words, message", [
    (["--verbose"], "unrecognized arguments: --verbose"), (["--conf", "recipes/toy.yaml"],
     "unrecognized arguments"),
    (["--config"], "--config"), (["--sweep", "actor.lrr=1,2"], "no key actor.lrr"),
])
def test_command_that_is_refused(words, message, refusal):
    assert message in refusal(*words)


def test_a_process_refuses_with_one_line_and_code_2():
    result = command("actor.lrr=1")
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: there is no key actor.lrr, the nearest is actor.lr (+actor.lrr=")
    assert len(result.stderr.splitlines()) == 1


def test_engine_arguments_are_checked(monkeypatch, refusal):
    def refuse(engine_args):
        raise ValueError(f"checked {engine_args}")

    monkeypatch.setitem(sys.modules, "rollout", SimpleNamespace(check_engine_args=refuse))
    assert refusal(*GOOD, "rollout.engine_args.n=0") == "checked {'n': 0}\n"


def test_help(capsys):
    with pytest.raises(SystemExit) as ended:
        train_ppo.main(["--help"])
    shown = capsys.readouterr().out
    assert not ended.value.code
    assert all(option in shown for option in ("--config", "--sweep", "--print-config", "+pools.b"))


def test_the_config_is_read_without_heavy_imports():
    code = "import sys, train_ppo; train_ppo.load(); print({'torch', 'ray'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True, timeout=90) == "set()\n"


# ---- sweeps ----

@pytest.fixture
def points(monkeypatch):
    """points(word, ...) sweeps, without processes: the points' configs, the exit code."""
    def run(*words, codes=(0,)):
        configs, left = [], list(codes)

        class Process:
            def __init__(self, argv):
                assert argv[:2] == [sys.executable, train_ppo.__file__]
                files = [word.removeprefix("--config=") for word in argv[2:] if word.startswith("--config=")]
                configs.append(load(files, argv[2 + len(files):]))

            def wait(self):
                return left.pop(0) if left else 0

        monkeypatch.setattr(train_ppo.subprocess, "Popen", Process)
        code = train_ppo.main(list(words))
        return configs, code
    return run


def test_sweep_runs_the_grid_and_says_if_a_point_failed(points, layer):
    file = str(layer("rollout: {n: 5}"))
    words = ["trainer.name=x", "--sweep", "actor.lr=1e-6,1e-5", "seed=1,2", "--config", file]
    configs, code = points(*words, codes=[3, 0])
    assert code == 1
    found = [(config.actor.lr, config.seed, config.rollout.n, config.trainer.dir) for config in configs]
    assert found == [(float(lr), seed, 5, f"runs/x/actor.lr={lr},seed={seed}")
                     for lr in ("1e-6", "1e-5") for seed in (1, 2)]


def test_sweep_within_a_directory_over_paths(points):
    configs, code = points("trainer.dir=/tmp/s", "--sweep", "ref.path=a/b,c")
    assert code == 0
    assert [config.trainer.dir for config in configs] == ["/tmp/s/ref.path=a_b", "/tmp/s/ref.path=c"]


@pytest.mark.parametrize("word", ["seed=1,two", "seed", "seed="])
def test_sweep_with_a_wrong_word_starts_nothing(word, refusal, monkeypatch):
    monkeypatch.setattr(train_ppo.subprocess, "Popen", None)
    refusal("--sweep", word)


def test_sweep_in_processes(layer):
    script = layer(f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import train_ppo
train_ppo.__file__, train_ppo.check = __file__, lambda config: None
train_ppo.run = lambda config: print(config.seed, config.trainer.dir, flush=True)
sys.exit(train_ppo.main())
""", "fake.py")
    words = [sys.executable, script, "--sweep", "seed=1,2"]
    result = subprocess.run(words, text=True, capture_output=True, timeout=120)
    assert result.returncode == 0 and result.stdout == "1 runs/run/seed=1\n2 runs/run/seed=2\n"
