"""Workers on real FSDP2 ranks (gloo): an update does not depend on how its rows are cut, packed or spread."""

import concurrent.futures
import math
import multiprocessing
import subprocess
import sys
import types
from pathlib import Path

import pebble
import pytest
import safetensors.torch
import torch
from peft import PeftModel
from torch.nn.attention.flex_attention import create_mask
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers import Qwen2ForSequenceClassification, Qwen2ForTokenClassification

import algos
import data
from config import load

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def on_ranks():
    """on_ranks(world, function, ...) calls function(rank, world, ...) in a process for each rank, all at the same
    time. They stay for the next call, so that they import everything once. A rank is the same process each time:
    torch keeps what it knows of its place in a mesh."""
    context = multiprocessing.get_context("spawn")
    processes = [pebble.ProcessPool(1, context=context) for _ in range(4)]

    def run(world, function, *args):
        futures = [processes[rank].schedule(function, (rank, world, *args)) for rank in range(world)]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()  # raises the first failure, while other ranks may wait for the one that failed
        finally:
            for future in futures:
                future.cancel()  # which ends its process

    yield run
    for process in processes:
        process.stop()
        process.join()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    path = tmp_path_factory.mktemp("models") / "tiny"
    config = Qwen2Config(vocab_size=64, **shape, **heads, tie_word_embeddings=True, attention_dropout=0.1)
    Qwen2ForCausalLM(config).save_pretrained(path)
    config.num_labels = 1  # a critic with a head: a new one is zero, and would give the layers below no gradient
    Qwen2ForTokenClassification(config).save_pretrained(path / "critic")
    config.pad_token_id = 0
    Qwen2ForSequenceClassification(config).save_pretrained(path / "reward")
    return str(path)


def make_batch():
    """Four prompts with four responses of 1 to 6 tokens each; some tokens in the middle were not written by the model."""
    generator = torch.Generator().manual_seed(3)
    batch = {name: [] for name in ("uid", "prompt_ids", "response_ids", "response_mask", "advantages", "returns")}
    for uid in range(4):
        prompt = torch.randint(64, (5 + uid,), generator=generator)
        for sample in range(4):
            length = 1 + (2 * sample + uid) % 6
            mask = torch.ones(length)
            mask[1:2] = float(length < 4)
            batch["uid"].append(uid)
            batch["prompt_ids"].append(prompt)
            batch["response_ids"].append(torch.randint(64, (length,), generator=generator))
            batch["response_mask"].append(mask)
            batch["advantages"].append(torch.randn(length, generator=generator))
            batch["returns"].append(torch.randn(length, generator=generator))
    return batch


def settings(model_path, *overrides):
    common = ["data.train=none", f"model.path={model_path}", f"critic.path={model_path}/critic", f"rollout.temperature={TEMPERATURE}"]
    return load(overrides=[*common, "actor.lr=1e-3", "actor.entropy_coef=0.01", "actor.kl_coef=0.1", *overrides])


