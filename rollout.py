"""The rollout engine: SGLang inside the worker process. Token ids in, token ids and their log-probs out.

One `Rollout` lives on every rank. The first rank of a tensor-parallel group owns the engine, whose schedulers are
processes of their own; the others only take part in gathering the weights. The engine follows a strict order,

    resume("weights") -> update_weights -> resume("kv_cache") -> generate ... -> release

because released weights come back undefined: nothing can be generated between a release and the next full sync.
Text, rewards and batching over ranks are not known here.
"""

import asyncio
import atexit
import ctypes
import difflib
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

import numpy as np
import psutil
import torch
import torch.distributed as dist

MIB = 2**20
ALIGNMENT = 16  # bytes; a tensor of any type may start at a multiple of it


def check_engine_args(engine_args):
    """Raise ValueError, one line, for a name in `rollout.engine_args` that SGLang does not know."""
    if not engine_args:
        return
    from sglang.srt.server_args import ServerArgs  # seconds of imports that most runs do not need here

    known = ServerArgs.__struct_fields__
    for name in engine_args:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"rollout.engine_args.{name}: SGLang's Engine has no such argument{hint}")


class Rollout:
    """One rank's part of the engine.

    model_path: folder in Hugging Face format; only its config is read, the weights come from `update_weights`.
    tokenizer: gives one of the ids that end a response; the model's generation config gives the others.
    rollout: the `rollout` section of the config.
    device: "cpu" or "cuda". mesh: DeviceMesh over all ranks with a dimension named "tp".
    seed: the run's seed. max_length: tokens of the longest prompt and response together.

    The engine starts with everything released (`rollout.release`) and no valid weights.
    """

    def __init__(self, *, model_path, tokenizer, rollout, device, mesh, seed, max_length, trust_remote_code=False):
        self._device = device
        self._seed = seed
        self._release = rollout.release
        self._bucket_bytes = rollout.bucket_mb * MIB
        self._max_new_tokens = rollout.max_response_length
        self._tp_group = mesh.get_group("tp")
        self._tp = mesh["tp"].size()
        self._owner = mesh.get_local_rank("tp") == 0
        self._stop_ids = stop_token_ids(model_path, tokenizer)
        self._engine = None
        self._state = "synced" if not self._owner else "empty"
        if not self._owner:
            return
        # SGLang takes over the signals of the main thread and leaves its event loop there; in a thread of its own it
        # does neither, and a Ray actor or a torchrun rank keeps its own handlers.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._processes = []
        args = engine_args(model_path, rollout, device, self._tp, seed, max_length, trust_remote_code)
        self._engine = self._call(start_engine, args)
        children = {child.pid: child for child in multiprocessing.active_children()}
        self._processes = [children[pid] for pid in self._engine.get_all_child_pids()]
        atexit.register(self.shutdown)
        self._state = "resumed"
        self.release()

    def generate(self, batch, *, step, sampling):
        """Answer every prompt of the batch.

        batch: lists of equal length: `prompt_ids` (1-D int64 each), `uid` (int, the prompt), `sample` (int, which of
        the prompt's responses). sampling: SGLang's sampling parameters, at least `temperature` (0 is greedy).
        Returns the batch with `response_ids` (1-D int64, the end token included), `response_mask` (1-D float32),
        `rollout_logprobs` (1-D float32, at the sampling temperature), `turns` (int), `finish_reason` (str).
        Raises RuntimeError before a full sync, when a request fails, or when an engine process died.
        """
        self._expect("ready", "generate")
        rows = zip(batch["prompt_ids"], batch["uid"], batch["sample"], strict=True)
        outputs = self._run(self._sample_all(list(rows), step, sampling))
        return {**batch, **{key: [output[key] for output in outputs] for key in outputs[0]}}

    async def _sample_all(self, rows, step, sampling):
        return await asyncio.gather(*(self._sample(*row, step, sampling) for row in rows))

    async def _sample(self, prompt_ids, uid, sample, step, sampling):
        """One response of one prompt, as a dict of columns."""
        params = {
            "max_new_tokens": self._max_new_tokens,
            "stop_token_ids": self._stop_ids,
            "sampling_seed": sampling_seed(self._seed, step, uid, sample),
            **sampling,
        }
        answer = await self._engine.async_generate(
            input_ids=prompt_ids.tolist(), sampling_params=params, return_logprob=True
        )
        meta = answer["meta_info"]
        finish = meta["finish_reason"]
        if finish["type"] == "abort":
            raise RuntimeError(f"the engine refused a request (prompt {uid}, sample {sample}): {finish.get('message')}")
        ids = torch.tensor(answer["output_ids"], dtype=torch.int64)
        return {
            "response_ids": ids,
            "response_mask": torch.ones(len(ids), dtype=torch.float32),
            "rollout_logprobs": torch.tensor([t[0] for t in meta["output_token_logprobs"]], dtype=torch.float32),
            "turns": 1,
            "finish_reason": finish["type"],
        }

    def update_weights(self, named_tensors):
        """Replace all weights. Every rank must call this and walks through the whole iterator.

        named_tensors: iterator of (Hugging Face name, full tensor on this rank's device); a tensor is copied before the
        next one is asked for, so one full tensor and one bucket of `rollout.bucket_mb` exist at a time.
        Raises RuntimeError when the engine refuses.
        """
        if self._owner:
            self._expect("resumed", "update_weights")
            self._state = "broken"  # until the last bucket is in
            self._accepted(self._call(self._engine.begin_weight_update))
        for bucket in buckets(named_tensors, self._bucket_bytes, shared=self._device == "cpu"):
            self._send(bucket)
            del bucket  # or it would live on while the next one fills
        if self._device == "cuda":
            torch.cuda.ipc_collect()
        if self._owner:
            self._accepted(self._call(self._engine.end_weight_update))
            self._state = "synced"

    def _send(self, bucket):
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        if self._device == "cpu":
            # One memory: every scheduler maps the owner's bucket, each through a handle of its own.
            payloads = [MultiprocessingSerializer.serialize(bucket) for _ in range(self._tp if self._owner else 0)]
        else:
            monkey_patch_torch_reductions()  # handles name a device by its UUID, as ranks number devices differently
            payloads = [None] * self._tp if self._owner else None
            dist.gather_object(MultiprocessingSerializer.serialize(bucket), payloads, group=self._tp_group, group_dst=0)
        if self._owner:
            update = self._engine.update_weights_from_tensor
            self._accepted(self._call(update, payloads, load_format="flattened_bucket", flush_cache=False))

    def release(self):
        """Give the engine's memory back: kv cache, weights and CUDA graphs. Weights are undefined from here on."""
        if not self._owner:
            return
        if self._release:
            for tag in ["kv_cache", "weights"] + ["cuda_graph"] * (self._device == "cuda"):
                self._call(self._engine.release_memory_occupation, [tag])
        self._state = "released"

    def resume(self, tag):
        """Take memory again: "weights" before `update_weights`, "kv_cache" after it.

        The second also drops the prefix cache, once a sync: its keys and values belong to the old weights.
        """
        if not self._owner:
            return
        before, after = {"weights": ("released", "resumed"), "kv_cache": ("synced", "ready")}[tag]
        self._expect(before, f"resume({tag!r})")
        if self._release:
            tags = [tag] + ["cuda_graph"] * (self._device == "cuda" and tag == "kv_cache")
            self._call(self._engine.resume_memory_occupation, tags)
        if tag == "kv_cache":
            result = self._call(self._engine.flush_cache)
            self._accepted((result.success, result.message))
        self._state = after

    def memory(self):
        """Resident memory (CPU) of each engine process, in MiB, by a short name."""
        if not self._owner:
            return {}
        return {f"engine_{i}": psutil.Process(p.pid).memory_info().rss / MIB for i, p in enumerate(self._processes)}

    def shutdown(self):
        """End the engine and its processes. Safe to call twice."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        from sglang.srt.utils import kill_process_tree

        atexit.unregister(self.shutdown)
        atexit.unregister(engine.shutdown)  # it would kill every child of this process, also those of others
        for process in self._processes:
            kill_process_tree(process.pid)
            process.join()
        engine.loop.call_soon_threadsafe(engine.loop.stop)
        self._thread.shutdown()
        self._state = "shut down"

    def _expect(self, state, action):
        if self._state != state:
            order = 'resume("weights") -> update_weights -> resume("kv_cache") -> generate -> release'
            raise RuntimeError(f"{action}: the engine is {self._state}, not {state}; the order is {order}")

    @staticmethod
    def _accepted(answer):
        success, message = answer
        if not success:
            raise RuntimeError(f"the engine refused a weight update: {message}")

    def _run(self, coroutine):
        return self._call(self._engine.loop.run_until_complete, coroutine)

    def _call(self, function, *args, **kwargs):
        """Call in the engine's thread. Raises RuntimeError as soon as an engine process is dead."""
        future = self._thread.submit(function, *args, **kwargs)
        try:
            while not wait([future], timeout=0.5).done:
                for process in self._processes:
                    if process.exitcode is not None:
                        raise RuntimeError(
                            f"the engine's scheduler (pid {process.pid}) died with exit code {process.exitcode}; "
                            "its own message, if it left one, is above (-9 is often the system out of memory)"
                        )
        except BaseException:  # also Ctrl-C: free the thread, or the interpreter would wait for it at exit
            self._state = "broken"
            if self._engine is not None:
                self._engine.loop.call_soon_threadsafe(self._engine.loop.stop)
            raise
        return future.result()


