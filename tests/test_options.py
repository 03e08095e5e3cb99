"""Every option of config.yaml, set to something else: either that is refused, or something that the run is made
of comes out differently. Looked at are the plan (`--dry-run`), what the trainer and an episode begin with, what
is asked of the engine, the samples that are shown, the optimizers, and losses and advantages of a fixed batch.
No process is started for it.

So it is not shown that a run obeys, only that what it is made of does. NOT_SEEN lists the options of which not
even that is shown here, but only that they are read (test_config.py).
"""

import contextlib
import io
import json
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import algos
import config as configuration
import data
import models
import records
import plan
import train_ppo
from agent import Agent
from models import build_optimizer
from test_config import GAE, IDLE, KL
from workers import Worker

ROOT = configuration.BASE.parent
TOY, GUESS = f"{ROOT}/recipes/toy.py", f"{ROOT}/recipes/guess.py"
CLASSIFIER = f"{ROOT}/tests/rewards.py:classifier"
TALK = f"rollout.interaction={{{GUESS}:Game: {{}}}}"
BASE = [f"model.path={GUESS}:build", "data.train=rows.jsonl", "data.val=val.jsonl", "data.batch_size=4",
        "data.max_prompt_length=8", "rollout.n=16", "rollout.max_response_length=16", "rollout.kv_tokens=4096",
        "trainer.dir=run", "trainer.steps=8"]
USED = {  # what makes options matter, where IDLE of test_config.py does not say it
    "critic.min_lr_ratio": [GAE, "critic.schedule=cosine"], "critic.*": [GAE], "rollout.only": [GAE],
    "ref.*": ["actor.kl_coef=0.1"], "validation.*": [],
    "actor.clip_cov_*": ["actor.policy_loss=clip_cov", "actor.clip_cov_ratio=0.5"],
    "algorithm.kl_estimator": [KL], "algorithm.kl_target": [KL], "actor.lora_targets": ["actor.lora_rank=4"],
    "rollout.max_turn*": [TALK], "rollout.tool_timeout": [TALK], "trainer.name": ["trainer.dir=null"],
    "trainer.epochs": ["trainer.steps=null"], "reward_model.*": [f"reward_model.path={CLASSIFIER}"],
    **dict.fromkeys(("model.fsdp_size", "model.sp", "rollout.tp"), ["pools.main.devices_per_node=2"])}
OTHER = {  # values for what is neither a number nor true or false, and for numbers that not any will do for
    "data.batch_size": 8, "rollout.n": 32, "*.mini_batch_size": 32, "*.warmup": 4.0, "actor.clip_cov_ub": 1.5,
    "actor.clip_cov_ratio": 0.01,
    "pools": {"main": {"nodes": 1, "devices_per_node": 2, "roles": ["actor", "rollout"]}},
    **dict.fromkeys(("model.path", "model.tokenizer", "critic.path", "ref.path"), f"{TOY}:build"),
    "reward_model.path": None, "reward_model.tokenizer": f"{TOY}:build", "model.fsdp_size": 1,
    "model.overrides": {"num_hidden_layers": 1}, "model.attn_implementation": "eager", "ray.num_cpus": 1,
    "ray.address": "auto", "launch": "local", "data.train": "more.jsonl", "data.val": None,
    "data.prompt_key": "question", "data.answer_key": "truth", "data.source_key": "place", "data.system": "1+",
    "data.overlong": "left", "reward.function": "number", "algorithm.advantage": "reinforce_plus_plus",
    "algorithm.kl_estimator": "k3", "algorithm.kl_target": 0.1, "rollout.correction": "token",
    "rollout.max_turn_tokens": 5, "rollout.tools": {f"{TOY}:score": {}}, "rollout.tool_parser": "qwen25",
    "rollout.interaction": {f"{GUESS}:Game": {}}, "rollout.engine_args": {"max_running_requests": 4},
    "*.schedule": "cosine", "*.betas": [0.5, 0.6], "*dtype": "bfloat16", "actor.lora_targets": "q_proj",
    "actor.old_logprobs": "skip", "actor.policy_loss": "gpg", "*.loss_agg": "seq-mean-token-sum",
    "actor.kl_estimator": "k1", "trainer.name": "other", "trainer.dir": "other", "trainer.replay": "records",
    "trainer.profile_steps": [1, 2]}