def measure(worker, folder, updates):
    """Score the batch, update actor and critic, save and load: the scores, gradients, weights and metrics seen."""
    batch = make_batch()
    norm = algos.normaliser(batch["response_mask"], 6.0)
    sp = worker.config.model.sp
    rows = data.split(batch, worker.world // sp)[worker.rank // sp]
    mine = data.select(batch, rows)
    for role in ("actor", "ref", "critic"):
        mine |= worker.score(mine, role)
    mine["rollout_weights"] = mine["response_mask"]
    mine["rollout_logprobs"] = mine["old_logprobs"]
    gradients, clip = {}, torch.nn.utils.clip_grad_norm_

    def record_and_clip(parameters, limit):
        parameters = list(parameters)
        for parameter in parameters:
            gradients[len(gradients)] = parameter.grad.full_tensor().clone()
        return clip(parameters, limit)

    torch.nn.utils.clip_grad_norm_ = record_and_clip
    metrics = [worker.update(mine, role, norm) for _ in range(updates) for role in ("actor", "critic")]
    torch.nn.utils.clip_grad_norm_ = clip
    weights = dict(worker.full_tensors("actor"))
    worker.save(f"{folder}/checkpoint")
    with torch.no_grad():
        for parameter in worker.models["actor"].parameters():
            parameter.zero_()
    worker.load(f"{folder}/checkpoint")
    restored = all(torch.equal(tensor, weights[name]) for name, tensor in worker.full_tensors("actor"))
    scores = {row: {name: mine[name][i] for name in ("old_logprobs", "entropy", "ref_logprobs", "values")}
              for i, row in enumerate(rows)}
    cuts = len(worker.micro_batches(mine, "actor"))
    return {"scores": scores, "gradients": gradients, "metrics": metrics, "restored": restored, "cuts": cuts}


def rank_main(rank, world, folder, configs, updates):
    from workers import Worker

    free, data.FREE = data.FREE, math.inf  # the budget alone says how many micro-batches there are
    results = []
    for number, config in enumerate(configs):
        worker = Worker(config, rank, world, rank, world, f"file://{folder}/ranks_{number}")
        for role, path in (("critic", config.critic.path), ("ref", config.model.path), ("actor", config.model.path)):
            worker.build(role, path, 10)
        results.append(measure(worker, folder, updates))
        worker.shutdown()
    torch.save(results, f"{folder}/results_{rank}")
    data.FREE = free


def run(on_ranks, folder, configs, world=1, updates=1):
    """The result of `measure` for each config; scores are of all ranks, the rest is equal on all of them."""
    on_ranks(world, rank_main, str(folder), configs, updates)
    results, *others = [torch.load(folder / f"results_{rank}") for rank in range(world)]
    for other in others:
        for result, part in zip(results, other):
            result["scores"] |= part["scores"]
    return results


# Every response in a row of its own, all rows in one micro-batch, on one rank: what all other ways must equal.
PLAIN = ["actor.share_prompt=false"]
WAYS = {
    "two micro-batches": ["actor.share_prompt=false", "actor.max_tokens_per_device=120"],
    "four micro-batches": ["actor.share_prompt=false", "actor.max_tokens_per_device=56"],
    "shared prompts": [],
    "shared prompts in several micro-batches": ["actor.max_tokens_per_device=30"],
    "gradient checkpointing": ["actor.gradient_checkpointing=true", "critic.gradient_checkpointing=true"],
}


TWO_RANKS = {
    "two ranks": ["actor.max_tokens_per_device=30"],
    "two copies (HSDP)": ["actor.max_tokens_per_device=30", "model.fsdp_size=1"],
    "sequences cut in two (Ulysses)": ["actor.max_tokens_per_device=30", "model.sp=2"],
    "sequences cut in two, not packed": ["actor.share_prompt=false", "model.sp=2"],
}
FOUR_RANKS = {  # each of the two kv heads goes to two ranks
    "sequences cut in four": ["model.sp=4"],
    "sequences cut in two, two copies": ["actor.max_tokens_per_device=30", "model.sp=2", "model.fsdp_size=2"],
}


@pytest.fixture(scope="module")
def results(model_path, tmp_path_factory, on_ranks):
    found = {}
    for world, ways in ((1, {"plain": PLAIN} | WAYS), (2, TWO_RANKS), (4, FOUR_RANKS)):
        configs = [settings(model_path, *overrides) for overrides in ways.values()]
        found |= zip(ways, run(on_ranks, tmp_path_factory.mktemp("ranks"), configs, world))
    return found


@pytest.fixture(scope="module")
def plain(results):
    return results["plain"]


def test_scores_are_those_of_transformers(model_path, plain):
    model = AutoModelForCausalLM.from_pretrained(model_path).eval()
    batch = make_batch()
    for row, scores in plain["scores"].items():
        prompt, response = batch["prompt_ids"][row], batch["response_ids"][row]
        with torch.no_grad():
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        logprobs = (logits / TEMPERATURE).log_softmax(-1)
        mask = batch["response_mask"][row]
        expected = logprobs.gather(-1, response[:, None])[:, 0] * mask
        torch.testing.assert_close(scores["old_logprobs"], expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(scores["ref_logprobs"], expected, atol=1e-5, rtol=0)
        entropy = -(logprobs.exp() * logprobs).sum(-1) * mask
        torch.testing.assert_close(scores["entropy"], entropy, atol=1e-5, rtol=0)


@pytest.mark.parametrize("way", [*WAYS, *TWO_RANKS, *FOUR_RANKS])
def test_an_update_does_not_depend_on_the_cut(results, plain, way):
    other = results[way]
    for row, scores in plain["scores"].items():
        for name, expected in scores.items():
            torch.testing.assert_close(other["scores"][row][name], expected, atol=1e-5, rtol=0)
    assert len(other["gradients"]) == len(plain["gradients"]) == 26 + 28  # tied actor; the critic has a head
    for number, gradient in plain["gradients"].items():
        error = (other["gradients"][number] - gradient).norm()
        assert gradient.norm() > 0
        assert error <= 1e-5 * gradient.norm() + 1e-8, (way, number)
    for mine, expected in zip(other["metrics"], plain["metrics"]):
        assert uncut(mine) == pytest.approx(uncut(expected), rel=1e-4, abs=1e-6)
    assert other["restored"]


def uncut(metrics):
    """Those that may not depend on how a batch is cut; what is padded does."""
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def test_budgets_cut_a_batch(results):
    assert [results[way]["cuts"] for way in ("plain", "two micro-batches", "four micro-batches")] == [1, 2, 4]


def test_the_share_of_padding_is_a_metric(plain):
    batch = make_batch()
    sizes = [len(batch["prompt_ids"][row]) + len(batch["response_ids"][row]) for row in range(16)]
    for role, metrics in zip(("actor", "critic"), plain["metrics"]):
        assert metrics[f"perf/padding_{role}"] == pytest.approx(1 - sum(sizes) / (16 * max(sizes)))


def test_first_update_is_on_policy(plain):
    actor = plain["metrics"][0]
    assert actor["actor/ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert actor["actor/clipfrac"] == 0


def test_schedule_moves_at_the_first_update(model_path, tmp_path, on_ranks):
    """Warm-up of 4: the updates use lr/4, 2 lr/4, 3 lr/4, lr, lr (KNOWN_FAULTS 25); a later ratio is not 1 (24)."""
    (result,) = run(on_ranks, tmp_path, [settings(model_path, "actor.warmup=4")], updates=5)
    actor = result["metrics"][0::2]
    assert [update["actor/lr"] for update in actor] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])
    assert actor[0]["actor/ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert abs(actor[4]["actor/ppo_kl"]) > 1e-5


def saving_main(rank, world, folder, configs):
    """For each config of a run that ends, and of one that goes on from its checkpoint: the weights and the rates."""
    from workers import Worker

    for number, (config, saves, steps) in enumerate(configs):
        worker = Worker(config, rank, world, rank, world, f"file://{folder}/saving_{number}")
        worker.build("actor", config.model.path, steps)
        batch = make_batch()
        batch["rollout_weights"] = batch["response_mask"]
        batch["rollout_logprobs"] = [torch.zeros(len(ids)) for ids in batch["response_ids"]]
        batch |= worker.score(batch, "actor")
        norm, rates = algos.normaliser(batch["response_mask"], 6.0), []
        for step in range(4):
            if step in saves:
                worker.save(f"{folder}/saved_{number}_{step}")
            if steps == 8 and step == 0:
                worker.load(f"{folder}/saved_0_0")  # of the first config, of 4 steps
            rates.append(worker.update(batch, "actor", norm)["actor/lr"])
        torch.save((dict(worker.full_tensors("actor")), rates), f"{folder}/saving_{number}.pt")
        worker.shutdown()


def test_a_save_changes_nothing_and_a_longer_run_has_its_own_schedule(model_path, tmp_path, on_ranks):
    """Also before the first update: torch makes the optimizer's state by an update of nothing, and counts it."""
    config = settings(model_path, "actor.kl_coef=0", "actor.schedule=cosine", "actor.min_lr_ratio=0.0", "data.batch_size=4", "rollout.n=4",
                      "actor.mini_batch_size=16")
    runs = (config, [0, 2], 4), (config, [], 4), (config, [], 8)
    on_ranks(1, saving_main, str(tmp_path), runs)
    (saved, rates), (straight, same_rates), (_, longer) = [torch.load(tmp_path / f"saving_{i}.pt") for i in range(3)]
    assert all(torch.equal(saved[name], straight[name]) for name in straight) and rates == same_rates
    assert longer == pytest.approx([1e-3 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(1, 5)], rel=0.05)
    assert rates[3] < 0.2 * longer[3]


def test_the_terms_of_the_actors_loss_have_their_signs():
    """Policy loss + kl_coef * KL - entropy_coef * entropy, each a mean over the two tokens that count. At ratio
    1 the first is -(1 - 2) / 2; k2 of differences 0.2 and -0.4 is (0.02 + 0.08) / 2."""
    from workers import Worker

    logprobs, X = torch.tensor([[-1.0, -2.0, -3.0]]), 99.0
    columns = {"response_mask": torch.tensor([[1.0, 1.0, 0.0]]), "advantages": torch.tensor([[1.0, -2.0, X]]),
               "old_logprobs": logprobs, "ref_logprobs": torch.tensor([[-1.2, -1.6, X]]), "rollout_weights": torch.ones(1, 3)}
    norm, entropy = algos.normaliser(columns["response_mask"]), torch.tensor([[1.0, 0.5, X]])
    for kl_coef, entropy_coef, expected in ((0, 0, 0.5), (10, 0, 0.5 + 10 * 0.05), (0, 2, 0.5 - 2 * 0.75)):
        words = f"actor.kl_coef={kl_coef}", f"actor.entropy_coef={entropy_coef}", "actor.kl_estimator=k2"
        loss, _ = Worker.actor_loss(types.SimpleNamespace(config=load([], words)), columns, logprobs, entropy, norm)
        assert loss.item() == pytest.approx(expected)


def test_what_packed_tokens_see():
    """A prompt of two tokens with responses of two and one, and padding; and flex_attention's blocks say the same."""
    from models import packed_mask

    segment = torch.tensor([[0, 0, 1, 1, 2, -1], [0, 1, 2, 2, 2, 2]])
    dense = packed_mask(segment, "sdpa")
    assert dense.shape == (2, 1, 6, 6) and dense[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 1]]
    seen = packed_mask(segment, "flex_attention").mask_mod
    assert torch.equal(create_mask(seen, 2, None, 6, 6, "cpu"), dense)


@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
def test_attention_obeys_the_mask(model_path, plain, attention):
    """Packed log-probs by each kind of attention are those of plain rows; with a mask in a form that it takes for
    something else they would not be. Flex has no backward pass on CPU: tests/gpu has that."""
    from models import token_logprobs
    from workers import pack

    batch = make_batch()
    units = [list(range(start, start + 4)) for start in range(0, 16, 4)]
    inputs, predictors = pack(batch, units, "cpu", attention=attention)
    model = AutoModelForCausalLM.from_pretrained(model_path, attn_implementation=attention).eval()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        logprobs, _ = token_logprobs(model, inputs, torch.cat(predictors), torch.cat(batch["response_ids"]), TEMPERATURE, False)
    for row, mine in enumerate(logprobs.split([len(ids) for ids in batch["response_ids"]])):
        expected = plain["scores"][row]["old_logprobs"]
        torch.testing.assert_close(mine * batch["response_mask"][row], expected, atol=1e-5, rtol=0)


def few_main(rank, world, folder, config):
    from workers import Worker

    worker = Worker(config, rank, world, rank, world, f"file://{folder}/ranks")
    for role, path in (("critic", config.critic.path), ("actor", config.model.path)):
        worker.build(role, path, 10)
    batch = data.select(make_batch(), [6])
    mine = data.select(batch, data.split(batch, world)[rank])
    for role in ("actor", "critic"):
        mine |= worker.score(mine, role)
    mine |= {"rollout_weights": mine["response_mask"], "rollout_logprobs": mine["old_logprobs"]}
    mine["ref_logprobs"] = mine["old_logprobs"]
    norm = algos.normaliser(batch["response_mask"], 6.0)
    torch.save([worker.update(mine, role, norm) for role in ("actor", "critic")], f"{folder}/few_{world}_{rank}")
    worker.shutdown()


def test_a_rank_without_rows_keeps_step(model_path, tmp_path, on_ranks):
    """One response on two ranks, as the end of dynamic sampling may leave: the update is that of one rank."""
    for world in (1, 2):
        folder = tmp_path / str(world)
        folder.mkdir()
        on_ranks(world, few_main, str(folder), settings(model_path))
    expected = torch.load(tmp_path / "1/few_1_0")
    assert expected[0]["actor/grad_norm"] > 0
    for rank in range(2):
        for mine, one in zip(torch.load(tmp_path / f"2/few_2_{rank}"), expected):
            assert mine == pytest.approx(one, rel=1e-4, abs=1e-6)


def sent_main(rank, world, folder, config):
    from workers import Worker

    worker = Worker(config, rank, world, rank, world, f"file://{folder}/ranks")
    worker.build("actor", config.model.path, 10)
    torch.save(dict(worker.full_tensors("actor")), f"{folder}/sent_{rank}")
    worker.shutdown()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_weights_are_sent_as_a_checkpoint_has_them(family, tmp_path, on_ranks):
    """transformers fuses the experts of a layer; the engine knows them by the names of the files, one by one."""
    experts = {"mixtral": {"num_local_experts": 4}, "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16}}
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2}
    config = AutoConfig.for_model(family, **shape, **heads, **experts[family])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    on_ranks(2, sent_main, str(tmp_path), settings(str(tmp_path / "model")))
    expected = safetensors.torch.load_file(tmp_path / "model/model.safetensors")
    assert any("experts.3" in name for name in expected)
    for rank in range(2):
        sent = torch.load(tmp_path / f"sent_{rank}")
        assert sent.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in sent.items())


