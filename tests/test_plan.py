"""The dry run: the table of ranks, batches and memory against numbers worked out by hand, and that it starts
nothing. The toy model has 2 layers, hidden size 64, 4 heads of 16, 2 of them for keys and values, and 75,264
parameters: 15 * 64 in the (tied) embedding, 37,120 in a layer, 64 in the last norm."""

import re
import subprocess
import sys
import weakref

import psutil
import pytest
import torch
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

import config as configuration
import data
import models
import plan

ROOT = configuration.BASE.parent
TOY = ["--config", "recipes/toy.yaml"]
TWO_NODES = ["pools.main.nodes=2", "pools.main.devices_per_node=8"]
SIXTEEN = [*TWO_NODES, "rollout.tp=4", "model.sp=2", "model.fsdp_size=8"]
APART = ["algorithm.advantage=gae", "pools.main.roles=[rollout, actor, ref]",
         "pools.b={nodes: 1, devices_per_node: 2, roles: [reward, critic]}", "critic.mini_batch_size=32",
         "critic.epochs=2", "reward_model.path=tests/rewards.py:classifier", "actor.kl_coef=0.1"]
LORA = ["actor.lora_rank=4", "actor.kl_coef=0.1"]


@pytest.fixture
def dry_run(capsys):
    """dry_run(word, ...) is what `--dry-run` prints for the toy recipe; no child process may be left."""
    def run(*words):
        before = psutil.Process().children(recursive=True)
        with pytest.raises(SystemExit) as ended:
            configuration.from_command_line("train_ppo.py", [*TOY, "--dry-run", *words])
        shown = capsys.readouterr()
        assert ended.value.code == 0 and shown.err == ""
        assert psutil.Process().children(recursive=True) == before
        return shown.out
    return run


@pytest.fixture
def refusal(capsys):
    """refusal(word, ...) is the line with which it refuses."""
    def run(*words):
        with pytest.raises(SystemExit) as ended:
            configuration.from_command_line("train_ppo.py", [*TOY, "--dry-run", *words])
        shown = capsys.readouterr()
        assert ended.value.code == 2 and shown.out == "" and shown.err.count("\n") == 1
        return shown.err
    return run


def ranks(text, pool="main"):
    """{rank: (its other numbers, the part of an engine that it starts)} of a pool's table."""
    lines = re.search(rf"^pool {pool}: .*\n.*\n((?: .*\n)+)", text, re.MULTILINE)[1].splitlines()
    cells = [(line.partition("starts")[0].split(), line.partition("starts")[2].strip()) for line in lines]
    return {int(rank): ([int(number) for number in rest], part) for (rank, *rest), part in cells}


def estimate(words, world=1):
    """{role: what `plan.memory` says}, in bytes."""
    config = configuration.load(TOY[1:], words)
    built = {role: plan.meta_model(role, config) for role in ("critic", "ref", "actor")}
    return {role: plan.memory(role, built, world, config) for role in (*built, "rollout")}


# ---- who does what ----

def test_two_nodes_of_eight(dry_run):
    text = dry_run(*SIXTEEN)
    table = ranks(text)
    #                 node, device, dp, sp, copy, shard, engine, tp
    assert table[0] == ([0, 0, 0, 0, 0, 0, 0, 0], "GPUs 0-3: nnodes=1 node_rank=0, serves")
    assert table[5] == ([0, 5, 2, 1, 0, 5, 1, 1], "")
    assert table[8] == ([1, 0, 4, 0, 1, 0, 2, 0], "GPUs 0-3: nnodes=1 node_rank=0, serves")
    assert table[12] == ([1, 4, 6, 0, 1, 4, 3, 0], "GPUs 4-7: nnodes=1 node_rank=0, serves")
    assert table[15] == ([1, 7, 7, 1, 1, 7, 3, 3], "")
    assert len(table) == 16 and [rank for rank in table if table[rank][1]] == [0, 4, 8, 12]
    for line in ("pool main: 2 nodes x 8 devices; starts in this order: actor, rollout", "  device='cuda'",
                 "  tp_size=4", "  max_total_tokens=4096",
                 "one step: 16 prompts x 8 = 128 responses, each up to 10 tokens with its prompt",
                 "  4 engines: about 32 responses each",
                 "  actor: 1 mini-batches x 1 epochs = 1 updates, 200 in up to 200 steps",
                 "    each of 128 responses, about 16 in each of 8 dp shares, even in tokens",
                 "    in forward passes of up to 4096 tokens, 2048 on each device"):
        assert line in text.splitlines()


