"""The trainer: worker groups, the step loop, validation and checkpoints. Run it: python train_ppo.py --config FILE key=value

One process drives: it draws prompts, has them answered, scored and turned into advantages, and has the workers learn.
It touches no tensor on a device; workers.py does, and rollout.py has the engine. `Trainer.fit` and `Trainer.train_step` are
the place to start reading. Left out on purpose: pipelining of rollout and update, streaming of data, other backends.
"""

import contextlib
import json
import math
import os
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

import config as configuration

# torch, Ray and what imports them are imported by `run`, when the config is known to be right.


# ---- Worker groups: how the trainer speaks to the processes that hold the devices ---------------------------------------


class WorkerGroup:
    """The workers of one pool, spoken to with two verbs: `call` all of them, or `map` a batch over them.

    A subclass has `world`, the number of ranks, and `run(method, args_per_rank)`, which returns a result per rank.
    """

    def call(self, method, *args):
        """Every rank runs `method` with the same arguments. Returns the results in order of rank."""
        return self.run(method, [args] * self.world)

    def share(self, method, batch, *args):
        """Every rank runs `method` on its share of the rows. Returns (row numbers, result) per rank."""
        parts = data.split(batch, self.world)
        return list(zip(parts, self.run(method, [(data.select(batch, part), *args) for part in parts])))

    def map(self, method, batch, *args):
        """`share` for methods that give new columns: returns the batch with them, in the batch's own order."""
        columns = {}
        for part, result in self.share(method, batch, *args):
            for name, values in result.items():
                column = columns.setdefault(name, [None] * len(batch["uid"]))
                for row, value in zip(part, values, strict=True):
                    column[row] = value
        return batch | columns


class SpmdGroup(WorkerGroup):
    """This process is one of the ranks: torchrun starts them all, launch=local has one. Every rank runs the same loop;
    results are gathered on every rank, so that all loops see the same batches and numbers."""

    def __init__(self, config, name, pool):
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local_rank, local_world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        init_method = "env://" if "RANK" in os.environ else f"file://{tempfile.mkdtemp()}/ranks"
        self.worker = Worker(config, self.rank, self.world, local_rank, local_world, init_method)

    def run(self, method, args_per_rank):
        results = [None] * self.world
        torch.distributed.all_gather_object(results, getattr(self.worker, method)(*args_per_rank[self.rank]))
        return results

    def close(self):
        self.worker.shutdown()