def lora_main(rank, world, folder, config):
    from workers import Worker

    worker = Worker(config, rank, world, rank, world, f"file://{folder}/ranks")
    worker.build("actor", config.model.path, 10)
    before = dict(worker.full_tensors("actor"))
    batch = make_batch()
    mine = data.select(batch, data.split(batch, world)[rank])
    mine |= worker.score(mine, "actor")
    first = mine["old_logprobs"]
    mine |= worker.score(mine, "ref") | {"rollout_weights": mine["response_mask"], "rollout_logprobs": first}
    norm = algos.normaliser(batch["response_mask"], 6.0)
    for _ in range(5):
        worker.update(mine, "actor", norm)
    base = {name: parameter.full_tensor().clone() for name, parameter in worker.models["actor"].named_parameters()
            if ".lora_" not in name}
    after = dict(worker.full_tensors("actor"))
    again, now = worker.score(mine, "ref")["ref_logprobs"], worker.score(mine, "actor")["old_logprobs"]
    worker.export(f"{folder}/export")
    worker.save(f"{folder}/checkpoint")
    for name, parameter in worker.models["actor"].named_parameters():
        if ".lora_" in name:
            parameter.detach().zero_()
    worker.load(f"{folder}/checkpoint")
    restored = dict(worker.full_tensors("actor"))
    worker.shutdown()
    torch.save({"before": before, "base": base, "after": after, "restored": restored, "rows": mine, "first": first,
                "ref again": again, "now": now}, f"{folder}/lora_{rank}")


