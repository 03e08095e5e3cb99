"""Config: what YAML and the command line mean, what is refused and with which words, what a run writes down.

The semantics of overrides are hydra 1.3.8's table (KNOWN_FAULTS.md A), those of scalars YAML 1.2's."""
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import train_ppo
from train_ppo import ConfigError, check, dump, flatten, load

ROOT = Path(train_ppo.__file__).parent
TABLE = "{a: {b: 1, l: [1, 2, 3]}, d: {driver: x, user: u}, model: {overrides: {}}}"
MISSING = object()


@pytest.fixture
def layer(tmp_path):
    """layer(text, name) writes a YAML file and returns its path."""
    def write(text, name="layer.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path
    return write


def get(config, key):
    return flatten(config).get(key, MISSING)


def same(value, expected):
    return type(value) is type(expected) and (value == expected or value != value and expected != expected)


def command(*words, **kwargs):
    return subprocess.run([sys.executable, ROOT / "train_ppo.py", *map(str, words)], cwd=ROOT, text=True,
                          capture_output=True, timeout=120, **kwargs)


# ---- scalars: the same in a file, on the command line, in a list, from the environment ----

SCALARS = [
    ("1e-6", 1e-6), ("2e-5", 2e-5), ("5e-7", 5e-7), ("1e6", 1e6), ("1E+6", 1e6), ("-1e-6", -1e-6),
    ("1.5", 1.5),
    (".5", 0.5), ("1.", 1.0), ("inf", math.inf), ("-inf", -math.inf), (".inf", math.inf), ("nan", math.nan),
    ("1", 1), ("-1", -1), ("+3", 3), ("0", 0), ("1000000", 1000000),
    ("true", True), ("True", True), ("tRuE", True), ("FALSE", False), ("null", None), ("~", None),
    ("on", "on"), ("off", "off"), ("yes", "yes"), ("no", "no"), ("y", "y"), ("12:30", "12:30"),
    ("007", "007"),
    ("0123", "0123"), ("0x1F", "0x1F"), ("2024-01-01", "2024-01-01"), ("1.2.3", "1.2.3"), ("e5", "e5"),
    ("'1e-6'", "1e-6"), ('"12"', "12"), ("'null'", "null"), ("'true'", "true"), ("x=y", "x=y"), ("''", ""),
]


@pytest.mark.parametrize("text, expected", SCALARS)
def test_scalar_means_the_same_wherever_it_stands(text, expected, layer, monkeypatch):
    base = layer("rollout: {engine_args: {}}", "base.yaml")
    monkeypatch.setenv("VALUE", text)
    key = "rollout.engine_args"
    config = load([layer(f"rollout:\n  engine_args:\n    file: {text}\n    list: [{text}]\n")],
                  [f"{key}.word={text}", f"{key}.words=[{text}]", f"{key}.dict={{x: {text}}}",
                   f"{key}.env=${{env:VALUE}}", f"{key}.default=${{env:NO_SUCH_VARIABLE,{text}}}"], base=base)
    found = config.rollout.engine_args
    values = [found[name] for name in ("file", "word", "env", "default")] + found["list"] + found["words"]
    values.append(found["dict"]["x"])
    assert all(same(value, expected) for value in values), values


@pytest.mark.parametrize("text", ["Answer #1", "a #b", "two\nlines", "don't", "a:b", "x*"])
def test_text_without_quotes_is_kept_to_the_letter(text):
    assert load([], [f"data.system={text}"]).data.system == text


def test_words_of_two_systems():
    config = load([], ["actor.lr=1e-5", "ref.path=null", "data.shuffle=False", "trainer.name=on"])
    assert same(config.actor.lr, 1e-5) and config.ref.path is None
    assert config.data.shuffle is False and config.trainer.name == "on"


@pytest.mark.parametrize("word", ["ref.path=None", "model.path=None", "ref.path='None'", "trainer.name=None",
                                  "rollout.engine_args.x=None", "pools.main.roles=[None]"])
def test_the_word_none_is_refused(word):
    with pytest.raises(ConfigError, match=r"None is written null"):
        load([], [word])


def test_the_word_none_is_refused_in_a_file(layer):
    with pytest.raises(ConfigError, match=r"ref\.path=None: None is written null"):
        load([layer("ref: {path: None}")])


# ---- overrides: hydra's table ----

@pytest.mark.parametrize("words, key, expected", [
    (["a.b=2"], "a.b", 2),
    (["+a.c=2"], "a.c", 2),
    (["++a.b=2"], "a.b", 2),
    (["++a.c=2"], "a.c", 2),
    (["+e.f.g=1"], "e.f.g", 1),
    (["++e.f.g=1"], "e.f.g", 1),
    (["a.l=[9]"], "a.l", [9]),
    (["a.l=[]"], "a.l", []),
    (["a.l.0=7"], "a.l", [7, 2, 3]),
    (["a.l.2=7", "++a.l.0=5"], "a.l", [5, 2, 7]),
    (["d={user: root}"], "d.user", "root"),
    (["d={user: root}"], "d.driver", "x"),
    (["+d={user: root, z: 1}"], "d.driver", "x"),
    (["+d={user: root, z: 1}"], "d.z", 1),
    (["++d={user: root, z: 1}"], "d.user", "root"),
    (["~a.b"], "a.b", MISSING),
    (["~a"], "a.l", MISSING),
    (["~a.b", "+a.b=5"], "a.b", 5),
    (["a.b=2", "a.b=3"], "a.b", 3),
    (["d.user=a=b"], "d.user", "a=b"),
    (["a.b=-1"], "a.b", -1),
    (["model.overrides.x=1"], "model.overrides.x", 1),
    (["model.overrides={x: {y: 1}}", "model.overrides.x.z=2"], "model.overrides.x.y", 1),
    (["model.overrides={x: {y: 1}}", "~model.overrides.x"], "model.overrides", {}),
])
def test_override(words, key, expected, layer):
    assert get(load([], words, base=layer(TABLE)), key) == expected


@pytest.mark.parametrize("words, message", [
    (["a.c=2"], r"^a\.c=2: there is no key a\.c, the nearest is a\.\w.*\+a\.c"),
    (["a.bb=2"], r"nearest is a\.b "),
    (["e.f=2"], r"no key e\.f"),
    (["d={z: 1}"], r"no key d\.z"),
    (["+a.b=2"], r"^\+a\.b=2: the key is there already, as 1"),
    (["a.l.5=1"], r"no key a\.l\.5"),
    (["+a.l.5=1"], r"a\.l=\[1, 2, 3\]: a key has either a value or keys below it"),
    (["a.l.-1=1"], r"no key a\.l\.-1"),
    (["a.l.x=1"], r"no key a\.l\.x"),
    (["~a.zz"], r"~a\.zz: there is no key a\.zz"),
    (["~a.l.0"], r"no key a\.l\.0"),
    (["~a.b=1"], r"an override is key=value"),
    (["a.b.c=1"], r"no key a\.b\.c"),
    (["+a.b.c=1"], r"a\.b=1: a key has either a value or keys below it"),
    (["++a.b.c=1"], r"a\.b=1: a key has either a value or keys below it"),
    (["a=1"], r"no key a,"),
    (["+a=1"], r"a=1: a key has either a value or keys below it"),
    (["a=null"], r"no key a,"),
    (["a.b"], r"^a\.b: an override is key=value"),
    (["+a.c"], r"an override is key=value"),
    (["=1"], r"an override is key=value"),
    (["a..b=1"], r"an override is key=value"),
    (["+++a.c=1"], r"an override is key=value"),
    (["d={user:root}"], r"^d=\{user:root\}: the key user:root .*space after its colon"),
    (["d={driver:x,user:root}"], r"space after its colon"),
    (["d={user: a, user: b}"], r"the key user stands here twice"),
    (["a.l=[1"], r"^a\.l=\[1: "),
    (["model.overrides.x=1", "model.overrides.x.y=1"], r"either a value or keys below it"),
])
def test_override_that_is_refused(words, message, layer):
    with pytest.raises(ConfigError, match=message):
        load([], words, base=layer(TABLE))


# ---- types ----

@pytest.mark.parametrize("word, expected", [
    ("actor.clip_grad=2", 2.0), ("actor.lr=1", 1.0), ("data.batch_size=16", 16),
    ("actor.betas=[0, 0.5]", [0.0, 0.5]),
    ("trainer.steps=3", 3), ("trainer.steps=null", None), ("algorithm.kl_target=1", 1.0),
    ("actor.clip_grad=inf", math.inf),
    ("trainer.dir=/tmp/x", "/tmp/x"), ("rollout.engine_args.x=1e3", 1000.0),
    ("rollout.engine_args.x=[1, a, null]", [1, "a", None]),
])
def test_type_that_fits(word, expected):
    assert same(get(load([], [word]), word.partition("=")[0]), expected)


@pytest.mark.parametrize("word, found, wanted", [
    ("data.batch_size=8.0", "float", "int"), ("data.batch_size=1e6", "float", "int"),
    ("data.batch_size=true", "bool", "int"),
    ("data.batch_size='8'", "str", "int"), ("data.batch_size=eight", "str", "int"),
    ("data.batch_size=null", "NoneType", "int"),
    ("actor.lr=true", "bool", "float"), ("actor.lr='1e-6'", "str", "float"),
    ("actor.lr=[1e-6]", "list", "float"),
    ("actor.lr={}", "dict", "float"), ("data.shuffle=1", "int", "bool"), ("data.shuffle=yes", "str", "bool"),
    ("trainer.name=12", "int", "str"), ("trainer.name=true", "bool", "str"),
    ("actor.betas=0.9", "float", "list"),
    ("actor.betas=[a, b]", "str", "float"), ("actor.betas.0=true", "bool", "float"),
    ("pools.main.nodes=two", "str", "int"),
    ("pools.main.roles=[1]", "int", "str"), ("trainer.steps=1e3", "float", "int"),
    ("trainer.steps=many", "str", "int"),
    ("model.path=7", "int", "str"), ("model.path={}", "dict", "str"),
    ("rollout.kv_tokens=1.5", "float", "int"),
    ("model.overrides=5", "int", "dict"), ("rollout.engine_args=null", "NoneType", "dict"),
])
def test_type_that_does_not_fit(word, found, wanted):
    with pytest.raises(ConfigError) as error:
        load([], [word])
    assert f"is of type {found}, must be {wanted}" in str(error.value)
    assert str(error.value).startswith(word.partition("=")[0].removesuffix(".0") + "=")


# ---- layers ----

def test_layers_in_order(layer):
    first = layer("defaults: [sub/a.yaml, b.yaml]\nactor: {lr: 3e-6}\n", "first.yaml")
    layer("defaults: [c.yaml]\nactor: {lr: 1e-6, epochs: 2, weight_decay: 0.5}\n", "sub/a.yaml")
    layer("actor: {lr: 9e-6, epochs: 9, clip_grad: 7.0}\n", "sub/c.yaml")
    layer("actor: {weight_decay: 0.25}\n", "b.yaml")
    second = layer("seed: 5\nactor.epochs: 4\n", "second.yaml")
    config = load([first, second], ["seed=6"])
    assert (config.actor.lr, config.actor.epochs, config.actor.weight_decay) == (3e-6, 4, 0.25)
    assert (config.actor.clip_grad, config.seed) == (7.0, 6)
    assert config.actor.betas == [0.9, 0.999]


@pytest.mark.parametrize("text, message", [
    ("actor: {lrr: 1}", r"layer\.yaml: there is no key actor\.lrr, the nearest is actor\.lr "),
    ("actr: {lr: 1}", r"layer\.yaml: there is no key actr\.lr, the nearest is actor\.lr"),
    ("actor:\n", r"layer\.yaml: there is no key actor,"),
    ("actor: {lr: {x: 1}}", r"no key actor\.lr\.x"),
    ("actor:\n  lr: 1.0\n  lr: 2.0\n", r"the key lr stands here twice.*line 2"),
    ("- 1\n- 2\n", r"must be a mapping"),
    ("just text", r"must be a mapping"),
    ("actor: [1\n", r"layer\.yaml: .*line 2"),
    ("a: !!python/name:os.system x", r"layer\.yaml: could not determine a constructor"),
    ("a: &x {b: *x}", r"layer\.yaml: "),
    ("defaults: [layer.yaml]", r"its defaults lead back to it"),
    ("defaults: other.yaml", r"layer\.yaml: defaults='other.yaml' is of type str, must be list"),
    ("defaults: null", r"layer\.yaml: defaults=None is of type NoneType, must be list"),
    ("defaults: [1]", r"layer\.yaml: defaults=1 is of type int, must be str"),
    ("defaults: [nowhere.yaml]", r"nowhere\.yaml: No such file"),
])
def test_layer_that_is_refused(text, message, layer):
    with pytest.raises(ConfigError, match=message.replace(".*", r"[\s\S]*")):
        load([layer(text)])


def test_defaults_in_a_circle(layer):
    layer("defaults: [b.yaml]", "a.yaml")
    layer("defaults: [./a.yaml]", "b.yaml")
    with pytest.raises(ConfigError, match="lead back"):
        load([layer("defaults: [a.yaml]")])


@pytest.mark.parametrize("text", ["", "# nothing\n", "defaults: []\n", "model: {overrides: {}}"])
def test_layer_that_says_nothing(text, layer):
    assert load([layer(text)]) == load()


def test_files_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            load([path])
    (tmp_path / "latin.yaml").write_bytes(b"trainer: {name: caf\xe9}")
    with pytest.raises(ConfigError, match="latin.yaml"):
        load([tmp_path / "latin.yaml"])


def test_free_sections_stay_dicts(layer):
    config = load([layer("model: {overrides: {rope_scaling: {factor: 2.0}}}")], ["rollout.engine_args.x=1"])
    assert config.model.overrides == {"rope_scaling": {"factor": 2.0}}
    assert config.rollout.engine_args == {"x": 1}
    assert isinstance(config.actor, SimpleNamespace)
    assert load().rollout.engine_args == {}


def test_pools(layer):
    main = {"nodes": 1, "devices_per_node": 1, "roles": ["actor", "rollout", "critic", "ref"]}
    assert load().pools == {"main": main}
    assert load([], ["pools.main.devices_per_node=8"]).pools == {"main": {**main, "devices_per_node": 8}}
    other = {"nodes": 2, "devices_per_node": 4, "roles": ["critic"]}
    words = ["pools.b={nodes: 2, devices_per_node: 4, roles: [critic]}", "pools.main.roles=[actor, rollout]"]
    assert load([], words).pools == {"main": {**main, "roles": ["actor", "rollout"]}, "b": other}
    file = layer("pools: {main: {nodes: 3}, b: {nodes: 2, devices_per_node: 4, roles: [critic]}}")
    assert load([file], ["~pools.main"]).pools == {"b": other}
    assert load([file]).pools == {"main": {**main, "nodes": 3}, "b": other}


def test_yaml_anchors_share_nothing(layer):
    config = load([layer("actor: {betas: &b [0.5, 0.6]}\ncritic: {betas: *b}\n")], ["actor.betas.0=0.1"])
    assert config.actor.betas == [0.1, 0.6] and config.critic.betas == [0.5, 0.6]
    assert "&" not in dump(load([layer("actor: {betas: &b [0.5, 0.6]}\ncritic: {betas: *b}\n")]))


# ---- references ----

@pytest.mark.parametrize("words, key, expected", [
    (["critic.path=${model.path}", "model.path=m"], "critic.path", "m"),
    (["critic.lr=${actor.lr}", "actor.lr=3e-6"], "critic.lr", 3e-6),
    (["critic.betas=${actor.betas}", "actor.betas=[0.1, 0.2]"], "critic.betas", [0.1, 0.2]),
    (["actor.lr=${critic.lr}", "critic.lr=${actor.min_lr_ratio}", "actor.min_lr_ratio=0.5"], "actor.lr", 0.5),
    (["trainer.name=lr-${actor.lr}-n${rollout.n}-${data.shuffle}-${data.val}", "actor.lr=1e-6"],
     "trainer.name",
     "lr-1e-06-n8-true-null"),
    (["trainer.name=${trainer.dir}x${trainer.dir}", "trainer.dir=a"], "trainer.name", "axa"),
    (["actor.betas=['${actor.min_lr_ratio}', 0.5]"], "actor.betas", [0.0, 0.5]),
    (["actor.lr=${env:LR}"], "actor.lr", 1e-5),
    (["actor.lr=${env:LR,3.0}"], "actor.lr", 1e-5),
    (["actor.lr=${env:UNSET,3e-6}"], "actor.lr", 3e-6),
    (["actor.lr=${env:UNSET,${critic.lr}}", "critic.lr=0.25"], "actor.lr", 0.25),
    (["actor.lr=${env:REFERS}", "critic.lr=0.25"], "actor.lr", 0.25),
    (["actor.betas=${env:UNSET,[0.5, 0.6]}"], "actor.betas", [0.5, 0.6]),
    (["trainer.name=run-${env:LR}"], "trainer.name", "run-1e-05"),
    (["trainer.dir=${env:UNSET,}"], "trainer.dir", None),
])
def test_reference(words, key, expected, monkeypatch):
    monkeypatch.setenv("LR", "1e-5")
    monkeypatch.setenv("REFERS", "${critic.lr}")
    monkeypatch.delenv("UNSET", raising=False)
    assert same(get(load([], words), key), expected)


@pytest.mark.parametrize("words, message", [
    (["critic.path=${model.pth}"], r"^critic\.path=.*no key model\.pth, the nearest is model\.path"),
    (["critic.path=${model}"], r"no key model,"),
    (["trainer.dir=${trainer.dir}"], r"^trainer\.dir=.*trainer\.dir refers to itself"),
    (["trainer.dir=${ref.path}", "ref.path=${critic.path}", "critic.path=x${ref.path}"], r"refers to itself"),
    (["trainer.dir=${env:LOOP}"], r"refers to itself"),
    (["trainer.name=${env:UNSET}"], r"^trainer\.name=\$\{env:UNSET\}: .*env:UNSET"),
    (["trainer.name=${trainer.dir"], r"^trainer\.name=.*needs its }"),
    (["trainer.name=${}"], r"^trainer\.name="),
    (["data.batch_size=${actor.lr}"], r"^data\.batch_size=1e-06 is of type float, must be int"),
    (["data.batch_size=${env:WORD}"], r"^data\.batch_size='None'|None is written null"),
    (["data.batch_size=${env:BROKEN}"], r"^data\.batch_size="),
])
def test_reference_that_is_refused(words, message, monkeypatch):
    monkeypatch.setenv("LOOP", "${env:LOOP}")
    monkeypatch.setenv("WORD", "None")
    monkeypatch.setenv("BROKEN", "[1")
    monkeypatch.delenv("UNSET", raising=False)
    with pytest.raises(ConfigError, match=message):
        load([], words)


# ---- the written config ----

def test_written_config_gives_the_same_config(layer, monkeypatch):
    monkeypatch.setenv("NAME", "'1e5'")
    words = ["trainer.name=${env:NAME}", "actor.clip_grad=inf", "actor.lr=1e-7",
     "data.system=\"a: 'b' # é\\n ☃\\t\"",
             "model.overrides={a: {b: [1, {c: '007'}]}, d: 'true', e: 'null', f: 'yes', g: ''}",
              "data.val='12'",
             "pools.b={nodes: 1, devices_per_node: 2, roles: [reward]}", "critic.path=${model.path}",
              "model.path='~'"]
    config = load([], words)
    again = load([layer(dump(config))])
    assert again == config and repr(again) == repr(config)
    assert again.trainer.name == "1e5" and again.actor.clip_grad == math.inf
    assert list(flatten(again)) == list(flatten(config))


def test_written_config_reads_the_same_elsewhere():
    assert yaml.safe_load(dump(load()))["actor"]["lr"] == 1e-6


def test_loading_leaves_no_trace():
    before = dump(load())
    load([], ["actor.betas.0=0.1", "model.overrides.x=1", "pools.main.nodes=2"])
    assert dump(load()) == before


# ---- cross-checks ----

GOOD = ["model.path=org/name", "data.train=reasoning_gym:chain_sum"]
GAE = "algorithm.advantage=gae"


@pytest.mark.parametrize("words", [
    [], [GAE, "critic.lr=1e-3", "algorithm.lam=0.9", "rollout.n=1", "actor.mini_batch_size=8",
     "critic.mini_batch_size=8"],
    ["algorithm.advantage=rloo"], ["algorithm.advantage=remax", "rollout.n=1", "actor.mini_batch_size=8"],
    ["actor.policy_loss=gspo"], ["actor.kl_coef=0.1", "ref.compute_dtype=bfloat16", "actor.kl_estimator=k1+"],
    ["algorithm.kl_in_reward=true", "algorithm.kl_target=0.1", "algorithm.kl_horizon=100"],
    ["pools.main.devices_per_node=4", "rollout.tp=2"], ["rollout.engine_args.dtype=half",
     "rollout.engine_args.n=0"],
    ["pools.main.roles=[actor, rollout]"], ["actor.schedule=cosine", "actor.min_lr_ratio=0.1"],
    ["model.overrides.n=0"], ["pools.main.roles=[actor, rollout]",
     "pools.x={nodes: 1, devices_per_node: 1, roles: [critic]}",
                              GAE],
])
def test_check_passes(words):
    check(load([], GOOD + words))


@pytest.mark.parametrize("words, message", [
    (["model.path=null"], r"^model\.path=None: is required"),
    (["data.train=null"], r"^data\.train=None: is required"),
    (["model.path=/no/such/folder"], r"^model\.path='/no/such/folder': must be a folder"),
    (["model.path=tests/nowhere"], r"^model\.path='tests/nowhere': must be a folder"),
    (["critic.path=./nowhere", GAE], r"^critic\.path='\./nowhere': must be a folder"),
    (["model.path=nowhere.py:build"], r"^model\.path=nowhere\.py:build: there is no file"),
    (["model.path=train_ppo.py:build"], r"^model\.path=.* no function 'build'"),
    (["data.train=nowhere.jsonl"], r"^data\.train=nowhere\.jsonl"),
    (["data.val=nowhere.parquet"], r"^data\.val=nowhere\.parquet"),
    (["reward.function=exactly"], r"^reward\.function=exactly"),
    (["rollout.n=1", "actor.mini_batch_size=8"], r"^rollout\.n=1: must be above 1 for grpo"),
    (["rollout.n=1", "actor.mini_batch_size=8", "algorithm.advantage=rloo"], r"above 1 for rloo"),
    (["rollout.n=1", "actor.mini_batch_size=8", "algorithm.advantage=reinforce_plus_plus_baseline"],
     r"above 1"),
    (["rollout.n=1", "actor.mini_batch_size=8", "algorithm.advantage=opo"], r"above 1"),
    (["rollout.n=1", "actor.mini_batch_size=8", "algorithm.advantage=grpo_passk"], r"above 1"),
    (["rollout.temperature=0"], r"^rollout\.temperature=0\.0: must be above 0"),
    (["rollout.temperature=-1"], r"^rollout\.temperature=-1\.0: must be a finite number from 0 on"),
    (["actor.lr=inf"], r"^actor\.lr=inf: must be a finite number"), (["actor.lr=nan"], r"^actor\.lr=nan"),
    (["actor.mini_batch_size=48"], r"^actor\.mini_batch_size=48: must divide .* = 64"),
    (["actor.mini_batch_size=128"], r"^actor\.mini_batch_size=128: must divide .* = 64"),
    (["critic.mini_batch_size=48", GAE], r"^critic\.mini_batch_size=48: must divide .* = 64"),
    (["actor.max_tokens_per_device=767"], r"^actor\.max_tokens_per_device=767: must be at least .* = 768"),
    (["data.batch_size=0"], r"^data\.batch_size=0: must be at least 1"),
    (["trainer.steps=0"], r"^trainer\.steps=0: must be at least 1"),
    (["rollout.top_p=0"], r"^rollout\.top_p=0\.0: must be above 0 and at most 1"),
    (["rollout.top_k=0"], r"^rollout\.top_k=0: must be -1 or"),
    (["actor.clip_ratio_c=1"], r"^actor\.clip_ratio_c=1\.0"),
    (["actor.betas=[0.9]"], r"^actor\.betas=\[0\.9\]: must be two numbers"),
    (["rollout.correction=mask"], r"^rollout\.correction='mask': must be off, token"),
    (["rollout.correction_cap=3.0"], r"^rollout\.correction_cap=3\.0: has no effect"),
    (["launch=slurm"], r"^launch='slurm': must be ray, local"),
    (["algorithm.advantage=grop"], r"^algorithm\.advantage='grop': must be .*grpo"),
    (["actor.policy_loss=pop"], r"^actor\.policy_loss='pop': must be .*ppo"),
    (["actor.loss_agg=mean"], r"^actor\.loss_agg='mean': must be token-mean, "),
    (["data.overlong=drop"], r"^data\.overlong='drop': must be filter, left, right, error"),
    (["actor.schedule=linear"], r"^actor\.schedule="), (["actor.kl_estimator=k4"], r"^actor\.kl_estimator="),
    (["rollout.dtype=half"], r"^rollout\.dtype='half': must be float32, bfloat16"),
    (["algorithm.lam=0.9"], r"^algorithm\.lam=0\.9: has no effect, because algorithm\.advantage is grpo"),
    (["algorithm.gamma=0.9"], r"^algorithm\.gamma=0\.9: has no effect"),
    (["algorithm.advantage=rloo", "algorithm.norm_adv_by_std=false"],
     r"^algorithm\.norm_adv_by_std=False: has no effect"),
    (["actor.policy_loss=gspo", "actor.clip_ratio_c=4.0"],
     r"^actor\.clip_ratio_c=4\.0: .*actor\.policy_loss is gspo"),
    (["actor.policy_loss=gpg", "actor.clip_ratio_high=0.28"],
     r"^actor\.clip_ratio_high=0\.28: has no effect"),
    (["algorithm.kl_target=0.1"],
     r"^algorithm\.kl_target=0\.1: has no effect, because algorithm\.kl_in_reward is false"),
    (["algorithm.kl_coef=0.1"], r"^algorithm\.kl_coef=0\.1: has no effect"),
    (["critic.warmup_steps=5"],
     r"^critic\.warmup_steps=5: has no effect, because algorithm\.advantage is not gae"),
    (["critic.lr=1e-3"], r"^critic\.lr=0\.001: has no effect"),
    (["ref.path=org/name"], r"^ref\.path='org/name': has no"),
    (["validation.every=5"], r"^validation\.every=5: has no effect, because data\.val is null"),
    (["actor.min_lr_ratio=0.1"], r"^actor\.min_lr_ratio=0\.1: has no effect"),
    (["launch=local", "ray.num_cpus=2"], r"^ray\.num_cpus=2: has no effect, because launch is local"),
    (["+trainer.foo=1"], r"^trainer\.foo=1: nothing reads this key"),
    (["~trainer.keep"], r"^trainer\.keep=None: needed, and was deleted"),
    (["pools.b.nodes=2"], r"^pools\.b=\{'nodes': 2\}: must have nodes, devices_per_node and roles"),
    (["pools.b=2"], r"^pools\.b=2: must have nodes"),
    (["~pools.main"], r"^pools=None: needed, and was deleted"),
    (["~model.overrides"], r"^model\.overrides=None: needed"),
    (["pools.main.nodes=0"], r"^pools\.main\.nodes=0: must be at least 1"),
    (["pools.main.x=0"], r"^pools\.main=.*no more"),
    (["pools.b={nodes: 1, devices_per_node: a, roles: []}"],
     r"^pools\.b\.devices_per_node='a' is of type str"),
    (["pools.b={nodes: 1, devices_per_node: 1, roles: [critic]}"], r"^pools=.*one pool"),
    (["pools.main.roles=[actor, rollout, judge]"], r"^pools="), (["pools.main.roles=[actor]"], r"^pools="),
    (["pools.main.roles=[actor, rollout]", GAE], r"^pools=.*actor, rollout, critic must each"),
    (["pools.main.roles=[actor, rollout]", "actor.kl_coef=0.1"], r"^pools=.*actor, rollout, ref must each"),
    (["rollout.tp=2"], r"^rollout\.tp=2: must divide the 1 devices"),
    (["rollout.tp=2", "pools.main.devices_per_node=3"], r"must divide the 3 devices"),
])
def test_check_refuses(words, message):
    with pytest.raises(ValueError, match=message) as error:
        check(load([], GOOD + words))
    assert "\n" not in str(error.value)


# ---- the command line ----

@pytest.mark.parametrize("words, message", [
    (["actor.lrr=1"], r"no key actor.lrr"),
    (["--config", "nowhere.yaml"], r"nowhere.yaml: No such file"),
    (["a.l=[1"], r"a.l=[1: while parsing"),
    (["--verbose"], r"unrecognized arguments: --verbose"),
    (["--conf", "recipes/toy.yaml"], r"unrecognized arguments"),
    (["--config"], r"--config"),
    (["model.path=org/name", "data.train=nowhere.jsonl"], "nowhere.jsonl"),
    (["--sweep", "actor.lrr=1,2"], r"no key actor.lrr"),
])
def test_command_that_is_refused(words, message):
    result = command(*words)
    assert result.returncode == 2 and result.stdout == ""
    assert len(result.stderr.splitlines()) == 1 and "error: " in result.stderr and message in result.stderr


def test_print_config(layer):
    file = layer("actor: {lr: 3e-6}")
    result = command("seed=7", "--config", file, "~model.liger", "+model.added=1", "--print-config",
     "rollout.top_k=-1")
    assert result.returncode == 0 and result.stderr == ""
    shown = yaml.safe_load(result.stdout)
    assert shown["actor"]["lr"] == 3e-6 and shown["seed"] == 7
    assert "liger" not in shown["model"] and shown["model"]["added"] == 1


def test_the_config_is_read_without_heavy_imports():
    code = "import sys, train_ppo; train_ppo.load(); print({'torch', 'ray'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True, timeout=90) == "set()\n"


def test_help():
    result = command("--help")
    assert result.returncode == 0
    assert all(option in result.stdout for option in ("--config", "--sweep", "--print-config", "+pools.b"))


# ---- sweeps: `run` is replaced, so that a point only says what it would have done ----

FAKE = """
import sys
sys.path.insert(0, {root!r})
import train_ppo
train_ppo.__file__ = __file__
train_ppo.check = lambda config: None
def run(config):
    trainer = config.trainer
    print(config.actor.lr, config.seed, config.rollout.n, trainer.name, trainer.dir, config.actor.betas)
    return 3 if config.seed == 1 else 0
train_ppo.run = run
if __name__ == "__main__":
    sys.exit(train_ppo.main())
"""


def fake(layer, *words):
    script = layer(FAKE.format(root=str(ROOT)), "fake.py")
    return subprocess.run([sys.executable, script, *words], text=True, capture_output=True, timeout=120)


def test_sweep_runs_the_grid_and_returns_the_first_failure(layer):
    file = str(layer("rollout: {n: 5}"))
    result = fake(layer, "trainer.name=x", "--sweep", "actor.lr=1e-6,1e-5", "seed=1,2", "--config", file)
    assert result.returncode == 3, result.stderr
    assert [line.split(" [")[0] for line in result.stdout.splitlines()] == [
        f"{float(lr)} {seed} 5 x-actor.lr={lr},seed={seed} None" for lr in ("1e-6",
         "1e-5") for seed in (1, 2)]


def test_sweep_within_a_directory_over_lists(layer):
    result = fake(layer, "trainer.dir=/tmp/s", "seed=2", "--sweep", "actor.betas=[0.1,0.2],[0.3,0.4]")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "1e-06 2 8 run /tmp/s/actor.betas=_0.1,0.2_ [0.1, 0.2]",
         "1e-06 2 8 run /tmp/s/actor.betas=_0.3,0.4_ [0.3, 0.4]"]


def test_sweep_word_with_one_value_holds_for_all_runs(layer):
    result = fake(layer, "--sweep", "seed=2,3", "trainer.dir=d", "~actor.betas", "++actor.betas=[0.5, 0.5]")
    assert [line.split()[-4] for line in result.stdout.splitlines()] == ["run", "run"]
    assert [line.split()[-3].split(",")[0] for line in result.stdout.splitlines()] == ["d/seed=2", "d/seed=3"]


@pytest.mark.parametrize("words", [["seed=1,two"], ["seed"], ["seed="], ["seed=2,2"], ["data.val=a/b,a_b"]])
def test_sweep_with_a_wrong_word_starts_nothing(words, layer):
    result = fake(layer, "--sweep", *words)
    assert result.returncode == 2 and result.stdout == "" and len(result.stderr.splitlines()) == 1
