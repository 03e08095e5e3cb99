"""The rollout engine: SGLang inside the worker process. Token ids in, token ids and their log-probs out.

Every rank has a `Rollout`. The first rank of a tensor-parallel group owns the engine, whose schedulers are
processes of their own. The other ranks only help to gather the weights. The order of calls is strict,

    resume("weights") -> update_weights -> resume("kv_cache") -> generate ... -> release

because released weights come back undefined: nothing is generated between a release and the next whole sync.
Text (agent.py has it), rewards and the split of a batch over ranks are not known here.
"""

import asyncio
import atexit
import functools
import itertools
import math
import multiprocessing
import os
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import psutil
import torch
import torch.distributed as dist

from agent import Agent, Episode
from engine import device_name, engine_arguments, free_address, start_engine

MIB = 2**20
ALIGNMENT = 16  # bytes; a tensor of any type may start at a multiple of it


class Rollout:
    """One rank's part of the engine.

    model_path: folder in Hugging Face format. Only its configs are read, weights come by `update_weights`.
    tokenizer: for agent.py, and for the id that ends a turn; SGLang knows those of the model's configs.
    device: "cpu", or "cuda", where the current device is the first of the engine's.
    mesh: DeviceMesh over all ranks, one of its dimensions named "tp".

    The engine starts without valid weights, and released (`rollout.release`). Call it from one thread.
    """

    def __init__(self, config, model_path, tokenizer, device, mesh):
        rollout = config.rollout
        self._device, self._seed, self._release = device, config.seed, rollout.release
        self._bucket_bytes = rollout.bucket_mb * MIB
        self._end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self._tp, self._tp_group, rank = rollout.tp, mesh.get_group("tp"), mesh.get_local_rank("tp")
        self._engine, self._processes = None, []
        self._state, self.leads = "on another rank", rank == 0
        own = torch.cuda.current_device() if device == "cuda" else 0
        place = free_address(), device_name(own, os.environ.get("CUDA_VISIBLE_DEVICES"))
        places = [None] * self._tp
        dist.all_gather_object(places, place, group=self._tp_group)
        hosts = [address.partition(":")[0] for address, _ in places]
        here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        if rank != here[0]:  # the first rank on a machine starts the engine's part there
            return
        firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
        nodes = [places[first][0] for first in firsts], firsts.index(rank)
        arguments = engine_arguments(config, model_path, device, *nodes)
        # SGLang takes over the signals and the event loop of the main thread. In a thread of its own it
        # leaves them alone, and a Ray actor or a torchrun rank keeps its handlers.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        engine = self._call(start_engine, arguments, [places[other][1] for other in here])
        children = {child.pid: child for child in multiprocessing.active_children()}
        self._processes = [children[pid] for pid in engine.get_all_child_pids()]
        if not self.leads:
            self._part = engine  # it obeys the engine's first node
            return
        self._engine, self._agent = engine, Agent(config, tokenizer)
        atexit.register(self.shutdown)
        self.release()

    def resume(self, tag):
        """Take memory again: "weights" before `update_weights`, "kv_cache" (and CUDA graphs) after it.

        The second also empties the prefix cache, once a sync: it holds keys and values of the old weights.
        """
        if self._engine is None:
            return
        self._expect({"weights": "released", "kv_cache": "synced"}[tag], f"resume({tag!r})")
        if self._release:
            tags = {"weights": ["weights"], "kv_cache": ["cuda_graph", "kv_cache"]}[tag]
            self._call(self._engine.resume_memory_occupation, tags)
        if tag == "kv_cache":
            self._call(self._engine.flush_cache)
        self._state = {"weights": "resumed", "kv_cache": "ready"}[tag]

    def update_weights(self, named_tensors):
        """Replace all weights. Every rank must call this, and walks through the whole iterator.

        named_tensors: iterator of (Hugging Face name, full tensor on this rank's device). A tensor is copied
        into a bucket of `rollout.bucket_mb` before the next one is asked for: one of each is all there is.
        Raises RuntimeError when the engine refuses a weight. Nothing can be generated after that.
        """
        if self._engine:
            self._expect("resumed", "update_weights")
            self._state = "broken"  # until the last bucket is in
            self._call(self._engine.begin_weight_update)
        if self._engine or self._device == "cuda":
            for bucket in buckets(named_tensors, self._bucket_bytes, shared=self._device == "cpu"):
                self._send(bucket)
                del bucket  # or it would live on while the next one fills
        for _ in named_tensors:  # on CPU a rank without an engine has only helped to gather
            pass
        if self._engine:
            self._call(self._engine.end_weight_update)
            self._state = "synced"

    def _send(self, bucket):
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        if self._device == "cpu":
            # One memory: every engine process maps the owner's bucket, each by a handle of its own.
            payloads = [MultiprocessingSerializer.serialize(bucket) for _ in range(self._tp)]
        else:
            # Every engine process reads the copy on its own GPU. With the patch, a handle names a GPU by its
            # UUID, because processes may number them differently.
            monkey_patch_torch_reductions()
            payload = MultiprocessingSerializer.serialize(bucket)
            payloads = [None] * self._tp if self._engine else None
            dist.gather_object(payload, payloads, group=self._tp_group, group_dst=0)
        if self._engine:
            update = self._engine.update_weights_from_tensor
            self._call(update, payloads, load_format="flattened_bucket", flush_cache=False)

    def generate(self, batch, *, step, sampling, share=1.0):
        """Play an episode for every row of the batch: see agent.py. Without tools it is one response.

        batch: lists of equal length: `prompt_ids` (1-D int64 each), `uid` (int, the prompt), `sample` (int,
        which of its responses), and what the agent reads. sampling: SGLang's parameters, at least
        `temperature` (0 is greedy). share: as soon as this share of the prompts is complete, in all of its
        samples, the rest is aborted.
        Returns new columns: `response_ids` (1-D int64, the token that ended it included), `response_mask`
        (1-D float32), `rollout_logprobs` (1-D float32, at the sampling temperature, at 1 when greedy),
        `turns` (int) and `finish_reason` ("stop", "length", "turns", "error" or "abort").
        Raises RuntimeError before a whole sync, when a request fails, and when an engine process has died.
        """
        self._expect("ready", "generate")
        rows = [dict(zip(batch, row)) for row in zip(*batch.values(), strict=True)]
        episodes = self._play_all(rows, step, sampling, share)
        outputs = self._call(self._engine.loop.run_until_complete, episodes)
        columns = Episode(self._agent, {}).columns()  # also for a rank without rows
        return {column: [output[column] for output in outputs] for column in columns}

    async def _play_all(self, rows, step, sampling, share):
        """All episodes at once; how many run together is the engine's business. Returns their columns."""
        episodes, groups = [Episode(self._agent, row) for row in rows], defaultdict(list)
        for episode in episodes:
            groups[episode.row["uid"]].append(episode)

        async def play(group):
            # SGLang computes a prompt again for each of its responses when they arrive together. So a
            # request for no tokens computes it first, and the responses find it in the prefix cache.
            await self._write(group[0].row["prompt_ids"].tolist(), {"max_new_tokens": 0})
            writers = [functools.partial(self._write_turn, episode.row, step, sampling) for episode in group]
            await asyncio.gather(*(episode.play(write) for episode, write in zip(group, writers)))
            return group

        playing = [asyncio.ensure_future(play(group)) for group in groups.values()]
        wanted = math.ceil(round(share * len(playing), 6))
        whole = [await group for group in itertools.islice(asyncio.as_completed(playing), wanted)]
        if wanted < len(playing):
            self._engine.tokenizer_manager.abort_request(abort_all=True)
            for group in playing:
                group.cancel()
            await asyncio.wait(playing)
        complete = {id(episode) for group in whole for episode in group}
        ended = [e if id(e) in complete else Episode(self._agent, e.row) for e in episodes]
        return [episode.columns() for episode in ended]

    async def _write_turn(self, row, step, sampling, ids, most, turn):
        """What an episode calls to have the model write its next turn: see agent.py."""
        seed = sampling_seed(self._seed, step, row["uid"], row["sample"], turn)
        limits = {"max_new_tokens": most, "stop_token_ids": self._end, "sampling_seed": seed}
        return await self._write(ids, limits | sampling)

    async def _write(self, ids, sampling):
        """The ids that the engine adds, their log-probs, and why it stopped."""
        request = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
        answer = await self._engine.async_generate(**request)
        finish, logprobs = answer["meta_info"]["finish_reason"], answer["meta_info"]["output_token_logprobs"]
        if finish["type"] == "abort":
            raise RuntimeError(f"the engine gave up a prompt of {len(ids)} tokens: {finish}")
        return answer["output_ids"], [logprob for logprob, *_ in logprobs], finish["type"]

    def release(self):
        """Give the engine's memory back. With `rollout.release` off only the state changes."""
        if self._engine:
            self._state = "released"
            # The scheduler may still be putting the last batch away, and would fail if it had to release
            # now. To empty its cache is the one request that waits until it is idle.
            idle = self._engine.tokenizer_manager.flush_cache(timeout_s=60.0)
            self._call(self._engine.loop.run_until_complete, idle)
            for tag in ("kv_cache", "weights", "cuda_graph") if self._release else ():
                self._call(self._engine.release_memory_occupation, [tag])

    def memory(self):
        """Resident MiB of each engine process; on GPU also the device memory that others than we hold."""
        used = {f"engine_{rank}": psutil.Process(process.pid).memory_info().rss / MIB
                for rank, process in enumerate(self._processes)}
        if self._engine and self._device == "cuda":
            used["engine_gpu"] = (torch.cuda.device_memory_used() - torch.cuda.memory_reserved()) / MIB
        return used

    def shutdown(self):
        """End the engine and its processes. Safe to call twice."""
        engine, self._engine = self._engine, None
        if engine:
            atexit.unregister(self.shutdown)
            atexit.unregister(engine.shutdown)  # it would kill all children of this process, others' too
            for process in self._processes:
                process.kill()
                process.join()
            self._thread.shutdown()
            for socket in (engine.send_to_rpc, engine.tokenizer_manager.recv_from_detokenizer):
                socket.context.destroy(linger=0)  # or its collection waits for the dead to fetch messages
            self._state, self._processes = "shut down", []

    def _expect(self, state, action):
        if self._state != state:
            order = 'resume("weights"), update_weights, resume("kv_cache"), generate, release'
            raise RuntimeError(f"{action}: the engine is {self._state}, not {state}. The order is {order}")

    def _call(self, function, *args, **kwargs):
        """Call in the engine's thread. Raises RuntimeError when the engine refuses or has lost a process."""
        future = self._thread.submit(function, *args, **kwargs)
        try:
            while not wait([future], timeout=0.5).done:
                for process in self._processes:
                    if process.exitcode is not None:
                        raise RuntimeError(f"engine process {process.pid} has died, exit code "
                                           f"{process.exitcode}: its own message is above, if it had time "
                                           "for one; -9 is often a machine out of memory")
        except BaseException:  # also Ctrl-C: the thread must come free, or this process could not end
            self._state = "broken"
            if self._engine:
                self._engine.loop.call_soon_threadsafe(self._engine.loop.stop)
            raise
        answer = future.result()
        success, message = answer if isinstance(answer, tuple) else (getattr(answer, "success", True), answer)
        if not success:
            raise RuntimeError(f"the engine refused: {message}")
        return answer


