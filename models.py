"""What a model is here: its forward pass to log-probs or values, loading, sharding (FSDP2, HSDP), sequence
parallelism (Ulysses), adapter (LoRA) and optimizer.

workers.py calls `build_model` and `build_optimizer`. A reader of the training step needs `token_logprobs`,
and, where `model.sp` is above 1, `sequence_shard` and `gather_tokens`.
"""

import functools
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification
from transformers import get_cosine_with_min_lr_schedule_with_warmup as cosine_schedule

import data

VALUED = ("critic", "reward")  # roles with a head of one number per token; others have a language-model head
# What some configs change logits by after the head, which `token_logprobs` does not do; 1 changes nothing.
AFTER_THE_HEAD = ("final_logit_softcapping", "logits_soft_cap", "logits_scaling", "logit_scale",
                  "lm_head_multiplier", "output_multiplier")


# ---- Forward passes ----------------------------------------------------------------------------------------


class HeadLogprobs(torch.autograd.Function):
    """Log-probs of `labels` [N] and entropy [N] (zeros unless asked for) from hidden states [N, H] and a head
    [V, H]: in chunks, whose logits are computed again in the backward pass, so that [N, V] never exists.

    Autograd could do it with checkpoints, but then every chunk has a gradient [V, H] of its own. With z the
    logits over the temperature and p = softmax(z):

        d log p_y / dz = onehot(y) - p        d entropy / dz = -p (log p + entropy)
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, temperature, with_entropy):
        # Filled chunk by chunk: what a loop leaves behind would lie in the holes where the next logits fit.
        logprobs, entropy = (torch.zeros(len(hidden), device=hidden.device) for _ in range(2))
        for h, y, logprobs_h, entropy_h in HeadLogprobs.chunks(weight, hidden, labels, logprobs, entropy):
            logp = F.linear(h, weight, bias).float().div_(temperature).log_softmax(-1)  # (chunk, V)
            logprobs_h.copy_(logp.gather(1, y[:, None])[:, 0])
            if with_entropy:
                entropy_h.copy_(-(logp.exp().mul_(logp)).sum(-1))
        ctx.save_for_backward(hidden, weight, bias, labels, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, bias, *columns = ctx.saved_tensors
        grads = [torch.zeros_like(columns[1]) if g is None else g for g in (grad_logprobs, grad_entropy)]
        grad_hidden = torch.empty_like(hidden)
        trained = ctx.needs_input_grad[1]  # the head may belong to the base of an adapter
        grad_weight = torch.zeros_like(weight) if trained else None
        grad_bias = torch.zeros_like(bias) if trained and bias is not None else None
        whole = hidden, grad_hidden, *columns, *grads
        for h, grad_h, y, entropy, g, g_entropy in HeadLogprobs.chunks(weight, *whole):
            logits, g = F.linear(h, weight, bias).float().div_(ctx.temperature), g[:, None] / ctx.temperature
            if grad_entropy is None:  # then one pass over the logits less
                grad = logits.softmax(-1).mul_(-g)
            else:
                logp = logits.log_softmax(-1)
                slope = g_entropy[:, None] / ctx.temperature * (logp + entropy[:, None])
                grad = logp.exp().mul_(-g - slope)
            grad = grad.scatter_add_(1, y[:, None], g).to(h.dtype)
            torch.mm(grad, weight, out=grad_h)
            if trained:
                grad_weight.addmm_(grad.t(), h)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        return grad_hidden, grad_weight, grad_bias, None, None, None

    @staticmethod
    def chunks(weight, *tensors):
        size = max(1, 2**24 // weight.shape[0])  # 64 MiB of logits
        return zip(*(tensor.split(size) for tensor in tensors))


def token_logprobs(model, inputs, predictors, labels, temperature, with_entropy):
    """What replaces the forward of a causal language model: log-probs and entropy [N] of N given tokens. Only
    the positions that predict a token (`predictors` [N], flat in B*T) reach the head."""
    hidden = model.get_decoder()(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)[predictors]
    head = model.get_output_embeddings()
    return HeadLogprobs.apply(hidden, head.weight, head.bias, labels, temperature, with_entropy)


def token_values(forward, inputs, predictors):
    """What replaces the forward of a critic or a reward model: the value [N] at the position that predicts
    each response token."""
    return (forward(**inputs, use_cache=False).logits.flatten(0, 1)[predictors, 0].float(),)


def packed_mask(segment, attention):
    """What the tokens of packed rows may see, from each one's segment [B, T]: 0 is the prompt, 1, 2, ... are
    its responses, -1 is padding. A token sees the prompt and its own segment, up to itself.

    Returns bool [B, 1, T, T], or for flex_attention a BlockMask, whose empty blocks cost nothing. Other kinds
    of attention would take a bool mask for numbers to be added, so config.py refuses them.
    """
    def visible(row, head, query, key):
        same = segment[row, query] == segment[row, key]
        return (query >= key) & (same | (segment[row, key] == 0))

    rows, width = segment.shape
    if attention == "flex_attention":
        return create_block_mask(visible, rows, None, width, width, segment.device)
    row, place = (torch.arange(size, device=segment.device) for size in (rows, width))
    return visible(row[:, None, None], None, place[:, None], place)[:, None]


# ---- Ulysses sequence parallelism (arXiv 2309.14509) -------------------------------------------------------
# The ranks of an sp group share rows: each holds T/sp columns of them, and in attention H/sp heads instead.


def sequence_shard(inputs, predictors, mesh):
    """This rank's columns of the model's inputs, which of `predictors` [N] are in them (bool [N]), and where
    those are in the smaller inputs."""
    ids = inputs["input_ids"]
    width = ids.shape[1] // mesh.size()
    row, column = predictors // ids.shape[1], predictors % ids.shape[1]
    mine = column // width == mesh.get_local_rank()
    names = ("input_ids", "position_ids")
    columns = {name: inputs[name].chunk(mesh.size(), 1)[mesh.get_local_rank()] for name in names}
    return inputs | columns, mine, (row * width + column % width)[mine]


def exchange(x, split, join, group):
    """All-to-all: a rank hands out equal parts of dimension `split` and joins what it gets along `join`."""
    parts = torch.stack(x.chunk(group.size(), split))
    ones = [1] * group.size()
    return torch.cat(all_to_all_single_autograd(parts, ones, ones, group).unbind(), join)


def ulysses_attention(group, module, query, key, value, attention_mask, scaling=None, **_):
    """What transformers calls as attention, from [B, H, T/sp, D] to [B, T/sp, H, D]: causal, or by a mask
    [B, 1, T, T]."""
    copies = group.size() // math.gcd(group.size(), key.shape[1])  # kv heads repeat until all ranks get some
    key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
    query, key, value = (exchange(x, 1, 2, group) for x in (query, key, value))
    options = {"is_causal": attention_mask is None, "scale": scaling, "enable_gqa": True}
    out = F.scaled_dot_product_attention(query, key, value, attention_mask, **options)
    return exchange(out, 2, 1, group).transpose(1, 2), None


def gather_tokens(part, mine, group):
    """Values [N] from the parts that the ranks of an sp group have. A gradient flows to the own part only, so
    that summed over ranks it is counted once."""
    own = torch.zeros(mine.shape, device=part.device).masked_scatter(mine, part)
    whole = own.detach().clone()
    dist.all_reduce(whole, group=group)
    return own + (whole - own.detach())


# ---- Building models ---------------------------------------------------------------------------------------


def settings_of(role, config):
    """The role's section of the config."""
    return config.reward_model if role == "reward" else getattr(config, role)


