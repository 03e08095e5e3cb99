"""Formulas of algos.py by their values. The numbers of the tests named fault_NN are those of a list of faults
that other systems of this kind have had (statistics over the wrong set, leaks from padding, means of means,
...).
"""
import math

import pytest
import torch

import algos

X = 99.0  # stands on masked positions, where nothing may look
OPTIONS = {"gamma": 0.9, "lam": 0.8, "norm_adv_by_std": True}
LOSS_OPTIONS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0, "tau_pos": 1.0,
                "tau_neg": 1.05, "kl_cov_ratio": 0.2, "ppo_kl_coef": 1.0, "clip_cov_ratio": 1.0,
                "clip_cov_lb": 0.1, "clip_cov_ub": 5.0}
CHOOSE_WITHIN_A_MICRO_BATCH = {"kl_cov", "clip_cov"}  # as documented, and as in verl


def T(*rows):
    return torch.tensor(rows, dtype=torch.float32)


def close(ours, expected, atol=2e-4):
    ours, expected = torch.as_tensor(ours), torch.as_tensor(expected)
    torch.testing.assert_close(ours, expected, rtol=0, atol=atol, check_dtype=False)


def outcome(name, scores, group=None, mask=None, **options):
    """Advantages [B] of responses with these scores; all tokens of a response must have the same one."""
    mask = torch.ones(len(scores), 3) if mask is None else mask
    rewards = torch.zeros_like(mask)
    rewards[:, 0] = torch.tensor(scores)
    batch = {"token_level_rewards": rewards, "response_mask": mask,
             "group": torch.zeros(len(scores), dtype=torch.long) if group is None else torch.tensor(group)}
    advantages, _ = algos.advantage(name, {**batch, **options.pop("inputs", {})}, {**OPTIONS, **options})
    assert torch.equal(advantages, advantages[:, :1] * mask)
    return advantages[:, 0]


def returns_of(name, rewards, mask, **keywords):
    batch = {"token_level_rewards": rewards, "response_mask": mask, **keywords.pop("inputs", {})}
    return algos.advantage(name, batch, {**OPTIONS, **keywords})[1]


