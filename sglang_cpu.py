"""What lets SGLang 0.5.23 run without a GPU, and fast enough to train with. Delete this file on the day a CPU wheel exists.

SGLang's own CPU engine needs kernels that are on no package index, so we run its plain PyTorch path and replace, in the
scheduler process only, the few things in it that ask for CUDA (`patch`). Nothing here is used on GPUs.
"""

import ctypes
import os
import sys
import types
from contextlib import contextmanager, nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode

BACKEND = "batched_cpu"

# The engine's processes inherit these. Dynamo would ask for a CUDA device; pynccl switches itself off without its library.
ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "SGLANG_NCCL_SO_PATH": "/nonexistent"}

ENGINE_ARGS = {
    "attention_backend": BACKEND,
    "sampling_backend": "pytorch",
    "enable_deterministic_inference": True,  # without it SGLang ignores the seeds of the requests
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "max_total_tokens": 32768,
}


def register():
    """Make SGLang accept our attention backend; needed in every process that reads or checks the engine's arguments."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    choices.add_attention_backend_choices([BACKEND])
    choices.add_deterministic_attention_backend_choices([BACKEND])
    choices.add_radix_supported_deterministic_attention_backend_choices([BACKEND])
    register_attention_backend(BACKEND)(_attention_backend)


def patch():
    """Change SGLang in this process, a scheduler, before it is started."""
    # Imported wherever there is no CUDA, called nowhere.
    package, module = types.ModuleType("vllm"), types.ModuleType("vllm._custom_ops")
    module.rotary_embedding = None
    sys.modules.update({"vllm": package, "vllm._custom_ops": module})
    # A CUDA build of torch answers torch.cuda here, which cannot be synchronised without a driver.
    torch.get_device_module = lambda device=None: torch.cpu

    import sglang.srt.batch_invariant_ops
    from sglang.srt.layers import sampler
    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

    sglang.srt.batch_invariant_ops.enable_batch_invariant_mode = lambda: None  # Triton kernels
    sampler.multinomial_with_seed = draw
    saver = PageSaver()
    TorchMemorySaverAdapter.create = staticmethod(lambda enable: saver)
    register()


def draw(logprobs, seeds, positions):
    """One token a row of logprobs (B, V), decided by the request's seed and position alone: Gumbel-max. Returns (B, 1)."""
    tokens = []
    for row, seed, position in zip(logprobs, seeds.tolist(), positions.tolist()):
        generator = torch.Generator().manual_seed((seed * 1_000_003 + position) % 2**63)
        noise = torch.empty_like(row).exponential_(generator=generator)
        tokens.append((row - noise.log()).argmax())
    return torch.stack(tokens)[:, None]


class PageSaver:
    """torch_memory_saver's idea on CPU: keep the virtual addresses, give the physical pages back to the system.

    After `pause` and `resume` a region reads as zeros.
    """

    enabled = True

    def __init__(self):
        self._regions = {}  # tag: {address: size in bytes}
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    @contextmanager
    def region(self, tag, enable_cpu_backup=False):
        with _Recorder(self._regions.setdefault(tag, [])):
            yield

    def pause(self, tag):
        page, dont_need = os.sysconf("SC_PAGE_SIZE"), 4
        for storage in self._regions.get(tag, []):
            start = -(-storage.data_ptr() // page) * page  # whole pages inside the tensor: its neighbours keep theirs
            size = (storage.data_ptr() + storage.nbytes()) // page * page - start
            if size > 0 and self._madvise(start, size, dont_need):
                raise OSError(ctypes.get_errno(), "madvise refused to release the engine's memory")

    def resume(self, tag):
        pass

    def check_validity(self, caller_name):
        pass

    def configure_subprocess(self):
        return nullcontext()

    disable = cuda_graph = configure_subprocess


class _Recorder(TorchDispatchMode):
    """Collects the storages of tensors made inside the context."""

    def __init__(self, storages):
        super().__init__()
        self._storages = storages

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and function._schema.name.startswith("aten::") and not args_share(out, args):
            self._storages.append(out.untyped_storage())
        return out


def args_share(out, args):
    return any(isinstance(a, torch.Tensor) and a.untyped_storage().data_ptr() == out.untyped_storage().data_ptr() for a in args)


def _attention_backend(runner):
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    return TorchNativeAttnBackend(runner)