def own_config(role, path, config):
    """The model's own config, with `model.overrides`. No weights are read. Raises ValueError for a model that
    cannot be cut, packed or as long as the config says, or whose head is not one that we compute."""
    options = {"trust_remote_code": config.model.trust_remote_code, **config.model.overrides}
    try:
        whole, unknown = AutoConfig.from_pretrained(path, return_unused_kwargs=True, **options)
    except Exception as error:  # of any kind where a config is odd, and often without the model's name
        raise ValueError(f"{path}: {error}") from error
    if unknown:
        raise ValueError(f"model.overrides={unknown}: the config of {path} has no such key")
    shape = whole.get_text_config()
    heads = getattr(shape, "num_attention_heads", 0)
    if not heads:
        raise ValueError(f"{path} must be a transformer, and {whole.model_type} has no attention heads")
    for key, size in (("model.sp", config.model.sp), ("rollout.tp", config.rollout.tp)):
        if heads % size and (key == "model.sp" or role == "actor"):  # the engine has the actor's model
            raise ValueError(f"{key}={size} must divide the {heads} attention heads of {path}")
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    if longest > (getattr(shape, "max_position_embeddings", None) or longest):
        raise ValueError(f"data.max_prompt_length + rollout.max_response_length = {longest} must be at most "
                         f"max_position_embeddings={shape.max_position_embeddings} of {path}")
    others = {*(getattr(shape, "layer_types", None) or ())} - {"full_attention"}  # our masks do not know them
    window = getattr(shape, "sliding_window", None) or longest
    if not hasattr(shape, "layer_types") and window < longest:
        others = {f"sliding_window={window}"}
    if others and (config.model.sp > 1 or config.actor.share_prompt):
        raise ValueError(f"actor.share_prompt=false and model.sp=1 are needed for {path}, which has layers "
                         f"with {', '.join(sorted(others))}")
    for key in AFTER_THE_HEAD if role not in VALUED else ():
        if getattr(shape, key, None) not in (None, 1):
            raise ValueError(f"{path} must not change its logits after the head, as {key}="
                             f"{getattr(shape, key)} says: log-probs are computed without that")
    classifies = any("Classification" in name for name in whole.architectures or ())
    if role == "reward" and not (classifies and whole.num_labels == 1):
        raise ValueError(f"reward_model.path={path} must be a classifier with one label, it is "
                         f"{whole.architectures} with {whole.num_labels}")
    return whole