NOT_SEEN = {
    # Other tests have them, in processes: test_train.py, test_resume.py,
    "launch", "data.num_workers", "validation.every", "validation.before", "trainer.save_every", "trainer.keep",
    "trainer.max_restarts", "trainer.profile_steps", "trainer.record", "trainer.export", "ray.num_cpus",
    # test_data.py, test_methods.py,
    "reward.function", "reward.timeout", "reward.fallback", "reward.overlong_buffer", "reward.overlong_penalty",
    "reward.mask_truncated", "algorithm.dynamic_sampling",
    # test_rollout.py and test_workers.py.
    "rollout.bucket_mb", "actor.clip_grad", "actor.lora_alpha", "critic.clip_grad",
    # Read on GPUs only.
    "rollout.mem_fraction",
    # No test has them.
    "ray.address", "model.liger", "reward_model.weight", "reward_model.max_tokens_per_device",
    "trainer.tensorboard",
}


def flip(key):
    """A config in which the option matters, and the same with another value of it."""
    idle = {word.partition("=")[0]: (word, used) for word, _, used, _ in IDLE}
    word, used = idle.get(key, (None, []))
    used = next((words for pattern, words in USED.items() if fnmatch(key, pattern)), used)
    now, other = (configuration.load([], [*BASE, *used]) for _ in range(2))
    value = configuration.options_in(now)[key]
    given = [value for pattern, value in OTHER.items() if fnmatch(key, pattern)]
    if given:
        value = given[0]
    elif word:
        value = configuration.options_in(configuration.load([], [*BASE, *used, word]))[key]
    elif isinstance(value, bool):
        value = not value
    else:
        value = value / 2 if isinstance(value, float) and value else value + 1
    *section, name = key.split(".")
    setattr(getattr(other, *section) if section else other, name, value)
    return now, other


def rows(name, *prompts):
    """A file of rows in which every column has a double with something else in it."""
    entries = [{"prompt": prompt, "question": f"{prompt}?", "answer": "1", "truth": "2", "source": "here",
                "place": "there"} for prompt in prompts]
    Path(name).write_text("".join(json.dumps(entry) + "\n" for entry in entries))