def buckets(named_tensors, bucket_bytes, shared):
    """Pack tensors into flat buffers of `bucket_bytes`, in the form SGLang calls "flattened_bucket".

    A larger tensor is a bucket of its own. Yields dicts, each good until the next one is asked for.
    shared (CPU): one buffer in shared memory serves all buckets, as the engine has its copy when an update
    returns. On a GPU the engine may still be copying then, so every bucket gets memory of its own.
    """
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    flat, metadata, end = None, [], 0
    for name, tensor in named_tensors:
        size = tensor.nbytes
        if metadata and end + size > len(flat):
            yield {"flattened_tensor": flat, "metadata": metadata}
            flat, metadata, end = (flat if shared else None), [], 0
        if flat is None or size > len(flat):
            room = max(bucket_bytes, size)
            flat = shared_memory(room) if shared else tensor.new_empty(room, dtype=torch.uint8)
        flat[end : end + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        metadata.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, end, end + size, size))
        end = -(-(end + size) // ALIGNMENT) * ALIGNMENT
        del tensor
    if metadata:
        yield {"flattened_tensor": flat, "metadata": metadata}


def shared_memory(size):
    """Bytes (size,) that other processes can map. Not in /dev/shm: docker gives it 64 MiB by default."""
    handle = os.memfd_create("weights")
    os.ftruncate(handle, size)  # pages are taken when written: a small model does not pay for a large bucket
    storage = torch.UntypedStorage._new_shared_fd_cpu(handle, size)
    os.close(handle)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def sampling_seed(seed, step, uid, sample, turn):
    """The seed of one turn: 63 bits, hashed from what it depends on, all non-negative integers."""
    return int(np.random.SeedSequence([seed, step, uid, sample, turn]).generate_state(1, np.uint64)[0]) >> 1
