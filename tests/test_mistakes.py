"""What users do wrong, one mistake at a time: each is answered by one line that names it, with exit code 2,
before any process starts. Words alone are in test_config.py; here are files, models, tools and machines.
"""

import fcntl
import importlib.util
import json
import shutil
import subprocess
import sys

import pytest
import ray

import config as configuration
import models
import scoring
import train_ppo
from recipes import guess, toy

TOY, GUESS = ["--config", "recipes/toy.yaml"], ["--config", "recipes/guess.yaml"]
BARE = [*TOY, "data.val=null", "validation.every=0"]
GOOD = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
PYTHON = {  # files that users write
    "rows.py": """
def raises():
    return [row["question"] for row in [{}]]
def late():
    yield {"prompt": "1+1=", "answer": "2"}
    raise OSError("the disk is gone")
def forgets():
    pass
def strings():
    return ["1+1="]
def asks(split):
    return []
number = 3
""",
    "syntax.py": "def score(response, answer, row)\n    return 1\n",
    "imports.py": "import no_such_package\n",
    "tools.py": '''
def bare(x):
    """No type."""
def silent(x: int) -> int:
    return x
def double(x: int) -> int:
    """Doubles it.

    Args:
        x: a number
    """
    return 2 * x
class Mute:
    """It cannot be called."""
class Needs:
    """It wants an argument."""
    def __init__(self, size):
        pass
    def __call__(self, messages):
        return "and?", False
def alone(messages):
    return "and?", False
def talk(messages, row):
    return "and?", False
number = 3
''',
    "reward.py": "def two(response, answer):\n    return 1.0\nnumber = 3\n",
}


def lines(*rows):
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