class RayGroup(WorkerGroup):
    """One Ray actor per device and one placement-group bundle per node."""

    def __init__(self, config, name, pool):
        nodes, devices = pool["nodes"], pool["devices_per_node"]
        self.world = nodes * devices
        resources = {"CPU": 1} | ({"GPU": 1} if torch.cuda.is_available() else {})
        have = ray.available_resources()
        for kind in resources:
            if self.world > have.get(kind, 0):
                raise RuntimeError(f"pools.{name} wants {self.world} {kind}s and Ray has {have.get(kind, 0):g}")
        bundle = {kind: devices for kind in resources}
        group = ray.util.placement_group([bundle] * nodes, strategy="STRICT_SPREAD")
        if not group.wait(30):
            raise RuntimeError(f"pools.{name} wants {nodes} nodes with {bundle} each, not found within 30 s")
        places = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node) for node in range(nodes)]
        init_method = f"file://{tempfile.mkdtemp()}/ranks"
        if nodes > 1:
            init_method = ray.get(ray.remote(free_address).options(num_cpus=0, scheduling_strategy=places[0]).remote())
        self.actors = []
        for rank in range(self.world):
            options = {"scheduling_strategy": places[rank // devices], "num_cpus": 1, "num_gpus": resources.get("GPU", 0)}
            actor = ray.remote(Worker).options(**options)
            self.actors.append(actor.remote(config, rank, self.world, 0, devices, init_method))

    def run(self, method, args_per_rank):
        futures = [getattr(actor, method).remote(*args) for actor, args in zip(self.actors, args_per_rank)]
        waiting = futures
        while waiting:
            done, waiting = ray.wait(waiting)
            ray.get(done)  # the first failure is raised here, while other ranks may wait for the one that failed
        return ray.get(futures)

    def close(self):
        ray.wait([actor.shutdown.remote() for actor in self.actors], num_returns=self.world, timeout=10)


def free_address():
    """tcp://host:port of a free port on the node where this runs."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"


# ---- The trainer -------------------------------------------------------------------------------------------------------


class Trainer:
    """The step loop. It holds batches and numbers; everything on a device happens in the worker groups.

    `launch` is ray, local or torchrun. Only the `main` process (rank 0 under torchrun) writes files and to the screen.
    """

    def __init__(self, config, launch, main):
        self.config, self.launch, self.main = config, launch, main
        model_path = data.resolve_model(config.model.path)
        self.paths = {"actor": model_path, "rollout": model_path}
        self.paths |= {role: data.resolve_model(getattr(config, role).path or model_path) for role in ("critic", "ref")}
        trust = config.model.trust_remote_code
        self.tokenizer = AutoTokenizer.from_pretrained(config.model.tokenizer or model_path, trust_remote_code=trust)
        self.val_prompts = None
        if config.data.val:
            self.val_prompts = data.Prompts(config.data.val, self.tokenizer, config.data, key="data.val")
        held_out = self.val_prompts if config.data.val != config.data.train else None
        order = config.seed, config.data.batch_size
        self.prompts = data.Prompts(config.data.train, self.tokenizer, config.data, *order, exclude=held_out)
        self.rewards = None
        if main:
            scoring = self.tokenizer, config.rollout.max_response_length, config.data.num_workers
            self.rewards = data.Rewards(config.reward, *scoring)
        self.total = config.trainer.steps or config.trainer.epochs * self.prompts.steps_per_epoch
        self.step, self.kl_coef, self.awake, self.metrics = 0, config.algorithm.kl_coef, False, {}
        self.pools, self.groups = [], {}

    def start(self):
        """Start every pool's workers and load the roles; the engine comes last, when the memory that is left is known."""
        config = self.config
        group_class = RayGroup if self.launch == "ray" else SpmdGroup
        for name, pool in config.pools.items():
            self.pools.append(group_class(config, name, pool))
        responses = config.data.batch_size * config.rollout.n
        updates = {
            role: self.total * settings.epochs * math.ceil(responses / settings.mini_batch_size)
            for role, settings in (("actor", config.actor), ("critic", config.critic))
        }
        for role in ("critic", "ref", "actor", "rollout"):
            if role in configuration.roles_needed(config):
                home = [role in pool["roles"] for pool in config.pools.values()].index(True)
                self.groups[role] = self.pools[home]
                self.groups[role].call("build", role, self.paths[role], updates)
        self.directory = self.once(self.open_directory)
        self.board = None
        if config.trainer.tensorboard and self.main:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(self.directory)

    def open_directory(self):
        name, now = self.config.trainer.name, time.strftime("%Y-%m-%d_%H-%M-%S")
        directory = Path(self.config.trainer.dir or f"runs/{name}/{now}").resolve()
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.yaml").write_text(configuration.dump(self.config))
        return directory

    def close(self):
        """End the workers and their engines. Ray's and the engines' processes end with this one in any case."""
        if self.main:
            self.rewards.close()
        for group in self.pools:
            group.close()

    def fit(self):
        """The run: validate, then train, validate and save step by step."""
        every = self.config.validation.every
        self.resume()
        if self.step == 0 and self.config.validation.before and self.val_prompts:
            self.validate()
            self.write_metrics()
        progress = tqdm(total=self.total, initial=self.step, disable=not self.main, unit="step", dynamic_ncols=True)
        while self.step < self.total:
            self.step += 1
            self.train_step()
            last = self.step == self.total
            if self.val_prompts and (last or (every and self.step % every == 0)):
                self.validate()
            self.write_metrics(progress)
            if last or (self.config.trainer.save_every and self.step % self.config.trainer.save_every == 0):
                self.save()
        progress.close()

    def train_step(self):
        """One step, in the order of DESIGN.md's diagram; every line adds columns to the batch."""
        config, start = self.config, time.perf_counter()
        self.wake()
        batch = self.collect()
        self.sleep()
        if config.actor.old_logprobs == "recompute":
            with self.phase("old_logprobs"):
                batch = self.groups["actor"].map("score", batch, "actor")
        if "ref" in self.groups:
            with self.phase("ref"):
                batch = self.groups["ref"].map("score", batch, "ref")
        if "critic" in self.groups:
            with self.phase("values"):
                batch = self.groups["critic"].map("score", batch, "critic")
        with self.phase("advantage"):
            batch = self.add_advantages(batch)
        if "critic" in self.groups:
            with self.phase("update_critic"):
                self.update("critic", batch)
        if self.step > config.critic.warmup_steps or "critic" not in self.groups:
            with self.phase("update_actor"):
                self.update("actor", batch)
        tokens = sum(len(p) + len(r) for p, r in zip(batch["prompt_ids"], batch["response_ids"]))
        seconds = time.perf_counter() - start
        self.metrics |= {"time/step": seconds, "perf/tokens": tokens, "perf/tokens_per_second": tokens / seconds}

    # -- rollout and rewards

    def wake(self):
        """Bring the engine back with the actor's present weights, unless it has them already (after a validation)."""
        with self.phase("sync"):
            if not self.awake:
                self.groups["actor"].call("wake")
        self.awake = True

    def sleep(self):
        with self.phase("sleep"):
            self.groups["actor"].call("sleep")
        self.awake = False

    def collect(self):
        """The step's scored responses: one draw of prompts, or with dynamic sampling (DAPO) as many as it takes, up to
        `algorithm.dynamic_sampling` draws, to fill the batch with groups whose rewards differ."""
        config, kept, thrown = self.config, [], 0
        sampling = {name: getattr(config.rollout, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        wanted = config.data.batch_size * config.rollout.n
        for draw in range(max(1, config.algorithm.dynamic_sampling)):
            prompts = self.prompts.next()
            with self.phase("rollout"):
                batch = self.groups["actor"].map("generate", data.repeat(prompts, config.rollout.n), self.step, sampling)
            with self.phase("reward"):
                batch, metrics = self.once(self.rewards, batch)
            if config.algorithm.advantage == "remax":
                batch = self.add_greedy_baseline(prompts, batch)
            if draw == 0:
                self.metrics |= metrics
            if not config.algorithm.dynamic_sampling:
                return batch
            informative = algos.informative_groups(torch.tensor(batch["scores"]), torch.tensor(batch["uid"])).nonzero()[:, 0]
            thrown += len(batch["uid"]) - len(informative)
            kept.append(data.select(batch, informative.tolist()))
            if sum(len(part["uid"]) for part in kept) >= wanted:
                break
        self.metrics |= {"dynamic/draws": draw + 1, "dynamic/thrown_responses": thrown}
        whole = data.concat(kept)
        if not whole["uid"]:
            raise RuntimeError(f"algorithm.dynamic_sampling={draw + 1}: no group of {draw + 1} draws has differing rewards")
        return data.select(whole, range(min(wanted, len(whole["uid"]))))

    def add_greedy_baseline(self, prompts, batch):
        """ReMax: the score of one greedy response per prompt, a column of the prompt's samples and nothing else."""
        with self.phase("rollout_greedy"):
            greedy = self.groups["actor"].map("generate", data.repeat(prompts, 1), self.step, {"temperature": 0.0})
        greedy, _ = self.once(self.rewards, greedy)
        scores = dict(zip(greedy["uid"], greedy["scores"]))
        return batch | {"reward_baselines": [scores[uid] for uid in batch["uid"]]}

    def validate(self):
        """Answer every validation prompt `validation.n` times; accuracies by source, all samples to samples.jsonl."""
        validation = self.config.validation
        self.wake()
        with self.phase("validate"):
            prompts = data.repeat(self.val_prompts.all(), validation.n)
            sampling = {"temperature": validation.temperature}
            batch = self.groups["actor"].map("generate", prompts, 0, sampling)
            batch, _ = self.once(self.rewards, batch, False)
        for source in sorted(set(batch["source"])):
            scores = [score for score, name in zip(batch["scores"], batch["source"]) if name == source]
            self.metrics[f"val/{source}/mean@{validation.n}"] = statistics.fmean(scores)
        if self.main:
            columns = ("uid", "sample", "source", "prompt", "response", "answer", "scores", "finish_reason")
            rows = [dict(zip(columns, row)) for row in zip(*(batch[name] for name in columns))]
            with open(self.directory / "samples.jsonl", "a") as file:
                file.writelines(json.dumps({"step": self.step, **row}, default=str) + "\n" for row in rows)
            for row in rows[: validation.samples]:
                prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
                tqdm.write(f"  {row['scores']:5.2f} | {prompt[-60:]!r} -> {row['response'][:60]!r} ({row['answer']!r})")

    # -- advantages and updates

    def add_advantages(self, batch):
        """Columns old_logprobs (if not yet there), token_level_rewards, advantages, returns, rollout_weights."""
        algorithm = self.config.algorithm
        batch.setdefault("old_logprobs", batch["rollout_logprobs"])
        columns = ("response_mask", "token_level_scores", "old_logprobs", "rollout_logprobs", "ref_logprobs", "values", "entropy")
        tensors = {name: data.pad(batch[name]) for name in columns if name in batch}
        tensors["group"] = torch.tensor(batch["uid"])
        if "reward_baselines" in batch:
            tensors["reward_baselines"] = torch.tensor(batch["reward_baselines"])
        mask, rewards = tensors["response_mask"], tensors["token_level_scores"]
        if algorithm.kl_in_reward:
            token_kl = algos.kl(tensors["old_logprobs"], tensors["ref_logprobs"], algorithm.kl_estimator)
            rewards = algos.apply_kl_penalty(rewards, token_kl, mask, self.kl_coef)
            observed = algos.masked_mean(token_kl, mask).item()
            self.metrics |= {"reward/kl": observed, "reward/kl_coef": self.kl_coef}
            n = len(batch["uid"])
            self.kl_coef = algos.kl_controller(self.kl_coef, observed, n, algorithm.kl_target, algorithm.kl_horizon)
        tensors["token_level_rewards"] = rewards
        advantages, returns = algos.advantage(algorithm.advantage, tensors, vars(algorithm))
        rollout = self.config.rollout
        pair = tensors["old_logprobs"], tensors["rollout_logprobs"]
        weights, gap = algos.rollout_correction(*pair, mask, rollout.correction, rollout.correction_cap)
        self.metrics |= {f"rollout/{name}": value.item() for name, value in gap.items()}
        if "entropy" in tensors:
            self.metrics["actor/entropy"] = algos.masked_mean(tensors["entropy"], mask).item()
        if "values" in tensors:
            explained = algos.explained_variance(tensors["values"], returns, mask)
            self.metrics["critic/explained_variance"] = explained.item()
        new = {"advantages": advantages, "returns": returns, "rollout_weights": weights}
        lengths = [len(ids) for ids in batch["response_ids"]]
        return batch | {name: data.unpad(tensor, lengths) for name, tensor in new.items()}

    def update(self, role, batch):
        """Mini-batches times epochs of one role's updates; metrics are means over the updates."""
        settings, rows, history = getattr(self.config, role), len(batch["uid"]), []
        for _ in range(settings.epochs):
            for start in range(0, rows, settings.mini_batch_size):
                mini_batch = data.select(batch, range(start, min(start + settings.mini_batch_size, rows)))
                norm = algos.normaliser(mini_batch["response_mask"], self.config.rollout.max_response_length)
                history.append(self.groups[role].share("update", mini_batch, role, norm)[0][1])
        self.metrics |= {name: statistics.fmean(update[name] for update in history) for name in history[0]}

    # -- records

    @contextlib.contextmanager
    def phase(self, name):
        """Time what stands inside as time/<name>, and note what each process of the pools holds after it."""
        start = time.perf_counter()
        yield
        key = f"time/{name}"
        self.metrics[key] = self.metrics.get(key, 0.0) + time.perf_counter() - start
        for group in self.pools:
            for memory in group.call("memory"):
                self.metrics |= {f"mem/{name}/{process}": mib for process, mib in memory.items()}

    def once(self, function, *args):
        """Run something on the main process only; all loops get its result."""
        if self.launch == "ray":
            return function(*args)
        result = [function(*args) if self.main else None]
        torch.distributed.broadcast_object_list(result)
        return result[0]

    def write_metrics(self, progress=None):
        """Append the step's row to metrics.jsonl and show it."""
        metrics, self.metrics = self.metrics, {}
        if not self.main:
            return
        with open(self.directory / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": self.step, **metrics}) + "\n")
        if self.board:
            for name, value in metrics.items():
                self.board.add_scalar(name, value, self.step)
        shown = {"reward": "reward/mean", "length": "response/length_mean", "kl": "actor/ppo_kl",
                 "tokens/s": "perf/tokens_per_second"}
        shown |= {name: name for name in metrics if name.startswith("val/")}
        texts = {label: f"{metrics[name]:.4g}" for label, name in shown.items() if name in metrics}
        tqdm.write(f"step {self.step}: " + ", ".join(f"{label} {text}" for label, text in texts.items()))
        if progress is not None:
            progress.set_postfix(texts, refresh=False)
            progress.update()

    # -- checkpoints

    def save(self):
        """Write a checkpoint beside, then rename it: it is whole or absent. Older ones are deleted only then."""
        folder = self.directory / "checkpoints"
        beside = folder / f"unfinished_{self.step}"
        with self.phase("save"):
            self.once(shutil.rmtree, beside, True)
            for group in self.pools:
                group.call("save", str(beside))
            self.once(self.finish_save, beside, folder / f"step_{self.step}")

    def finish_save(self, beside, final):
        state = {"step": self.step, "kl_coef": self.kl_coef, "prompts": self.prompts.state_dict()}
        (beside / "trainer.json").write_text(json.dumps(state))
        shutil.rmtree(final, ignore_errors=True)
        beside.rename(final)
        for old in checkpoints(self.directory)[: -self.config.trainer.keep]:
            shutil.rmtree(old)

    def resume(self):
        """Continue from the newest whole checkpoint, if there is one; later rows of the records are of no run any more."""
        found = checkpoints(self.directory)
        if found:
            state = json.loads((found[-1] / "trainer.json").read_text())
            self.step, self.kl_coef = state["step"], state["kl_coef"]
            self.prompts.load_state_dict(state["prompts"])
            for group in self.pools:
                group.call("load", str(found[-1]))
            tqdm.write(f"resumed from {found[-1]}")
        self.once(self.trim_records)

    def trim_records(self):
        for name in ("metrics.jsonl", "samples.jsonl"):
            path = self.directory / name
            if path.exists():
                lines = [line for line in path.read_text().splitlines(True) if json.loads(line)["step"] <= self.step]
                path.write_text("".join(lines if checkpoints(self.directory) else []))


def checkpoints(directory):
    """The whole checkpoints of a run directory, oldest first."""
    return sorted((directory / "checkpoints").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))


# ---- One run -----------------------------------------------------------------------------------------------------------


def run(config):
    """Train as `config` (already checked) says. Whatever ends it, no process of the run stays behind."""
    # Seconds of imports, made only when there is something to run.
    global AutoTokenizer, PlacementGroupSchedulingStrategy, Worker, algos, data, ray, torch
    if config.ray.address is None:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray's servers then listen on loopback only
    import ray
    import torch
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    from transformers import AutoTokenizer

    import algos
    import data
    import report
    from workers import Worker

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # run what stands under `finally`
    launch = "torchrun" if "RANK" in os.environ else config.launch
    trainer = Trainer(config, launch, main=int(os.environ.get("RANK", 0)) == 0)
    try:
        if launch == "ray":
            start_ray(config.ray)
        trainer.start()
        trainer.fit()
        if trainer.main:
            print(f"report: {report.write(trainer.directory)}")
    finally:
        trainer.close()
        if launch == "ray":
            ray.shutdown()


def start_ray(settings):
    """Join the cluster at ray.address, or start a private one on this machine."""
    if settings.address:
        ray.init(address=settings.address, logging_level="ERROR")
    else:
        ray.init(num_cpus=settings.num_cpus, include_dashboard=False, logging_level="ERROR")


if __name__ == "__main__":
    run(configuration.from_command_line(__file__))
