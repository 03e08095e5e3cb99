"""Every formula of the system: advantages, policy losses, KL, value loss, aggregation, rollout correction.

Pure functions on padded [B, T] float tensors: B responses, T token positions. `response_mask` is 1 where the
model wrote the token and 0 on padding AND on tool text in the middle of a response. A 0 is in no statistic,
no recursion and no loss: a trained token gets the result it would have with those positions cut out. An
advantage estimator sees the whole batch of a step, because its statistics are global. A policy loss sees one
micro-batch and returns a loss per token, because `aggregate` must normalise over a whole mini-batch.

Methods are found by name in ADVANTAGES and POLICY_LOSSES and called through `advantage` and `policy_loss`.
What a method reads stands in its signature, keyword-only: inputs by the names in INPUTS, options by their
names in config.yaml, and constants of the method with a default.

Not here: log-probs and entropy (the worker computes them in chunks, next to the logits), and whatever knows
of devices or ranks. verl 0.9.1 gives the same numbers (tests/test_golden.py). Docstrings say where we differ.
"""
import inspect

import torch

INPUTS = {"group", "values", "reward_baselines"}


def options_of(fn):
    """The config options that a method reads; one that it does not read has no effect and can be refused."""
    keywords = [p for p in inspect.signature(fn).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return [p.name for p in keywords if p.default is p.empty and p.name not in INPUTS]


@torch.no_grad()
def advantage(name, batch, options):
    """(advantages, returns), both [B, T], of estimator `name`, which gets what it reads of the dicts `batch`
    (tensors: token_level_rewards, response_mask and INPUTS) and `options`.

    A row without a score (NaN) or without a trained token is in no statistic and gets advantage 0, and so
    does one whose group has lost all others that way."""
    read = inspect.signature(ADVANTAGES[name]).parameters
    batch = {key: tensor for key, tensor in batch.items() if key in read}
    counted = ~batch["token_level_rewards"].sum(-1).isnan() & (batch["response_mask"].sum(-1) > 0)
    if not counted.all():
        if "group" in read:
            left, had = (group_reduce(x.float(), batch["group"], "sum") for x in (counted, counted >= 0))
            counted &= (left > 1) | (had == 1)
        results = advantage(name, {key: tensor[counted] for key, tensor in batch.items()}, options)
        full, rows = torch.zeros_like(batch["response_mask"]), counted.nonzero().squeeze(-1)
        return tuple(full.index_copy(0, rows, result) for result in results)
    return ADVANTAGES[name](**batch, **{key: value for key, value in options.items() if key in read})


def policy_loss(name, log_prob, old_log_prob, advantages, response_mask, options, rollout_weights=None):
    """(loss [B, T], metrics) of policy loss `name`, which gets what it reads of the dict `options`; the loss
    is multiplied by rollout_weights [B, T] (of `rollout_correction`).

    The loss is per token, still to be aggregated. Metrics are tensors [B, T]: their mean over the trained
    tokens of the mini-batch is the number to report."""
    fn = POLICY_LOSSES[name]
    keywords = {key: options[key] for key in options_of(fn)}
    loss, metrics = fn(log_prob, old_log_prob, advantages, response_mask, **keywords)
    if rollout_weights is None:
        return loss, metrics
    if name == "geo_mean":  # its ratio is a geometric mean over the sequence, so its weight is one too
        rollout_weights = masked_mean((rollout_weights + 1e-10).log(), response_mask, -1).exp()
    return loss * rollout_weights, metrics


# ------------------------------------------------------- masked, recursive and grouped sums: each exists once


def masked_mean(x, mask, dim=None):
    """Mean of x, weighted by mask (0 or 1, or any weights): of all x, or along `dim` (kept); 0 of nothing."""
    keepdim = dim is not None
    return (x * mask).sum(dim, keepdim=keepdim) / mask.sum(dim, keepdim=keepdim).clamp(min=1)


def masked_moments(x, mask):
    """(mean, unbiased variance) of x, weighted by mask; scalars. The variance of less than two is 0."""
    mean = masked_mean(x, mask)
    return mean, ((x - mean).square() * mask).sum() / (mask.sum() - 1).clamp(min=1)


def whiten(x, mask):
    """x shifted and scaled to mean 0 and standard deviation 1, weighted by mask."""
    x = x.double()  # in float32 equal rewards of 1000 would get advantages of 0.8, not 0
    mean, variance = masked_moments(x, mask)
    return ((x - mean) * torch.rsqrt(variance + 1e-8)).float()


def advantages_backwards(rewards, values, mask, gamma, lam):
    """A_t = r_t + gamma V_next - V_t + gamma lam A_next, from the last trained token to the first, where
    "next" is the next trained token; all [B, T], 0 where masked. With values 0 and lam 1 it is the discounted
    return. A reward on a masked position (tool text) goes to the trained token before it."""
    rewards, values, trained = (x.t().contiguous() for x in (rewards, values, mask > 0))  # (T, B)
    advantages, ahead = torch.empty_like(rewards), torch.zeros_like(rewards[0])
    for t in range(len(rewards) - 1, -1, -1):
        q = rewards[t] + ahead  # what a token here leads to
        advantages[t] = q - values[t]
        ahead = torch.where(trained[t], gamma * (values[t] + lam * advantages[t]), q)
    return advantages.masked_fill_(~trained, 0.0).t().contiguous()


def group_reduce(x, group, how, start=0.0):
    """For each row the sum, amax or amin of x over the rows of its group, from `start` on; a NaN is left out.
    x [B]; group [B]: any integers, in any order."""
    ids, index = group.unique(return_inverse=True)
    x = x.masked_fill(x.isnan(), start)
    return x.new_full((len(ids),), start).scatter_reduce(0, index, x, how)[index]


def group_statistics(token_level_rewards, group):
    """Each row's score (the sum of its rewards), and the mean, unbiased standard deviation and number of its
    group's scores; all [B]. A row alone in its group has mean 0 and deviation 1, as in verl. In float64 the
    mean of equal float32 scores is exactly that score: a group without differences gets advantage 0, not
    rounding divided by rounding."""
    scores = token_level_rewards.sum(-1).double()
    n = group_reduce(torch.ones_like(scores), group, "sum")
    mean = (group_reduce(scores, group, "sum") / n).masked_fill(n < 2, 0.0)
    variance = group_reduce((scores - mean).square(), group, "sum") / (n - 1).clamp(min=1)
    return scores, mean, variance.sqrt().masked_fill(n < 2, 1.0), n


def per_token(row_values, response_mask):
    """[B] to (advantages, returns), both [B, T]: the trained tokens of a response get its value."""
    spread = row_values.float().unsqueeze(-1) * response_mask
    return spread, spread


# ------------------------------------------------------- advantages: (advantages, returns), both [B, T]
# token_level_rewards [B, T]; group [B] tells which responses answer the same prompt. `advantage` sees to it
# that every row has a score and a trained token. Results are 0 where masked.


def gae(token_level_rewards, response_mask, *, values, gamma, lam):
    """Generalized Advantage Estimation (arXiv 1506.02438), whitened. values [B, T] are the critic's; before
    whitening the advantages are returns - values."""
    advantages = advantages_backwards(token_level_rewards, values, response_mask, gamma, lam)
    return whiten(advantages, response_mask) * response_mask, (advantages + values) * response_mask


def reinforce_plus_plus(token_level_rewards, response_mask, *, gamma):
    """REINFORCE++ (arXiv 2501.03262): the discounted return from each token on, whitened over the batch."""
    no_values = torch.zeros_like(token_level_rewards)
    returns = advantages_backwards(token_level_rewards, no_values, response_mask, gamma, 1.0)
    return whiten(returns, response_mask) * response_mask, returns


def reinforce_plus_plus_baseline(token_level_rewards, response_mask, *, group):
    """REINFORCE++-baseline (arXiv 2501.03262): score - group mean, whitened over the batch's tokens."""
    scores, mean, _, _ = group_statistics(token_level_rewards, group)
    return per_token(whiten(scores - mean, response_mask.sum(-1)), response_mask)


def grpo(token_level_rewards, response_mask, *, group, norm_adv_by_std, epsilon=1e-6):
    """GRPO (arXiv 2402.03300): (score - group mean) / group std; undivided it is Dr. GRPO (2503.20783)."""
    scores, mean, std, _ = group_statistics(token_level_rewards, group)
    advantages = scores - mean
    if norm_adv_by_std:
        advantages = advantages / (std + epsilon)
    return per_token(advantages, response_mask)


def grpo_passk(token_level_rewards, response_mask, *, group, norm_adv_by_std, epsilon=1e-6):
    """Pass@k (arXiv 2503.19595): a group's best response gets its lead over the second best, the others 0.
    If two share the lead, or for a response alone in its group (which verl refuses), that is 0."""
    scores, _, std, n = group_statistics(token_level_rewards, group)
    best = scores == group_reduce(scores, group, "amax", -torch.inf)
    lead = scores - group_reduce(scores.masked_fill(best, -torch.inf), group, "amax", -torch.inf)
    leads = best & (group_reduce(best.double(), group, "sum") == 1) & (n > 1)
    advantages = lead.masked_fill(~leads, 0.0)
    if norm_adv_by_std:
        advantages = advantages / (std + epsilon)
    return per_token(advantages, response_mask)


def rloo(token_level_rewards, response_mask, *, group):
    """RLOO (arXiv 2402.14740): score - mean of the group's others, or n / (n - 1) (score - group mean)."""
    scores, mean, _, n = group_statistics(token_level_rewards, group)
    return per_token((scores - mean) * n / (n - 1).clamp(min=1), response_mask)


def opo(token_level_rewards, response_mask, *, group):
    """OPO (arXiv 2505.23585): score - group mean weighted by length in trained tokens."""
    scores, _, _, n = group_statistics(token_level_rewards, group)
    length = response_mask.sum(-1).double()
    baseline = group_reduce(length * scores, group, "sum") / group_reduce(length, group, "sum")
    return per_token(scores - baseline.masked_fill(n < 2, 0.0), response_mask)


def gpg(token_level_rewards, response_mask, *, group):
    """GPG (arXiv 2504.02546): alpha (score - group mean). The paper's alpha is batch size over the number of
    responses that have a gradient; verl, and so we, count the responses whose score is not 0."""
    scores, mean, _, _ = group_statistics(token_level_rewards, group)
    alpha = len(scores) / scores.count_nonzero().clamp(min=1)
    return per_token(alpha * (scores - mean), response_mask)


def remax(token_level_rewards, response_mask, *, reward_baselines):
    """ReMax (arXiv 2310.10505): return - reward_baselines [B], the score of a greedy answer to the prompt."""
    returns = token_level_rewards.flip(-1).cumsum(-1).flip(-1) * response_mask
    return returns - reward_baselines.unsqueeze(-1) * response_mask, returns


ADVANTAGES = {fn.__name__: fn for fn in (gae, grpo, grpo_passk, rloo, opo, gpg, remax, reinforce_plus_plus,
                                         reinforce_plus_plus_baseline)}


# ------------------------------------------------------- policy losses: (loss [B, T], metrics of [B, T])
# log_prob, old_log_prob, advantages, response_mask: all [B, T]


def log_ratio(log_prob, old_log_prob, mask):
    """log(pi / pi_old) [B, T], 0 where masked; clamped before any exp, so value and gradient are finite."""
    return (log_prob - old_log_prob).masked_fill(mask == 0, 0.0).clamp(-20.0, 20.0)


def clipped_surrogate(ratio, advantages, clip_ratio_low, clip_ratio_high):
    """(max(-A r, -A clip(r)), 1 where the clipped one is larger), both [B, T]."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    return torch.maximum(unclipped, clipped), (clipped > unclipped).float()


def ppo(log_prob, old_log_prob, advantages, response_mask, *, clip_ratio_low, clip_ratio_high, clip_ratio_c):
    """PPO (arXiv 1707.06347) with separate bounds (DAPO, 2503.14476) and dual clip (1912.09729)."""
    difference = log_ratio(log_prob, old_log_prob, response_mask)
    loss, clipped = clipped_surrogate(difference.exp(), advantages, clip_ratio_low, clip_ratio_high)
    limit = torch.where(advantages < 0, -clip_ratio_c * advantages, torch.inf)
    metrics = {"ppo_kl": -difference, "clipfrac": clipped, "clipfrac_lower": (loss > limit).float()}
    return torch.minimum(loss, limit), metrics


def gspo(log_prob, old_log_prob, advantages, response_mask, *, clip_ratio_low, clip_ratio_high):
    """GSPO (arXiv 2507.18071), token form: a token has the ratio of its sequence and its own gradient."""
    difference = log_ratio(log_prob, old_log_prob, response_mask)
    sequence = masked_mean(difference, response_mask, -1).detach()  # (B, 1)
    ratio = (sequence + difference - difference.detach()).exp()
    loss, clipped = clipped_surrogate(ratio, advantages, clip_ratio_low, clip_ratio_high)
    return loss, {"ppo_kl": -difference, "clipfrac": clipped}


def cispo(log_prob, old_log_prob, advantages, response_mask, *, clip_ratio_low, clip_ratio_high):
    """CISPO (MiniMax-M1, arXiv 2506.13585): REINFORCE weighted by the clipped ratio, without its gradient."""
    difference = log_ratio(log_prob, old_log_prob, response_mask)
    ratio = difference.detach().exp()
    weight = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    return -weight * advantages * log_prob, {"ppo_kl": -difference, "clipfrac": (ratio != weight).float()}


def gpg_loss(log_prob, old_log_prob, advantages, response_mask):
    """GPG (arXiv 2504.02546): the plain policy gradient, without a ratio."""
    return -advantages * log_prob, {"ppo_kl": -log_ratio(log_prob, old_log_prob, response_mask)}


def geo_mean(log_prob, old_log_prob, advantages, response_mask, *, clip_ratio_low, clip_ratio_high):
    """GMPO (arXiv 2507.20673): the geometric mean of a sequence's ratios, each clipped in log space, as every
    token's ratio. seq-mean-token-mean makes it the paper's; verl's mean also counts rows without a token."""
    difference = log_ratio(log_prob, old_log_prob, response_mask)
    clamped, sign = difference.clamp(-clip_ratio_low, clip_ratio_high), advantages.sign()
    pessimistic = sign * torch.minimum(sign * difference, sign * clamped)
    ratio = masked_mean(pessimistic, response_mask, -1).exp()  # (B, 1)
    loss = -masked_mean(advantages, response_mask, -1) * ratio
    clipped = (difference != clamped).float()
    metrics = {"clipfrac": clipped * (advantages > 0), "clipfrac_lower": clipped * (advantages < 0)}
    return loss.expand_as(log_prob), {"ppo_kl": -difference, **metrics}


def sapo(log_prob, old_log_prob, advantages, response_mask, *, tau_pos, tau_neg):
    """SAPO (arXiv 2511.20347): a smooth gate in place of the clip, with its own slope for A <= 0."""
    difference = log_ratio(log_prob, old_log_prob, response_mask)
    tau = torch.where(advantages > 0, tau_pos, tau_neg)
    gate = torch.sigmoid(tau * (difference.exp() - 1)) * 4 / tau
    return -gate * advantages, {"ppo_kl": -difference}


def covariance(log_prob, advantages, response_mask):
    """Each token's part in the covariance of log-probability and advantage over the tensor's trained tokens
    [B, T], without gradient; -inf where masked."""
    centred = advantages - masked_mean(advantages, response_mask)
    parts = centred * (log_prob - masked_mean(log_prob, response_mask)).detach()
    return parts.masked_fill(response_mask == 0, -torch.inf)


def largest(x, share, response_mask):
    """1 at the largest x [B, T]: as many as a share of the trained tokens, at least one; never at -inf."""
    count = max(1, int(share * int(response_mask.sum())))
    chosen = torch.zeros_like(x).flatten().index_fill(0, x.flatten().topk(count).indices, 1.0)
    return chosen.view_as(x) * (x > -torch.inf)


def kl_cov(log_prob, old_log_prob, advantages, response_mask, *, kl_cov_ratio, ppo_kl_coef):
    """KL-Cov (arXiv 2505.22617): a penalty |log ratio| on the share kl_cov_ratio of tokens with the largest
    covariance among the tensor given: per micro-batch, as in verl. Its ppo_kl is the mean of |log ratio|."""
    difference = log_ratio(log_prob, old_log_prob, response_mask)
    chosen = largest(covariance(log_prob, advantages, response_mask), kl_cov_ratio, response_mask)
    loss = -advantages * difference.exp() + ppo_kl_coef * chosen * difference.abs()
    return loss, {"ppo_kl": difference.abs()}


def clip_cov(log_prob, old_log_prob, advantages, response_mask, *, clip_ratio_low, clip_ratio_high,
             clip_cov_ratio, clip_cov_lb, clip_cov_ub):
    """Clip-Cov (arXiv 2505.22617): no gradient from a share clip_cov_ratio of tokens, drawn (torch's global
    generator) among those whose covariance within the tensor given is between the bounds: per micro-batch, as
    in verl. clipfrac counts the drawn tokens."""
    difference = log_ratio(log_prob, old_log_prob, response_mask)
    loss, clipped = clipped_surrogate(difference.exp(), advantages, clip_ratio_low, clip_ratio_high)
    covariances = covariance(log_prob, advantages, response_mask)
    between = (covariances > clip_cov_lb) & (covariances < clip_cov_ub) & (clipped == 0)
    lots = torch.rand_like(covariances).masked_fill(~between, -torch.inf)
    drawn = largest(lots, clip_cov_ratio, response_mask)
    return loss * (1 - drawn), {"ppo_kl": -difference, "clipfrac": drawn}


POLICY_LOSSES = {"ppo": ppo, "gspo": gspo, "cispo": cispo, "gpg": gpg_loss, "geo_mean": geo_mean,
                 "sapo": sapo, "kl_cov": kl_cov, "clip_cov": clip_cov}


# ------------------------------------------------------- aggregation: [B, T] to a scalar


def normaliser(masks, loss_scale=1.0):
    """What `aggregate` divides by, counted over a whole mini-batch: masks is [B, T] or a list of 1-D masks. A
    sequence without a trained token does not count. On several ranks add up tokens and sequences first."""
    lengths = torch.stack([mask.sum() for mask in masks])
    return {"tokens": float(lengths.sum()), "sequences": float((lengths > 0).sum()), "loss_scale": loss_scale}


AGGREGATIONS = {  # a token's weight: N tokens, S sequences, its own sequence's length, the constant scale
    "token-mean": lambda N, S, length, scale: 1 / N,
    "seq-mean-token-sum": lambda N, S, length, scale: 1 / S,
    "seq-mean-token-mean": lambda N, S, length, scale: 1 / (S * length),
    "seq-mean-token-sum-norm": lambda N, S, length, scale: 1 / (S * scale),
}


def aggregate(loss, response_mask, mode, norm):
    """A micro-batch's share of its mini-batch's loss: summed over micro-batches and ranks it is the loss of
    the mini-batch, however that was cut (where gradients are averaged over ranks, multiply by their number).
    An entirely masked micro-batch gives 0 with gradients 0.

    loss, response_mask [B, T]; norm is `normaliser` of the mini-batch. seq-mean-token-mean is "sequence-level
    weighting": each sequence weighs 1, each of its n tokens 1 / n. token-mean is DAPO's (arXiv 2503.14476),
    seq-mean-token-sum-norm with a constant loss_scale Dr. GRPO's (2503.20783)."""
    length = response_mask.sum(-1, keepdim=True).clamp(min=1)  # (B, 1)
    weight = AGGREGATIONS[mode](max(norm["tokens"], 1), max(norm["sequences"], 1), length, norm["loss_scale"])
    return (loss.masked_fill(response_mask == 0, 0.0) * weight).sum()


# ------------------------------------------------------- KL, critic, the gap between engine and trainer


def k3(difference):
    """exp(-d) - 1 + d, never negative; at most 10, as in verl. -d is clamped before exp, so value and
    gradient are finite."""
    x = (-difference).clamp(-20.0, 20.0)
    return (x.exp() - x - 1).clamp(max=10.0)


KL_ESTIMATORS = {"k1": lambda d: d, "k2": lambda d: d.square() / 2, "k3": k3, "abs": torch.abs}


def kl(log_prob, ref_log_prob, estimator):
    """KL(policy, reference) per token [B, T], from samples of the policy
    (http://joschu.net/blog/kl-approx.html). With a + (k1+, k3+, ...) the value is the estimator's, the
    gradient k2's, on average the true KL's."""
    difference = log_prob - ref_log_prob
    value = KL_ESTIMATORS[estimator.removesuffix("+")](difference)
    if not estimator.endswith("+"):
        return value
    k2 = KL_ESTIMATORS["k2"](difference)
    return value.detach() + (k2 - k2.detach())


def apply_kl_penalty(token_level_scores, token_kl, response_mask, kl_coef):
    """token_level_rewards [B, T]: the scores minus kl_coef * KL on trained tokens."""
    return token_level_scores - kl_coef * token_kl.masked_fill(response_mask == 0, 0.0)


def kl_controller(kl_coef, observed, n, kl_target, kl_horizon):
    """kl_coef after n responses of mean KL `observed` (arXiv 1909.08593); without kl_target it is fixed."""
    if kl_target is None:
        return kl_coef
    error = min(max(observed / kl_target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * n / kl_horizon)


def value_loss(values, old_values, returns, cliprange_value):
    """PPO's clipped value loss, with its factor 1/2: (loss [B, T], metrics of [B, T]); all inputs [B, T]."""
    clipped_values = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
    unclipped, clipped = (values - returns).square(), (clipped_values - returns).square()
    return torch.maximum(unclipped, clipped) / 2, {"clipfrac": (clipped > unclipped).float()}


def explained_variance(values, returns, response_mask):
    """1 - Var(returns - values) / Var(returns): 1 is a perfect critic, 0 a constant one. NaN or -inf where
    all returns are equal."""
    _, variance = masked_moments(returns, response_mask)
    return 1 - masked_moments(returns - values, response_mask)[1] / variance


ROLLOUT_CORRECTIONS = ("off", "token", "sequence", "token-mask", "sequence-mask")


def rollout_correction(old_log_prob, rollout_log_prob, response_mask, mode, cap):
    """(weights [B, T] without gradient, metrics): corrects losses for an engine whose log-probs are not the
    trainer's. rho = pi_old / pi_rollout, per token or multiplied over the sequence, is truncated at `cap`
    (importance sampling) or, in the mask forms, set to 0 above it (rejection). "off" weighs all 1."""
    gap = log_ratio(old_log_prob, rollout_log_prob, response_mask).detach()
    log_rho = gap
    if mode.startswith("sequence"):
        log_rho = gap.sum(-1, keepdim=True).clamp(-20.0, 20.0).expand_as(gap)
    rho = torch.ones_like(gap) if mode == "off" else log_rho.exp()
    metrics = {
        "logprob_diff_mean": masked_mean(gap.abs(), response_mask),
        "logprob_diff_max": gap.abs().max(),
        "logprob_diff_k3": masked_mean(k3(-gap), response_mask),  # KL(rollout, old): the engine sampled
        "correction_capped": masked_mean((rho > cap).float(), response_mask),
    }
    return rho.masked_fill(rho > cap, 0.0 if mode.endswith("mask") else cap), metrics


# ------------------------------------------------------- DAPO (arXiv 2503.14476)


def informative_groups(scores, group):
    """Dynamic sampling keeps the rows [B] where this is True: their group's scores are not all equal (NaN is
    no score), so that the group has a gradient. scores, group [B]."""
    return group_reduce(scores, group, "amax", -torch.inf) > group_reduce(scores, group, "amin", torch.inf)