def test_lora_trains_an_adapter_and_nothing_else(model_path, tmp_path, on_ranks):
    """The base stays to the bit; the reference is the actor without its adapter; what is sent to the engine and
    exported is the merged weight, and the adapter loads in peft (KNOWN_FAULTS: adapters)."""
    config = settings(model_path, "actor.lora_rank=4", "actor.lora_alpha=8", "actor.lr=1e-2")
    on_ranks(2, lora_main, str(tmp_path), config)
    base = AutoModelForCausalLM.from_pretrained(model_path)
    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
        adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_path), tmp_path / "export/adapter")
        ids = torch.arange(20)[None]
        torch.testing.assert_close(adapted(ids).logits, whole(ids).logits, atol=1e-5, rtol=0)
        assert (base(ids).logits - whole(ids).logits).abs().max() > 1e-3
    for rank in range(2):
        seen = torch.load(tmp_path / f"lora_{rank}")
        weights = dict(base.named_parameters())
        assert seen["before"].keys() == seen["after"].keys() == weights.keys()
        for name, weight in seen["base"].items():
            assert torch.equal(weight, weights[name.replace(".base_layer", "")]), name
        changed = {name for name, weight in seen["after"].items() if not torch.equal(weight, seen["before"][name])}
        assert len(changed) == 2 * 7  # every linear layer of two blocks
        exported = dict(whole.named_parameters())
        for name, weight in seen["after"].items():
            assert torch.equal(weight, exported[name]) and torch.equal(weight, seen["restored"][name]), name
        for first, reference, again, now in zip(seen["first"], seen["rows"]["ref_logprobs"], seen["ref again"], seen["now"]):
            assert torch.equal(first, reference) and torch.equal(reference, again)
        assert any((now - first).abs().max() > 1e-3 for now, first in zip(seen["now"], seen["first"]))


