"""What a pass through a model holds, found out on the meta device, where a tensor has a shape and no memory.

plan.py has its activations from here. No run needs it.
"""

import math
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv

UNIT_TOKENS = 1024  # of a row with a prompt and several responses, at most: data.micro_batches


class Peak(TorchDispatchMode):
    """The most bytes of tensors that were alive together, of those made inside. `before`: tensors that were
    there before, of which operations may make views."""

    def __init__(self, before=()):
        super().__init__()
        self.alive, self.most = {tensor.untyped_storage()._cdata: 0 for tensor in before}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.alive:
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, storage._cdata)
        self.most = max(self.most, sum(self.alive.values()))
        return made


def activations(model, tokens, config):
    """The most bytes that the layers hold, besides weights and gradients, in a forward pass of so many tokens
    and, if the model is trained, its backward pass. Each device of a sequence has its part of the columns.
    NaN if the pass needs numbers that are real, as that of some mixtures of experts does."""
    packed = config.actor.share_prompt and config.rollout.n > 1
    trained = any(parameter.requires_grad for parameter in model.parameters())
    width = min(tokens, UNIT_TOKENS) if packed else tokens
    rows, columns = tokens // width, -(-width // config.model.sp)
    size = model.config.get_text_config().hidden_size
    with torch.device("meta"), Peak(model.state_dict().values()) as peak:
        positions = torch.zeros(rows, columns, dtype=torch.int64)
        mask = torch.ones(rows, 1, width, width, dtype=torch.bool) if packed else None
        embedded = torch.zeros(rows, columns, size, dtype=model.dtype, requires_grad=trained)
        inputs = {"inputs_embeds": embedded, "position_ids": positions, "attention_mask": mask}
        try:
            hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
            if trained:
                torch.autograd.grad(hidden, embedded, torch.empty_like(hidden))
        except RuntimeError:
            return math.nan
    return peak.most


def fused_attention(module, query, key, value, attention_mask, scaling=None, **_):
    """What transformers calls as attention here, from [B, H, T, D] to [B, T, H, D], by a kernel that keeps no
    scores, like sdpa's on real devices. On the meta device sdpa would take the formula, which keeps them."""
    options = {"is_causal": True, "scale": scaling}
    if attention_mask is not None:  # with a mask transformers repeats kv heads
        groups = getattr(module, "num_key_value_groups", 1)
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        options |= {"is_causal": False, "attn_mask": attention_mask.to(query.dtype)}
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, **options)[0].transpose(1, 2), None


AttentionInterface.register("fused", fused_attention)
