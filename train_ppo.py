"""The trainer: worker groups, the step loop, validation and checkpoints.

python train_ppo.py --config recipes/chain_sum.yaml actor.lr=2e-6

One process drives: it draws prompts, has them answered, scored and turned into advantages, and has the
workers learn. It touches no tensor on a device: workers.py does, and rollout.py has the engine. `Trainer.fit`
and `Trainer.train_step` are the place to start reading. Left out on purpose: pipelining of rollout and
update, streaming of data, other backends.
"""

import contextlib
import fcntl
import functools
import json
import math
import os
import shutil
import sys
import tempfile
import time
from unittest import mock

from tqdm import tqdm

import config as configuration

# The token columns that `add_advantages` reads, where they are there.
PADDED = ("response_mask", "old_logprobs", "token_level_scores", "rollout_logprobs", "ref_logprobs", "values",
          "entropy")
SAMPLED = ("uid", "sample", "source", "prompt", "response", "answer", "scores", "finish_reason",
           "transcript")  # of samples.jsonl
SHOWN = ("reward/mean", "response/length_mean", "actor/entropy", "actor/ppo_kl", "perf/", "val/")  # on screen


# ---- Worker groups: how the trainer speaks to the processes that hold the devices --------------------------


class WorkerGroup:
    """The workers of one pool. `call` speaks to all of them, `share` gives each its rows of a batch, and
    `map` is `share` for new columns.

    A subclass has `world`, the number of ranks, `sp`, how many of them share a sequence, and
    `run(method, args_per_rank)`, which returns a result per rank.
    """

    def call(self, method, *args):
        """Every rank runs `method` with the same arguments. Returns the results in order of rank."""
        return self.run(method, [args] * self.world)

    def share(self, method, batch, *args, together=None):
        """Every `together` ranks (those of a sequence, unless said) run `method` on one share of the rows.
        Returns (row numbers, result) per share."""
        together = together or self.sp
        parts = data.split(batch, self.world // together)
        shares = [data.select(batch, part) for part in parts]
        results = self.run(method, [(shares[rank // together], *args) for rank in range(self.world)])
        return list(zip(parts, results[::together]))

    def map(self, method, batch, *args, together=None):
        """`share` for a method that gives new columns. Returns the batch with them, its order kept."""
        shared = self.share(method, batch, *args, together=together)
        columns = data.concat([result for _, result in shared])
        order = [row for part, _ in shared for row in part]
        return batch | data.select(columns, torch.tensor(order).argsort().tolist())


class SpmdGroup(WorkerGroup):
    """This process is one of the ranks: torchrun starts them all, launch=local has one.

    Every rank runs the same loop. Results are gathered on all, so that all loops see the same batches and
    numbers.
    """

    def __init__(self, config, name, pool):
        names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}  # torchrun sets these
        self.rank, self.world, *local = (int(os.environ.get(name, value)) for name, value in names.items())
        self.sp = config.model.sp
        init_method = "env://" if "RANK" in os.environ else f"file://{tempfile.mkdtemp()}/ranks"
        self.worker = Worker(config, self.rank, self.world, *local, init_method)

    def run(self, method, args_per_rank):
        results = [None] * self.world
        result = getattr(self.worker, method)(*args_per_rank[self.rank])
        torch.distributed.all_gather_object(results, result)
        return results

    def close(self):
        self.worker.shutdown()


class RayGroup(WorkerGroup):
    """One Ray actor per device, in a placement group with a bundle per node."""

    def __init__(self, config, name, pool):
        nodes, devices = pool["nodes"], pool["devices_per_node"]
        self.world, self.sp = nodes * devices, config.model.sp
        kinds = ["CPU", "GPU"] if ray.cluster_resources().get("GPU") else ["CPU"]
        bundle = dict.fromkeys(kinds, devices)
        group = ray.util.placement_group([bundle] * nodes, strategy="STRICT_SPREAD")
        if not group.wait(25):
            free = {kind: ray.available_resources().get(kind, 0) for kind in kinds}
            raise RuntimeError(f"pools.{name} wants {nodes} nodes with {bundle}; after 25 s Ray has {free}")
        places = [PlacementGroup(group, placement_group_bundle_index=node) for node in range(nodes)]
        init_method = f"file://{tempfile.mkdtemp()}/ranks"
        if nodes > 1 or config.ray.address:
            first_node = ray.remote(free_address).options(num_cpus=0, scheduling_strategy=places[0])
            init_method = f"tcp://{ray.get(first_node.remote())}"
        self.actors = []
        for rank in range(self.world):
            place, gpus = places[rank // devices], kinds.count("GPU")
            actor = ray.remote(Worker).options(scheduling_strategy=place, num_cpus=1, num_gpus=gpus)
            self.actors.append(actor.remote(config, rank, self.world, 0, devices, init_method))

    def run(self, method, args_per_rank):
        futures = [getattr(actor, method).remote(*args) for actor, args in zip(self.actors, args_per_rank)]
        waiting = futures
        while waiting:
            done, waiting = ray.wait(waiting)
            ray.get(done)  # raises the first failure, while other ranks may wait for the one that failed
        return ray.get(futures)

    def close(self):
        ray.wait([actor.shutdown.remote() for actor in self.actors], num_returns=self.world, timeout=10)


# ---- The trainer -------------------------------------------------------------------------------------------


class Trainer:
    """The step loop. It holds batches and numbers; everything on a device happens in the worker groups.

    `launch` is ray, local or torchrun. Only the `main` process (rank 0 under torchrun) writes files and to
    the screen. Raises ValueError or OSError with one line for a model or data that cannot be used. No process
    has started then.
    """

    def __init__(self, config, launch, main):
        self.config, self.launch, self.main = config, launch, main
        path = data.resolve_model(config.model.path)
        own = {role: getattr(models.settings_of(role, config), "path", None) for role in configuration.ROLES}
        self.paths = {role: data.resolve_model(own[role] or path) for role in own}
        trust, other = config.model.trust_remote_code, config.reward_model.tokenizer
        for role in configuration.roles_needed(config) - {"rollout"}:
            models.meta_model(role, self.paths[role], config, config.model.attn_implementation)
        self.tokenizer = data.load_tokenizer(config.model.tokenizer or path, trust)
        tools = Agent(config, self.tokenizer).schemas
        self.reward_tokenizer = data.load_tokenizer(other, trust) if other else None
        prompts = functools.partial(data.Prompts, tokenizer=self.tokenizer, options=config.data, tools=tools)
        self.val_prompts = prompts(config.data.val, key="data.val") if config.data.val else None
        held_out = self.val_prompts if config.data.val != config.data.train else None
        drawn = config.data.batch_size + config.rollout.oversample
        self.prompts = prompts(config.data.train, seed=config.seed, batch_size=drawn, exclude=held_out)
        self.total = config.trainer.steps or config.trainer.epochs * self.prompts.steps_per_epoch
        if config.trainer.replay:
            records.check(config, self.total)
        self.step, self.kl_coef, self.awake, self.metrics = 0, config.algorithm.kl_coef, False, {}
        self.best = -math.inf  # mean validation score over sources
        self.rewards = self.board = None
        self.pools, self.groups = [], {}
        self.open_directory()

    def open_directory(self):
        """Take the run's directory, and the position in its newest whole checkpoint, if there is one."""
        self.directory = configuration.run_directory(self.config)
        found = records.checkpoints(self.directory)
        self.resumed = found[-1] if found else None
        if self.resumed:
            state = records.state(self.resumed)
            self.step, self.kl_coef, self.best = state["step"], state["kl_coef"], state["best"]
            self.prompts.load_state_dict(state["prompts"])
            trains = configuration.roles_trained(self.config)
            if state["trains"] != trains:
                raise ValueError(f"trainer.dir={self.directory} is of a run that trains {state['trains']}, "
                                 f"and this one trains {trains}; take another folder")
        if self.main:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.lock = open(self.directory / "lock", "w")
            with contextlib.suppress(BlockingIOError):
                return fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            raise ValueError(f"trainer.dir={self.directory} is in use by another run")

    def start(self):
        """Start all processes. The engine comes last, when the memory that is left is known."""
        config, longest = self.config, self.config.rollout.max_response_length
        if self.main:
            self.rewards = scoring.Rewards(config.reward, self.tokenizer, longest, config.data.num_workers)
        group_class = RayGroup if self.launch == "ray" else SpmdGroup
        for name, pool in config.pools.items():
            self.pools.append(group_class(config, name, pool))
            needed = configuration.roles_needed(config).intersection(pool["roles"])
            self.groups |= dict.fromkeys(needed, self.pools[-1])
        built = configuration.roles_built(config)
        for role in built:
            self.groups[role].call("build", role, self.paths[role], self.total)
        if "ref" in self.groups and "ref" not in built:  # it is the actor with its adapter off
            self.groups["ref"] = self.groups["actor"]
        self.directory = self.once(lambda: self.directory)  # where its name is the time, ranks may differ
        if config.trainer.tensorboard and self.main:
            from torch.utils import tensorboard

            self.board = tensorboard.SummaryWriter(self.directory)

    def fit(self):
        """The run: validate, then train, validate and save step by step."""
        every = self.config.validation.every
        self.resume()
        validates = self.val_prompts and not (self.config.rollout.only or self.config.trainer.replay)
        if self.step == 0 and self.config.validation.before and validates:
            self.validate()
            self.write_metrics()
        steps = range(self.step + 1, self.total + 1)
        first, final = self.config.trainer.profile_steps or (0, 0)
        profiled = range(max(first, steps.start), min(final, self.total) + 1)  # of those that this run makes
        for self.step in tqdm(steps, total=self.total, initial=self.step, disable=not self.main):
            if profiled and self.step == profiled[0]:
                self.groups["actor"].call("start_profile")
            self.train_step()
            if profiled and self.step == profiled[-1]:
                self.groups["actor"].call("stop_profile", str(self.directory))
            last = self.step == self.total
            if validates and (last or (every and self.step % every == 0)):
                self.validate()
            self.write_metrics()
            if last or (self.config.trainer.save_every and self.step % self.config.trainer.save_every == 0):
                self.save()
        if self.config.trainer.export:
            self.groups["actor"].call("export", str(self.directory / "export"))
            self.once(self.tokenizer.save_pretrained, self.directory / "export")

    def train_step(self):
        """One step, as README.md draws it: columns are added to the batch, then the models learn."""
        start = time.perf_counter()
        if self.config.trainer.replay:
            batch, recorded = records.replay(self.config.trainer.replay, self.step)
            self.metrics |= recorded
        else:
            self.wake()
            batch = self.collect()
            self.sleep()
        if self.config.trainer.record:
            self.once(records.record, self.directory, self.step, batch, self.metrics)
        if self.config.rollout.only:
            return self.once(self.write_samples, batch)
        for role, phase in (("actor", "old_logprobs"), ("ref", "ref_logprobs"), ("critic", "values")):
            if role in self.groups and (role != "actor" or self.config.actor.old_logprobs == "recompute"):
                with self.phase(phase):
                    batch = self.groups[role].map("score", batch, role)
        with self.phase("advantage"):
            batch = self.add_advantages(batch)
        if "critic" in self.groups:
            self.update("critic", batch)
        if self.step > self.config.critic.warmup_steps:  # 0 without a critic
            self.update("actor", batch)
        if not self.metrics.get("rollout/logprob_diff_mean", 0) <= 1:  # precision costs a hundredth of that
            raise RuntimeError("engine and trainer differ by more than 1 in the mean token's log-prob: does "
                               "SGLang know all of this model's weights, by the same names?")
        seconds = time.perf_counter() - start
        tokens = sum(len(p) + len(r) for p, r in zip(batch["prompt_ids"], batch["response_ids"]))
        self.metrics |= {"time/step": seconds, "perf/tokens_per_second": tokens / seconds}

    # -- rollout and rewards

    def wake(self):
        """Give the engine its memory and the actor's weights, unless a validation has just done so."""
        with self.phase("sync"):
            if not self.awake:
                self.groups["actor"].call("wake")
        self.awake = True

    def sleep(self):
        with self.phase("sleep"):
            self.groups["actor"].call("sleep")
        self.awake = False

    def collect(self):
        """The step's scored responses.

        With dynamic sampling (DAPO, arXiv 2503.14476, eq. 11) groups whose raw scores are all equal are
        thrown away, and more prompts are drawn, at most `algorithm.dynamic_sampling` times in all.
        """
        wanted = self.config.data.batch_size * self.config.rollout.n
        draws, kept = self.config.algorithm.dynamic_sampling, []
        if not draws:
            return self.draw()
        for drawn in range(1, draws + 1):
            batch = self.draw()
            raw, groups = torch.tensor(batch["raw_scores"]), torch.tensor(batch["uid"])
            informative = algos.informative_groups(raw, groups)
            kept.append(data.select(batch, informative.nonzero()[:, 0].tolist()))
            whole = data.concat(kept)
            if len(whole["uid"]) >= wanted:
                break
        if not whole["uid"]:
            return batch  # all advantages are 0, but KL, entropy and the critic may have something to learn
        self.metrics |= {"dynamic/draws": drawn, "dynamic/thrown": drawn * wanted - len(whole["uid"])}
        return data.select(whole, range(min(wanted, len(whole["uid"]))))

    def draw(self):
        """The next prompts, answered `rollout.n` times and scored."""
        rollout, prompts = self.config.rollout, self.prompts.next()
        sampling = {name: getattr(rollout, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        share = self.config.data.batch_size / self.prompts.batch_size  # below 1 with over-sampling
        batch, metrics = self.answer(data.repeat(prompts, rollout.n), sampling, self.step, "rollout", share)
        for name in ("reward/errors", "reward/timeouts"):  # of all draws of a step; the rest is of the last
            metrics[name] += self.metrics.get(name, 0)
        self.metrics |= metrics
        if self.config.algorithm.advantage == "remax":  # a greedy response is its prompt's baseline
            greedy, _ = self.answer(data.repeat(prompts, 1), {"temperature": 0}, self.step, "rollout_greedy")
            baselines = dict(zip(greedy["uid"], greedy["scores"]))
            batch["reward_baselines"] = [baselines[uid] for uid in batch["uid"]]
        return batch

    def answer(self, prompts, sampling, step, phase, share=1.0):
        """The prompts with responses and scores, by the function and the reward model, and metrics of these.
        Step 0 is a validation: no penalties. Only this share of the prompts is kept, of those done first."""
        with self.phase(phase):
            together = self.config.rollout.tp
            batch = self.groups["rollout"].map("generate", prompts, step, sampling, share, together=together)
            whole = [row for row, end in enumerate(batch["finish_reason"]) if end != "abort"]
            batch = data.select(batch, whole[: round(share * len(batch["uid"]))])
        if "reward" in self.groups:
            with self.phase("reward_model"):
                rows = data.conversations(batch, self.tokenizer, self.reward_tokenizer)
                scored = self.groups["reward"].map("score", rows, "reward")
            weight = self.config.reward_model.weight
            batch["model_scores"] = [weight * score.item() for score in scored["model_scores"]]
        with self.phase("reward"):
            return self.once(self.rewards, batch, step > 0)

    def validate(self):
        """Scores of all validation prompts, by source; all samples go to samples.jsonl."""
        validation = self.config.validation
        self.wake()
        prompts = data.repeat(self.val_prompts.all(), validation.n)
        batch, _ = self.answer(prompts, {"temperature": validation.temperature}, 0, "validate")
        found = scoring.validation_metrics(batch, validation.n)
        means = [value for name, value in found.items() if "/mean@" in name]
        self.best = max(self.best, sum(means) / len(means))
        self.metrics |= found | {"val/best": self.best}
        self.once(self.write_samples, batch)

    def write_samples(self, batch):
        """Append all samples to samples.jsonl and show a few."""
        rows = [dict(zip(batch, row)) for row in zip(*batch.values())]
        rows = [{name: row[name] for name in SAMPLED if name in row} for row in rows]
        with open(self.directory / "samples.jsonl", "a") as file:
            file.writelines(json.dumps({"step": self.step, **row}, default=str) + "\n" for row in rows)
        for row in rows[: self.config.validation.samples]:
            shown = f"{str(row['prompt'])[-60:]} -> {row['response'][:60]!r} (answer {row['answer']!r})"
            tqdm.write(f"  {row['scores']:5.2f}  {shown}")

    # -- advantages and updates

    def add_advantages(self, batch):
        """New columns advantages, returns, rollout_weights, and old_logprobs if they are not there. What has
        no score, or none to compare it with, or is rejected by the rollout correction, gets a response_mask
        of 0: it is in no loss, and does not count where losses are averaged."""
        algorithm, rollout = self.config.algorithm, self.config.rollout
        batch.setdefault("old_logprobs", batch["rollout_logprobs"])
        tensors = {name: data.pad(batch[name]) for name in PADDED if name in batch}
        tensors["group"] = torch.tensor(batch["uid"])
        tensors["reward_baselines"] = torch.tensor(batch.get("reward_baselines", [0.0] * len(batch["uid"])))
        old, rewards = tensors["old_logprobs"], tensors["token_level_scores"]
        unscored = (rewards.sum(-1) + tensors["reward_baselines"]).isnan()
        mask = tensors["response_mask"] = tensors["response_mask"] * ~unscored[:, None]
        if algorithm.kl_in_reward:
            token_kl = algos.kl(old, tensors["ref_logprobs"], algorithm.kl_estimator)
            rewards = algos.apply_kl_penalty(rewards, token_kl, mask, self.kl_coef)
            observed, n = algos.masked_mean(token_kl, mask).item(), len(batch["uid"])
            self.metrics |= {"reward/kl": observed, "reward/kl_coef": self.kl_coef}
            target, horizon = algorithm.kl_target, algorithm.kl_horizon
            self.kl_coef = algos.kl_controller(self.kl_coef, observed, n, target, horizon)
        tensors["token_level_rewards"] = rewards
        advantages, returns = algos.advantage(algorithm.advantage, tensors, vars(algorithm))
        weights, gap = algos.rollout_correction(old, tensors["rollout_logprobs"], mask, rollout.correction,
                                                rollout.correction_cap)
        if self.config.actor.old_logprobs == "recompute":  # otherwise the update sees the gap
            self.metrics |= {f"rollout/{name}": value.item() for name, value in gap.items()}
        if "entropy" in tensors:
            self.metrics["actor/entropy"] = algos.masked_mean(tensors["entropy"], mask).item()
        if "values" in tensors:
            explained = algos.explained_variance(tensors["values"], returns, mask)
            self.metrics["critic/explained_variance"] = explained.item()
        lengths = [len(ids) for ids in batch["response_ids"]]
        new = {"advantages": advantages, "returns": returns, "rollout_weights": weights}
        new["response_mask"] = mask * (weights > 0)
        return batch | {name: data.unpad(tensor, lengths) for name, tensor in new.items()}

    def update(self, role, batch):
        """Mini-batches times epochs of one role's updates; metrics are means over the updates."""
        settings, history = getattr(self.config, role), []
        mini_batches = torch.arange(len(batch["uid"])).split(settings.mini_batch_size)
        with self.phase(f"update_{role}"):
            for rows in mini_batches * settings.epochs:
                mini_batch = data.select(batch, rows.tolist())
                norm = algos.normaliser(mini_batch["response_mask"], self.config.rollout.max_response_length)
                history.append(self.groups[role].share("update", mini_batch, role, norm)[0][1])
        self.metrics |= {name: sum(update[name] for update in history) / len(history) for name in history[0]}
        # Of the gap to the engine the first update tells: later ones see a policy that has moved.
        self.metrics |= {name: value for name, value in history[0].items() if name.startswith("rollout/")}

    # -- records

    @contextlib.contextmanager
    def phase(self, name):
        """Time what stands inside as time/<name>, and note what each process of the pools holds after it."""
        start = time.perf_counter()
        yield
        key = f"time/{name}"
        self.metrics[key] = self.metrics.get(key, 0.0) + time.perf_counter() - start
        for pool, group in zip(self.config.pools, self.pools):
            place = f"mem/{name}/{pool}_" if len(self.pools) > 1 else f"mem/{name}/"
            for memory in group.call("memory"):
                self.metrics |= {f"{place}{process}": mib for process, mib in memory.items()}

    def once(self, function, *args):
        """Run something on the main process only; all loops get its result."""
        if self.launch == "ray":
            return function(*args)
        result = [function(*args) if self.main else None]
        torch.distributed.broadcast_object_list(result)
        return result[0]

    def write_metrics(self):
        """Append the step's row to metrics.jsonl and show it."""
        metrics, self.metrics = self.metrics, {}
        if not self.main:
            return
        with open(self.directory / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": self.step, **metrics}) + "\n")
        for name, value in metrics.items() if self.board else ():
            self.board.add_scalar(name, value, self.step)
        shown = [f"{name} {value:.4g}" for name, value in metrics.items() if name.startswith(SHOWN)]
        tqdm.write(f"step {self.step}: " + ", ".join(shown))

    # -- checkpoints

    def resume(self):
        """Load the models from the newest whole checkpoint, if any, and cut the records back to its step."""
        for group in self.pools if self.resumed else ():
            group.call("load", str(self.resumed))
        fingerprints = [source and source.fingerprint for source in (self.prompts, self.val_prompts)]
        if self.once(lambda: fingerprints) != fingerprints:
            raise RuntimeError("data.train or data.val is not the same on all ranks: is its function random?")
        self.once(self.begin)

    def begin(self):
        """What the run will be is written down, and what a killed one wrote after its checkpoint goes."""
        records.write(self.directory / "config.yaml", configuration.dump(self.config).encode())
        if self.resumed:
            tqdm.write(f"resumed from {self.resumed}: {self.total - self.step} of {self.total} steps to go")
        records.trim(self.directory, self.step)

    def save(self):
        """Write a checkpoint beside, then rename it: it is whole or absent. Older ones go after that."""
        folder = self.directory / "checkpoints"
        beside = folder / "unfinished"  # of any step: what a killed run left is cleared by the next save
        if self.awake:  # the models need their memory back
            self.sleep()
        with self.phase("save"):
            self.once(shutil.rmtree, beside, True)
            try:
                for group in self.pools:
                    group.call("save", str(beside))
            except (Exception, torch.distributed.checkpoint.CheckpointException) as error:
                # Of a full disk torch says "unexpected pos 704 vs 598".
                free = shutil.disk_usage(self.directory).free / 2**20
                raise RuntimeError(f"{beside} was not written; {free:.0f} MiB are free there") from error
            self.once(self.finish_save, beside, folder / f"step_{self.step}")

    def finish_save(self, beside, final):
        state = {"step": self.step, "kl_coef": self.kl_coef, "best": self.best}
        state |= {"prompts": self.prompts.state_dict(), "trains": configuration.roles_trained(self.config)}
        (beside / "trainer.json").write_text(json.dumps(state))
        beside.rename(final)
        for old in records.checkpoints(self.directory)[: -self.config.trainer.keep]:
            shutil.rmtree(old)

    def close(self):
        """End the workers and their engines; what is left of Ray and the engines ends with this process."""
        if self.rewards:
            self.rewards.close()
        for group in self.pools:
            group.close()


# ---- One run -----------------------------------------------------------------------------------------------


def import_libraries():
    """What takes seconds to import, which a run with a wrong config is spared. A Trainer needs it first."""
    global Agent, PlacementGroup, Worker, algos, data, free_address, models, ray, records, scoring, torch
    import ray
    import torch
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as PlacementGroup

    import algos
    import data
    import models
    import records
    import scoring
    from agent import Agent
    from engine import free_address
    from workers import Worker


def run(config):
    """Train as `config` (already checked) says. Whatever ends it, no process of the run stays behind."""
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # libraries' words about kernels that are not here
    os.environ.setdefault("RAY_worker_niceness", "0")  # with Ray's 15 every other program would go first
    # Pages of 2 MiB make an update on CPU faster by a tenth, in the processes that start from here: the
    # workers of a private Ray.
    os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    if config.ray.address is None:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # a private Ray then listens on loopback only
    import_libraries()
    import report

    configuration.end_on_signals()
    launch = "torchrun" if "RANK" in os.environ else config.launch
    with configuration.one_line_errors():
        trainer = Trainer(config, launch, main=int(os.environ.get("RANK", 0)) == 0)
    print("starting the workers and the engine: half a minute to two, most of it imports", flush=True)
    try:
        if launch == "ray":
            # Ray would put its own handler of SIGTERM in place, which says nothing; auto finds a Ray, or not.
            with mock.patch("ray._private.utils.set_sigterm_handler"), configuration.one_line_errors():
                # With None in place of "local" Ray would join what runs on this machine.
                address, quiet = config.ray.address or "local", {"logging_level": "ERROR"}
                ray.init(address, num_cpus=config.ray.num_cpus, include_dashboard=False, **quiet)
            configuration.end_on_signals()  # now that of Ray's C++ part is there, which aborts after 3 s
        trainer.start()
        trainer.fit()
        if trainer.main:
            print(f"report: {report.write(trainer.directory)}")
    finally:
        trainer.close()
        ray.shutdown()


if __name__ == "__main__":
    chosen = configuration.from_command_line(__file__)
    if chosen.trainer.max_restarts:
        sys.exit(configuration.supervise(chosen))
    run(chosen)