def reward_main(rank, world, folder, config, batch):
    from workers import Worker

    worker = Worker(config, rank, world, rank, world, f"file://{folder}/ranks")
    worker.build("reward", config.reward_model.path, 10)
    part = data.split(batch, world)[rank]
    torch.save((part, worker.score(data.select(batch, part), "reward")["model_scores"]), f"{folder}/reward_{rank}")
    worker.shutdown()


def test_a_reward_model_reads_the_last_token(model_path, tmp_path, on_ranks):
    """Scores equal those of transformers' own class for one conversation alone, which ends in what is its padding."""
    rows = make_batch()
    rows["response_ids"] = [torch.cat([ids, torch.tensor([0])]) for ids in rows["response_ids"]]  # pad id at the end
    batch = data.conversations(rows, None, None)
    config = settings(model_path, f"reward_model.path={model_path}/reward", "reward_model.max_tokens_per_device=40")
    on_ranks(2, reward_main, str(tmp_path), config, batch)
    model = Qwen2ForSequenceClassification.from_pretrained(f"{model_path}/reward").eval()
    for rank in range(2):
        part, scores = torch.load(tmp_path / f"reward_{rank}")
        for row, score in zip(part, scores):
            with torch.no_grad():
                hidden = model.model(batch["prompt_ids"][row][None]).last_hidden_state
                expected = model.score(hidden)[0, -1]
            torch.testing.assert_close(score, expected, atol=1e-5, rtol=0)