ROWS = {  # files of rows: the name, what is in it, what is said of it
    "empty": ("", "0 of 0 dropped; 0 too long (filter), 0 also in data.val; 0 left"),
    "few": (lines(*GOOD[:3]), "3 left; data.batch_size must be at most that"),
    "long": (lines({"prompt": "1+1+1+1+1=", "answer": "5"}), "1 of 1 dropped; 1 too long (filter)"),
    "broken": (lines(*GOOD, '{"prompt": oops}'), 'line 26={"prompt": oops}: JSONDecodeError: Expecting value'),
    "array": (json.dumps(GOOD), "row 0 has [{'prompt': '0+0=', 'answer': '0'}, {"),
    "columns": (lines({"question": "1+1=", "answer": "2"}), "row 0 has question, answer, but not text or mess"),
    "late": (lines(*GOOD, {"prompt": "1+1="}), "row 25 has prompt, but not text or messages as data.prompt_key="
             "prompt and something as data.answer_key=answer"),
    "letter": (lines(*GOOD, {"prompt": "1 x 1=", "answer": "1"}), "row 25, '1 x 1=': no tokens for ['x']"),  # a tokenizer of characters does not drop one in silence
    "null": (lines({"prompt": None, "answer": "2"}), "row 0 has prompt, answer, but not text or messages"),
    "chat": (lines({"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}), "chat template"),
    "roleless": (lines({"prompt": [{"content": "1+1="}], "answer": "2"}), "must be messages with role and con"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where these files are."""
    folder = tmp_path_factory.mktemp("mistakes")
    for name, text in PYTHON.items():
        (folder / name).write_text(text)
    for name, (text, _) in ROWS.items():
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "file").write_text("")
    (folder / "text.parquet").write_text("text")
    (folder / "nothing").mkdir()
    return folder


def model(folder, name, without=(), **changes):
    """A copy of the toy's model, without some files and with changes to its config, where None deletes."""
    copy = folder / name
    shutil.copytree(toy.build(), copy)
    for pattern in without:
        for path in copy.glob(pattern):
            path.unlink()
    shape = json.loads((copy / "config.json").read_text())
    shape = {key: value for key, value in (shape | changes).items() if value is not None}
    (copy / "config.json").write_text(json.dumps(shape))
    return copy


@pytest.fixture
def refusal(capsys, monkeypatch):
    """refusal(word, ...) gives the command and returns the line with which it is refused, in this process."""
    toy.build(), guess.build()  # transformers shows how it saves them, once

    def start(*_, **__):
        raise AssertionError("processes are about to start")

    def run(*words):
        monkeypatch.setattr(ray, "init", start)
        monkeypatch.setattr(configuration, "end_on_signals", lambda: None)  # these are pytest's
        with pytest.raises(SystemExit) as ended:
            train_ppo.run(configuration.from_command_line("train_ppo.py", [str(word) for word in words]))
        shown = capsys.readouterr()
        assert ended.value.code == 2 and shown.err.count("\n") == 1, shown.err
        return shown.err.removeprefix("error: ").strip()
    return run


# ---- data ----

@pytest.mark.parametrize("name", ROWS)
def test_rows(name, folder, refusal):
    line = refusal(*BARE, f"data.train={folder}/{name}.jsonl")
    assert line.startswith(f"data.train={folder}/{name}.jsonl: ") and ROWS[name][1] in line


def test_empty_lines_are_no_rows(tmp_path):
    import data
    (tmp_path / "rows.jsonl").write_text(lines(GOOD[0], "", GOOD[1], "  "))
    options = configuration.load().data
    assert len(list(data.load_rows(f"{tmp_path}/rows.jsonl", options))) == 2


@pytest.mark.parametrize("name, message", [
    ("raises", "KeyError: 'question' (line 3)"), ("late", "OSError: the disk is gone (line 6)"),
    ("forgets", "TypeError: 'NoneType' object is not iterable"), ("strings", "row 0 has '1+1=', but not text"),
    ("asks", "TypeError: asks() missing 1 required positional argument: 'split'"),
    ("number", "no function 'number' in "), ("nowhere", "no function 'nowhere' in "),
])
def test_a_function_of_rows(name, message, folder, refusal):
    line = refusal(*BARE, f"data.train={folder}/rows.py:{name}")
    assert line.startswith(f"data.train={folder}/rows.py:{name}: ") and message in line


def test_a_broken_parquet_file_and_a_model_that_is_rows(folder, refusal):
    """The first is a line of ours alone, without that of the library that reads it."""
    program = [sys.executable, "train_ppo.py", *TOY, f"data.train={folder}/text.parquet"]
    said = subprocess.run(program, capture_output=True, text=True)
    assert said.returncode == 2 and said.stderr.count("\n") == 1 and "ArrowInvalid: Parquet" in said.stderr
    assert "model.path=recipes/toy.py:problems: TypeError" in refusal(*TOY, "model.path=recipes/toy.py:problems")


@pytest.mark.parametrize("message, words", [
    ("data.train=rows.csv: a file must be .jsonl, .parquet or .py:function", ["data.train=rows.csv"]),
    ("data.val=recipes/toy.py:problems: ", ["data.max_prompt_length=3", "data.val=recipes/toy.py:problems"]),
    ("55 also in data.val; 0 left", ["data.val=recipes/toy.py:problems?"]),
    ("as data.answer_key=solution", ["data.answer_key=solution"]), ("chat template", ["data.system=Be good."]),
])
def test_data(message, words, refusal):
    assert message in refusal(*BARE, *words)


# ---- rewards, tools, interactions ----

@pytest.mark.parametrize("spec, message", [
    ("reward.py:two", "too many positional arguments; it is called with (response, answer, row)"),
    ("reward.py:number", "no function 'number'"), ("reward.py", "write path/to/file.py:function"),
    ("nowhere.py:score", "there is no file"), ("imports.py:score", "No module named 'no_such_package' (line 1)"),
    ("syntax.py:score", "SyntaxError: expected ':' (syntax.py, line 1)"),
])
def test_rewards(spec, message, folder, refusal):
    line = refusal(*TOY, f"reward.function={folder}/{spec}")
    assert line.startswith(f"reward.function={folder}/{spec}: ") and message in line


def test_a_file_imports_those_beside_it(tmp_path):
    """When it is loaded and when it is called; ours are not hidden by files of the same name."""
    for name, text in {"beside_me": "value = 2.0", "later_me": "value = 3.0", "config": "value = 5.0"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "reward.py").write_text(
        "import beside_me\nimport config\ndef score(response, answer, row):\n    import later_me\n"
        "    assert config.load\n    return beside_me.value * later_me.value\n")
    assert scoring.score_one(f"{tmp_path}/reward.py:score", "", "", {}) == {"score": 6.0}


@pytest.mark.parametrize("name, message", [
    ("bare", "x"), ("silent", "docstring"), ("number", "no function 'number'"), ("Mute", "it has no __call__"),
    ("nowhere", "no function 'nowhere'"), ("Needs", "missing a required argument: 'size'"),
])
def test_tools(name, message, folder, refusal):
    tools = f"rollout.tools={{{folder}/tools.py:{name}: {{}}}}"
    line = refusal(*GUESS, tools, "rollout.tool_parser=qwen25")
    assert line.startswith(f"rollout.tools={folder}/tools.py:{name}: ") and message in line


@pytest.mark.parametrize("name, arguments, message", [
    ("alone", "{}", "too many positional arguments; it takes (messages)"),
    ("number", "{}", "no function 'number'"), ("Mute", "{}", "it has no __call__"),
    ("Needs", "{size: 1}", "too many positional arguments; it takes (self, messages)"),
    ("talk", "{haste: 1}", "got an unexpected keyword argument 'haste'; it takes (messages, row)"),
])
def test_interactions(name, arguments, message, folder, refusal):
    spec = f"{folder}/tools.py:{name}"
    line = refusal(*TOY, f"rollout.interaction={{{spec}: {arguments}}}")
    assert line.startswith(f"rollout.interaction={spec}: ") and message in line


@pytest.mark.parametrize("message, words", [
    ("rollout.tool_parser=None must be one of ", []),
    ("rollout.tool_parser='qwen99' must be one of ", ["rollout.tool_parser=qwen99"]),
    ("it takes (x: int) -> int", ["rollout.tools={FOLDER/tools.py:double: {y: 1}}"]),
    ("must be {path/to/file.py:name: {argument: value}}", ["rollout.tools={FOLDER/tools.py:double: 1}"]),
    ("Cannot merge incompatible container types", ["rollout.tools=[FOLDER/tools.py:double]"]),
    ("rollout.interaction=", ["rollout.interaction={FOLDER/tools.py:talk: {}}"]),
])
def test_settings_of_tools(message, words, folder, refusal):
    words = [word.replace("FOLDER", str(folder)) for word in words]
    assert message in refusal(*GUESS, f"rollout.tools={{{folder}/tools.py:double: {{}}}}", *words)


def test_tools_need_a_chat_template(folder, refusal):
    tools = f"rollout.tools={{{folder}/tools.py:double: {{}}}}"
    assert "need a tokenizer with a chat template" in refusal(*TOY, tools, "rollout.tool_parser=qwen25")


# ---- models ----

@pytest.mark.parametrize("message, without, changes", [
    ("model.path=NAME must have files like *.safetensors", ["*.safetensors"], {}),
    ("model.path=NAME must have files like tokenizer*", ["tokenizer*"], {}),
    ("trust_remote_code", [], {"auto_map": {"AutoConfig": "code.Shape"}, "model_type": "new"}),
    ("SGLang cannot run GPTNeoXForCausalLM without a GPU", [], {"architectures": ["GPTNeoXForCausalLM"]}),
    ("mamba has no attention heads", [],
     {"model_type": "mamba", "num_attention_heads": None, "layer_types": None}),
    ("NAME: Validation error for field 'hidden_size'", [], {"hidden_size": "wide"}),
    ("actor.share_prompt=false and model.sp=1 are needed for NAME, which has layers with sliding_attention", [],
     {"layer_types": ["full_attention", "sliding_attention"]}),
    ("which has layers with sliding_window=8", [],
     {"model_type": "mistral", "sliding_window": 8, "layer_types": None}),
    *((f"NAME must not change its logits after the head, as {key}={value} says", [],
       {"model_type": kind, "architectures": [f"{kind.title()}ForCausalLM"], **said}) for key, value, kind, said in (
          ("logits_scaling", 8.0, "granite", {"logits_scaling": 8.0}), ("logit_scale", 0.0625, "cohere", {}),
          ("final_logit_softcapping", 30.0, "qwen2", {"final_logit_softcapping": 30.0}))),
    ("qwen99", [], {"model_type": "qwen99"}), ("max_position_embeddings", [], {"max_position_embeddings": 9}),
])
def test_models(message, without, changes, tmp_path, refusal):
    folder = model(tmp_path, "copy", without, **changes)
    assert message.replace("NAME", str(folder)) in refusal(*TOY, f"model.path={folder}")


@pytest.mark.parametrize("role, kind", [("actor", "granite"), ("ref", "gemma3_text"), ("critic", "cohere")])
def test_a_head_that_changes_nothing_or_is_not_there(role, kind, tmp_path):
    """Granite's default divides logits by 1, Gemma3's is null, and a critic does not have Cohere's head."""
    folder = model(tmp_path, "copy", model_type=kind, layer_types=["full_attention"] * 2)
    assert models.own_config(role, folder, configuration.load(TOY[1:])).model_type == kind


def test_a_reward_model_has_one_label(tmp_path, refusal):
    """Two is what transformers takes where a model's config has no number."""
    folder = model(tmp_path, "copy", architectures=["Qwen2ForSequenceClassification"])
    line = refusal(*TOY, f"reward_model.path={folder}")
    assert line == (f"reward_model.path={folder} must be a classifier with one label, it is "
                    "['Qwen2ForSequenceClassification'] with 2")


@pytest.mark.parametrize("message, words", [
    ("model.overrides={'nope': 1}: the config of ", ["model.overrides.nope=1"]),
    ("flash", ["model.attn_implementation=flash", "actor.share_prompt=false"]),
    ("model.attn_implementation='eager' must be sdpa or flex_attention for packed prompts", ["model.attn_implementation=eager"]), ("actor.lora_targets=nope: ", ["actor.lora_targets=nope"]),
    *((f"actor.lora_targets={name}: must leave out the embedding and the head", [f"actor.lora_targets={name}"])
      for name in ("lm_head", ".*embed_tokens", ".*(q_proj|lm_head)")),
    ("reward_model.path=MODEL must be a classifier with one label", ["reward_model.path=recipes/toy.py:build"]),
    ("model.sp=8 must divide the 4 attention heads", ["model.sp=8", "pools.main.devices_per_node=8", "ray.num_cpus=8"]),
    ("model.path=FOLDER/rows.py:raises: KeyError: 'question' (line 3)", ["model.path=FOLDER/rows.py:raises"]),
    ("model.path=recipes/toy.py:build has 15 words, and the tokenizer of SMALL has 18", ["model.tokenizer=SMALL"]),
    ("critic.path=recipes/toy.py:build has 15 words, and the tokenizer of SMALL has 18",
     ["model.path=SMALL", "critic.path=recipes/toy.py:build", "algorithm.advantage=gae",
      "critic.mini_batch_size=128"]),
    ("'FOLDER/file' must be a folder", ["model.path=FOLDER/file"]), ("liger-kernel", ["model.liger=true"]),
])
def test_options_of_models(message, words, folder, refusal, monkeypatch):
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "liger_kernel" else there(name))
    names = {"FOLDER": str(folder), "MODEL": str(toy.build()), "SMALL": str(guess.build())}
    for name, value in names.items():
        message, words = message.replace(name, value), [word.replace(name, value) for word in words]
    assert message in refusal(*TOY, "actor.lora_rank=4", *words)


# ---- the machine and the run directory ----

@pytest.mark.parametrize("message, words", [
    ("wants 999 devices, this machine has ", ["pools.main.devices_per_node=999", "data.batch_size=999",
     "actor.mini_batch_size=7992"]),
    ("wants 4 devices, this machine has 3; ray.address would", ["pools.main.devices_per_node=4", "ray.num_cpus=3"]),
    ("ray.address=127.0.0.1:1 must be auto, or host:port of a Ray: [Errno 111]", ["ray.address=127.0.0.1:1"]),
    ("ray.address=cluster must be auto, or host:port of a Ray: invalid literal", ["ray.address=cluster"]),
    ("pools.main.nodes=2 needs ray.address: a Ray of our own is one node", ["pools.main.nodes=2"]),
    ("FOLDER/file must be a folder", ["trainer.dir=FOLDER/file"]),
    ("FOLDER/file must be a folder", ["trainer.dir=FOLDER/file/run"]),
    ("trainer.dir='~/run' must not begin with ~", ["trainer.dir=~/run"]),
    ("trainer.dir: [Errno 36] File name too long", [f"trainer.dir={300 * 'x'}"]),
    ("model.path='~/model' must not begin with ~", ["model.path=~/model"]),
])
def test_machine(message, words, folder, refusal):
    words = [word.replace("FOLDER", str(folder)) for word in words]
    assert message.replace("FOLDER", str(folder)) in refusal(*TOY, *words)


@pytest.fixture
def begun(tmp_path):
    """The directory of a run of the toy recipe that has saved its first step."""
    import data
    checkpoint, config = tmp_path / "checkpoints/step_1", configuration.load(TOY[1:], ["+model.mine=1"])
    checkpoint.mkdir(parents=True)
    tokenizer = data.load_tokenizer(str(toy.build()), False)
    prompts = data.Prompts(config.data.train, tokenizer, config.data, config.seed, config.data.batch_size)
    state = {"step": 1, "kl_coef": 0.0, "best": 0.0, "prompts": prompts.state_dict(), "trains": ["actor"]}
    (checkpoint / "trainer.json").write_text(json.dumps(state))
    (tmp_path / "config.yaml").write_text(configuration.dump(config))
    return tmp_path


@pytest.mark.parametrize("message, words", [
    ("seed=2 was 1 when ", ["seed=2"]), ("actor.lora_rank=4 was 0 when ", ["actor.lora_rank=4"]),
    ("model.path='recipes/guess.py:build' was 'recipes/toy.py:build' when ", ["model.path=recipes/guess.py:build"]),
    ("actor.lr=0.001 was 0.002 when ", ["actor.lr=1e-3"]),
    ("algorithm.kl_coef=0.5 was 0.001 when ", ["algorithm.kl_in_reward=true", "algorithm.kl_coef=0.5"]), ("the data or its order changed", ["data.batch_size=8",
     "actor.mini_batch_size=64"]),
    ("is of a run that trains ['actor'], and this one trains []; take another folder", ["rollout.only=true"]),
    ("and this one trains ['actor', 'critic']; take another folder", ["algorithm.advantage=gae"]),
])
def test_a_run_that_continues_keeps_what_its_checkpoints_have_inside(message, words, begun, refusal):
    assert message in refusal(*TOY, f"trainer.dir={begun}", *words)


def test_a_directory_has_one_run(begun, refusal):
    with open(begun / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert refusal(*TOY, f"trainer.dir={begun}") == f"trainer.dir={begun} is in use by another run"
