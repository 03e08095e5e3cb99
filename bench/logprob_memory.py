"""Memory of log-probs over a large vocabulary: python bench/logprob_memory.py [tokens] [vocabulary]

The trainer's way, in chunks that are computed again in the backward pass, against the plain one, which keeps
[tokens x vocabulary]: peak resident memory over what the model itself takes, and time, forward alone and with
backward, each in a process of its own. The model is a Qwen2 of one layer. Targets: a quarter of the memory, 1.15
times the time.
"""
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HIDDEN = 512


def peak_kib():
    """This program's largest resident memory, in KiB. getrusage's ru_maxrss would begin with its parent's."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def measure(way, backward, tokens, vocabulary):
    """Prints peak MiB over the model's and seconds."""
    sys.path.insert(0, str(ROOT))
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from models import token_logprobs
    from workers import keep_freed_memory

    keep_freed_memory()  # as a worker does
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=vocabulary, hidden_size=HIDDEN, intermediate_size=1024, num_hidden_layers=1,
        num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True,
    ))
    inputs = {"input_ids": torch.randint(vocabulary, (tokens // 256, 256))}
    labels, predictors = torch.randint(vocabulary, (tokens,)), torch.arange(tokens)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # part of what the model takes

    def plain():
        logits = model(**inputs, use_cache=False).logits.flatten(0, 1).float()
        return logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]

    def chunked():
        return token_logprobs(model, inputs, predictors, labels, 1.0, False)[0]

    before = peak_kib()
    start = time.perf_counter()
    with torch.set_grad_enabled(bool(backward)):
        logprobs = {"plain": plain, "chunked": chunked}[way]()
        if backward:
            logprobs.sum().backward()
    seconds = time.perf_counter() - start
    print((peak_kib() - before) / 1024, seconds)


def main(tokens=8192, vocabulary=150_000):
    print("| | chunked MiB | plain MiB | memory | chunked s | plain s | time |\n" + "| --- " * 7 + "|")
    for name, backward in (("forward", False), ("forward and backward", True)):
        numbers = {}
        for way in ("chunked", "plain"):
            command = [sys.executable, __file__, "--measure", way, str(int(backward)), str(tokens), str(vocabulary)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            numbers[way] = list(map(float, done.stdout.split()))
        (memory, seconds), (plain_memory, plain_seconds) = numbers["chunked"], numbers["plain"]
        print(f"| {name} | {memory:.0f} | {plain_memory:.0f} | {memory / plain_memory:.2f} "
              f"| {seconds:.1f} | {plain_seconds:.1f} | {seconds / plain_seconds:.2f} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2], *map(int, sys.argv[3:]))
    else:
        main(*map(int, sys.argv[1:]))