def test_logits_are_never_there_at_once():
    """Of 8,192 x 60,000 logits (1,875 MiB) a few chunks of 64 MiB exist. The allocator decides: what a chunk left
    behind could lie where the next one would have fit, and then they add up (1,577 MiB, seen)."""
    command = [sys.executable, "bench/logprob_memory.py", "--measure", "chunked", "0", "8192", "60000"]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE, text=True, check=True)
    assert float(done.stdout.split()[0]) < 1000


def test_chunked_logprobs_equal_plain_ones():
    """Values from KNOWN_FAULTS 23 and 36, and the gradient of chunks against the gradient of the whole."""
    from models import HeadLogprobs, token_logprobs

    logits, labels = torch.tensor([[2.0, 1.0, 0.0]] * 3), torch.arange(3)
    logprobs, entropy = HeadLogprobs.apply(logits, torch.eye(3), None, labels, 0.5, True)
    torch.testing.assert_close(logprobs, torch.tensor([-0.1429, -2.1429, -4.1429]), atol=1e-4, rtol=0)
    _, entropy = HeadLogprobs.apply(logits, torch.eye(3), None, labels, 1.0, True)
    torch.testing.assert_close(entropy, torch.full((3,), 0.832396), atol=1e-5, rtol=0)

    vocabulary, width, count = 2**20, 2, 40  # 16 tokens a chunk
    hidden = torch.randn(1, count, width, requires_grad=True)
    head = torch.nn.Linear(width, vocabulary, bias=False)
    decoder = types.SimpleNamespace(last_hidden_state=hidden)
    model = types.SimpleNamespace(get_decoder=lambda: lambda use_cache: decoder, get_output_embeddings=lambda: head)
    labels = torch.randint(vocabulary, (count,))
    chunked, entropy = token_logprobs(model, {}, torch.arange(count), labels, 0.7, True)
    whole = (head(hidden[0]) / 0.7).log_softmax(-1)
    plain, plain_entropy = whole.gather(-1, labels[:, None])[:, 0], -(whole.exp() * whole).sum(-1)
    torch.testing.assert_close(chunked, plain)
    torch.testing.assert_close(entropy, plain_entropy)
    for mine, other in ((chunked.square().sum(), plain.square().sum()),
                        ((chunked.square() - entropy.square()).sum(), (plain.square() - plain_entropy.square()).sum())):
        grads = [torch.autograd.grad(loss, [hidden, head.weight], retain_graph=True) for loss in (mine, other)]
        for grad, expected in zip(*grads):
            assert (grad - expected).norm() <= 1e-5 * expected.norm()