def random_batch(seed, B=12, length=9):
    """A batch with tool text inside responses, padding behind them, and one shuffled group layout."""
    g = torch.Generator().manual_seed(seed)
    mask = (torch.rand(B, length, generator=g) > 0.35).float()
    mask[:, 0] = 1
    mask[: B // 2, length - 3:] = 0
    rewards = torch.randn(B, length, generator=g) * mask
    return {"token_level_rewards": rewards, "response_mask": mask,
            "values": torch.randn(B, length, generator=g),
            "reward_baselines": torch.randn(B, generator=g), "group": torch.tensor([5, -1, 7] * (B // 3))}


def compacted(batch):
    """The same responses with the masked positions cut out, and 5 columns of padding more."""
    order = batch["response_mask"].argsort(dim=-1, descending=True, stable=True)
    pad = torch.nn.functional.pad
    return {key: pad(x.gather(-1, order), (0, 5)) if x.dim() == 2 else x for key, x in batch.items()}, order


# ------------------------------------------------------- advantages


def test_fault_12_a_missing_score_is_left_out():
    scores = [1.0, 0.0, math.nan, 1.0]
    close(outcome("grpo", scores), [0.5774, -1.1547, 0.0, 0.5774])
    close(outcome("rloo", scores), [0.5, -1.0, 0.0, 0.5])
    assert algos.informative_groups(torch.tensor(scores), torch.zeros(4)).all()


@pytest.mark.parametrize("name", algos.ADVANTAGES)
@pytest.mark.parametrize("how", ["nan", "empty"])
def test_a_row_that_does_not_count_changes_no_other(name, how):
    batch = random_batch(1)
    kept = torch.arange(12) != 4
    expected = algos.advantage(name, {key: x[kept] for key, x in batch.items()}, OPTIONS)
    if how == "nan":
        batch["token_level_rewards"][4, 2] = math.nan
    else:
        batch["response_mask"][4] = 0
    for ours, theirs in zip(algos.advantage(name, batch, OPTIONS), expected):
        close(ours[kept], theirs, atol=1e-6)
        assert (ours[4] == 0).all()


def test_fault_13_statistics_are_those_of_the_group():
    scores, group = [1.0, 1, 0, 1, 0, 1, 1, 1], [3, 8, 3, 8, 3, 8, 3, 8]
    a, b = 0.8660, 0.0
    close(outcome("grpo", scores, group), [a, b, -a, b, -a, b, a, b])
    close(outcome("grpo", scores, group, norm_adv_by_std=False), [0.5, b, -0.5, b, -0.5, b, 0.5, b])
    close(outcome("grpo", [1.0, 0, 0, 0]), [1.5, -0.5, -0.5, -0.5])  # n - 1; with n it would be 1.732


def test_fault_14_no_differences_no_advantage():
    for name in ("grpo", "rloo", "opo", "grpo_passk", "reinforce_plus_plus_baseline"):
        assert (outcome(name, [0.1] * 4) == 0).all(), name
        assert (outcome(name, [1000.1] * 3) == 0).all(), name
    assert (algos.whiten(torch.full((3, 3), 1000.1), torch.ones(3, 3)) == 0).all()
    close(outcome("grpo", [0.0] + [0.95] * 7), [-2.4749] + [0.3536] * 7)  # the bound is (n - 1) / sqrt(n)
    for n in range(2, 20):  # float32 would round the mean of some
        assert (outcome("grpo", [0.95] * n) == 0).all(), n


def test_fault_15_returns_pass_over_observations():
    mask, rewards = T([1, 1, 0, 0, 1, 1]), T([0, 0, 0, 0, 0, 1.0])
    close(returns_of("reinforce_plus_plus", rewards, mask, gamma=1.0), T([1, 1, 0, 0, 1, 1]))
    returns = returns_of("reinforce_plus_plus", rewards, mask, gamma=0.9)
    close(returns, T([0.729, 0.81, 0, 0, 0.9, 1]), atol=1e-6)
    mask = T([1, 0, 0, 1])
    rewards = algos.apply_kl_penalty(torch.zeros(1, 4), T([1, X, X, 1]), mask, 1.0)
    close(returns_of("reinforce_plus_plus", rewards, mask, gamma=0.9)[0, 0], -1.9, atol=1e-6)


def test_fault_16_gae_bootstraps_from_trained_tokens_only():
    def raw(rewards, values, mask):  # before whitening; returns = advantages + values
        returns = returns_of("gae", rewards, mask, inputs={"values": values}, gamma=1.0, lam=0.95)
        return returns, (returns - values) * mask

    close(raw(T([0, 1, 0]), T([0, 0, 100]), T([1, 1, 0]))[1], T([0.95, 1, 0]), atol=1e-6)
    returns, advantages = raw(T([0, 0, 0, 0, 1]), T([0.1, 0.2, 5, 5, 0.4]), T([1, 1, 0, 0, 1]))
    close(advantages, T([0.8315, 0.77, 0, 0, 0.6]), atol=1e-6)
    close(returns, T([0.9315, 0.97, 0, 0, 1.0]), atol=1e-6)
    close(raw(T([0, 0, 1]), T([0.5, 0.5, 0.5]), T([1, 1, 1]))[1], T([0.45125, 0.475, 0.5]), atol=1e-6)
    # a reward at the end of tool text that closes the response goes to the last trained token, undiminished
    close(raw(T([0, 0, 1]), T([0, 0, 100]), T([1, 1, 0]))[1], T([0.95, 1, 0]), atol=1e-6)
    close(returns_of("reinforce_plus_plus", T([0, 0, 1]), T([1, 1, 0]), gamma=0.9), T([0.9, 1, 0]), atol=1e-6)


def test_fault_17_whitening_sees_valid_cells_only():
    for pad in (0, 3):
        x = torch.nn.functional.pad(T([1, 2], [3, X]), (0, pad), value=X)
        mask = torch.nn.functional.pad(T([1, 1], [1, 0]), (0, pad))
        assert algos.masked_moments(x, mask) == (2.0, 1.0)
        close(algos.whiten(x, mask)[mask > 0], [-1.0, 0.0, 1.0])
    for few in (mask * T([1], [0]) * T([1, 0, 0, 0, 0]), 0 * mask):
        assert algos.whiten(x, few).isfinite().all()
        assert algos.masked_moments(x, few)[1] == 0


def test_fault_18_baselines():
    close(outcome("remax", [1.0, 0, 1], mask=torch.ones(3, 1), inputs={"reward_baselines": T(0.5, 0.5, 0.5)}),
          [0.5, -0.5, 0.5])
    lengths = torch.tensor([10, 30, 60])
    mask = (torch.arange(60) < lengths[:, None]).float()
    close(outcome("opo", [1.0, 0, 0], mask=mask), [0.9, -0.1, -0.1], atol=1e-6)
    close(outcome("opo", [1.0, 0, 0]), [2 / 3, -1 / 3, -1 / 3], atol=1e-6)


def test_remax_rewards_every_token_before_the_reward():
    rewards, mask = T([0, 0, 0, 1.0]), T([1, 0, 1, 1])
    batch = {"token_level_rewards": rewards, "response_mask": mask, "reward_baselines": T(0.25)}
    close(algos.advantage("remax", batch, {})[0], T([0.75, 0, 0.75, 0.75]))


def test_pass_at_k_rewards_the_lead_of_the_single_best():
    close(outcome("grpo_passk", [0.2, 1.0, 0.7], norm_adv_by_std=False), [0, 0.3, 0])
    close(outcome("grpo_passk", [1.0, 1.0, 0.0]), [0, 0, 0])
    close(outcome("grpo_passk", [1.0, 0.0, 5.0], group=[0, 0, 1], norm_adv_by_std=False), [1, 0, 0])
    close(outcome("grpo_passk", [-3.0, math.nan, -1.0], norm_adv_by_std=False), [0, 0, 2])


def test_a_response_alone_in_its_group_is_compared_with_0():
    for name in ("grpo", "rloo", "opo"):
        close(outcome(name, [0.7, 1.0, 0.0], group=[4, 2, 2], norm_adv_by_std=False)[0], 0.7, atol=1e-5)


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"])
def test_a_response_that_has_lost_its_group_is_compared_with_nothing(name):
    batch = random_batch(1)
    group = (batch["group"] == batch["group"][0]).nonzero()[:, 0]
    batch["token_level_rewards"][group[1:]] = math.nan
    assert (algos.advantage(name, batch, OPTIONS)[0][group] == 0).all()


@pytest.mark.parametrize("name", algos.ADVANTAGES)
def test_rows_may_come_in_any_order(name):
    batch = random_batch(2)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    shuffled = algos.advantage(name, {key: x[order] for key, x in batch.items()}, OPTIONS)
    for ours, theirs in zip(shuffled, algos.advantage(name, batch, OPTIONS)):
        close(ours, theirs[order], atol=1e-6)


@pytest.mark.parametrize("name", algos.ADVANTAGES)
def test_observations_and_padding_could_as_well_be_cut_out(name):
    batch = random_batch(3)
    short, order = compacted(batch)
    for full, cut in zip(algos.advantage(name, batch, OPTIONS), algos.advantage(name, short, OPTIONS)):
        close(full.gather(-1, order), cut[:, :9], atol=1e-6)
        assert (full[batch["response_mask"] == 0] == 0).all() and full.abs().sum() > 0


def test_methods_say_what_they_read():
    assert algos.options_of(algos.ADVANTAGES["gae"]) == ["gamma", "lam"]
    assert algos.options_of(algos.ADVANTAGES["rloo"]) == []
    assert algos.options_of(algos.ADVANTAGES["grpo"]) == ["norm_adv_by_std"]
    assert algos.options_of(algos.POLICY_LOSSES["sapo"]) == ["tau_pos", "tau_neg"]
    assert algos.options_of(algos.POLICY_LOSSES["gpg"]) == []


# ------------------------------------------------------- losses and normalisation


def loss_of(ratio, advantage, name="ppo", **options):
    log_prob = torch.tensor([[math.log(ratio)]], requires_grad=True)
    options = {**LOSS_OPTIONS, "clip_ratio_high": 0.2, **options}
    loss, metrics = algos.policy_loss(name, log_prob, T([0.0]), T([advantage]), T([1.0]), options)
    loss.sum().backward()
    return loss.item(), log_prob.grad.item(), {key: x.item() for key, x in metrics.items()}


@pytest.mark.parametrize("ratio, advantage, loss, gradient, clipped, capped", [
    (1.5, 1, -1.2, 0.0, 1, 0), (0.5, 1, -0.5, -0.5, 0, 0), (1.5, -1, 1.5, 1.5, 0, 0),
    (0.5, -1, 0.8, 0.0, 1, 0), (10, -1, 3.0, 0.0, 0, 1), (10, 1, -1.2, 0.0, 1, 0)])
def test_fault_22_clipping(ratio, advantage, loss, gradient, clipped, capped):
    value, slope, metrics = loss_of(ratio, advantage)
    close([value, slope], [loss, gradient], atol=1e-5)
    assert (metrics["clipfrac"], metrics["clipfrac_lower"]) == (clipped, capped)
    close(metrics["ppo_kl"], -math.log(ratio), atol=1e-5)


def test_fault_22_asymmetric_and_no_dual_clip():
    close(loss_of(1.25, 1, clip_ratio_high=0.28)[0], -1.25, atol=1e-5)
    close(loss_of(1.5, 1, clip_ratio_high=0.28)[0], -1.28, atol=1e-5)
    close(loss_of(10, -1, clip_ratio_c=1e9)[0], 10.0, atol=1e-4)


@pytest.mark.parametrize("name", algos.POLICY_LOSSES)
def test_fault_24_on_policy_every_loss_is_the_policy_gradient(name):
    """At ratio 1 the gradient with respect to log_prob is -A per token, and nothing is clipped."""
    batch = random_batch(4)
    mask, old = batch["response_mask"], batch["values"]
    A = torch.randn(12, 1, generator=torch.Generator().manual_seed(0)).expand(12, 9) * mask
    log_prob = old.clone().requires_grad_()
    loss, metrics = algos.policy_loss(name, log_prob, old, A, mask, {**LOSS_OPTIONS, "clip_cov_lb": 4.9})
    mode = "seq-mean-token-mean" if name == "geo_mean" else "seq-mean-token-sum"
    algos.aggregate(loss, mask, mode, {"tokens": 1, "sequences": 1, "loss_scale": 1}).backward()
    weight = 1 / mask.sum(-1, keepdim=True) if name == "geo_mean" else 1
    close(log_prob.grad, -A * weight, atol=1e-5)
    assert all((x * mask).abs().max() == 0 for x in metrics.values())


@pytest.mark.parametrize("name", algos.POLICY_LOSSES)
def test_masked_positions_have_no_say_in_a_loss(name):
    """Neither value nor gradient changes with what stands on masked positions, nor when they are cut out."""
    batch = random_batch(5)
    mask = batch["response_mask"]
    log_prob, A = batch["values"], batch["values"].roll(1, 0)
    old = log_prob + 0.3 * batch["token_level_rewards"]

    def result(log_prob, old, A, mask):
        log_prob = log_prob.clone().requires_grad_()
        loss, _ = algos.policy_loss(name, log_prob, old, A, mask, LOSS_OPTIONS)
        total = algos.aggregate(loss, mask, "token-mean", algos.normaliser(mask))
        total.backward()
        return total.detach(), log_prob.grad

    value, gradient = result(log_prob, old, A, mask)
    garbage = [torch.where(mask > 0, x, bad) for x, bad in ((log_prob, X), (old, -math.inf), (A, -X))]
    for ours, theirs in zip(result(*garbage, mask), (value, gradient)):
        close(ours, theirs, atol=1e-6)
    short, order = compacted({"log_prob": log_prob, "old": old, "A": A, "response_mask": mask})
    cut_value, cut_gradient = result(*short.values())
    close(cut_value, value, atol=1e-6)
    close(cut_gradient[:, :9], gradient.gather(-1, order), atol=1e-6)
    assert gradient.abs().sum() > 0 and (gradient[mask == 0] == 0).all()


def aggregated(loss, mask, mode, scale=1.0, cuts=None):
    norm = algos.normaliser(mask, scale)
    cuts = cuts or [len(mask)]
    parts = zip(loss.split(cuts), mask.split(cuts))
    return sum(algos.aggregate(part, part_mask, mode, norm) for part, part_mask in parts)


@pytest.mark.parametrize("cuts", [[2], [1, 1]])
def test_fault_19_no_mean_of_means(cuts):
    mask = T([1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1])
    loss = T([1, 1, X, X, X, X], [3, 3, 3, 3, 3, 3])
    for mode, expected in {"token-mean": 2.5, "seq-mean-token-mean": 2.0, "seq-mean-token-sum": 10.0}.items():
        close(aggregated(loss, mask, mode, cuts=cuts), expected, atol=1e-6)


@pytest.mark.parametrize("name", sorted(set(algos.POLICY_LOSSES) - CHOOSE_WITHIN_A_MICRO_BATCH))
@pytest.mark.parametrize("mode", algos.AGGREGATIONS)
def test_gradients_do_not_depend_on_micro_batches(name, mode):
    batch = random_batch(6)
    batch["response_mask"][7] = 0  # a sequence that does not count
    results = []
    for cuts in ([12], [1] * 12, [5, 7], [7, 1, 4]):
        norm = algos.normaliser(list(batch["response_mask"]), loss_scale=9)
        log_prob, total = batch["values"].clone().requires_grad_(), 0.0
        columns = [log_prob, batch["values"] - 0.2, batch["token_level_rewards"], batch["response_mask"]]
        for micro in zip(*(x.split(cuts) for x in columns)):
            share = algos.aggregate(algos.policy_loss(name, *micro, LOSS_OPTIONS)[0], micro[3], mode, norm)
            share.backward(retain_graph=True)
            total += share.item()
        results.append((total, log_prob.grad))
    for total, gradient in results[1:]:
        close(total, results[0][0], atol=1e-5)
        close(gradient, results[0][1], atol=1e-6)
    assert results[0][1].abs().sum() > 0


def test_fault_20_divisors():
    mask = T([1, 1, 1, 1], [1, 1, 0, 0])
    for pad in (0, 4):
        padded = torch.nn.functional.pad(mask, (0, pad))
        close(aggregated(torch.ones_like(padded), padded, "seq-mean-token-sum-norm", scale=4), 0.75)
    dropped = T([1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0])
    assert algos.normaliser(dropped)["sequences"] == 1
    for mode, expected in {"token-mean": 1.0, "seq-mean-token-mean": 1.0, "seq-mean-token-sum": 4.0}.items():
        close(aggregated(torch.ones_like(dropped), dropped, mode), expected)


@pytest.mark.parametrize("mode", algos.AGGREGATIONS)
def test_fault_20_an_empty_micro_batch_gives_0_and_gradients_0(mode):
    log_prob = torch.full((2, 3), -1.0, requires_grad=True)
    mask = torch.zeros(2, 3)
    for name in algos.POLICY_LOSSES:
        inputs = (log_prob, torch.zeros(2, 3), torch.ones(2, 3), mask)
        loss, metrics = algos.policy_loss(name, *inputs, LOSS_OPTIONS, rollout_weights=torch.ones(2, 3))
        total = algos.aggregate(loss, mask, mode, algos.normaliser(mask))
        total.backward()
        assert total == 0 and (log_prob.grad == 0).all(), name
    loss, _ = algos.value_loss(log_prob, torch.zeros(2, 3), torch.full((2, 3), math.inf), 0.5)
    assert algos.aggregate(loss, mask, mode, algos.normaliser(mask)) == 0


# ------------------------------------------------------- KL and the critic


def test_fault_21_kl_values():
    x = T(0.5, -0.5, 0.0)  # log(ref / policy)
    close(algos.kl(-x, torch.zeros(3), "k3"), [0.14872, 0.10653, 0.0], atol=1e-5)
    close(algos.kl(-x, torch.zeros(3), "k1"), -x)
    close(algos.kl(-x, torch.zeros(3), "k2"), x * x / 2)
    close(algos.kl(-x, torch.zeros(3), "abs"), x.abs())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"])
@pytest.mark.parametrize("gap", [100.0, -100.0, 1e4])
def test_fault_21_kl_is_finite_with_its_gradient(estimator, gap):
    log_prob = torch.tensor([-gap], requires_grad=True)
    value = algos.kl(log_prob, torch.zeros(1), estimator)
    value.sum().backward()
    assert value.isfinite().all() and log_prob.grad.isfinite().all()
    if estimator.endswith("+"):
        assert value.item() == algos.kl(torch.tensor([-gap]), torch.zeros(1), estimator[:-1]).item()
        assert log_prob.grad.item() == -gap


def test_ratios_are_finite_with_their_gradient():
    for name in algos.POLICY_LOSSES:
        for gap in (-500.0, 500.0):
            log_prob = torch.full((1, 2), gap, requires_grad=True)
            inputs = (log_prob, torch.zeros(1, 2), T([1, -1]), torch.ones(1, 2), LOSS_OPTIONS)
            loss, _ = algos.policy_loss(name, *inputs)
            loss.sum().backward()
            assert loss.isfinite().all() and log_prob.grad.isfinite().all(), name


def test_kl_controllers():
    assert algos.kl_controller(0.2, 50.0, 64, None, 1000) == 0.2
    close(algos.kl_controller(0.2, 6.6, 100, 6.0, 1000), 0.2 * 1.01, atol=1e-7)  # 10 % above the target
    close(algos.kl_controller(0.2, 600.0, 100, 6.0, 1000), 0.2 * 1.02, atol=1e-7)  # at most 20 %
    close(algos.kl_controller(0.2, 0.0, 100, 6.0, 1000), 0.2 * 0.98, atol=1e-7)


def test_value_loss_and_explained_variance():
    values, old, returns = T([2.0, 0.2]), T([0.0, 0.0]), T([0.0, 1.0])
    loss, metrics = algos.value_loss(values, old, returns, 0.5)
    close(loss, T([2.0, 0.32]))  # (2 - 0)^2 / 2 although clipping says 0.125: the larger one counts
    close(metrics["clipfrac"], T([0, 0]))
    loss, metrics = algos.value_loss(T([1.0]), T([0.0]), T([1.0]), 0.5)
    close([loss.item(), metrics["clipfrac"].item()], [0.125, 1.0])
    values, returns, mask = T([1, 2, 3, X]), T([1, 2, 4, -X]), T([1, 1, 1, 0])
    close(algos.explained_variance(values, returns, mask), 1 - (1 / 3) / (7 / 3), atol=1e-6)
    close(algos.explained_variance(returns, returns, mask), 1.0)


# ------------------------------------------------------- engine gap, over-long, dynamic sampling


def test_rollout_correction():
    rollout, mask = torch.zeros(2, 3), T([1, 1, 0], [1, 1, 1])
    old = T([math.log(1.5), math.log(3.0), X], [math.log(0.5), math.log(0.8), 0.0])

    def weights(mode):
        return algos.rollout_correction(old, rollout, mask, mode, 2.0)[0] * mask

    close(weights("off"), mask)
    close(weights("token"), T([1.5, 2, 0], [0.5, 0.8, 1]))
    close(weights("token-mask"), T([1.5, 0, 0], [0.5, 0.8, 1]))
    close(weights("sequence"), T([2, 2, 0], [0.4, 0.4, 0.4]))
    close(weights("sequence-mask"), T([0, 0, 0], [0.4, 0.4, 0.4]))
    metrics = algos.rollout_correction(old, rollout, mask, "token", 2.0)[1]
    gap = [math.log(1.5), math.log(3.0), math.log(0.5), math.log(0.8), 0.0]
    close(metrics["logprob_diff_max"], math.log(3.0))
    close(metrics["logprob_diff_mean"], sum(map(abs, gap)) / 5)
    close(metrics["logprob_diff_k3"], sum(math.exp(x) - 1 - x for x in gap) / 5)
    close(metrics["correction_capped"], 0.2)
    assert not algos.rollout_correction(old.requires_grad_(), rollout, mask, "token", 2.0)[0].requires_grad


def test_rollout_weights_multiply_the_loss():
    inputs = (T([0.1, 0.2]), T([0, 0]), T([1, 1]), torch.ones(1, 2), LOSS_OPTIONS)
    weights = T([2.0, 0.5])
    for name in set(algos.POLICY_LOSSES) - {"clip_cov"}:
        weighted = algos.policy_loss(name, *inputs, rollout_weights=weights)[0]
        factor = torch.ones(1, 2) if name == "geo_mean" else weights  # geometric mean of 2 and 1/2
        close(weighted, algos.policy_loss(name, *inputs)[0] * factor, atol=1e-6)


def test_kl_cov_adds_a_penalty_where_the_covariance_is_largest():
    log_prob, A, mask = T([1, 2, 3, X]), T([-1, 0, 1, X]), T([1, 1, 1, 0])  # covariance parts 1, 0, 1
    options = {"kl_cov_ratio": 0.7, "ppo_kl_coef": 10.0}  # int(0.7 * 3) = 2 tokens
    loss, metrics = algos.policy_loss("kl_cov", log_prob, log_prob - 0.1, A, mask, options)
    close(loss[:, :3] + A[:, :3] * math.exp(0.1), T([1, 0, 1]))
    close(metrics["ppo_kl"], T([0.1, 0.1, 0.1, 0]))


def test_clip_cov_drops_a_share_of_the_tokens_between_the_bounds():
    torch.manual_seed(0)
    log_prob, A, mask = torch.randn(4, 50), torch.randn(4, 50), torch.ones(4, 50)
    old = log_prob - 0.5 * torch.randn(4, 50)
    clipped = algos.policy_loss("ppo", log_prob, old, A, mask, LOSS_OPTIONS)[1]["clipfrac"] > 0
    for share, count in ((0.1, 20), (1.0, None)):
        options = {**LOSS_OPTIONS, "clip_cov_lb": 0.0, "clip_cov_ub": 1.0, "clip_cov_ratio": share}
        loss, metrics = algos.policy_loss("clip_cov", log_prob, old, A, mask, options)
        dropped, covariance = metrics["clipfrac"] > 0, algos.covariance(log_prob, A, mask)
        assert (loss[dropped] == 0).all() and (loss[~dropped] != 0).all()
        eligible = (covariance > 0) & (covariance < 1) & ~clipped
        assert not (dropped & ~eligible).any() and dropped.sum() == (count or eligible.sum())
    assert (clipped & (covariance > 0)).any()


def test_informative_groups():
    scores = torch.tensor([1.0, 0.1, 0.0, 0.1, math.nan, 1.0, math.nan])
    group = torch.tensor([9, 4, 9, 4, 4, 6, 6])
    assert algos.informative_groups(scores, group).tolist() == [True, False, True, False, False, False, False]