def test_an_engine_over_two_nodes(dry_run):
    table = ranks(dry_run(*TWO_NODES, "rollout.tp=16", "model.overrides.num_attention_heads=16"))
    both = "GPUs 0-7: nnodes=2 node_rank={} dist_init_addr=node 0"
    assert table[0] == ([0, 0, 0, 0, 0, 0, 0, 0], both.format(0) + ", serves")
    assert table[8] == ([1, 0, 8, 0, 0, 8, 0, 8], both.format(1))
    assert [rank for rank in table if table[rank][1]] == [0, 8]


def test_the_second_engine_over_two_of_four_nodes(dry_run):
    table = ranks(dry_run("pools.main.nodes=4", "pools.main.devices_per_node=2", "rollout.tp=4"))
    assert {rank: part for rank, (_, part) in table.items() if part and rank > 3} == {
        4: "GPUs 0-1: nnodes=2 node_rank=0 dist_init_addr=node 2, serves",
        6: "GPUs 0-1: nnodes=2 node_rank=1 dist_init_addr=node 2"}


def test_pools_of_their_own_in_order_of_start(dry_run):
    text = dry_run(*APART, "trainer.steps=10", "critic.warmup_steps=3")
    assert "pool main: 1 nodes x 1 devices; starts in this order: ref, actor, rollout\n" in text
    assert "pool b: 1 nodes x 2 devices; starts in this order: critic, reward\n" in text
    assert ranks(text, "b") == {0: ([0, 0, 0, 0, 0, 0], ""), 1: ([0, 1, 1, 0, 0, 1], "")}  # no engine
    assert "  critic: 4 mini-batches x 2 epochs = 8 updates, 80 in up to 10 steps\n" in text
    assert "  actor: 1 mini-batches x 1 epochs = 1 updates, 7 in up to 10 steps\n" in text


def test_total_updates_from_the_rows(dry_run):
    """The toy has 55 rows: 3 batches of 16. What is on a hub is not loaded for it."""
    words = ["trainer.steps=null", "trainer.epochs=2"]
    assert "= 1 updates, 6 in up to 6 steps\n" in dry_run(*words)
    assert plan.total_steps(configuration.load(TOY[1:], [*words, "data.train=org/name?split=test"])) is None


@pytest.mark.parametrize("message, words", [
    ("rollout.tp=3 must divide the 16 devices of the pool with role rollout", ["rollout.tp=3"]),
    ("model.fsdp_size=5 must divide the 16 devices of the pool with role actor", ["model.fsdp_size=5"]),
    ("model.sp=8 must divide the 4 attention heads of ", ["model.sp=8"]),
    ("rollout.tp=16 must divide the 4 attention heads of ", ["rollout.tp=16"]),
    ("argument --sweep: not allowed with argument --dry-run", ["--sweep", "seed=1,2"]),
])
def test_refused(message, words, refusal):
    assert message in refusal(*TWO_NODES, *words)


