"""One process per device: FSDP2 models (actor, critic, reference, reward model), their passes and
updates, and one rank's engine.

A `Worker` is told what to do by the trainer, through Ray or directly (torchrun, launch=local). Every method
that takes a batch is called on all ranks together, each with its own share of the rows. Inside, rows become
micro-batches of padded model rows. Outside, nothing is padded. A worker knows nothing of datasets, rewards or
steps.
"""

import ctypes
import functools
import math
import os
from collections import defaultdict

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as transformers_logging

import algos
import data
import models
from config import updates_of
from rollout import Rollout

# The token columns that losses are made from, and those that a forward pass gives.
TOKEN_COLUMNS = ("response_mask", "old_logprobs", "ref_logprobs", "advantages", "returns", "values",
                 "rollout_weights", "rollout_logprobs")
SCORES = {"actor": ("old_logprobs", "entropy"), "ref": ("ref_logprobs",), "critic": ("values",),
          "reward": ("model_scores",)}


def pack(batch, units, device, multiple=1, attention="sdpa"):
    """Lay out units (lists of row indices of one prompt) as padded rows: prompt, response 1, response 2, ...

    Positions restart after the prompt for every response, and the mask lets a response see the prompt and
    itself only, so that a group's prompt is computed once. The last token of a response predicts nothing that
    is used and is left out.

    Returns the model's inputs (input_ids [B, T], position_ids [B, T], attention_mask of `packed_mask` for
    this kind of attention, or None where every row holds one response and plain causal attention is right. T
    is a multiple of `multiple`), and for all responses in order of the units the flat position in B*T that
    predicts each response token: a list of 1-D tensors.
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
    width, mask = -(-max(map(len, ids)) // multiple) * multiple, None
    columns = {"input_ids": ids, "position_ids": positions}
    inputs = {name: data.pad(rows, width=width).to(device) for name, rows in columns.items()}
    if any(len(unit) > 1 for unit in units):
        mask = models.packed_mask(data.pad(segments, -1, width).to(device), attention)
    return inputs | {"attention_mask": mask}, [row * width + position for row, position in predictors]


def keep_freed_memory():
    """glibc maps every large tensor anew, and the kernel clears its pages: a tenth of an update's time. So
    there is no allocation by mmap (M_MMAP_MAX), and no trimming (M_TRIM_THRESHOLD)."""
    for parameter, value in ((-4, 0), (-1, -1)):
        ctypes.CDLL(None).mallopt(parameter, value)


# ---- The worker --------------------------------------------------------------------------------------------


class Worker:
    """One rank: its shards of every model in its pool, and its engine. Batches are those of data.py.

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
            keep_freed_memory()
        backend = "cpu:gloo,cuda:nccl" if self.device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world)
        # Every `fsdp_size` ranks hold a whole model; with fewer than all (HSDP) there are copies of it.
        shards, sp = config.model.fsdp_size or world, config.model.sp
        self.mesh = init_device_mesh(self.device, (world // shards, shards), mesh_dim_names=("copy", "shard"))
        self.mesh = self.mesh if shards < world else self.mesh["shard"]
        self.sequence = init_device_mesh(self.device, (world // sp, sp), mesh_dim_names=("dp", "sp"))["sp"]
        if sp > 1:
            attention = functools.partial(models.ulysses_attention, self.sequence.get_group())
            AttentionInterface.register("ulysses", attention)
        self.rollout, self.models, self.optimizers, self.schedules = None, {}, {}, {}

    def build(self, role, path, steps):
        """Load one role; the trainer calls this for critic, reference, reward, actor and rollout, in that
        order."""
        config = self.config
        if role == "rollout":
            trust, tp = config.model.trust_remote_code, config.rollout.tp
            tokenizer = data.load_tokenizer(config.model.tokenizer or path, trust)
            mesh = init_device_mesh(self.device, (self.world // tp, tp), mesh_dim_names=("dp", "tp"))
            self.rollout = Rollout(config, path, tokenizer, self.device, mesh)
            return
        settings = models.settings_of(role, config)
        self.models[role] = model = models.build_model(role, path, settings, config, self.mesh)
        if role in ("actor", "critic"):
            updates = updates_of(role, config, steps)
            self.optimizers[role], self.schedules[role] = models.build_optimizer(model, settings, updates)

    # -- rollout

    def wake(self):
        """Engine weights come back, the actor's shards stream in, then the kv cache: after this the engine
        may generate."""
        self.place("actor", self.device)
        self.rollout.resume("weights")
        self.rollout.update_weights(self.full_tensors("actor", getattr(torch, self.config.rollout.dtype)))
        for role in self.models.keys() - {"reward"}:  # which scores while the engine is awake
            self.place(role, "cpu" if self.config.actor.offload else self.device)
        self.rollout.resume("kv_cache")

    def full_tensors(self, role, dtype=torch.float32):
        """(name in a checkpoint, whole tensor) of every weight once, gathered one at a time; all ranks must
        walk through all of it. Where there is an adapter, W is W + scaling B A, and A and B do not appear.
        What transformers has fused, such as the experts of a layer, is taken apart as in its checkpoints."""
        model = self.models[role]
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                continue
            layer, base, rest = name.partition(".base_layer")
            weight = parameter.detach().to(dtype).full_tensor()
            if base and rest == ".weight":
                lora = model.get_submodule(layer)
                a, b = (pair["default"].weight.detach().full_tensor() for pair in (lora.lora_A, lora.lora_B))
                weight = weight + (lora.scaling["default"] * b @ a).to(dtype)
            yield from revert_weight_conversion(model, {layer + rest: weight}).items()

    def place(self, role, device):
        """Move a role's shards and optimizer state to the device, or to host memory, where they wait while
        the engine has the device (`actor.offload`; on CPU there is nowhere to go)."""
        self.models[role].to(device)
        for state in self.optimizers[role].state.values() if role in self.optimizers else ():
            state.update({name: tensor.to(device) for name, tensor in state.items()})
        if device != self.device:
            torch.cuda.empty_cache()

    def generate(self, batch, step, sampling, share):
        """New columns response_ids, response_mask, rollout_logprobs, turns, finish_reason; see rollout.py."""
        if not self.rollout.leads:  # the first rank of its tensor-parallel group answers for all
            return {}
        return self.rollout.generate(batch, step=step, sampling=sampling, share=share)

    def sleep(self):
        self.rollout.release()
        for role in self.models:
            self.place(role, self.device)

    # -- forward passes

    def micro_batches(self, batch, role):
        """This rank's micro-batches: (units, weight). All ranks must run equally many forward and backward
        passes, or FSDP's collectives hang; a rank with fewer repeats its first row with weight 0."""
        budgets = {"critic": self.config.critic, "reward": self.config.reward_model}
        settings = budgets.get(role, self.config.actor)
        plan = data.micro_batches(batch, settings.max_tokens_per_device, self.config.actor.share_prompt)
        longest = torch.tensor(len(plan))
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return [(units, 1.0) for units in plan] + [([[0]], 0.0)] * (int(longest) - len(plan))

    def forward(self, role, batch, units, weight, with_entropy=False):
        """One micro-batch: its token columns padded to [n, R], and the model's outputs in the same shape, 0
        where the model did not write the token. Rows are in the order of `units`."""
        if not batch["uid"]:  # fewer rows than ranks: a row of one token keeps step
            batch = dict.fromkeys(batch, torch.zeros(1, 1, dtype=torch.int64))
        rows = [row for unit in units for row in unit]
        names = [name for name in TOKEN_COLUMNS if name in batch]
        columns = {name: data.pad([batch[name][row] for row in rows]).to(self.device) for name in names}
        columns["response_mask"] = columns["response_mask"] * weight
        written = columns["response_mask"].bool()
        inputs, predictors = pack(batch, units, self.device, multiple=self.sequence.size(),
                                  attention=self.config.model.attn_implementation)
        flat = torch.cat([batch["response_mask"][row] for row in rows]).bool() & bool(weight)
        predictors = torch.cat(predictors)[flat].to(self.device)
        inputs, mine, predictors = models.sequence_shard(inputs, predictors, self.sequence)
        if role in models.VALUED:
            outputs = self.models[role](inputs, predictors)
        else:
            labels = torch.cat([batch["response_ids"][row] for row in rows])[flat].to(self.device)[mine]
            temperature = self.config.rollout.temperature
            outputs = self.models[role](inputs, predictors, labels, temperature, with_entropy)
        padded = torch.zeros(written.shape, device=self.device)
        outputs = [models.gather_tokens(output, mine, self.sequence.get_group()) for output in outputs]
        return columns, [padded.masked_scatter(written, output) for output in outputs]

    @torch.no_grad()
    def score(self, batch, role):
        """New columns of 1-D float32 tensors over the response: old_logprobs and entropy (role "actor"),
        ref_logprobs ("ref"), values ("critic") or model_scores ("reward")."""
        columns = {name: [None] * len(batch["response_ids"]) for name in SCORES[role]}
        home = role if role in self.models else "actor"  # which is the reference when its adapter is off
        if home != role:
            self.models[home].disable_adapters()
        for units, weight in self.micro_batches(batch, home):
            _, outputs = self.forward(home, batch, units, weight, with_entropy=role == "actor")
            rows = [row for unit in units for row in unit] if weight else []
            for name, output in zip(SCORES[role], outputs):
                for row, values in zip(rows, output.cpu()):
                    columns[name][row] = values[: len(batch["response_ids"][row])].clone()
        if home != role:
            self.models[home].enable_adapters()
        self.models[home].reshard()  # a forward pass alone leaves what is outside the layers whole
        return columns

    # -- updates

    def update(self, batch, role, norm):
        """One optimizer update of the actor or the critic from this rank's share of a mini-batch.

        `norm` holds the counts of the whole mini-batch over all ranks (algos.normaliser): each micro-batch's
        loss is its part of the whole, so gradients just add up, whatever the split. Returns metrics, equal on
        all ranks.
        """
        settings, loss_function = getattr(self.config, role), getattr(self, f"{role}_loss")
        totals, widest = defaultdict(float), torch.zeros(1, device=self.device)
        # What clip_cov draws must be the same when resumed.
        torch.manual_seed(self.config.seed + self.schedules[role].last_epoch)
        with_entropy = role == "actor" and (settings.entropy_coef or settings.old_logprobs != "recompute")
        for units, weight in self.micro_batches(batch, role):
            columns, outputs = self.forward(role, batch, units, weight, with_entropy)
            loss, stats = loss_function(columns, *outputs, norm)
            loss.backward()
            totals["loss"] += loss.item()
            sizes = [data.count_tokens(batch, unit) for unit in units if batch["uid"]]
            totals["positions"] += len(sizes) * max(sizes, default=0)
            totals["used"] += weight * sum(sizes)
            for name, tensor in stats.items():
                per_token = tensor.detach() * columns["response_mask"]
                totals[name] += per_token.sum().item() / max(norm["tokens"], 1)
                if name == "rollout/logprob_diff_mean":
                    widest = torch.maximum(widest, per_token.max())
        metrics = self.sum_over_ranks(totals, widest) | self.step_optimizer(role)
        metrics[f"perf/padding_{role}"] = 1 - metrics.pop("used") / metrics.pop("positions")
        return {name if "/" in name else f"{role}/{name}": value for name, value in metrics.items()}

    def sum_over_ranks(self, totals, widest):
        """Parts of the mini-batch's means from all ranks together, and the largest gap to the engine."""
        sums = torch.tensor(list(totals.values()), dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        sums /= self.sequence.size()  # these ranks have counted the same rows
        dist.all_reduce(widest, op=dist.ReduceOp.MAX)
        metrics = dict(zip(totals, sums.tolist()))
        if "rollout/logprob_diff_mean" in metrics:
            metrics["rollout/logprob_diff_max"] = widest.item()
        return metrics

    def step_optimizer(self, role):
        """Clip the gradient to its norm over all ranks and take a step, unless that norm is not finite."""
        settings, parameters = getattr(self.config, role), self.models[role].parameters()
        optimizer, schedule = self.optimizers[role], self.schedules[role]
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, settings.clip_grad).full_tensor().item()
        finite = math.isfinite(grad_norm)
        if finite:
            optimizer.step()
        optimizer.zero_grad()
        lr = schedule.get_last_lr()[0]
        schedule.step()
        return {"grad_norm": grad_norm, "lr": lr, "skipped_updates": float(not finite)}

    def actor_loss(self, columns, logprobs, entropy, norm):
        """Policy loss + kl_coef * KL(policy, reference) - entropy_coef * entropy, as parts of the
        mini-batch's mean."""
        actor, mask = self.config.actor, columns["response_mask"]
        old = logprobs.detach() if actor.old_logprobs == "skip" else columns["old_logprobs"]
        losses, stats = algos.policy_loss(actor.policy_loss, logprobs, old, columns["advantages"], mask,
                                          vars(actor), columns["rollout_weights"])
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
        options = StateDictOptions(ignore_frozen_params=True)  # with an adapter, only that
        optimizer = self.optimizers[role]
        fresh = not optimizer.state
        model_state, optimizer_state = get_state_dict(self.models[role], optimizer, options=options)
        for entry in optimizer.state.values() if fresh else ():
            entry["step"].zero_()  # torch has made it by an update with gradients of 0, and counted that
        updates = self.schedules[role].last_epoch
        return {"model": model_state, "optimizer": optimizer_state, "updates": updates}

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
            set_state_dict(self.models[role], self.optimizers[role], model_state_dict=state["model"],
                           optim_state_dict=state["optimizer"], options=StateDictOptions(strict=False))
            self.schedules[role].last_epoch = state["updates"] - 1
            self.schedules[role].step()  # where trainer.steps has changed, so has the rate of the next update

    def export(self, path):
        """Write the actor as an ordinary Hugging Face folder; an adapter is merged, and also in adapter/."""
        model, trust = self.models["actor"], self.config.model.trust_remote_code
        weights = {name: weight.cpu() for name, weight in self.full_tensors("actor") if self.rank == 0}
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        trained = get_model_state_dict(model, options=options)
        if self.rank == 0:
            with torch.device("meta"):
                plain = AutoModelForCausalLM.from_config(model.config, trust_remote_code=trust)
            plain.save_pretrained(path, state_dict=weights)
            if self.config.actor.lora_rank:
                model.save_pretrained(f"{path}/adapter", state_dict=trained)

    def start_profile(self):
        self.profiler = torch.profiler.profile()
        self.profiler.start()

    def stop_profile(self, folder):
        """Write a trace for chrome://tracing or ui.perfetto.dev."""
        self.profiler.stop()
        self.profiler.export_chrome_trace(f"{folder}/trace_rank{self.rank}.json.gz")

    def memory(self):
        """MiB held by each process of this rank: resident on CPU, reserved by the allocator on a GPU."""
        own = torch.cuda.memory_reserved() if self.device == "cuda" else psutil.Process().memory_info().rss
        engine = self.rollout.memory() if self.rollout else {}
        return {f"{name}{self.rank}": mib for name, mib in ({"trainer": own / 2**20} | engine).items()}

    def shutdown(self):
        if self.rollout:
            self.rollout.shutdown()
        dist.destroy_process_group()
