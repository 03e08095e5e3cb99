"""Every method that YAML can name takes real steps on the toy recipe: one process, one engine, a config for each step."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import algos
import data
import train_ppo
from config import load
from runs import PATIENCE

ADVANTAGES = ["gae", "grpo", "grpo_passk", "rloo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline",
              "opo", "gpg"]
LOSSES = ["ppo", "gspo", "cispo", "gpg", "geo_mean", "sapo", "kl_cov", "clip_cov"]
AGGREGATIONS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
CORRECTIONS = ["token", "sequence", "token-mask", "sequence-mask"]
TWICE = ["actor.mini_batch_size=64", "actor.epochs=2"]  # so that ratios differ from 1
METHODS = {
    **{f"advantage {name}": [f"algorithm.advantage={name}"] for name in ADVANTAGES},
    **{f"loss {name}": [f"actor.policy_loss={name}", *TWICE] for name in LOSSES},
    **{f"aggregation {name}": [f"actor.loss_agg={name}"] for name in AGGREGATIONS},
    **{f"correction {name}": [f"rollout.correction={name}"] for name in CORRECTIONS},
    "Dr. GRPO": ["algorithm.norm_adv_by_std=false", "actor.loss_agg=seq-mean-token-sum-norm"],
    "KL in the loss": ["actor.kl_coef=0.1", "actor.kl_estimator=k3+"],
    "KL in the reward": ["algorithm.kl_in_reward=true", "algorithm.kl_target=0.1"],
    "DAPO": ["actor.clip_ratio_high=0.28", "algorithm.dynamic_sampling=20", "reward.overlong_buffer=1"],
    "engine's log-probs": ["actor.old_logprobs=rollout"],
    "ratio 1": ["actor.old_logprobs=skip"],
    "truncated responses masked": ["reward.mask_truncated=true"],
}
ONLY = {"rollout only": ["rollout.only=true"]}  # learns nothing


def train_all(trainer):
    """In place of Trainer.fit: one step per method, each with the config that its words give."""
    from config import check, roles_needed

    groups, rows = trainer.groups, {}
    for name, words in (METHODS | ONLY).items():
        config = load(["recipes/toy.yaml"], ["launch=local", "seed=5", *words])
        check(config)
        trainer.config = trainer.pools[0].worker.config = config
        trainer.groups = {role: groups[role] for role in roles_needed(config)}
        trainer.step += 1
        trainer.metrics = {}
        trainer.train_step()
        rows[name] = trainer.metrics
    Path(sys.argv[1]).write_text(json.dumps(rows))


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("methods")
    command = [sys.executable, __file__, str(folder / "rows.json"), str(folder / "run")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr[-3000:]
    samples = (folder / "run/samples.jsonl").read_text().splitlines()
    return json.loads((folder / "rows.json").read_text()) | {"samples": [json.loads(line) for line in samples]}


@pytest.mark.parametrize("name", METHODS)
def test_a_step_with(rows, name):
    metrics = rows[name]
    assert all(math.isfinite(value) for key, value in metrics.items() if key.startswith(("actor/", "rollout/")))
    assert metrics["actor/grad_norm"] > 0
    assert metrics["actor/skipped_updates"] == 0
    assert metrics["rollout/logprob_diff_max"] < 1e-4
    assert metrics["actor/entropy"] > 0


def test_what_belongs_to_one_method_shows_there(rows):
    assert "critic/explained_variance" in rows["advantage gae"] and "critic/loss" not in rows["advantage grpo"]
    assert "time/rollout_greedy" in rows["advantage remax"]
    assert rows["KL in the loss"]["actor/kl_loss"] >= 0
    assert rows["KL in the reward"]["reward/kl_coef"] == 0.001
    assert rows["DAPO"]["dynamic/draws"] > 1 and rows["DAPO"]["dynamic/thrown"] > 0
    assert abs(rows["loss ppo"]["actor/ppo_kl"]) > 1e-6  # two epochs of two mini-batches: off-policy by the second
    assert rows["ratio 1"]["actor/ppo_kl"] == 0


def test_remax_compares_with_one_greedy_answer_to_the_same_prompt(monkeypatch):
    """Which comes in any order, and is neither trained on nor counted."""
    asked = []

    def answer(prompts, sampling, step, phase, share=1.0):
        asked.append((phase, sampling["temperature"], prompts["uid"]))
        batch = data.select(prompts, range(len(prompts["uid"]))[::-1])
        metrics = {"reward/mean": phase, "reward/errors": 1, "reward/timeouts": 2}
        return batch | {"scores": [uid / 10 for uid in batch["uid"]]}, metrics

    monkeypatch.setattr(train_ppo, "data", data, raising=False)  # which run() imports
    prompts = SimpleNamespace(next=lambda: {"uid": [3, 7]}, batch_size=16)
    config = load(["recipes/toy.yaml"], ["algorithm.advantage=remax", "rollout.n=2", "rollout.temperature=0.7"])
    earlier = {"reward/errors": 10, "reward/timeouts": 20}  # of another draw of this step
    trainer = SimpleNamespace(config=config, prompts=prompts, answer=answer, step=1, metrics=earlier)
    batch = train_ppo.Trainer.draw(trainer)
    assert asked == [("rollout", 0.7, [3, 3, 7, 7]), ("rollout_greedy", 0.0, [3, 7])]
    assert (batch["uid"], batch["reward_baselines"]) == ([7, 7, 3, 3], [0.7, 0.7, 0.3, 0.3])
    assert trainer.metrics == {"reward/mean": "rollout", "reward/errors": 11, "reward/timeouts": 22}


def added(trainer_options, monkeypatch, **columns):
    """What `add_advantages` makes of two responses of two tokens each, scored 1 and 3, in groups of their own."""
    for module in (algos, data, torch):  # which run() imports
        monkeypatch.setattr(train_ppo, module.__name__, module, raising=False)
    twice = [torch.ones(2), torch.ones(2)]
    scores = [torch.tensor([0.0, score]) for score in (1.0, 3.0)]
    batch = {"uid": [0, 1], "response_ids": twice, "response_mask": twice, "rollout_logprobs": [-x for x in twice],
             "old_logprobs": [-x for x in twice], "token_level_scores": scores}
    trainer = SimpleNamespace(config=load(["recipes/toy.yaml"], trainer_options), metrics={}, kl_coef=0.0)
    return train_ppo.Trainer.add_advantages(trainer, batch | columns), trainer.metrics


def test_a_response_without_a_score_is_in_no_loss(monkeypatch):
    """Of the critic neither: its target would be 0."""
    scores = [torch.tensor([0.0, 1.0]), torch.tensor([0.0, math.nan])]
    values = [torch.tensor([0.5, 0.5]), torch.tensor([9.0, 9.0])]
    batch, metrics = added(["algorithm.advantage=gae"], monkeypatch, token_level_scores=scores, values=values)
    assert [mask.tolist() for mask in batch["response_mask"]] == [[1, 1], [0, 0]]
    assert algos.normaliser(batch["response_mask"])["tokens"] == 2
    assert batch["returns"][0].tolist() == [1, 1]
    assert math.isnan(metrics["critic/explained_variance"])  # of two equal returns


def test_a_response_without_a_baseline_is_in_no_loss(monkeypatch):
    batch, _ = added(["algorithm.advantage=remax"], monkeypatch, reward_baselines=[0.5, math.nan])
    assert [mask.tolist() for mask in batch["response_mask"]] == [[1, 1], [0, 0]]
    assert [row.tolist() for row in batch["advantages"]] == [[0.5, 0.5], [0, 0]]


def test_what_the_rollout_correction_rejects_does_not_count(monkeypatch):
    """KNOWN_FAULTS 20: the mean of a loss of 1 is 1 when half of the tokens are rejected, not 0.5."""
    old = [torch.tensor([-1.0, 4.0]), torch.tensor([-1.0, -1.0])]
    for mode, masks in (("token-mask", [[1, 0], [1, 1]]), ("sequence-mask", [[0, 0], [1, 1]]), ("token", [[1, 1]] * 2)):
        options = ["algorithm.advantage=reinforce_plus_plus", f"rollout.correction={mode}"]
        batch, _ = added(options, monkeypatch, old_logprobs=old)
        assert [mask.tolist() for mask in batch["response_mask"]] == masks
        mask, norm = data.pad(batch["response_mask"]), algos.normaliser(batch["response_mask"])
        assert algos.aggregate(torch.ones(2, 2), mask, "token-mean", norm).item() == 1
        assert any(row.any() for row in batch["advantages"])


def test_rollout_only_stops_after_the_rewards(rows):
    """Every response of the step is in samples.jsonl with its score, and no model has learned from them."""
    samples, metrics = rows["samples"], rows["rollout only"]
    assert [sample["step"] for sample in samples] == [len(METHODS) + 1] * 16 * 8
    mean = sum(sample["scores"] for sample in samples) / len(samples)
    assert mean == pytest.approx(metrics["reward/mean"])
    assert not any(name.startswith(("actor/", "time/update", "time/old_logprobs")) for name in metrics)


if __name__ == "__main__":
    train_ppo.Trainer.fit = train_all
    roles = ["algorithm.advantage=gae", "actor.kl_coef=0.1"]
    train_ppo.run(load(["recipes/toy.yaml"], ["launch=local", f"trainer.dir={sys.argv[2]}", *roles]))
