"""One process per device: FSDP2 models (actor, critic, reference), their passes and updates, and one rank's
engine.

A `Worker` is told what to do by the trainer, through Ray or directly (torchrun, launch=local). Every method
that takes a batch is called on all ranks together, each with its own share of the rows. Inside, rows become
micro-batches of padded model rows; outside, nothing is padded. A worker knows nothing of datasets, rewards or
steps.
"""

import functools
import math
import os
from collections import defaultdict

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification
from transformers import get_cosine_with_min_lr_schedule_with_warmup as cosine_schedule
from transformers.utils import logging as transformers_logging

import algos
import data
from rollout import Rollout

# The token columns that losses are made from, and those that a forward pass gives.
TOKEN_COLUMNS = ("response_mask", "old_logprobs", "ref_logprobs", "advantages", "returns", "values",
                 "rollout_weights", "rollout_logprobs")
SCORES = {"actor": ("old_logprobs", "entropy"), "ref": ("ref_logprobs",), "critic": ("values",)}


# ---- Forward passes ----------------------------------------------------------------------------------------


def pack(batch, units, device):
    """Lay out units (lists of row indices of one prompt) as padded rows: prompt, response 1, response 2, ...

    Positions restart after the prompt for every response, and the mask lets a response see the prompt and
    itself only, so that a group's prompt is computed once. The last token of a response predicts nothing that
    is used and is left out.

    Returns the model's inputs (input_ids [B, T], position_ids [B, T], attention_mask [B, 1, T, T] or None
    where every row holds one response and plain causal attention is right), and for all responses in order of
    the units the flat position in B*T that predicts each response token: a list of 1-D tensors.
    """
    ids, positions, segments, predictors = [], [], [], []
    for unit in units:
        prompt = batch["prompt_ids"][unit[0]]
        parts = [prompt, *(batch["response_ids"][row][:-1] for row in unit)]
        lengths, end = [len(part) for part in parts], len(prompt)
        starts = [0] + [end] * len(unit)
        positions.append(torch.cat([start + torch.arange(length) for start, length in zip(starts, lengths)]))
        segments.append(torch.arange(len(parts)).repeat_interleave(torch.tensor(lengths)))
        for length in lengths[1:]:  # the prompt's last token predicts a response's first
            predicting = torch.cat([torch.tensor([len(prompt) - 1]), end + torch.arange(length)])
            predictors.append((len(ids), predicting))
            end += length
        ids.append(torch.cat(parts))
    inputs = {"input_ids": data.pad(ids).to(device), "position_ids": data.pad(positions).to(device)}
    width, mask = inputs["input_ids"].shape[1], None
    if any(len(unit) > 1 for unit in units):
        segment = data.pad(segments, -1)
        same = segment[:, None, :] == segment[:, :, None]
        causal = torch.ones(width, width, dtype=torch.bool).tril()
        mask = ((same | (segment == 0)[:, None, :]) & causal)[:, None].to(device)
    return inputs | {"attention_mask": mask}, [row * width + position for row, position in predictors]


def chunk_logprobs(hidden, weight, bias, labels, temperature, with_entropy):
    """Log-probs of `labels` [N] and entropy [N] (zeros unless asked for) from hidden states [N, H]; logits
    live only here."""
    logits = F.linear(hidden, weight, bias).float() / temperature
    logsumexp = logits.logsumexp(-1)
    logprobs = logits.gather(-1, labels[:, None])[:, 0] - logsumexp
    if not with_entropy:
        return logprobs, torch.zeros_like(logprobs)
    return logprobs, logsumexp - (torch.softmax(logits, -1) * logits).sum(-1)


