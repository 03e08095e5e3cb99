"""A toy that learns from nothing: digit addition for a tiny random Qwen2 with a tokenizer of characters.

`build` makes the model (and caches it under models/toy), `problems` the task, `score` the reward; see toy.yaml.
"""
import os
import shutil
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "models" / "toy"
WORDS = ["<pad>", "<eos>", *"0123456789", "+", "=", " "]


def build():
    """The folder of the model in Hugging Face format, made on first use: 0.1M parameters, no chat template."""
    if FOLDER.is_dir():
        return FOLDER
    import tokenizers
    import torch
    import transformers
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    words.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    config = transformers.Qwen2Config(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=1, pad_token_id=0)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = transformers.Qwen2ForCausalLM(config)
    beside = FOLDER.with_name(f"toy.{os.getpid()}")
    model.save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    try:
        beside.rename(FOLDER)
    except OSError:  # another process was first
        shutil.rmtree(beside)
    return FOLDER


def problems():
    """All 55 sums of two digits that are one digit: "3+4=" with the answer "7"."""
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10 - a)]


def score(response, answer, row):
    """1 for the answer and nothing else."""
    return float(response == answer)


if __name__ == "__main__":
    print(build())
