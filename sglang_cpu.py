"""What lets SGLang 0.5.23 run without a GPU, and fast enough to train. Delete it when a CPU wheel exists.

SGLang's own CPU engine needs kernels that are on no package index. So its plain PyTorch path runs, and the
few things in it that ask for CUDA, or are slow, are replaced in the scheduler process. GPUs need none of it.
"""

import ctypes
import gc
import math
import mmap
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import torch
from sglang.srt.arg_groups import choices
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter, _TorchMemorySaverAdapterNoop
from torch.nn.functional import embedding, pad, scaled_dot_product_attention

BACKENDS = ["batched_cpu", "torch_native"]  # ours and SGLang's

ENGINE_ARGS = {
    "attention_backend": "batched_cpu",
    "sampling_backend": "pytorch",
    "enable_deterministic_inference": True,  # without it SGLang ignores the seeds of the requests
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "max_total_tokens": 32768,
}

choices.add_attention_backend_choices(BACKENDS[:1])
choices.add_deterministic_attention_backend_choices(BACKENDS)
choices.add_radix_supported_deterministic_attention_backend_choices(BACKENDS)


def environment(tp):
    """Environment variables for the engine's `tp` processes. Each has as many threads as this process, whose
    worker sleeps while they work: its share of a machine on which there may be more."""
    return {
        "TORCHDYNAMO_DISABLE": "1",  # it would ask for a CUDA device
        "SGLANG_NCCL_SO_PATH": "/nonexistent",  # so pynccl switches itself off, and gloo does its work
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join("0" * tp),  # asked for; only the missing kernels would obey
        "OMP_NUM_THREADS": str(torch.get_num_threads()),  # Ray sets 1
        # Threads that spin for long while they wait make small products up to 20 times slower on a busy
        # machine; those that never do make a decode step 1.6 times slower on an idle one.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "20000",
        "MALLOC_MMAP_MAX_": "0",  # freed memory is kept, see workers.py
        "MALLOC_TRIM_THRESHOLD_": "-1",
    }


def patch():
    """Change SGLang in this process, which is about to become a scheduler."""
    from sglang.srt import batch_invariant_ops
    from sglang.srt.layers import sampler

    # PR_SET_THP_DISABLE: of a page of 2 MiB with an edge in use the kernel keeps all until memory is short,
    # so that a release would give back next to nothing.
    ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)
    # Imported where there is no CUDA, never called.
    sys.modules["vllm._custom_ops"] = sys.modules["vllm"] = SimpleNamespace(rotary_embedding=None)
    # A CUDA build of torch answers torch.cuda, whose synchronize() fails without a driver.
    torch.get_device_module = lambda device=None: torch.cpu
    batch_invariant_ops.enable_batch_invariant_mode = lambda: None  # Triton kernels
    sampler.sampling_from_probs_torch = lambda probs, sampling_seed, positions: draw(
        probs, sampling_seed, positions
    ).view(-1)
    sampler.multinomial_with_seed = lambda logprobs, seeds, positions: draw(logprobs.exp(), seeds, positions)
    saver = PageSaver()
    TorchMemorySaverAdapter.create = staticmethod(lambda enable: saver)


def draw(probs, seeds, positions):
    """Sample a token for each row of probs (B, V), by seed and position (B,) of its request alone: (B, 1).

    First a block of the vocabulary is drawn, then a token in it, each by exponential races: argmax p / E,
    which is Gumbel-max. That takes 2 sqrt(V) random numbers a row. An inverse CDF takes one, but its
    thresholds move with the rounding of the batch that a row happens to be in; a race hardly ever turns.
    """
    batch, vocab = probs.shape
    side = math.isqrt(vocab - 1) + 1
    blocks = pad(probs, (0, side * side - vocab)).view(batch, side, side)
    keys = torch.stack([seeds, positions], dim=1).numpy().astype(np.uint64)
    races = [np.random.Generator(np.random.Philox(key=key)).standard_exponential((2, side)) for key in keys]
    races = torch.from_numpy(np.stack(races))  # (B, 2, side)
    block = (blocks.sum(-1) / races[:, 0]).argmax(-1)
    token = (blocks[torch.arange(batch), block] / races[:, 1]).argmax(-1)
    return (block * side + token)[:, None]


@register_attention_backend("batched_cpu")
class BatchedAttention(TorchNativeAttnBackend):
    """torch_native attends one request after the other; here all requests with one new token go together.

    Those are decode steps and prompts from the prefix cache. Other prompts take the parent's way.
    """

    def init_forward_metadata(self, batch):
        super().init_forward_metadata(batch)
        self.slots = None
        if batch.forward_mode.is_decode() or batch.extend_num_tokens == batch.batch_size:
            seen = torch.arange(int(batch.seq_lens.max())) < batch.seq_lens[:, None]  # (B, longest)
            slots = self.req_to_token_pool.req_to_token[batch.req_pool_indices, : seen.shape[1]]
            self.slots = slots.where(seen, 0)  # (B, longest) rows of the kv cache
            self.mask = seen[:, None, None]  # (B, 1, 1, longest)

    def _run_sdpa_forward_decode(self, *args, **options):
        return self._attend(super()._run_sdpa_forward_decode, args, options)

    def _run_sdpa_forward_extend(self, *args, **options):
        return self._attend(super()._run_sdpa_forward_extend, args, options)

    def _attend(self, one_by_one, args, options):
        special = options["is_cross_attn"] or options["sliding_window_size"] is not None
        if self.slots is None or special:
            return one_by_one(*args, **options)
        query, output, k_cache, v_cache = args[:4]  # (B, heads, D) twice, (slots, kv heads, D) twice
        # The query heads that share a kv head are the rows of one attention: (B, kv heads, rows, D)
        query = query.view(len(query), k_cache.shape[1], -1, query.shape[2])
        # embedding() takes rows faster than an index does.
        taken = (embedding(self.slots, cache.flatten(1)) for cache in (k_cache, v_cache))
        key, value = (rows.unflatten(2, k_cache.shape[1:]).transpose(1, 2).to(query.dtype) for rows in taken)
        out = scaled_dot_product_attention(query, key, value, attn_mask=self.mask, scale=options["scaling"])
        return output.copy_(out.reshape(output.shape))


class PageSaver(_TorchMemorySaverAdapterNoop):
    """torch_memory_saver's idea on CPU: keep the addresses, give the pages back. They return as zeros."""

    def __init__(self):
        self._storages = {}  # tag: {address: storage}
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    @contextmanager
    def region(self, tag, enable_cpu_backup=False):
        before = living_storages()
        yield
        made = {address: s for address, s in living_storages().items() if address not in before}
        self._storages.setdefault(tag, {}).update(made)

    def pause(self, tag):
        for address, storage in self._storages.get(tag, {}).items():
            start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages: the edges have other tenants
            size = (address + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE - start
            if size > 0 and self._madvise(start, size, mmap.MADV_DONTNEED):
                raise OSError(ctypes.get_errno(), "madvise did not release the engine's memory")


def living_storages():
    """The storage of every tensor of this process, by address."""
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