def token_logprobs(model, inputs, predictors, labels, temperature, with_entropy):
    """What replaces the forward of a causal language model: log-probs and entropy [N] of N given tokens.

    Only the positions that predict a token (`predictors` [N], flat in B*T) reach the head, and they do so in
    chunks whose logits are recomputed in the backward pass: [tokens x vocabulary] never exists at once.
    """
    hidden = model.get_decoder()(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)[predictors]
    head = model.get_output_embeddings()
    size = max(1, 2**24 // head.weight.shape[0])
    chunks = []
    for h, y in zip(hidden.split(size), labels.split(size)):
        args = (h, head.weight, head.bias, y, temperature, with_entropy)
        chunks.append(checkpoint(chunk_logprobs, *args, use_reentrant=False))
    return tuple(torch.cat(parts) for parts in zip(*chunks))


def token_values(forward, inputs, predictors):
    """What replaces the forward of a critic: the value [N] at the position that predicts each response
    token."""
    return (forward(**inputs, use_cache=False).logits.flatten(0, 1)[predictors, 0].float(),)


# ---- Building models ---------------------------------------------------------------------------------------


def build_model(role, path, settings, config, mesh):
    """An FSDP2 model on `mesh`: "critic" has a value head, every other role a language-model head.

    Rank 0 reads the weights, the other ranks build on the meta device and receive their shards from it, so a
    full copy exists once per job and only while loading. Master weights are float32; `settings.compute_dtype`
    is the precision of the passes. Dropout of any name is set to 0: a ratio of new to old log-probs must be 1
    before the first update.
    """
    trust = config.model.trust_remote_code
    model_config = AutoConfig.from_pretrained(path, trust_remote_code=trust, **config.model.overrides)
    for name in list(vars(model_config)):
        if name.endswith(("dropout", "pdrop")):
            setattr(model_config, name, 0.0)
    auto = AutoModelForCausalLM
    if role == "critic":
        auto, model_config.num_labels = AutoModelForTokenClassification, 1
    kwargs = {"trust_remote_code": trust, "dtype": torch.float32}
    kwargs["attn_implementation"] = config.model.attn_implementation
    if dist.get_rank() == 0:
        model, loading = auto.from_pretrained(path, config=model_config, output_loading_info=True, **kwargs)
        if role != "critic" and loading["missing_keys"]:
            raise ValueError(f"{path}: the checkpoint has no {sorted(loading['missing_keys'])}")
        for name in loading["missing_keys"]:
            torch.nn.init.zeros_(model.get_parameter(name))  # a critic's new head: the first values are 0
    else:
        with torch.device("meta"):
            model = auto.from_config(model_config, **kwargs)
    if config.model.liger:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    if getattr(settings, "gradient_checkpointing", False):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # some heads have one that no config names
    model.train()
    if role == "critic":
        model.forward = functools.partial(token_values, model.forward)
    else:
        model.forward = functools.partial(token_logprobs, model)
    return shard_model(model, getattr(torch, settings.compute_dtype), mesh)


def shard_model(model, compute_dtype, mesh):
    """Shard every layer, then the rest, over `mesh`, and fill all ranks with rank 0's weights and buffers.

    Gradients are summed over ranks, not averaged: losses are already divided by the whole mini-batch's
    counts.
    """
    weights = model.state_dict() if dist.get_rank() == 0 else {}
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    layers = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    for module in [*layers, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction with a factor
    if dist.get_rank() == 0:
        model.to(mesh.device_type)
    else:
        model.to_empty(device=mesh.device_type)
    model.tie_weights()  # to_empty gives tied weights a tensor each
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(model, weights, options=options)
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)
    return model


def build_optimizer(model, settings, updates):
    """AdamW and its schedule over `updates` optimizer updates. The schedule starts at 1, so that with a
    warm-up of w the first update uses lr/w and not 0, and the last one the floor."""
    groups = [{"params": list(model.parameters()), "initial_lr": settings.lr}]
    options = {"betas": tuple(settings.betas), "weight_decay": settings.weight_decay, "fused": True}
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, **options)
    warmup = int(settings.warmup * updates) if 0 < settings.warmup < 1 else int(settings.warmup)
    floor = 1.0 if settings.schedule == "constant" else settings.min_lr_ratio  # a cosine from 1 to 1 is flat
    return optimizer, cosine_schedule(optimizer, warmup, updates, last_epoch=0, min_lr_rate=floor)


# ---- The worker --------------------------------------------------------------------------------------------