@pytest.fixture(scope="module")
def sees(tmp_path_factory):
    """sees(config): what is made from it, as text, by who makes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("options"))
        for module in (algos, data, models, records, torch):  # run() imports them, later
            patch.setattr(train_ppo, module.__name__, module, raising=False)
        patch.setattr(train_ppo, "Agent", Agent, raising=False)
        rows("rows.jsonl", *(f"{a}+{b}=" for a in range(4) for b in range(3)), "1+2+3+4+5+6=")
        rows("more.jsonl", *(f"{a}-{a}=" for a in range(8)))
        rows("val.jsonl", *(f"{a}+3=" for a in range(6)), "1+1=")
        torch.set_printoptions(precision=8)
        cache = {}

        def sees(config, again=False):
            key = repr(config)
            if again or key not in cache:
                cache[key] = {part.__name__: part(config) for part in PARTS}
            return cache[key]

        yield sees
        torch.set_printoptions(profile="default")


# ---- What is looked at -------------------------------------------------------------------------------------


def the_plan(config):
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        plan.show(config)
    return shown.getvalue()


def the_start(config):
    """What the trainer and the episodes begin with."""
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = train_ppo.Trainer(config, "ray", main=True)
    trainer.lock.close()
    directory = trainer.directory if config.trainer.dir else trainer.directory.parent
    sources = [(source.rows, source.next()) for source in (trainer.prompts, trainer.val_prompts) if source]
    agent = vars(Agent(config, trainer.tokenizer))
    both = trainer.tokenizer, trainer.reward_tokenizer
    tokenizers = [tokenizer and sorted(tokenizer.get_vocab().items()) for tokenizer in both]
    attention = config.model.attn_implementation
    attention = models.meta_model("actor", trainer.paths["actor"], config, attention).config._attn_implementation
    episode = [agent[name] for name in ("seconds", "max_turns", "room", "turn_room", "schemas")]
    return repr([directory, trainer.total, trainer.paths, sources, tokenizers, attention, episode,
                 [*agent["makers"]], sorted(configuration.roles_needed(config))])


class Asked(Exception):
    """The engine would be asked now."""


def the_requests(config):
    """In a step and in a validation: prompts, what says how to sample, the step, and the share that is kept."""
    def answer(prompts, sampling, *rest):
        requests.append((len(prompts["uid"]), sampling, rest))
        raise Asked

    requests, four = [], lambda: {"uid": [0, 1, 2, 3]}
    drawn = config.data.batch_size + config.rollout.oversample
    prompts = SimpleNamespace(next=four, all=four, batch_size=drawn)
    trainer = SimpleNamespace(config=config, prompts=prompts, val_prompts=prompts, answer=answer, step=1,
                              wake=lambda: None)
    for phase in (train_ppo.Trainer.draw, train_ppo.Trainer.validate):
        with contextlib.suppress(Asked):
            phase(trainer)
    return repr(requests)


def the_samples(config):
    """What a validation shows of its samples."""
    names = "prompt", "response", "answer", "scores"
    trainer = SimpleNamespace(config=config, directory=Path(), step=1)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        train_ppo.Trainer.write_samples(trainer, {name: range(20) for name in names} | {"response": ["x"] * 20})
    return shown.getvalue()


def the_optimizers(config):
    steps = []
    for settings in (config.actor, config.critic):
        optimizer, schedule = build_optimizer(torch.nn.Linear(1, 1), settings, 20)
        for _ in range(20):
            group = optimizer.param_groups[0]
            steps.append((group["lr"], group["betas"], group["weight_decay"]))
            optimizer.step()
            schedule.step()
    return repr(steps)


def batch():
    """16 responses in groups of 4, with ratios and gaps wide enough for every clip and cap to matter."""
    torch.manual_seed(0)
    lengths = [3, 12, 7, 9] * 4
    names = "old_logprobs", "ref_logprobs", "rollout_logprobs", "values", "entropy", "advantages", "returns"
    columns = {name: [torch.randn(length) for length in lengths] for name in names}
    columns["advantages"] = [3 * advantages for advantages in columns["advantages"]]
    columns["rollout_weights"] = columns["response_mask"] = [torch.ones(length) for length in lengths]
    columns["token_level_scores"] = [torch.eye(length)[-1] * torch.randn(()) for length in lengths]
    columns["response_ids"] = columns["response_mask"]
    return columns | {"uid": [row // 4 for row in range(16)], "reward_baselines": [0.5] * 16}


def the_losses(config):
    """Of the actor and of the critic, as the worker computes them."""
    columns, worker = batch(), SimpleNamespace(config=config)
    norm = algos.normaliser(columns["response_mask"], config.rollout.max_response_length)
    padded = {name: data.pad(column) for name, column in columns.items() if torch.is_tensor(column[0])}
    new = padded["old_logprobs"] + torch.randn(padded["values"].shape)
    actor = Worker.actor_loss(worker, padded, new, padded["entropy"], norm)
    return repr([actor, Worker.critic_loss(worker, padded, padded["values"] + 1, norm)])


def the_advantages(config):
    """And the KL controller's next coefficient."""
    trainer = SimpleNamespace(config=config, metrics={}, kl_coef=config.algorithm.kl_coef)
    found = train_ppo.Trainer.add_advantages(trainer, batch())
    return repr([found["advantages"], found["returns"], found["rollout_weights"], trainer.kl_coef])


PARTS = the_plan, the_start, the_requests, the_samples, the_optimizers, the_losses, the_advantages


# ---- The test ----------------------------------------------------------------------------------------------


def test_what_is_seen_is_the_same_twice(sees):
    config = flip("seed")[0]
    assert sees(config) == sees(config, again=True)


@pytest.mark.parametrize("key", configuration.options_in(configuration.load()))
def test_another_value_is_refused_or_changes_something(key, sees):
    now, other = flip(key)
    configuration.check(now)
    before = sees(now)
    try:
        configuration.check(other)
        changed = [part for part, seen in sees(other).items() if seen != before[part]]
    except ValueError as error:
        assert key in str(error)
    else:
        assert bool(changed) == (key not in NOT_SEEN), changed