def buckets(named_tensors, bucket_bytes, shared):
    """Pack tensors into flat buffers of at most `bucket_bytes`, in the form SGLang calls "flattened_bucket".

    A larger tensor is a bucket of its own. Yields dicts; every bucket is a new buffer, because on a GPU the engine may
    still be reading the last one. shared: make the buffer in shared memory (CPU), which saves a copy when it is sent.
    """
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    flat, metadata, end = None, [], 0
    for name, tensor in named_tensors:
        size = tensor.nbytes
        if metadata and end + size > len(flat):
            yield {"flattened_tensor": flat, "metadata": metadata}
            flat, metadata, end = None, [], 0
        if flat is None:
            flat = torch.empty(max(bucket_bytes, size), dtype=torch.uint8, device=tensor.device)
            if shared:
                flat.share_memory_()
        flat[end : end + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        metadata.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, end, end + size, size))
        end = -(-(end + size) // ALIGNMENT) * ALIGNMENT
        del tensor
    if metadata:
        yield {"flattened_tensor": flat, "metadata": metadata}


def sampling_seed(seed, step, uid, sample):
    """A seed for one response, a 63-bit hash of what it depends on. All arguments are non-negative integers."""
    return int(np.random.SeedSequence([seed, step, uid, sample]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def stop_token_ids(model_path, tokenizer):
    """All ids that end a response, sorted: a chat model often has two, and the tokenizer knows only one."""
    from transformers import AutoConfig, GenerationConfig

    ids = {tokenizer.eos_token_id}
    for kind in (AutoConfig, GenerationConfig):
        try:
            eos = kind.from_pretrained(model_path).eos_token_id
        except OSError:  # no generation_config.json
            continue
        ids.update(eos if isinstance(eos, list) else [eos])
    return sorted(ids - {None})


def engine_args(model_path, rollout, device, tp, seed, max_length, trust_remote_code):
    """SGLang's arguments for this run, `rollout.engine_args` last."""
    args = {
        "model_path": model_path,
        "device": device,
        "trust_remote_code": trust_remote_code,
        "load_format": "dummy",  # the first sync brings the weights, so reading them from disk would be for nothing
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "enable_memory_saver": rollout.release and device == "cuda",
        "sleep_on_idle": True,  # an idle scheduler would spin and hold a core of the trainer
        "dtype": rollout.dtype,
        "tp_size": tp,
        "context_length": max_length + 8,  # SGLang keeps a few positions for itself and shortens responses otherwise
        "random_seed": seed,
        "host": "127.0.0.1",
        "log_level": "error",
    }
    if device == "cpu":
        import sglang_cpu

        args.update(sglang_cpu.ENGINE_ARGS)
    else:
        args["base_gpu_id"] = torch.cuda.current_device()
        args["mem_fraction_static"] = rollout.mem_fraction
    if rollout.kv_tokens is not None:
        args["max_total_tokens"] = rollout.kv_tokens
    return {**args, **vars_of(rollout.engine_args)}


def vars_of(namespace):
    return namespace if isinstance(namespace, dict) else vars(namespace)


def start_engine(args):
    """Start SGLang's processes in a way that they end with this one. Blocks until they are ready (25 to 35 s)."""
    environment = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    if args["device"] == "cpu":
        import sglang_cpu

        environment.update(sglang_cpu.ENVIRONMENT)
    with environ(environment):
        from sglang.srt.entrypoints.engine import Engine

        if args["device"] == "cpu":
            sglang_cpu.register()

        class OwnEngine(Engine):
            run_scheduler_process_func = staticmethod(run_scheduler)

            @staticmethod
            def _launch_detokenizer_subprocesses(**kwargs):
                return [], []  # ids in, ids out: it would only hold memory

        engine = OwnEngine(**args)
    engine.tokenizer_manager._subprocess_watchdog.stop()  # it would end the trainer; `_call` watches instead
    return engine


@contextmanager
def environ(values):
    """Environment variables for the processes started inside the context."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def run_scheduler(server_args, port_args, *args, **kwargs):
    """The scheduler process: SGLang's own, tied to its parent's life and to the loopback interface."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the trainer, which ends us
    parent = multiprocessing.parent_process().pid
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die when the parent does, however it dies
    if os.getppid() != parent:  # it was gone before we asked
        sys.exit(1)
    # A failed scheduler would send SIGQUIT to the trainer; dying is enough, and leaves the trainer to say why.
    psutil.Process.send_signal = lambda self, sig: os._exit(1)
    if server_args.nnodes == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        # torch's TCPStore would listen on all interfaces.
        store = os.path.join(tempfile.gettempdir(), f"engine-{port_args.instance_id}")
        os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{store}"
    if server_args.device == "cpu":
        import sglang_cpu

        sglang_cpu.patch()
    from sglang.srt.managers.scheduler import run_scheduler_process

    run_scheduler_process(server_args, port_args, *args, **kwargs)