class Worker:
    """One rank: its shards of every model in its pool, and its engine. Batches are dicts of lists, see
    DESIGN.md.

    `init_method` is where the ranks of a pool meet: env:// under torchrun, a file on one machine, tcp://
    across machines.
    """

    def __init__(self, config, rank, world, local_rank, local_world, init_method):
        self.config, self.rank, self.world = config, rank, world
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if self.device == "cuda":
            torch.cuda.set_device(local_rank)
        else:
            # Ray sets OMP_NUM_THREADS to an actor's CPUs; here a machine's ranks share its cores evenly.
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world))
        backend = "cpu:gloo,cuda:nccl" if self.device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world)
        self.mesh = init_device_mesh(self.device, (world,), mesh_dim_names=("dp",))
        self.models, self.optimizers, self.schedules = {}, {}, {}
        self.rollout = None

    def build(self, role, path, steps):
        """Load one role; the trainer calls this for critic, reference, then actor and rollout, in that
        order."""
        config = self.config
        if role == "rollout":
            tokenizer = data.load_tokenizer(config.model, path)
            shape = self.world // config.rollout.tp, config.rollout.tp
            mesh = init_device_mesh(self.device, shape, mesh_dim_names=("dp", "tp"))
            self.rollout = Rollout(config, path, tokenizer, self.device, mesh)
            return
        settings = getattr(config, role)
        self.models[role] = model = build_model(role, path, settings, config, self.mesh)
        if role in ("actor", "critic"):
            responses = config.data.batch_size * config.rollout.n
            updates = steps * settings.epochs * (responses // settings.mini_batch_size)
            self.optimizers[role], self.schedules[role] = build_optimizer(model, settings, updates)

    # -- rollout

    def wake(self):
        """Engine weights come back, the actor's shards stream in, then the kv cache: after this the engine
        may generate."""
        self.rollout.resume("weights")
        self.rollout.update_weights(self.full_tensors("actor"))
        self.rollout.resume("kv_cache")

    def full_tensors(self, role):
        """(name, whole tensor) of every parameter once, gathered one at a time; all ranks must walk
        through all of it."""
        dtype = getattr(torch, self.config.rollout.dtype)
        for name, parameter in self.models[role].named_parameters():
            yield name, parameter.detach().to(dtype).full_tensor()

    def sleep(self):
        self.rollout.release()

    def generate(self, batch, step, sampling):
        """New columns response_ids, response_mask, rollout_logprobs, turns, finish_reason; see rollout.py."""
        answered = self.rollout.generate(batch, step=step, sampling=sampling)
        return {name: column for name, column in answered.items() if name not in batch}

    # -- forward passes

    def micro_batches(self, batch, role):
        """This rank's micro-batches: (units, weight). All ranks must run equally many forward and backward
        passes, or FSDP's collectives hang; a rank with fewer repeats its first row with weight 0."""
        settings = getattr(self.config, "critic" if role == "critic" else "actor")
        plan = data.micro_batches(batch, settings.max_tokens_per_device, self.config.actor.share_prompt)
        longest = torch.tensor(len(plan))
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return [(units, 1.0) for units in plan] + [([[0]], 0.0)] * (int(longest) - len(plan))

    def forward(self, role, batch, units, weight, with_entropy=False):
        """One micro-batch: its token columns padded to [n, R], and the model's outputs in the same shape, 0
        where the model did not write the token. Rows are in the order of `units`."""
        rows = [row for unit in units for row in unit]
        names = [name for name in TOKEN_COLUMNS if name in batch]
        columns = {name: data.pad([batch[name][row] for row in rows]).to(self.device) for name in names}
        columns["response_mask"] = columns["response_mask"] * weight
        written = columns["response_mask"].bool()
        inputs, predictors = pack(batch, units, self.device)
        flat = torch.cat([batch["response_mask"][row] for row in rows]).bool() & bool(weight)
        predictors = torch.cat(predictors)[flat].to(self.device)
        if role == "critic":
            outputs = self.models[role](inputs, predictors)
        else:
            labels = torch.cat([batch["response_ids"][row] for row in rows])[flat].to(self.device)
            temperature = self.config.rollout.temperature
            outputs = self.models[role](inputs, predictors, labels, temperature, with_entropy)
        padded = torch.zeros(written.shape, device=self.device)
        return columns, [padded.masked_scatter(written, output) for output in outputs]

    @torch.no_grad()
    def score(self, batch, role):
        """New columns of 1-D float32 tensors over the response: old_logprobs and entropy (role "actor"),
        ref_logprobs ("ref"), or values ("critic")."""
        columns = {name: [None] * len(batch["response_ids"]) for name in SCORES[role]}
        for units, weight in self.micro_batches(batch, role):
            _, outputs = self.forward(role, batch, units, weight, with_entropy=role == "actor")
            rows = [row for unit in units for row in unit] if weight else []
            for name, output in zip(SCORES[role], outputs):
                for row, values in zip(rows, output.cpu()):
                    columns[name][row] = values[: len(batch["response_ids"][row])].clone()
        return columns

    # -- updates

    def update(self, batch, role, norm):
        """One optimizer update of the actor or the critic from this rank's share of a mini-batch.

        `norm` holds the counts of the whole mini-batch over all ranks (algos.normaliser): each micro-batch's
        loss is its part of the whole, so gradients just add up, whatever the split. Returns metrics, equal on
        all ranks.
        """
        model, optimizer, schedule = self.models[role], self.optimizers[role], self.schedules[role]
        settings, loss_function = getattr(self.config, role), getattr(self, f"{role}_loss")
        totals, widest = defaultdict(float), torch.zeros(1, device=self.device)
        torch.manual_seed(self.config.seed + schedule.last_epoch)  # clip_cov draws: the same when resumed
        for units, weight in self.micro_batches(batch, role):
            with_entropy = role == "actor" and (settings.entropy_coef or settings.old_logprobs != "recompute")
            columns, outputs = self.forward(role, batch, units, weight, with_entropy)
            loss, stats = loss_function(columns, *outputs, norm)
            loss.backward()
            totals["loss"] += loss.item()
            for name, tensor in stats.items():
                per_token = tensor.detach() * columns["response_mask"]
                totals[name] += per_token.sum().item() / max(norm["tokens"], 1)
                if name == "rollout/logprob_diff_mean":
                    widest = torch.maximum(widest, per_token.max())
        sums = torch.tensor(list(totals.values()), dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        dist.all_reduce(widest, op=dist.ReduceOp.MAX)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad)
        grad_norm = grad_norm.full_tensor().item()
        finite = math.isfinite(grad_norm)
        if finite:
            optimizer.step()
        optimizer.zero_grad()
        metrics = dict(zip(totals, sums.tolist()), grad_norm=grad_norm, lr=schedule.get_last_lr()[0])
        metrics["skipped_updates"] = float(not finite)
        if "rollout/logprob_diff_mean" in metrics:
            metrics["rollout/logprob_diff_max"] = widest.item()
        schedule.step()
        return {name if "/" in name else f"{role}/{name}": value for name, value in metrics.items()}

    def actor_loss(self, columns, logprobs, entropy, norm):
        """Policy loss + kl_coef * KL(policy, reference) - entropy_coef * entropy, as parts of the
        mini-batch's mean."""
        actor, mask = self.config.actor, columns["response_mask"]
        old = logprobs.detach() if actor.old_logprobs == "skip" else columns["old_logprobs"]
        inputs = logprobs, old, columns["advantages"], mask, vars(actor), columns["rollout_weights"]
        losses, stats = algos.policy_loss(actor.policy_loss, *inputs)
        loss = algos.aggregate(losses, mask, actor.loss_agg, norm)
        if actor.kl_coef:
            kl = algos.kl(logprobs, columns["ref_logprobs"], actor.kl_estimator)
            loss = loss + actor.kl_coef * algos.aggregate(kl, mask, actor.loss_agg, norm)
            stats["kl_loss"] = kl
        if actor.entropy_coef:
            loss = loss - actor.entropy_coef * algos.aggregate(entropy, mask, actor.loss_agg, norm)
        if actor.old_logprobs != "recompute":  # only here are they compared to the engine's
            gap = algos.log_ratio(logprobs, columns["rollout_logprobs"], mask)
            stats |= {"rollout/logprob_diff_mean": gap.abs(), "rollout/logprob_diff_k3": algos.k3(-gap)}
            stats["entropy"] = entropy
        return loss, stats

    def critic_loss(self, columns, values, norm):
        critic, mask = self.config.critic, columns["response_mask"]
        old, returns = columns["values"], columns["returns"]
        losses, stats = algos.value_loss(values, old, returns, critic.cliprange_value)
        return algos.aggregate(losses, mask, critic.loss_agg, norm), stats

    # -- state

    def state(self, role):
        model_state, optimizer_state = get_state_dict(self.models[role], self.optimizers[role])
        schedule_state = self.schedules[role].state_dict()
        return {"model": model_state, "optimizer": optimizer_state, "schedule": schedule_state}

    def save(self, path):
        """Write every trained role's shards below `path`; the trainer makes the folder whole by renaming
        it."""
        for role in self.optimizers:
            dcp.save(self.state(role), checkpoint_id=f"{path}/{role}")

    def load(self, path):
        """Read what `save` wrote, by any number of ranks."""
        for role in self.optimizers:
            state = self.state(role)
            dcp.load(state, checkpoint_id=f"{path}/{role}")
            models = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
            set_state_dict(self.models[role], self.optimizers[role], **models)
            self.schedules[role].load_state_dict(state["schedule"])

    def memory(self):
        """MiB held by each process of this rank: resident on CPU, reserved by the allocator on a GPU."""
        resident = psutil.Process().memory_info().rss
        own = torch.cuda.memory_reserved() if self.device == "cuda" else resident
        engine = self.rollout.memory() if self.rollout else {}
        return {f"{name}{self.rank}": mib for name, mib in ({"trainer": own / 2**20} | engine).items()}

    def shutdown(self):
        if self.rollout:
            self.rollout.shutdown()
        dist.destroy_process_group()
