"""A toy that learns from nothing: digit addition for a tiny random Qwen2 with a tokenizer of characters.

`build` makes the model and caches it as models/toy (delete that after a change here), `problems` are the task
and `score` is the reward. toy.yaml trains it: nine sums of ten are right after 200 steps.
"""
import os
import shutil
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "models" / "toy"
WORDS = ["<pad>", "<eos>", *"0123456789", "+", "=", "Ġ"]  # the last is a space, as Qwen2's tokenizer writes it


def build(folder=FOLDER, words=WORDS, chat_template=None):
    """The folder of the model in Hugging Face format, made on first use: 75 thousand parameters."""
    if folder.is_dir():
        return folder
    import tokenizers
    import torch
    import transformers
    words = {word: number for number, word in enumerate(words)}
    characters = tokenizers.Tokenizer(tokenizers.models.WordLevel(words))
    characters.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    characters.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", chat_template=chat_template)
    config = transformers.Qwen2Config(
        vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
        initializer_range=0.1,  # with 0.02 all prompts look alike to it
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = transformers.Qwen2ForCausalLM(config)
    beside = folder.with_name(f"{folder.name}.{os.getpid()}")
    transformers.utils.logging.disable_progress_bar()  # a refused config is answered by one line
    model.save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    try:
        beside.rename(folder)
    except OSError:  # another process was first
        shutil.rmtree(beside)
    return folder


def problems():
    """All 55 sums of two digits that are one digit: "3+4=" with the answer "7"."""
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10 - a)]


def score(response, answer, row):
    """1 for the answer and nothing else."""
    return float(response == answer)


if __name__ == "__main__":
    print(build())