def model_class(role, path, config):
    """(transformers' class for a role's model, its config): with a head as VALUED says, and no dropout of any
    name, because the ratio of new to old log-probs must be 1 before the first update."""
    model_config = own_config(role, path, config)
    for name in list(vars(model_config)):
        if name.endswith(("dropout", "pdrop")):
            setattr(model_config, name, 0.0)
    if role not in VALUED:
        return AutoModelForCausalLM, model_config
    model_config.num_labels = 1
    return AutoModelForTokenClassification, model_config


def prepare(model, settings, seed):
    """Make a model as transformers gives it ready for training, with its adapter if it has one. Raises
    ValueError for an adapter of its embedding or head."""
    if getattr(settings, "lora_rank", 0):
        torch.manual_seed(seed)  # B is 0 and A is drawn: the first policy is the base model
        size = {"r": settings.lora_rank, "lora_alpha": settings.lora_alpha}
        model.add_adapter(LoraConfig(**size, target_modules=settings.lora_targets))
        ends = model.get_input_embeddings(), model.get_output_embeddings()
        if any(hasattr(end, "base_layer") for end in ends):  # `token_logprobs` reads the head's weight alone
            raise ValueError("must leave out the embedding and the head, where no adapter is trained")
    if getattr(settings, "gradient_checkpointing", False):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # some heads have one that no config names
    model.train()


def meta_model(role, path, config, attention):
    """The model that `build_model` makes for a role, with its adapter, on the meta device: the shapes, not
    the memory. Raises ValueError, one line, where the config does not fit it."""
    auto, model_config = model_class(role, path, config)
    settings = settings_of(role, config)
    kwargs = {"trust_remote_code": config.model.trust_remote_code, "attn_implementation": attention}
    with torch.device("meta"), data.blame(role, path):
        model = auto.from_config(model_config, dtype=getattr(torch, settings.compute_dtype), **kwargs)
    with torch.device("meta"), data.blame("actor.lora_targets", config.actor.lora_targets):
        prepare(model, settings, config.seed)
    return model


def build_model(role, path, settings, config, mesh):
    """An FSDP2 model on `mesh`.

    Rank 0 reads the weights, the other ranks build on the meta device and receive their shards from it, so a
    full copy exists once per job and only while loading. Master weights are float32; `settings.compute_dtype`
    is the precision of the passes. Raises ValueError for a weight that the checkpoint lacks, other than a
    critic's head.
    """
    auto, model_config = model_class(role, path, config)
    kwargs = {"trust_remote_code": config.model.trust_remote_code, "dtype": torch.float32}
    kwargs["attn_implementation"] = "ulysses" if config.model.sp > 1 else config.model.attn_implementation
    if dist.get_rank() == 0:
        model, loading = auto.from_pretrained(path, config=model_config, output_loading_info=True, **kwargs)
        allowed = {"critic": ("weight", "bias"), "reward": ("bias",)}.get(role, ())  # of a head
        for name in loading["missing_keys"]:
            if not name.endswith(allowed) or name.startswith(model.base_model_prefix):
                raise ValueError(f"{path}: the checkpoint has no {name}")
            torch.nn.init.zeros_(model.get_parameter(name))  # a critic's new head: the first values are 0
    else:
        with torch.device("meta"):
            model = auto.from_config(model_config, **kwargs)
    if config.model.liger:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    prepare(model, settings, config.seed)
    if role in VALUED:
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
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": trained, "initial_lr": settings.lr}]
    options = {"betas": tuple(settings.betas), "weight_decay": settings.weight_decay, "fused": True}
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, **options)
    warmup = int(settings.warmup * updates) if 0 < settings.warmup < 1 else int(settings.warmup)
    floor = 1.0 if settings.schedule == "constant" else settings.min_lr_ratio  # a cosine from 1 to 1 is flat
    return optimizer, cosine_schedule(optimizer, warmup, updates, last_epoch=0, min_lr_rate=floor)