def test_nothing_is_started(tmp_path):
    """A process that notes what it starts, but for ldconfig, which ctypes asks where a library is."""
    code = f"""
import sys
started = []
def note(event, values):
    starts = event in ("os.fork", "os.posix_spawn", "os.system", "subprocess.Popen", "socket.connect")
    if starts and values[:1] != ("/sbin/ldconfig",):
        started.append((event, values))
sys.addaudithook(note)
import config
try:
    config.from_command_line("train_ppo.py", {[*TOY, *SIXTEEN, f"trainer.dir={tmp_path}/run", "--dry-run"]})
finally:
    import ray
    print(started, ray.is_initialized(), "sglang" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[] False False"
    assert list(tmp_path.iterdir()) == []


# ---- memory ----

def test_parameters_are_those_of_the_real_models():
    path, parts = data.resolve_model("recipes/toy.py:build"), estimate(LORA[1:])
    actor = AutoModelForCausalLM.from_pretrained(path)
    critic = AutoModelForTokenClassification.from_pretrained(path, num_labels=1)
    size = {"actor": actor.num_parameters(), "ref": actor.num_parameters(), "rollout": actor.num_parameters(),
            "critic": critic.num_parameters()}
    assert {role: parts[role]["parameters"] for role in parts} == size and size["actor"] == 75_264
    assert {role: parts[role]["trained"] for role in parts} == size | {"ref": 0, "rollout": 0}
    actor.add_adapter(LoraConfig(r=4, target_modules="all-linear"))
    adapter = sum(weight.numel() for weight in actor.parameters() if weight.requires_grad)
    parts = estimate(LORA)
    assert parts["actor"]["parameters"] == actor.num_parameters() == 75_264 + adapter
    # A layer's q, o: 4 * 128 each; k, v: 4 * 96; gate, up, down: 4 * 192.
    assert parts["actor"]["trained"] == adapter == 2 * 4 * (2 * 128 + 2 * 96 + 3 * 192)
    assert parts["rollout"]["parameters"] == 75_264  # merged


def test_bytes_on_each_device():
    parts = estimate(["rollout.tp=4", "model.fsdp_size=8", "actor.compute_dtype=bfloat16", "model.sp=2",
                      "rollout.dtype=bfloat16"], world=16)
    bytes_each = {"weights": 4 * 75_264 / 8, "gradients": 4 * 75_264 / 8, "optimizer": 8 * 75_264 / 8,
                  "unsharded": 2 * 2 * 75_264,  # weights and gradients of both layers and what is around them
                  "logits": plan.LOGITS_COPIES * 4 * 2048 * 15, "kv cache": 0}
    assert {part: parts["actor"][part] for part in bytes_each} == bytes_each
    assert (parts["ref"]["unsharded"], parts["ref"]["optimizer"]) == (4 * 75_264, 0)
    assert parts["rollout"]["weights"] == 2 * 75_264 / 4
    assert parts["rollout"]["kv cache"] == 2 * 2 * 1 * 16 * 2 * 4096  # 2 kv heads for 4: one on each
    assert estimate(["rollout.kv_tokens=null"])["rollout"]["kv cache"] == 2 * 2 * 2 * 16 * 4 * 32_768
    words = ["model.overrides.vocab_size=65536"]
    assert estimate(words)["actor"]["logits"] == plan.LOGITS_COPIES * 4 * 2**24


def test_what_is_there_together(dry_run):
    """In MiB, one device, critic and actor: see the rows that it prints above that line."""
    def together(*words):
        text = dry_run("algorithm.advantage=gae", "critic.mini_batch_size=128", *words)
        rows = dict(re.findall(r"^(critic|actor|rollout) +\d+ +\d+ (.*)", text, re.MULTILINE))
        rows = {role: [float(number) for number in row.split()] for role, row in rows.items()}
        shown = re.search(r"together (.*) while it trains, (.*) while it generates", text)
        return rows, [float(number) for number in shown.groups()]

    rows, (training, generating) = together()
    weights, gradients, optimizer, unsharded, logits, _ = rows["actor"]
    kept, engine = 2 * (weights + optimizer), sum(rows["rollout"])
    assert training == pytest.approx(kept + gradients + unsharded + logits, abs=0.04)
    assert generating == pytest.approx(kept + engine, abs=0.04)
    _, (training_awake, offloaded) = together("rollout.release=false", "actor.offload=true")
    assert training_awake == pytest.approx(training + engine, abs=0.04)
    assert offloaded == pytest.approx(engine, abs=0.04)


def test_lora_has_gradients_and_moments_of_the_adapter_only(dry_run):
    text = dry_run(*LORA)
    assert "\nref: the actor with its adapter off\n" in text
    assert "starts in this order: actor, rollout\n" in text
    row = re.search(r"^actor +(\d+) +(\d+) +(\S+) +(\S+) +(\S+)", text, re.MULTILINE).groups()
    assert row == ("83456", "8192", "0.32", "0.03", "0.06")  # 4, 4 and 8 bytes


class Peak(TorchDispatchMode):
    """The largest sum of bytes of tensors that were alive together, of those made inside."""

    def __init__(self):
        super().__init__()
        self.alive, self.most = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.alive:
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, storage._cdata)
        self.most = max(self.most, sum(self.alive.values()))
        return made


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_of_a_chunk_of_logits(dtype, with_entropy):
    hidden = torch.randn(128, 2, dtype=dtype, requires_grad=True)
    weight = torch.randn(4096, 2, dtype=dtype, requires_grad=True)
    args = hidden, weight, None, torch.zeros(128, dtype=torch.int64), 1.0, with_entropy
    with Peak() as peak:
        sum(models.HeadLogprobs.apply(*args)).sum().backward()
    assert peak.most / (4 * 128 * 4096) == pytest.approx(plan.LOGITS_COPIES, rel=0.2)
