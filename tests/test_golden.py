"""verl 0.9.1's own numbers: every case of a JSON file, named by the environment variable GOLDEN.

Each parameter is read from its case. Everything is float32, and two numbers agree when |a - b| <= 1e-5 *
max(|b|, 0.1): 1e-5 relative, except that a number nearer to 0 than 0.1 (a whitened advantage, a mean of
signed log-ratios) is a difference of numbers of size 1, each of which float32 knows to 6e-8 only, so that it
has no relative precision.

Where our definition differs from verl's:
- clipfrac and clipfrac_lower are only reported by losses that have them; where verl then says 0, we say
  nothing.
- sapo and geo_mean ignore loss_agg_mode in verl: their number is always that of seq-mean-token-mean.
- geo_mean's mean counts rows without a trained token in verl; they are no sequences here (fault 20).
"""
import json
import os
import pathlib

import pytest
import torch

import algos

FILE = pathlib.Path(os.environ.get("GOLDEN", pathlib.Path(__file__).parent / "golden" / "verl_0.9.1.json"))
CASES = json.loads(FILE.read_text())["cases"]
INPUTS = ("token_level_rewards", "response_mask", "values", "reward_baselines")


def cases(kind):
    found = [case for case in CASES if case["kind"] == kind]
    label = "{}-{}".format
    names = [label(case.get("name", kind), case.get("loss_agg_mode", "")).strip("-") for case in found]
    return pytest.mark.parametrize("case", found, ids=names)


def tensor(numbers):
    return torch.tensor(numbers, dtype=torch.float32)


def leaf(numbers):
    return tensor(numbers).requires_grad_()


def assert_close(ours, theirs, mask=None):
    ours, theirs = torch.as_tensor(ours, dtype=torch.float32).detach(), tensor(theirs)
    assert ours.shape == theirs.shape
    error = (ours - theirs).abs() / theirs.abs().clamp(min=0.1)
    if mask is not None:  # verl leaves arbitrary numbers on masked positions, we leave 0
        error = error * mask
    assert not error.isnan().any() and error.max() <= 1e-5, f"off by {error.max():.2e}"


def aggregated(loss, mask, mode, case):
    scale = case.get("loss_scale_factor") or mask.shape[-1]  # verl's default divisor is the padded width
    return algos.aggregate(loss, mask, mode, algos.normaliser(mask, scale))


def case_options(case):
    return {key: value for key, value in case.items() if isinstance(value, (int, float))}


@cases("advantage")
def test_advantage(case):
    batch = {key: tensor(case[key]) for key in INPUTS if key in case}
    batch["group"] = torch.tensor(case["group"])
    advantages, returns = algos.advantage(case["name"], batch, case_options(case))
    assert_close(advantages, case["advantages"], batch["response_mask"])
    if "returns" in case:
        assert_close(returns, case["returns"], batch["response_mask"])


@cases("policy_loss")
def test_policy_loss(case):
    log_prob, mask = leaf(case["log_prob"]), tensor(case["response_mask"])
    old_log_prob, advantages = tensor(case["old_log_prob"]), tensor(case["advantages"])
    weights = None if case.get("rollout_is_weights") is None else tensor(case["rollout_is_weights"])
    mode = "seq-mean-token-mean" if case["name"] in ("sapo", "geo_mean") else case["loss_agg_mode"]
    inputs = (log_prob, old_log_prob, advantages, mask, case_options(case), weights)
    loss, metrics = algos.policy_loss(case["name"], *inputs)
    loss = aggregated(loss, mask, mode, case)
    loss.backward()
    assert_close(loss, case["loss"])
    assert_close(log_prob.grad, case["grad_log_prob"])
    for name, theirs in case["metrics"].items():
        name = name.removeprefix("pg_")
        if name in metrics:
            assert_close(aggregated(metrics[name], mask, "token-mean", case), theirs)
        else:
            assert theirs == 0.0, name


@cases("kl")
def test_kl(case):
    log_prob = leaf(case["log_prob"])
    value = algos.kl(log_prob, tensor(case["ref_log_prob"]), case["name"])
    value.sum().backward()
    assert_close(value, case["value"])
    assert_close(log_prob.grad, case["grad_log_prob"])


@cases("value_loss")
def test_value_loss(case):
    values, mask = leaf(case["values_new"]), tensor(case["response_mask"])
    old_values, returns = tensor(case["values_old"]), tensor(case["returns"])
    loss, metrics = algos.value_loss(values, old_values, returns, case["cliprange_value"])
    loss = aggregated(loss, mask, case["loss_agg_mode"], case)
    loss.backward()
    assert_close(loss, case["loss"])
    assert_close(values.grad, case["grad"])
    assert_close(aggregated(metrics["clipfrac"], mask, "token-mean", case), case["clipfrac"])


@cases("kl_controller")
def test_kl_controller(case):
    coef, target = case["init_kl_coef"], case.get("target_kl")
    if case["name"] == "fixed":
        target = None
    ours = []
    for observed in case["observed_kl"]:
        coef = algos.kl_controller(coef, observed, case["n_steps"], target, case.get("horizon"))
        ours.append(coef)
    assert_close(ours, case["coef_after"])


def test_the_file_has_cases():
    known = {"advantage", "policy_loss", "kl", "value_loss", "kl_controller"}
    assert CASES and {case["kind"] for case in CASES} <= known
